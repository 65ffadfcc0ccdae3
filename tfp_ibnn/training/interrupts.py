"""Ctrl-C, where Keras would swallow it."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import keras

__all__ = ["Interrupts"]


class Interrupts(keras.callbacks.Callback):
    """Raises an interruption that has got lost again, at the end of its batch.

    Keras waits for the logs of a batch inside of a bare `except: pass`. On JAX that is where most
    of the time passes, and with it Ctrl-C. Used as a context around `fit` and as a callback; a
    handler of somebody's own is left alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.came = False
        self._before: Any = None

    def __enter__(self) -> "Interrupts":
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Raise what came."""
        if self.came:
            raise KeyboardInterrupt
