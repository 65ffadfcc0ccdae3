"""Steps and bounds of posteriors for each layer, and over all layers."""

import json

import keras
import numpy as np

import tfp_ibnn as ibnn
from lib import data, files, networks, provenance
from lib.benchmark import timing
from lib.benchmark.networks import stepper

SHAPE, BATCH, PASSES = (28, 28, 1), 128, 10
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def couplings():
    return [ibnn.flows.AffineCoupling(swap=swap) for swap in (False, True)]


POSTERIORS = {
    "Gaussian for each layer": lambda: ibnn.NormalAffine(beta=1.0),
    "joint Gaussian, rank 4": lambda: ibnn.JointPosterior(ibnn.NormalLowRank(4, beta=1.0)),
    "joint, two couplings": lambda: ibnn.JointPosterior(ibnn.FlowPosterior(couplings(), beta=1.0)),
}


def execute(options):
    """Do what the command line says; return the rows that are printed."""
    rows = []
    for network in options.networks:
        times = steps(network, options)
        bounds = elbos(network, options) if options.epochs else {}
        for name in POSTERIORS:
            measured = timing.ratio(times[name], times[None])
            row = {"network": network, "posterior": name, **measured, "ms": 1e3 * min(times[name])}
            rows.append({**row, "deterministic_ms": 1e3 * min(times[None]), **bounds.get(name, {})})
            print(json.dumps(rows[-1]), flush=True)
    if options.json:
        kept = {key: value for key, value in vars(options).items() if key != "data_dir"}
        files.write_json(options.json, {**provenance(kept), "rows": rows})
    return rows


def steps(network, options):
    """Return the seconds of a step for each posterior, and for none."""
    keras.utils.set_random_seed(options.seed)
    models = {None: getattr(networks, network)(SHAPE)}
    for name, make in POSTERIORS.items():
        models[name] = ibnn.to_stochastic(
            getattr(networks, network)(SHAPE), make(), train_size=50_000
        )
    run = {name: stepper(x, BATCH, options.steps, options.seed) for name, x in models.items()}
    return timing.interleave(run, options.rounds)


def elbos(network, options):
    """Return the ELBO of each posterior over z in nats, with its error; the weights are given."""
    (x, y), _ = data.load("fashion_mnist", options.data_dir)
    x, y = x[: options.images].astype("float32") / 255, y[: options.images]
    keras.utils.set_random_seed(options.seed)
    plain = getattr(networks, network)(SHAPE)
    plain.compile(keras.optimizers.Adam(1e-3), LOSS)
    plain.fit(x, y, batch_size=BATCH, epochs=min(options.epochs, 10), verbose=0)
    found = {}
    for name, make in POSTERIORS.items():
        model = ibnn.to_stochastic(plain, make(), train_size=len(x))
        ibnn.freeze(model, "deterministic")
        total = options.epochs * -(-len(x) // BATCH)
        rate = keras.optimizers.schedules.CosineDecay(1e-2, total)
        model.compile(keras.optimizers.Adam(rate), LOSS)
        model.fit(x, y, batch_size=BATCH, epochs=options.epochs, verbose=0)
        scored = {"batch_size": 500, "verbose": 0, "return_dict": True}
        losses = [model.evaluate(x, y, **scored)["loss"] for _ in range(PASSES)]
        each = -len(x) * np.array(losses)
        error = float(each.std(ddof=1) / PASSES**0.5)
        found[name] = {"elbo": float(each.mean()), "elbo_error": error}
    return found
