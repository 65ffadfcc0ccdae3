"""An epoch's training steps in one compiled loop, on JAX.

Keras calls a compiled step for each batch, with all weights as arguments. On a GPU that takes the
host longer than the GPU needs for a small network. Here the data lies on the device, and one call
takes the steps of a whole epoch, each on the rows that are its batch. The steps, their order and
their noise are those of plain `fit`, and so, to float tolerance, is what comes out. On CPUs XLA
computes convolutions inside of loops many times slower, so there plain `fit` stays.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from tfp_ibnn._core import backend
from tfp_ibnn.data import ShuffledBatches

__all__ = ["can_scan", "scanned"]

LARGEST = 4 * 2**30
"""Bytes of data above which an epoch is not scanned: the device must hold all of it."""


def can_scan(batches: ShuffledBatches) -> bool:
    """Whether scanning pays and can be done: JAX on a GPU or TPU, batches of one size that fit."""
    return (
        backend.NAME == "jax"
        and bool(backend.accelerators())
        and (batches.drop_remainder or len(batches) == 1)
        and batches.x.nbytes + batches.y.nbytes <= LARGEST
    )


@contextlib.contextmanager
def scanned(model: keras.Model, batches: ShuffledBatches) -> Iterator[None]:
    """Let `fit` on these batches, within a `with` block, take each epoch in one call.

    Callbacks see one batch an epoch, the last. The model must be compiled, and on one device.

    Args:
        model: a compiled model.
        batches: what `fit` is called with, along with `batches.follow()` among the callbacks.
    """
    import jax

    arrays = jax.device_put((batches.x, batches.y))
    shape = len(batches), min(batches.batch_size, len(batches.x))

    def epoch(state: Any, order: Any, arrays: Any) -> tuple[Any, Any]:
        def step(state: Any, rows: Any) -> tuple[Any, Any]:
            logs, state = model.train_step(state, tuple(part[rows] for part in arrays))
            return state, logs

        state, logs = jax.lax.scan(step, state, order)
        return jax.tree.map(lambda values: values[-1], logs), state

    compiled = jax.jit(epoch, donate_argnums=0)

    def train_function(state: Any, iterator: Any) -> tuple[Any, Any]:
        del iterator  # nothing is read from it: the data is on the device already
        model.steps_per_execution = before  # `fit` has read it; callbacks may predict
        order = batches._order[: shape[0] * shape[1]].astype("int32").reshape(shape)
        return compiled(state, order, arrays)

    # `fit` counts the steps of one call by this; given to `compile`, it would be saved as well.
    before, model.steps_per_execution = model.steps_per_execution, len(batches)
    model.train_function = train_function
    try:
        yield
    finally:
        model.steps_per_execution, model.train_function = before, None
