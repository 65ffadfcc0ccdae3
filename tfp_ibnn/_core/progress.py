"""Lines on the console while something takes long."""

import threading
import time
from collections.abc import Callable
from types import TracebackType

EVERY = 10.0
"""Seconds after which a line says what is still being done."""


def silent(line: str) -> None:
    """Print nothing."""


class Heartbeat:
    """Say every ten seconds what is being done, and for how long, until it ends or is stopped.

    Args:
        what: what is being done.
        say: takes the lines; nothing is done for `silent`.
    """

    def __init__(self, what: str, say: Callable[[str], None]) -> None:
        self._what, self._say = what, say
        self._ended = threading.Event()

    def __enter__(self) -> "Heartbeat":
        if self._say is not silent:
            threading.Thread(target=self._run, args=(EVERY,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Say nothing more."""
        self._ended.set()

    def _run(self, every: float) -> None:
        start = time.perf_counter()
        while not self._ended.wait(every):
            self._say(f"{self._what}: {time.perf_counter() - start:.0f} s so far")
