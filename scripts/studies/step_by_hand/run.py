"""A training step of VGG16 with noise, by hand in JAX."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from studies import by_hand

BLOCKS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
UNITS = (1024, 512, 10)
CONVOLVED, PLANAR = (3, 7, 10), (14,)  # layers with a flow; the first have 1x1 convolutions too
KINDS = ("none", "gaussian", "merged", "flow")
TRAIN_SIZE, PRIOR_SCALE = 50_000, 0.5


def execute(options):
    """Do what the command line says; return the rows that are printed."""
    rows = []
    for batch_size in options.batch_sizes:
        size = {"narrower": 32, "steps": 2} if options.quick else {"narrower": 1, "steps": 50}
        actions = {kind: compiled(kind, batch_size, **size) for kind in KINDS}
        rounds = 2 if options.quick else options.rounds
        rows += by_hand.timed(actions, rounds, "kind", batch_size)
    return rows


def compiled(kind, batch_size, steps, narrower=1):
    """Return an action: seconds of a step and the last loss of so many in one call."""
    rng = np.random.default_rng(0)
    weights = initial(kind, rng, narrower)
    velocity = jax.tree.map(jnp.zeros_like, weights)
    averages = [(jnp.zeros(len(g)), jnp.ones(len(g))) for g in weights["gamma"]]
    x = jnp.asarray(rng.normal(size=(batch_size, 32, 32, 3)), "float32")
    y = jnp.asarray(rng.integers(0, 10, batch_size))
    order = np.stack([rng.permutation(batch_size) for _ in range(steps)])

    def step(state, data):
        weights, velocity, averages, key = state
        key, own = jax.random.split(key)
        gradient = jax.value_and_grad(loss, has_aux=True)
        (value, moments), found = gradient(weights, *data, own, kind)
        velocity = jax.tree.map(lambda v, g: 0.9 * v - 0.01 * g, velocity, found)
        weights = jax.tree.map(jnp.add, weights, velocity)
        averages = jax.tree.map(lambda a, b: 0.99 * a + 0.01 * b, averages, moments)
        return (weights, velocity, averages, key), value

    state = weights, velocity, averages, jax.random.key(0)
    return by_hand.compiled(step, state, (x[order], y[order]), steps)


def initial(kind, rng, narrower):
    filters = [size // narrower for block in BLOCKS for size in block]
    units = [*(size // narrower for size in UNITS[:-1]), UNITS[-1]]
    inputs = [3, *filters, *units[:-1]]

    def normal(*shape, fan_in):
        return jnp.asarray(rng.normal(size=shape) * np.sqrt(2 / fan_in), "float32")

    convolutions = list(zip(inputs[:13], filters, strict=True))
    weights = {
        "kernel": [normal(3, 3, i, o, fan_in=9 * i) for i, o in convolutions],
        "gamma": [jnp.ones(size) for size in filters],
        "beta": [jnp.zeros(size) for size in filters],
        "matrix": [normal(i, o, fan_in=i) for i, o in zip(inputs[13:], units, strict=True)],
        "bias": [jnp.zeros(size) for size in units],
    }
    if kind != "none":
        sizes = [sum(inputs)] if kind == "merged" else inputs
        weights["mean"] = [jnp.ones(size) for size in sizes]
        weights["scale"] = [jnp.full(size, np.log(np.expm1(PRIOR_SCALE))) for size in sizes]
    if kind == "flow":
        weights["flows"] = {}
        for layer in (*CONVOLVED, *PLANAR):
            width, steps = inputs[layer], 4 if layer in CONVOLVED else 2
            flow = {"v": normal(steps, width, fan_in=2e4), "b": jnp.zeros(steps)}
            flow["w"] = normal(steps, width, fan_in=2 * width)
            if layer in CONVOLVED:
                flow["factors"] = normal(3, width, width, fan_in=5e3)
            weights["flows"][str(layer)] = flow
    return weights


def loss(weights, x, y, key, kind, dtype=jnp.bfloat16):
    """Return the mean NLL plus KL / N of one batch, and the moments of the normalized layers."""
    factors, kl = latents(weights, key, len(x), kind)
    factors, moments, layer = [z.astype(dtype) for z in factors], [], 0
    x = x.astype(dtype)
    for block in BLOCKS:
        for _ in block:
            x = x * factors[layer][:, None, None, :] if factors else x
            x = lax.conv_general_dilated(
                *(x, weights["kernel"][layer].astype(dtype), (1, 1), "SAME"),
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            full = x.astype("float32")
            mean = full.mean((0, 1, 2))
            variance = jnp.maximum((full * full).mean((0, 1, 2)) - mean * mean, 0)
            moments.append((mean, variance))
            scale = weights["gamma"][layer] * lax.rsqrt(variance + 1e-3)
            shift = weights["beta"][layer] - mean * scale
            x = jax.nn.relu((full * scale + shift).astype(dtype))
            layer += 1
        window = (1, 2, 2, 1)
        x = lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")
    x = x.reshape(len(x), -1)
    for matrix, bias in zip(weights["matrix"], weights["bias"], strict=True):
        x = x * factors[layer] if factors else x
        x = x @ matrix.astype(dtype) + bias.astype(dtype)
        layer += 1
        x = jax.nn.relu(x) if layer < 16 else x
    logs = jax.nn.log_softmax(x.astype("float32"))
    return kl / TRAIN_SIZE - jnp.mean(jnp.take_along_axis(logs, y[:, None], 1)), moments


def latents(weights, key, count, kind):
    """Return z for each layer, of the shape (examples, channels), and the KL of all."""
    if kind == "none":
        return [], 0.0
    drawn, kl = [], 0.0
    for layer, (mean, raw) in enumerate(zip(weights["mean"], weights["scale"], strict=True)):
        key, own = jax.random.split(key)
        noise, scale = jax.random.normal(own, (count, len(mean))), jax.nn.softplus(raw)
        if flow := weights.get("flows", {}).get(str(layer)):
            z, own_kl = through_flow(noise, mean, scale, flow, layer)
        else:
            z, own_kl = mean + scale * noise, by_hand.gaussian_kl(mean, scale, PRIOR_SCALE)
        drawn.append(z)
        kl = kl + own_kl
    if kind == "merged":
        sizes = [kernel.shape[2] for kernel in weights["kernel"]]
        sizes += [len(matrix) for matrix in weights["matrix"]]
        drawn = jnp.split(drawn[0], np.cumsum(sizes)[:-1], axis=1)
    return drawn, kl


def through_flow(noise, mean, scale, flow, layer):
    """Return mean + scale * flow(noise), and an estimate of its KL."""
    x, log_q, width = noise, log_normal(noise), noise.shape[1]
    rng = np.random.default_rng(layer)
    order, signs = rng.permutation(width), np.sign(rng.normal(size=width)).astype("float32")
    for step, (v, w, b) in enumerate(zip(flow["v"], flow["w"], flow["b"], strict=True)):
        if step == 2:
            for factor in flow["factors"]:
                logs = 3 * jnp.tanh(jnp.diagonal(factor) / 3)
                lower = jnp.tril(factor / width**0.5, -1) + jnp.eye(width)
                upper = jnp.triu(factor / width**0.5, 1) + jnp.diag(signs * jnp.exp(logs))
                x = jnp.matmul(x, upper.T, precision="highest")
                x = jnp.matmul(x, lower.T, precision="highest")[:, order]
                log_q = log_q - jnp.sum(logs)
        product = jnp.sum(w * v)
        slope = jnp.where(product > 0, product, jnp.expm1(jnp.minimum(product, 0)))
        u = v + (slope - product) * w / jnp.maximum(jnp.sum(w * w), 1e-12)
        hidden = jnp.tanh(jnp.sum(x * w, axis=-1) + b)
        x = x + hidden[:, None] * u
        log_q = log_q - jnp.log1p(slope * (1 - hidden * hidden))
    z = mean + scale * x
    log_p = log_normal((z - 1) / PRIOR_SCALE) - width * np.log(PRIOR_SCALE)
    return z, jnp.mean(log_q - jnp.sum(jnp.log(scale)) - log_p)


def log_normal(x):
    return -(jnp.sum(x * x, axis=-1) + x.shape[-1] * np.log(2 * np.pi)) / 2
