"""The networks that are timed, how they are trained and called, and processes of their own."""

import contextlib
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import keras
import numpy as np

import tfp_ibnn as ibnn

__all__ = ["KINDS", "TRAIN_SIZE", "a_few_images", "compiled", "images", "stepper", "stochastic"]

KINDS = {"gaussian": "Gaussian", "flow": "flow"}
"""The posteriors that are timed, and what tables call them."""
TRAIN_SIZE = 50_000
CLASSES = 10
EPOCHS = 3
_LIMIT_SECONDS = 900


def stochastic(network, kind, *, noise="channel", first=True):
    """Return a network of `ibnn.models` with the posteriors of `posterior_map`.

    Args:
        network: its name.
        kind: of the posteriors; "none" leaves the network deterministic.
        noise: "channel" or "position".
        first: whether the first layer, `conv1`, is stochastic too.
    """
    plain = getattr(ibnn.models, network)()
    if kind == "none":
        return plain
    posteriors = ibnn.models.posterior_map(network, kind, deterministic=None if first else "conv1")
    return ibnn.to_stochastic(plain, posteriors, TRAIN_SIZE, noise=noise)


@contextlib.contextmanager
def a_few_images():
    """Train on fewer images than `TRAIN_SIZE` without a warning: what is computed is the same."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`train_size` is")
        yield


def images(count, seed, shape=(32, 32, 3)):
    """Return random images of a shape and random labels."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, *shape)).astype("float32")
    return x, rng.integers(0, CLASSES, count).astype("int32")


def stepper(model, batch, steps, seed, library=keras):
    """Compile a model; return an action that trains it and returns the seconds of one step.

    It is plain `fit` on random images for three epochs, each one execution of `steps` steps; the
    fastest counts. The clock runs from an execution's begin to its end, as callbacks see them: the
    set-up of `fit` is not counted. The library is Keras, or `tf_keras`.
    """
    loss = library.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(library.optimizers.SGD(0.01, momentum=0.9), loss, steps_per_execution=steps)
    # An optimizer without variables would have the step traced twice.
    model.optimizer.build(model.trainable_variables)
    x, y = images(batch * steps, seed, tuple(model.input_shape[1:]))
    began, took = [], []

    def begin(batch, logs=None):
        began.append(time.perf_counter())

    def end(batch, logs):
        float(logs["loss"])  # waits for it where steps are dispatched ahead
        took.append(time.perf_counter() - began[-1])

    clock = library.callbacks.LambdaCallback(on_train_batch_begin=begin, on_train_batch_end=end)
    options = {"epochs": EPOCHS, "shuffle": False, "verbose": 0, "callbacks": [clock]}

    def action():
        took.clear()
        with a_few_images():
            model.fit(x, y, batch_size=batch, **options)
        return min(took) / steps

    return action


def compiled(model, x, repeats=1):
    """Return an action that calls a TensorFlow model on a batch in memory, compiled, some times.

    `predict` adds the same few milliseconds to every call, however much is computed. They are left
    out on both sides of a ratio.
    """
    import tensorflow as tf

    x = tf.constant(x)
    function = tf.function(lambda batch: model(batch))

    def action():
        began = time.perf_counter()
        for _ in range(repeats):
            outputs = function(x)
        keras.tree.map_structure(lambda part: part.numpy(), outputs)
        return time.perf_counter() - began

    return action


def environment(**more):
    """Return the environment of a process that imports this package."""
    scripts = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [scripts, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **more}


def child(*arguments, **more):
    """Return what `children`, or a command, prints as JSON in a process of its own.

    Args:
        *arguments: of `children`; or "-c" and code.
        **more: environment variables.
    """
    words = arguments if arguments[0] == "-c" else ("-m", f"{__package__}.children", *arguments)
    name = "A process" if words[0] == "-c" else " ".join(map(str, words))
    try:
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            capture_output=True,
            text=True,
            timeout=_LIMIT_SECONDS,
            env=environment(**more),
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{name} took longer than {_LIMIT_SECONDS} s.") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise RuntimeError(f"{name} failed ({done.returncode}): {last}")
    return json.loads(done.stdout.strip().splitlines()[-1])
