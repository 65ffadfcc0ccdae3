"""A training step of a small ViT with noise, by hand in JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from studies import by_hand

BLOCKS, WIDTH, HEADS, TOKENS, PATCH = 4, 64, 4, 49, 16
PROJECTIONS = ("query", "key", "value", "output")
PLACES = {"none": (), "attention": PROJECTIONS, "MLPs": ("up", "down")}
PLACES["both"] = PLACES["attention"] + PLACES["MLPs"]
TRAIN_SIZE, PRIOR_SCALE = 55_000, 0.2


def execute(options):
    """Do what the command line says; return the rows that are printed."""
    steps, rounds = (2, 2) if options.quick else (50, options.rounds)
    size = 4 if options.quick else options.batch_size
    actions = {place: compiled(place, size, steps) for place in PLACES}
    return by_hand.timed(actions, rounds, "place", size)


def compiled(place, batch_size, steps):
    """Return an action: seconds of a step, and the last loss of so many in one call."""
    rng = np.random.default_rng(0)
    weights = initial(place, rng)
    moments = [jax.tree.map(jnp.zeros_like, weights) for _ in range(2)]
    x = jnp.asarray(rng.normal(size=(steps, batch_size, TOKENS, PATCH)), "float32")
    y = jnp.asarray(rng.integers(0, 10, (steps, batch_size)))

    def step(state, data):
        weights, (first, second), count, key = state
        key, own = jax.random.split(key)
        value, slopes = jax.value_and_grad(loss)(weights, *data, own, place)
        count = count + 1
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, slopes)
        second = jax.tree.map(lambda m, g: 0.999 * m + 0.001 * g * g, second, slopes)
        rate = 1e-3 * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        moved = jax.tree.map(
            lambda w, a, b: w - rate * a / (jnp.sqrt(b) + 1e-7), weights, first, second
        )
        return (moved, (first, second), count, key), value

    state = weights, tuple(moments), jnp.zeros((), "float32"), jax.random.key(0)
    return by_hand.compiled(step, state, (x, y), steps)


def initial(place, rng):
    def layer(i, o, noisy=False):
        made = {"kernel": rng.normal(size=(i, o)) / np.sqrt(i), "bias": np.zeros(o)}
        if noisy:
            made |= {"mean": np.ones(i), "scale": np.full(i, np.log(np.expm1(PRIOR_SCALE)))}
        return {name: jnp.asarray(value, "float32") for name, value in made.items()}

    def norm():
        return {"gamma": jnp.ones(WIDTH, "float32"), "beta": jnp.zeros(WIDTH, "float32")}

    blocks, noisy = [], PLACES[place]
    for _ in range(BLOCKS):
        block = {name: layer(WIDTH, WIDTH, name in noisy) for name in PROJECTIONS}
        block["up"] = layer(WIDTH, 2 * WIDTH, "up" in noisy)
        block["down"] = layer(2 * WIDTH, WIDTH, "down" in noisy)
        blocks.append(block | {"before": norm(), "between": norm()})
    table = jnp.asarray(0.02 * rng.normal(size=(TOKENS, WIDTH)), "float32")
    ends = {"patches": layer(PATCH, WIDTH), "head": layer(WIDTH, 10), "last": norm()}
    return {"blocks": blocks, "positions": table, **ends}


def loss(weights, x, y, key, place):
    """Return the mean NLL plus KL / N of one batch."""
    keys, kls = iter(jax.random.split(key, 10 * BLOCKS)), []

    def dense(layer, x):
        if "mean" in layer:
            scale = jax.nn.softplus(layer["scale"])
            noise = jax.random.normal(next(keys), (len(x), x.shape[-1]), "float32")
            x = x * (layer["mean"] + scale * noise)[:, None]
            kls.append(by_hand.gaussian_kl(layer["mean"], scale, PRIOR_SCALE))
        return x @ layer["kernel"] + layer["bias"]

    def dropped(x):
        return jnp.where(jax.random.bernoulli(next(keys), 0.9, x.shape), x / 0.9, 0)

    x = dense(weights["patches"], x) + weights["positions"]
    for block in weights["blocks"]:
        before = normalized(block["before"], x)
        q, k, v = (heads(dense(block[name], before)) for name in PROJECTIONS[:3])
        share = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / (WIDTH / HEADS) ** 0.5)
        found = jnp.einsum("bhqk,bkhd->bqhd", share, v).reshape(x.shape)
        x = x + dropped(dense(block["output"], found))
        found = jax.nn.gelu(dense(block["up"], normalized(block["between"], x)), approximate=False)
        x = x + dropped(dense(block["down"], found))
    logits = dense(weights["head"], normalized(weights["last"], x).mean(axis=1))
    logs = jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1)
    return functools.reduce(jnp.add, kls, 0.0) / TRAIN_SIZE - jnp.mean(logs)


def heads(x):
    return x.reshape(*x.shape[:2], HEADS, WIDTH // HEADS)


def normalized(weights, x):
    mean = x.mean(axis=-1, keepdims=True)
    variance = jnp.square(x - mean).mean(axis=-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-3) * weights["gamma"] + weights["beta"]
