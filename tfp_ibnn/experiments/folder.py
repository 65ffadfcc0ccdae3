"""The folder of a run: what it holds, and whose it is."""

import json
import os
from pathlib import Path
from typing import Any, Self

from tfp_ibnn._core import files

__all__ = ["RecordError", "RunError", "RunFolder", "read_record"]


class RunError(RuntimeError):
    """A run that cannot begin or go on; the message is one line."""


class RecordError(RunError):
    """A file of a run that cannot be read."""


class RunFolder:
    """A folder that belongs to one run, known by its settings.

    Looking at it is safe: a folder that holds something else, or a run with other settings, is left
    as it is, and nothing is written before `claim`.

    As a context it keeps why the run fails, if it does, and lets others have the folder at the end.

    Args:
        path: of the folder.
        identity: what makes this run this run, ready for JSON.
        check: look whether the folder is free, or this run's.
    """

    def __init__(
        self, path: str | os.PathLike, identity: dict[str, Any], *, check: bool = True
    ) -> None:
        self.path, self.identity = Path(path), identity
        self._lock: Any = None
        if not check:
            return
        if self._record.exists():
            self._check_same()
        elif self.path.exists() and not self._is_empty():
            raise RunError(f"{self.path} holds something that is no run: choose another folder.")

    def claim(self) -> None:
        """Make the folder this run's own; it may be already.

        Raises:
            RunError: if somebody else is at it. That ends by `release`, and with the process.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if not self._record.exists():
            files.write_json(self._record, self.identity)
        self._lock = files.locked(self._record)
        if self._lock is None:
            raise RunError(f"{self.path} is in use: somebody else is at this run.")
        try:
            self._check_same()  # it may have been claimed since it was looked at
            files.remove_leftovers(self.path)
            self._failure.unlink(missing_ok=True)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let others have the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if isinstance(error, RunError):
                self.fail(error)
        finally:
            self.release()

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def metrics(self) -> dict[str, Any] | None:
        """What the finished run measured, or None."""
        path = self.path / "metrics.json"
        return read_record(path) if path.exists() else None

    def fail(self, error: RunError) -> None:
        """Keep why the run failed, for whoever looks at the folder; if it is this run's own."""
        if self._lock is not None:
            files.write_text(self._failure, f"{error}\n")

    @property
    def failure(self) -> str | None:
        """Why the run failed when it was last tried, or None."""
        return self._failure.read_text(encoding="utf-8").strip() if self._failure.exists() else None

    @property
    def _failure(self) -> Path:
        return self.path / "failure.txt"

    @property
    def _record(self) -> Path:
        return self.path / "settings.json"

    def _is_empty(self) -> bool:
        return self.path.is_dir() and all(map(files.is_leftover, self.path.iterdir()))

    def _check_same(self) -> None:
        found, identity = read_record(self._record), self.identity
        names = sorted(
            name for name in found.keys() | identity.keys() if found.get(name) != identity.get(name)
        )
        if names:
            listed = ", ".join(
                f"{name} {found.get(name)!r}, not {identity.get(name)!r}" for name in names[:4]
            )
            raise RunError(f"{self.path} holds another run ({listed}): choose another folder.")


def read_record(path: Path) -> dict[str, Any]:
    """Return what a JSON file of a run holds, or raise RecordError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{path} cannot be read ({error}).") from error
    if not isinstance(content, dict):
        raise RecordError(f"{path} is not the record of a run.")
    return content
