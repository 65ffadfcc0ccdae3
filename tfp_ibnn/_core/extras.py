"""Packages that only a part of the library needs, and that a plain install leaves out."""

import contextlib
from collections.abc import Iterator

EXTRAS: dict[str, tuple[str, ...]] = {
    "data": ("PIL", "importlib_resources", "sklearn", "tensorflow_datasets"),
    "diagnostics": ("arviz",),
    "plots": ("matplotlib",),
}
"""The modules of each extra that the library imports; pyproject.toml names their packages."""


def install_line(module: str, extra: str) -> str:
    """Return which module is missing, and the line that installs it."""
    return f'{module} is missing. Run: pip install "tfp_ibnn[{extra}]"'


@contextlib.contextmanager
def needs(extra: str, error: type[Exception] = ImportError) -> Iterator[None]:
    """Import modules of an extra in this context; a missing one raises the line to run."""
    try:
        yield
    except ModuleNotFoundError as cause:
        module = (cause.name or "").split(".")[0]
        if module not in EXTRAS[extra]:
            raise
        raise error(install_line(module, extra)) from cause
