"""What it takes to repeat a run."""

import contextlib
import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path

import keras

import tfp_ibnn as ibnn

__all__ = ["provenance"]

_PACKAGES = ("keras", "tensorflow", "jax", "tensorflow-probability", "tfp-nightly", "numpy")


def provenance(options):
    """Return options, command, versions and hardware, ready for JSON."""
    script, *arguments = sys.argv
    if script and Path(script).is_absolute():
        script = os.path.relpath(script)
    versions = {"tfp_ibnn": ibnn.__version__}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    cores = f"{platform.machine()}, {os.cpu_count()} CPU cores"
    return {
        "options": options,
        "command": shlex.join(["python", script, *arguments]),
        "backend": keras.backend.backend(),
        "versions": versions,
        "python": platform.python_version(),
        "hardware": "; ".join([*_accelerators(), cores]),
    }


def _accelerators():
    """Return the names of the GPUs and TPUs in use."""
    if keras.backend.backend() == "jax":
        import jax

        return [device.device_kind for device in jax.devices() if device.platform != "cpu"]
    import tensorflow as tf

    found = tf.config.list_physical_devices("GPU") + tf.config.list_physical_devices("TPU")
    details = tf.config.experimental.get_device_details
    return [details(device).get("device_name", device.device_type) for device in found]
