import os
import signal
import threading
import time

import keras
import numpy as np
import pytest

from tfp_ibnn.training import Interrupts

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler,
        reason="signals are the main thread's, and somebody handles this one",
    ),
]


class Swallows(keras.callbacks.Callback):
    """Interrupts the first batch, and loses it as Keras does."""

    batches = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if self.batches == 1:
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)
            except:  # noqa: E722
                pass


def fit(*callbacks):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    x, y = np.ones((8, 3)), np.ones((8, 2))
    model.fit(x, y, batch_size=2, epochs=2, verbose=0, callbacks=list(callbacks))


def test_an_interruption_that_was_swallowed_ends_the_training():
    swallows = Swallows()
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        fit(swallows, interrupts)
    assert swallows.batches == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_that_came_does_not_end_the_next_training():
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        fit(Swallows(), interrupts)
    with interrupts:
        fit(interrupts)


def test_without_it_the_training_goes_on():
    swallows = Swallows()
    fit(swallows)
    assert swallows.batches == 8


def test_a_handler_of_ones_own_stays():
    def mine(number, frame):
        """Do nothing."""

    before = signal.signal(signal.SIGINT, mine)
    try:
        with Interrupts() as interrupts:
            assert signal.getsignal(signal.SIGINT) is mine
            fit(Swallows(), interrupts)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_training_in_another_thread_is_let_be():
    errors = []

    def train():
        try:
            with Interrupts() as interrupts:
                fit(interrupts)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert errors == []
