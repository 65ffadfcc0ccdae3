"""The networks that are timed, how they are trained and called, and processes of their own."""

import concurrent.futures
import contextlib
import multiprocessing
import os
import time
import tomllib
import warnings
from pathlib import Path

import keras
import numpy as np

import tfp_ibnn as ibnn
from lib import networks

KINDS = {"gaussian": "Gaussian", "flow": "flow"}  # what is timed, and what tables call it
CASES = tomllib.loads(Path(__file__).with_name("cases.toml").read_text(encoding="utf-8"))
TRAIN_SIZE, CLASSES, EPOCHS = 50_000, 10, 3
# Images of LeNet: of this size its pooling is plain, and the same in Keras 2.
SHAPES = {"lenet": (28, 28, 3), "vgg16": (32, 32, 3)}


def plain(network="lenet", **options):
    return getattr(networks, network)(SHAPES[network], **options)


def stochastic(network, kind, *, noise="channel", first=True):
    """Return a network with the posteriors of `posterior_map`."""
    model = plain(network)
    if kind == "none":
        return model
    posteriors = networks.posterior_map(network, kind, deterministic=None if first else "conv1")
    return ibnn.to_stochastic(model, posteriors, TRAIN_SIZE, noise=noise)


@contextlib.contextmanager
def a_few_images():
    """Train on fewer images than `TRAIN_SIZE` without a warning: what is computed is the same."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`train_size` is")
        yield


def images(count, seed, shape=SHAPES["lenet"]):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, *shape)).astype("float32")
    return x, rng.integers(0, CLASSES, count).astype("int32")


def prepare(model, steps=1, library=keras):
    """Compile a model for training; an optimizer without variables would be traced twice."""
    loss = library.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(library.optimizers.SGD(0.01, momentum=0.9), loss, steps_per_execution=steps)
    model.optimizer.build(model.trainable_variables)
    return model


def stepper(model, batch, steps, seed, library=keras):
    """Compile a model; return an action that trains it and returns the seconds of one step.

    It is plain `fit` on random images for three epochs, each one execution, of which the fastest
    counts, without the set-up of `fit`. The library is Keras, or `tf_keras`.
    """
    prepare(model, steps, library)
    x, y = images(batch * steps, seed, tuple(model.input_shape[1:]))
    began, took = [], []

    def end(batch, logs):
        float(logs["loss"])  # waits for it where steps are dispatched ahead
        took.append(time.perf_counter() - began[-1])

    clock = library.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: began.append(time.perf_counter()),
        on_train_batch_end=end,
    )
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

    x, function = tf.constant(x), tf.function(lambda batch: model(batch))

    def action():
        began = time.perf_counter()
        for _ in range(repeats):
            outputs = function(x)
        keras.tree.map_structure(lambda part: part.numpy(), outputs)
        return time.perf_counter() - began

    return action


def looped(model, x, repeats):
    """Return an action that averages the probabilities of several calls in one compiled loop.

    The calls must differ, as those of a network with random weights do.
    """
    import tensorflow as tf

    x = tf.constant(x)

    @tf.function
    def mean(batch):
        def step(count, total):
            return count + 1, total + tf.nn.softmax(model(batch))

        start = tf.constant(0), tf.zeros((len(x), CLASSES))
        return tf.while_loop(lambda count, total: count < repeats, step, start)[1] / repeats

    def action():
        began = time.perf_counter()
        mean(x).numpy()
        return time.perf_counter() - began

    return action


def process():
    """Return a pool of one process; not forked, which TensorFlow and JAX do not survive."""
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(1, mp_context=context)


def in_process(function, *arguments, **environment):
    """Return what a function gives in a process of its own, with some environment variables."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        with process() as pool:
            return pool.submit(function, *arguments).result()
    except Exception as error:  # whatever it is, the other groups go on
        words = " ".join(map(str, (function.__name__, *arguments)))
        raise RuntimeError(f"{words} failed: {error}") from error
    finally:
        os.environ.clear()
        os.environ.update(before)
