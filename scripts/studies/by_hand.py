"""Training steps that are written by hand in JAX: how they are compiled, and timed in turns."""

import json
import time

import jax
import jax.numpy as jnp
from jax import lax


def compiled(step, state, data, steps):
    """Return an action: seconds of a step, and the last loss, of so many in one compiled call."""
    epoch = jax.jit(lambda state, data: lax.scan(step, state, data), donate_argnums=0)

    def action():
        nonlocal state
        began = time.perf_counter()
        state, losses = epoch(state, data)
        jax.block_until_ready(losses)
        return (time.perf_counter() - began) / steps, float(losses[-1])

    action()
    return action


def timed(actions, rounds, key, batch):
    """Print and return a row for each action: its least seconds, to those without noise."""
    times = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            times[name].append(action()[0])
    rows = []
    for name, seconds in times.items():
        ratio = min(seconds) / min(times["none"])
        rows.append({key: name, "batch": batch, "ms": 1e3 * min(seconds), "ratio": ratio})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def gaussian_kl(mean, scale, prior_scale):
    """Return the KL of a Gaussian z to that of mean 1 and a scale."""
    log, off = jnp.log(scale / prior_scale), ((mean - 1) / prior_scale) ** 2
    return jnp.sum((off + jnp.expm1(2 * log)) / 2 - log)
