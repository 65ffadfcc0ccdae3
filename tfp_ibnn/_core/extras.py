"""Packages that only a part of the library needs, and that a plain install leaves out."""

import contextlib
from collections.abc import Iterator

EXTRAS: dict[str, tuple[str, ...]] = {"diagnostics": ("arviz",), "plots": ("matplotlib",)}
"""The modules of each extra that the library imports; pyproject.toml names their packages."""


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Import modules of an extra in this context; a missing one raises the line to run."""
    try:
        yield
    except ModuleNotFoundError as cause:
        module = (cause.name or "").split(".")[0]
        if module not in EXTRAS[extra]:
            raise
        line = f'pip install "tfp_ibnn[{extra}]"'
        raise ImportError(f"{module} is missing. Run: {line}") from cause
