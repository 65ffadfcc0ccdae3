"""What it takes to repeat a run."""

import contextlib
import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import tfp_ibnn
from tfp_ibnn._core import backend

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
        >>> from tfp_ibnn.experiments import provenance
        >>> provenance({"seed": 0})["options"]
        {'seed': 0}
    """
    return {
        "options": options,
        "command": command(),
        "backend": backend.NAME,
        "versions": {"tfp_ibnn": tfp_ibnn.__version__, **_versions()},
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
    return "; ".join([*backend.accelerators(), cores])


def _versions() -> dict[str, str]:
    """Return those of the packages that are installed."""
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
