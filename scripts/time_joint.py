"""Compare a posterior for each layer with one over all layers: step times and ELBOs.

Times: a training step of LeNet and of an MLP (784-256-128-10), batch 128, random images, as ratios
to the deterministic network; all cases take turns in one run, and the minimum counts. ELBOs: the
network is trained on some images of Fashion-MNIST, then its weights stay, and each posterior is
trained alone with beta = 1: these are bounds of one evidence, so that their differences are nats.
Either backend, CPU or GPU; --json keeps the numbers with command, versions and hardware.

Examples:
    python scripts/time_joint.py --json results/benchmark/joint_tensorflow.json
    KERAS_BACKEND=jax python scripts/time_joint.py --json results/benchmark/joint_jax.json
    python scripts/time_joint.py --networks lenet --epochs 0
"""

import argparse
import json
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("MPLBACKEND", "Agg")

NETWORKS = ("lenet", "mlp")


def parse(argv=None):
    about = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(**about)
    add = parser.add_argument
    add("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    add("--rounds", type=int, default=8, help="repeats of each step's time (default 8)")
    add("--steps", type=int, default=16, help="steps in one execution (default 16)")
    add("--images", type=int, default=5000, help="of Fashion-MNIST (default 5000)")
    add(
        "--epochs", type=int, default=20, help="to train each posterior; 0: times only (default 20)"
    )
    add("--seed", type=int, default=0, help="default 0")
    add("--data-dir", help="cache of the data (default: TFP_IBNN_DATA, or the user's cache)")
    add("--json", help="file for the numbers")
    return parser.parse_args(argv)


if __name__ == "__main__":
    parse()  # --help need not wait for the imports below, which take seconds

import keras
import numpy as np

import tfp_ibnn as ibnn
from experiments import data, files, networks, provenance
from experiments.benchmark import timing
from experiments.benchmark.networks import stepper

SHAPE, BATCH, PASSES = (28, 28, 1), 128, 10
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def couplings():
    return [ibnn.flows.AffineCoupling(swap=swap) for swap in (False, True)]


POSTERIORS = {
    "Gaussian for each layer": lambda: ibnn.NormalAffine(beta=1.0),
    "joint Gaussian, rank 4": lambda: ibnn.JointPosterior(ibnn.NormalLowRank(4, beta=1.0)),
    "joint, two couplings": lambda: ibnn.JointPosterior(ibnn.FlowPosterior(couplings(), beta=1.0)),
}


def main(argv=None):
    options = parse(argv)
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


if __name__ == "__main__":
    main()
