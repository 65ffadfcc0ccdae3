"""The folder of a run: what it holds, and whose it is."""

import json
import os
from pathlib import Path
from typing import Any

from tfp_ibnn import _files

__all__ = ["RunError", "RunFolder", "read_record"]


class RunError(RuntimeError):
    """A run that cannot begin or go on; the message is one line."""


class RunFolder:
    """A folder that belongs to one run, known by its settings.

    Opening it is safe: a folder that holds something else, or a run with other settings, is left
    as it is.

    Args:
        path: of the folder; made if it is missing.
        identity: what makes this run this run, ready for JSON.
    """

    def __init__(self, path: str | os.PathLike, identity: dict[str, Any]) -> None:
        self.path = Path(path)
        record = self.path / "settings.json"
        if record.exists():
            self._check_same(record, identity)
            return
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise RunError(
                f"{self.path} holds something that is no run: choose another output folder."
            )
        self.path.mkdir(parents=True, exist_ok=True)
        _files.write_json(record, identity)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def metrics(self) -> dict[str, Any] | None:
        """What the finished run measured, or None."""
        path = self.path / "metrics.json"
        return read_record(path) if path.exists() else None

    def _check_same(self, record: Path, identity: dict[str, Any]) -> None:
        found = read_record(record)
        names = sorted(
            name for name in found.keys() | identity.keys() if found.get(name) != identity.get(name)
        )
        if names:
            listed = ", ".join(
                f"{name} {found.get(name)!r}, not {identity.get(name)!r}" for name in names[:4]
            )
            raise RunError(
                f"{self.path} holds another run ({listed}): choose another output folder."
            )


def read_record(path: Path) -> dict[str, Any]:
    """Return what a JSON file of a run holds, or raise RunError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}).") from error
    if not isinstance(content, dict):
        raise RunError(f"{path} is not the record of a run.")
    return content
