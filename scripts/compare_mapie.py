"""Compare conformal sets with MAPIE's: the same predictions and calibration examples, in one run.

A small network is trained on digits; its predictions go to MAPIE, in the environment of `make
peers` and a process of its own. Sets by LAC and APS (the last label included) have to be identical;
those by RAPS are made with the k and lambda that MAPIE chose, from the examples that it calibrated
with. The table has the number of new examples whose sets differ. --store keeps it in
results/benchmark/mapie.json.

Examples:
    python scripts/compare_mapie.py
    python scripts/compare_mapie.py --store
"""

import argparse
import os
import subprocess
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

RESULTS = Path("results/benchmark/mapie.json")


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--python", default=".venv-peers/bin/python", help="with MAPIE")
    parser.add_argument("--store", action="store_true", help=f"keep the rows in {RESULTS}")
    return parser.parse_args(argv)


if __name__ == "__main__":
    parse()  # --help need not wait for the imports below, which take seconds

import keras
import numpy as np
from sklearn.datasets import load_digits

import tfp_ibnn as ibnn
from experiments.benchmark import record

PEER = Path(__file__).parent / "experiments" / "benchmark" / "mapie_peer.py"
COVERAGES = (0.8, 0.9, 0.95)


def main(argv=None):
    options = parse(argv)
    model, (x, y), new = trained(options)
    mc = ibnn.MonteCarlo(model, samples=1, seed=0)
    p, p_new = (mc.predict(part, verbose=0)["mean"].astype("float64") for part in (x, new))
    with tempfile.TemporaryDirectory() as folder:
        task = {"p": p, "y": y, "p_new": p_new, "coverages": COVERAGES}
        np.savez(Path(folder) / "task.npz", **task)
        subprocess.run([options.python, "-W", "ignore", PEER, folder], check=True)
        with np.load(Path(folder) / "peer.npz") as file:
            peer = dict(file)
    rows = []
    for coverage in COVERAGES:
        for method in ("lac", "aps", "raps"):
            name, chosen, rest = f"{method} {coverage}", {}, np.ones(len(y), bool)
            if method == "raps":
                k, penalty = (float(np.ravel(peer[f"{name} {x}"])[0]) for x in ("k", "lambda"))
                chosen = {"k": int(k), "penalty": penalty}
                rest[peer[f"{name} kept"]] = False
            sets = ibnn.Conformal(mc, method, coverage, **chosen).fit(x[rest], y[rest]).predict(new)
            differ = int((sets != peer[name]).any(axis=1).sum())
            row = {"method": method, "coverage": coverage, **chosen, "calibration": int(rest.sum())}
            row |= {"mean size": round(float(sets.sum(axis=1).mean()), 4)}
            rows.append({**row, "examples": len(new), "sets that differ": differ})
            print(rows[-1])
    print(f"Beside {peer['version']}.")
    if options.store:
        details = {"seed": options.seed, "epochs": options.epochs, "peer": str(peer["version"])}
        record.write(RESULTS, rows, details)
    return rows


def trained(options):
    """Return a network, calibration examples and new inputs, of digits with noise."""
    keras.utils.set_random_seed(options.seed)
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(options.seed).permutation(len(y))
    noise = np.random.default_rng(options.seed + 1).normal(size=x.shape) / 3
    x, y = (x / 16 + noise)[order].astype("float32"), y[order]
    dense = keras.layers.Dense
    model = keras.Sequential([keras.Input((64,)), dense(32, "relu"), dense(10, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(x[:500], y[:500], epochs=options.epochs, verbose=0)
    return model, (x[500:1100], y[500:1100]), x[1100:]


if __name__ == "__main__":
    main()
