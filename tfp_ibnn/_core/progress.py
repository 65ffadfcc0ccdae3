"""Lines on the console while something takes long."""

import functools
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import keras

EVERY = 10.0
"""Seconds after which a line says what is still being done."""


def silent(line: str) -> None:
    """Print nothing."""


def printer(verbose: Any) -> Callable[[str], None]:
    """Return what prints lines at once, or `silent` for a false `verbose`."""
    return functools.partial(print, flush=True) if verbose else silent


class Stoppable:
    """A context that calls its method `stop` at the end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Say nothing more."""


class Heartbeat(Stoppable):
    """Says every ten seconds what is being done, and for how long, until it ends or is stopped.

    Args:
        what: what is being done.
        say: takes the lines; nothing is done for `silent`.
        every: seconds between the lines.
    """

    def __init__(self, what: str, say: Callable[[str], None], every: float | None = None) -> None:
        self._what = what
        self._say = say
        self._every = EVERY if every is None else every
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        if self._say is not silent:
            threading.Thread(target=self._run, daemon=True).start()
        return self

    def stop(self) -> None:
        """Say nothing more."""
        self._ended.set()

    def _run(self) -> None:
        start = time.perf_counter()
        while not self._ended.wait(self._every):
            seconds = time.perf_counter() - start
            self._say(f"{self._what}: {seconds:.0f} s so far")


class FirstBatch(Stoppable, keras.callbacks.Callback):
    """A callback that says that a model compiles its first batch, if that takes long.

    Args:
        compiled: what Keras has compiled for this verb before, such as `model.train_function`;
            nothing is said if there is something.
    """

    def __init__(self, compiled: Any) -> None:
        super().__init__()
        self._expected = set() if compiled is not None else {"train", "test", "predict"}
        self._heartbeat = Heartbeat("", silent)

    def stop(self) -> None:
        """Say nothing more."""
        self._heartbeat.stop()

    def _begin(self, verb: str) -> None:
        if verb in self._expected and self.params.get("verbose"):
            what = f"{self.model.name!r} compiles its first batch, which is done once"
            self._heartbeat = Heartbeat(what, printer(True)).__enter__()
        self._expected -= {verb}

    def on_train_begin(self, logs: Any = None) -> None:
        self._begin("train")

    def on_test_begin(self, logs: Any = None) -> None:  # of a validation too
        self._begin("test")

    def on_predict_begin(self, logs: Any = None) -> None:
        self._begin("predict")

    def _end(self, batch: int, logs: Any = None) -> None:
        self.stop()

    on_train_batch_end = on_predict_batch_end = on_test_batch_end = _end
