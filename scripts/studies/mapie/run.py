"""Conformal sets, and MAPIE's of the same predictions."""

import subprocess
import tempfile
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits

import tfp_ibnn as ibnn
from lib.benchmark import record
from studies.mapie import RESULTS

PEER = Path(__file__).with_name("peer.py")
COVERAGES = (0.8, 0.9, 0.95)


def execute(options):
    """Do what the command line says; return the rows that are printed."""
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
