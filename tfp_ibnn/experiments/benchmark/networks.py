"""The networks that are timed, and how they are trained and called."""

import contextlib
import time
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from tfp_ibnn import conversion, models
from tfp_ibnn.experiments.benchmark.timing import Action
from tfp_ibnn.layers.model import StochasticModel

__all__ = [
    "KINDS",
    "TRAIN_SIZE",
    "a_few_images",
    "compiled",
    "images",
    "stepper",
    "stochastic",
]

KINDS = {"gaussian": "Gaussian", "flow": "flow"}
"""The posteriors that are timed, and what tables call them."""

TRAIN_SIZE = 50_000
CLASSES = 10
EPOCHS = 3


def stochastic(
    network: str, kind: str, *, noise: str = "channel", first: bool = True
) -> StochasticModel:
    """Return a network of `tfp_ibnn.models` with the posteriors of `posterior_map`.

    Args:
        network: its name.
        kind: of the posteriors.
        noise: "channel" or "position".
        first: whether the first layer, `conv1`, is stochastic too.
    """
    posteriors = models.posterior_map(network, kind, deterministic=None if first else "conv1")
    plain = getattr(models, network)()
    return conversion.to_stochastic(plain, posteriors, TRAIN_SIZE, noise=noise)


@contextlib.contextmanager
def a_few_images() -> Iterator[None]:
    """Train on fewer images than `TRAIN_SIZE` without a warning: what is computed is the same."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`train_size` is")
        yield


def images(count: int, seed: int, shape: tuple[int, ...] = (32, 32, 3)) -> tuple[Any, Any]:
    """Return random images of a shape and random labels."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, *shape)).astype("float32")
    return x, rng.integers(0, CLASSES, count).astype("int32")


def stepper(model: Any, batch: int, steps: int, seed: int, library: Any = keras) -> Action:
    """Compile a model; return an action that trains it and returns the seconds of one step.

    It is plain `fit` on random images for three epochs, each one execution of `steps` steps; the
    fastest counts. The clock runs from an execution's begin to its end, as callbacks see them: the
    set-up of `fit` is not counted.

    Args:
        model: a Keras model for images.
        batch: size of a batch.
        steps: in one execution.
        seed: of the images.
        library: Keras, or `tf_keras`.
    """
    loss = library.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(library.optimizers.SGD(0.01, momentum=0.9), loss, steps_per_execution=steps)
    # An optimizer without variables would have the step traced twice.
    model.optimizer.build(model.trainable_variables)
    x, y = images(batch * steps, seed, tuple(model.input_shape[1:]))
    began, took = [], []

    def begin(batch: int, logs: Any = None) -> None:
        began.append(time.perf_counter())

    def end(batch: int, logs: dict[str, Any]) -> None:
        float(logs["loss"])  # waits for it where steps are dispatched ahead
        took.append(time.perf_counter() - began[-1])

    callback = library.callbacks.LambdaCallback(on_train_batch_begin=begin, on_train_batch_end=end)

    def action() -> float:
        took.clear()
        with a_few_images():
            model.fit(
                x,
                y,
                batch_size=batch,
                epochs=EPOCHS,
                shuffle=False,
                verbose=0,
                callbacks=[callback],
            )
        return min(took) / steps

    return action


def compiled(model: Any, x: Any, repeats: int = 1) -> Action:
    """Return an action that calls a model on a batch in memory, compiled, `repeats` times.

    `predict` adds the same few milliseconds to every call, however much is computed. They are left
    out on both sides of a ratio.

    Args:
        model: of TensorFlow.
        x: the batch.
        repeats: calls.
    """
    import tensorflow as tf

    x = tf.constant(x)
    function = tf.function(lambda batch: model(batch))

    def action() -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            outputs = function(x)
        keras.tree.map_structure(lambda part: part.numpy(), outputs)
        return time.perf_counter() - began

    return action
