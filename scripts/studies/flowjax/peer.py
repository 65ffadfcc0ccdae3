"""A density in the plane by FlowJAX, in an environment of its own.

    python flowjax_peer.py FOLDER    reads FOLDER/task.npz, writes FOLDER/peer.json

Flows have the layers, hidden units and bins of ours, and FlowJAX's defaults otherwise. The loop is
that of `fit_to_data` without validation data; data are standardized, as its guide advises.
"""

import importlib.metadata
import json
import sys
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flowjax.bijections import RationalQuadraticSpline
from flowjax.distributions import StandardNormal
from flowjax.flows import coupling_flow, masked_autoregressive_flow
from flowjax.train.losses import MaximumLikelihoodLoss
from flowjax.train.train_utils import get_batches, step
from paramax import NonTrainable, unwrap

SPLINE = {"transformer": RationalQuadraticSpline(knots=8, interval=4)}
FLOWS = {
    "8 affine couplings": (coupling_flow, {"flow_layers": 8}),
    "6 spline couplings": (coupling_flow, {"flow_layers": 6, **SPLINE}),
    "8 autoregressive (MAF)": (masked_autoregressive_flow, {"flow_layers": 8}),
}


def main(folder):
    task = np.load(Path(folder) / "task.npz")
    mean, scale = task["train"].mean(axis=0), task["train"].std(axis=0)
    names = ("train", "test", "validation")
    train, test, held_out = (jnp.asarray((task[name] - mean) / scale) for name in names)
    trials = [trial(task, train, float(rate)) for rate in task["rates"]]
    log_prob = eqx.filter_jit(lambda flow, x: flow.log_prob(x))
    tried = [float(log_prob(flow, held_out).mean() - np.log(scale).sum()) for flow, *_ in trials]
    tried = [value if np.isfinite(value) else None for value in tried]
    best = int(np.argmax([-np.inf if value is None else value for value in tried]))
    flow, parameters, seconds, epochs = trials[best]
    found = np.asarray(log_prob(flow, test), "float64") - np.log(scale).sum()
    versions = {name: importlib.metadata.version(name) for name in ("flowjax", "jax")}
    record = {
        "log-likelihood": float(found.mean()),
        "validation": tried,
        "rate": float(task["rates"][best]),
        "parameters": parameters,
        "seconds": round(seconds, 2),
        "epochs": epochs,
        "versions": versions,
    }
    (Path(folder) / "peer.json").write_text(json.dumps(record))


def trial(task, train, rate):
    """Return a flow that is trained at a rate, its size, and its seconds in all and by epoch."""
    begun = time.perf_counter()
    key, first = jax.random.split(jax.random.key(int(task["seed"])))
    make, options = FLOWS[str(task["flow"])]
    base = StandardNormal((train.shape[1],))
    flow = make(first, base_dist=base, nn_width=int(task["hidden"]), nn_depth=1, **options)
    params, static = eqx.partition(
        flow, eqx.is_inexact_array, is_leaf=lambda leaf: isinstance(leaf, NonTrainable)
    )
    batch, steps = int(task["batch"]), int(task["steps"])
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))
    loss_fn = MaximumLikelihoodLoss()  # one object: another would be compiled anew
    state, epochs = optimizer.init(params), []
    for _ in range(max(1, steps * batch // len(train))):
        key, order = jax.random.split(key)
        started = time.perf_counter()
        for (x,) in zip(*get_batches([jax.random.permutation(order, train)], batch), strict=True):
            key, new = jax.random.split(key)
            params, state, loss = step(
                params,
                static,
                x,
                optimizer=optimizer,
                opt_state=state,
                loss_fn=loss_fn,
                key=new,
            )
        loss.block_until_ready()
        epochs.append(time.perf_counter() - started)
    seconds = time.perf_counter() - begun
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    return unwrap(eqx.combine(params, static)), size, seconds, epochs


if __name__ == "__main__":
    main(*sys.argv[1:])
