"""The folder of a run: what it holds, and whose it is."""

import json
from pathlib import Path

from lib import files


class RunError(RuntimeError):
    """A run that cannot begin or go on; the message is one line."""


class RecordError(RunError):
    """A file of a run that cannot be read."""


class RunFolder:
    """A folder that belongs to one run, known by its settings.

    What holds something else, or a run with other settings, is left as it is, and nothing is
    written before `claim`. As a context it keeps why the run fails, and lets go at the end.
    """

    def __init__(self, path, identity, *, check=True):
        self.path, self.identity, self._lock = Path(path), identity, None
        self._record, self._failure = self / "settings.json", self / "failure.txt"
        if check and self._record.exists():
            self._check_same()
        elif check and self.path.exists() and not self._is_empty():
            raise RunError(f"{self.path} holds something that is not a run: choose another folder.")

    def claim(self):
        """Make the folder this run's own, until `release`; raise RunError if it is in use."""
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

    def release(self):
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        try:
            if isinstance(error, RunError) and self._lock is not None:
                files.write_text(self._failure, f"{error}\n")
        finally:
            self.release()

    def __truediv__(self, name):
        return self.path / name

    @property
    def metrics(self):
        path = self / "metrics.json"
        return read_record(path) if path.exists() else None

    @property
    def failure(self):
        return self._failure.read_text(encoding="utf-8").strip() if self._failure.exists() else None

    def _is_empty(self):
        return self.path.is_dir() and all(map(files.is_leftover, self.path.iterdir()))

    def _check_same(self):
        found, mine = read_record(self._record), self.identity
        if names := [n for n in sorted({*found, *mine}) if found.get(n) != mine.get(n)]:
            listed = ", ".join(f"{n} {found.get(n)!r}, not {mine.get(n)!r}" for n in names[:4])
            raise RunError(f"{self.path} holds another run ({listed}): choose another folder.")


def read_record(path):
    """Return what a JSON file of a run holds, or raise RecordError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{path} cannot be read ({error}).") from error
    if not isinstance(content, dict):
        raise RecordError(f"{path} is not the record of a run.")
    return content
