"""What it takes to repeat a run."""

import contextlib
import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import keras

import tfp_ibnn as ibnn

__all__ = ["provenance"]

_PACKAGES = (
    "keras",
    "tensorflow",
    "jax",
    "tensorflow-probability",
    "tfp-nightly",
    "numpy",
)


def provenance(options: dict[str, Any]) -> dict[str, Any]:
    """Return options, command, versions and hardware, ready for JSON.

    Args:
        options: the options of the run.

    Example:
        >>> from experiments import provenance
        >>> provenance({"seed": 0})["options"]
        {'seed': 0}
    """
    return {
        "options": options,
        "command": command(),
        "backend": keras.backend.backend(),
        "versions": {"tfp_ibnn": ibnn.__version__, **_versions()},
        "python": platform.python_version(),
        "hardware": hardware(),
    }


def command() -> str:
    """Return the command line, with the script's path relative to the folder it was started in."""
    script, *arguments = sys.argv
    if script and Path(script).is_absolute():
        script = os.path.relpath(script)
    return shlex.join(["python", script, *arguments])


def hardware() -> str:
    """Return the kind and number of processors."""
    cores = f"{platform.machine()}, {os.cpu_count()} CPU cores"
    return "; ".join([*_accelerators(), cores])


def _accelerators() -> list[str]:
    """Return the names of the GPUs and TPUs in use."""
    if keras.backend.backend() == "jax":
        import jax

        return [device.device_kind for device in jax.devices() if device.platform != "cpu"]
    import tensorflow as tf

    found = tf.config.list_physical_devices("GPU") + tf.config.list_physical_devices("TPU")
    details = tf.config.experimental.get_device_details
    return [details(device).get("device_name", device.device_type) for device in found]


def _versions() -> dict[str, str]:
    """Return those of the packages that are installed."""
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
