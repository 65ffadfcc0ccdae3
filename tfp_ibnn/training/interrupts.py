"""Interrupts by Ctrl-C that Keras swallows."""

import signal
import threading
from types import FrameType
from typing import Any

import keras


class Interrupts(keras.callbacks.Callback):
    """Raise an interrupt that Keras has swallowed, at the end of its batch.

    Keras waits for the logs of a batch inside of a bare `except: pass`: on JAX most of the time.
    Used as a context around `fit` and as a callback; a handler of the user's own is left alone.

    Example:
        One object is both:

            with ibnn.training.Interrupts() as interrupts:
                model.fit(x, y, callbacks=[interrupts])
    """

    came = False
    """Whether an interrupt has come since the context was entered."""

    def __enter__(self) -> "Interrupts":
        self.came = False
        # Python lets the main thread alone set a handler.
        is_main = threading.current_thread() is threading.main_thread()
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self._acts = is_main and is_default
        if self._acts:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self._acts:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.came and kind is not None:  # TensorFlow may have raised something of its own
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self.came:
            raise KeyboardInterrupt
