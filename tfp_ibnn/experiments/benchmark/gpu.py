"""The cost of a training step on a GPU: JAX, 16 bits, the steps of an epoch in one loop."""

import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from tfp_ibnn import models
from tfp_ibnn._core import keras_internals
from tfp_ibnn.experiments.benchmark import timing
from tfp_ibnn.experiments.benchmark.networks import KINDS, images, stochastic
from tfp_ibnn.experiments.benchmark.record import Row, row
from tfp_ibnn.experiments.benchmark.settings import Settings

__all__ = ["gpu_steps", "scanned"]

BATCH, STEPS = 256, 195
"""An epoch of 50,000 images."""

TARGETS = {"gaussian": 1.10, "flow": 1.30}


def gpu_steps(
    settings: Settings, network: str = "vgg16", batch: int = BATCH, steps: int = STEPS
) -> Iterator[Row]:
    """Time a step of VGG16 in mixed_bfloat16, batch 256, the 195 steps of an epoch in one loop."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        keras.utils.set_random_seed(settings.seed)
        found = {"deterministic": getattr(models, network)()}
        found |= {f"gpu.{kind}": stochastic(network, kind) for kind in TARGETS}
        data = epoch_of_images(batch, steps, settings.seed)
        actions = {name: scanned(model, *data) for name, model in found.items()}
        times = timing.interleave(actions, max(4, settings.rounds // 2))
    finally:
        keras.config.set_dtype_policy(before)
    reference = times["deterministic"]
    for kind, target in TARGETS.items():
        own = times[f"gpu.{kind}"]
        yield row(
            f"gpu.{kind}",
            f"{network.upper()} step, bfloat16, batch {batch}, {KINDS[kind]}",
            timing.ratio(own, reference),
            target,
            seconds={
                "step": min(own),
                "deterministic": min(reference),
                "epoch": min(own) * steps,
                "epoch_deterministic": min(reference) * steps,
            },
        )


def epoch_of_images(batch: int, steps: int, seed: int) -> tuple[Any, Any]:
    """Return random images (steps, batch, 32, 32, 3) and labels (steps, batch), on the device."""
    import jax

    x, y = images(batch, seed)
    rng = np.random.default_rng(seed)
    order = np.stack([rng.permutation(batch) for _ in range(steps)])
    return jax.numpy.asarray(x)[order], jax.numpy.asarray(y)[order]


def scanned(model: keras.Model, x: Any, y: Any) -> timing.Action:
    """Compile a model for one loop over all steps; return an action: the seconds of one step.

    The loop is `lax.scan` over Keras's own `train_step`. Its state stays on the device.

    Args:
        model: of JAX.
        x: images, (steps, batch, ...).
        y: labels, (steps, batch).
    """
    import jax

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    model.optimizer.build(model.trainable_variables)
    keras_internals.symbolic_build(model, (x[0], y[0]))

    def step(state: Any, data: Any) -> tuple[Any, Any]:
        logs, state = model.train_step(state, data)
        return state, logs["loss"]

    epoch = jax.jit(lambda state, x, y: jax.lax.scan(step, state, (x, y)), donate_argnums=0)
    parts = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    # Copies: what is given away to the loop must not be the model's own.
    state = tuple([jax.numpy.array(variable.value) for variable in part] for part in parts)

    def action() -> float:
        nonlocal state
        began = time.perf_counter()
        state, losses = epoch(state, x, y)
        jax.block_until_ready((state, losses))
        return (time.perf_counter() - began) / len(y)

    return action
