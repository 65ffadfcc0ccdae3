"""An epoch's training steps in one compiled loop, on JAX.

Keras calls a compiled step for each batch, which takes the host longer than a GPU needs for a small
network. Here the data lies on the device, and one call takes the steps of a whole epoch, the same
ones. On CPUs XLA computes convolutions inside of loops many times slower: there plain `fit` stays.
"""

import contextlib

import keras

from lib import devices

LARGEST = 4 * 2**30
"""Bytes of data above which an epoch is not scanned: the device must hold all of it."""


def can_scan(batches):
    """Whether scanning pays and can be done: JAX on a GPU or TPU, batches of one size that fit."""
    return (
        keras.backend.backend() == "jax"
        and bool(devices.accelerators())
        and (batches.drop_remainder or len(batches) == 1)
        and batches.x.nbytes + batches.y.nbytes <= LARGEST
    )


@contextlib.contextmanager
def scan(model, batches):
    """Let `fit` on these batches, within a `with` block, take each epoch in one call.

    Callbacks see one batch an epoch, the last. The model must be compiled, and on one device;
    `batches` are an `ibnn.data.ShuffledBatches`, whose `follow()` is a callback that `fit` needs.
    """
    shape = len(batches), min(batches.batch_size, len(batches.x))
    epoch = _epoch_in_one_call(model.train_step, (batches.x, batches.y))

    def train_function(state, iterator):
        del iterator  # nothing is read from it: the data is on the device already
        model.steps_per_execution = before  # `fit` has read it; callbacks may predict
        order = batches.order[: shape[0] * shape[1]].astype("int32").reshape(shape)
        return epoch(state, order)

    # `fit` counts the steps of one call by this; given to `compile`, it would be saved as well.
    before, model.steps_per_execution = model.steps_per_execution, len(batches)
    model.train_function = train_function
    try:
        yield
    finally:
        model.steps_per_execution, model.train_function = before, None


def _epoch_in_one_call(train_step, arrays):
    """Return a compiled function of a model's state and rows, (steps, batch), of the arrays.

    It takes a training step on each batch, and returns the logs of the last, and the state.
    """
    if (backend := keras.backend.backend()) != "jax":
        remedy = "Here, give `steps_per_execution` to `compile`"
        raise RuntimeError(f"An epoch in one call takes JAX; the backend is {backend!r}. {remedy}.")
    import jax

    arrays = jax.device_put(tuple(arrays))

    def epoch(state, order, arrays):
        def step(state, rows):
            logs, state = train_step(state, tuple(part[rows] for part in arrays))
            return state, logs

        state, logs = jax.lax.scan(step, state, order)
        return jax.tree.map(lambda values: values[-1], logs), state

    compiled = jax.jit(epoch, donate_argnums=0)
    return lambda state, order: compiled(state, order, arrays)
