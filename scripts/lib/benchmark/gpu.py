"""The cost of a training step of VGG16 on a GPU, in 16 and in 32 bits.

Each network is in a process of its own. XLA takes up to a minute to compile one: the processes
of a precision compile side by side, and then take turns: one is at work while it is timed.
"""

import contextlib
import itertools
import time

import keras
import numpy as np

from lib.benchmark import timing
from lib.benchmark.networks import KINDS, images, prepare, process, stepper, stochastic
from lib.benchmark.record import row

BATCHES = (128, 256)
PRECISIONS = {"bfloat16": "mixed_bfloat16", "float32": "float32"}
TARGETS = {"gaussian": 1.10, "flow": 1.30}


def gpu_steps(settings, network="vgg16", steps=50):
    """Time a step of a network, 50 steps in one execution, in all precisions and batch sizes."""
    library = {"jax": "JAX", "tensorflow": "TensorFlow"}[keras.backend.backend()]
    for precision in PRECISIONS:
        with contextlib.ExitStack() as stack:
            cases = list(itertools.product(("none", *TARGETS), BATCHES))
            pools = {case: stack.enter_context(process()) for case in cases}
            words = {case: (network, case[0], precision, case[1], steps) for case in cases}
            begun = {c: pool.submit(_begin, *words[c], settings.seed) for c, pool in pools.items()}
            for case, future in begun.items():
                if error := future.exception():
                    raise RuntimeError(f"{' '.join(map(str, words[case]))} failed: {error}")
            actions = {case: lambda pool=pools[case]: pool.submit(_step).result() for case in cases}
            times = timing.interleave(actions, max(4, settings.rounds // 2), warmup=0)
        for kind, batch in itertools.product(TARGETS, BATCHES):
            own, reference = (times[x, batch] for x in (kind, "none"))
            label = f"{network.upper()} step, {library}, {precision}, batch {batch}, {KINDS[kind]}"
            name, seconds = f"gpu.{precision}.{batch}.{kind}", {"step": min(own)}
            seconds["deterministic"] = min(reference)
            yield row(name, label, timing.ratio(own, reference), TARGETS[kind], seconds=seconds)


def _begin(*arguments):
    _begin.action = stepping(*arguments)
    _begin.action()


def _step():
    return _begin.action()


def stepping(network, kind, precision, batch, steps, seed):
    """Return an action: the seconds of a step, of `fit` on TensorFlow, of a loop on JAX."""
    keras.config.set_dtype_policy(PRECISIONS[precision])
    keras.utils.set_random_seed(seed)
    model = stochastic(network, kind)
    if keras.backend.backend() == "tensorflow":
        return stepper(model, batch, steps, seed)
    import jax

    rng, drawn = np.random.default_rng(seed), images(batch, seed, model.input_shape[1:])
    order = np.stack([rng.permutation(batch) for _ in range(steps)])
    return looping(model, *(jax.numpy.asarray(part)[order] for part in drawn))


def looping(model, x, y):
    """Compile a model for `lax.scan` over its `train_step`; return an action, as `stepping`."""
    import jax

    prepare(model)

    def step(state, data):
        logs, state = model.train_step(state, data)
        return state, logs["loss"]

    epoch = jax.jit(lambda state, x, y: jax.lax.scan(step, state, (x, y)), donate_argnums=0)
    parts = (
        *(model.trainable_variables, model.non_trainable_variables),
        *(model.optimizer.variables, model.metrics_variables),
    )
    # Copies: what is given away to the loop must not be the model's own.
    state = tuple([jax.numpy.array(variable.value) for variable in part] for part in parts)

    def action():
        nonlocal state
        began = time.perf_counter()
        state, losses = epoch(state, x, y)
        jax.block_until_ready((state, losses))
        return (time.perf_counter() - began) / len(y)

    return action
