"""Rows a second of scripts/score.py and of `MonteCarlo.predict`."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
import pandas as pd
from keras import layers

import tfp_ibnn as ibnn
from lib import files, provenance
from lib.markdown import markdown_table
from studies.score_time import RESULTS

INPUTS, CLASSES, DRAWS = 8, 3, 32
BATCHES = (256, 4096)
SCRIPT = Path(__file__).parents[2] / "score.py"


def execute(options):
    """Do what the command line says; return the rows that are printed."""
    if not Path(options.python).exists():
        sys.exit(f"error: {options.python} is not there: `make beam` makes the environment.")
    keras.utils.set_random_seed(options.seed)
    average = ibnn.MonteCarlo(network(), DRAWS, seed=options.seed)
    x = np.random.default_rng(options.seed).normal(size=(options.rows, INPUTS)).astype("float32")
    with tempfile.TemporaryDirectory() as folder:
        mean, seconds = scored(average, x, Path(folder), options)
    rows = [row("scripts/score.py", options.workers, len(x), seconds)]
    for batch in BATCHES:
        average.predict(x[: 2 * batch], batch_size=batch, verbose=0)  # compiles
        began = time.perf_counter()
        predicted = average.predict(x, batch_size=batch, verbose=0)["mean"]
        seconds = time.perf_counter() - began
        rows.append(row(f"`MonteCarlo.predict`, batches of {batch:,}", 1, len(x), seconds))
    np.testing.assert_allclose(mean, predicted, atol=1e-5)
    table = markdown_table(pd.DataFrame(rows))
    print(table)
    if options.store:
        kept = {name: value for name, value in vars(options).items() if name != "store"}
        files.write_json(RESULTS / "runs.json", {**provenance(kept), "rows": rows})
        files.fill_tables(RESULTS / "README.md", "score", {"rows": table})
    return rows


def network():
    """Return a network with a Gaussian over z, whose weights are random."""
    inputs = keras.Input((INPUTS,), name="x")
    x = inputs
    for width in (64, 64):
        x = layers.Dense(width, "relu")(x)
    outputs = layers.Dense(CLASSES, "softmax")(x)
    return ibnn.to_stochastic(keras.Model(inputs, outputs), ibnn.NormalAffine(), train_size=1000)


def scored(average, x, folder, options):
    """Score rows by the script; return their means in order, and the seconds of the command."""
    model = ibnn.export(average, folder / "model.onnx", format="onnx", draws=DRAWS)
    names = [f"x{number}" for number in range(INPUTS)]
    pd.DataFrame(x, columns=names).to_parquet(folder / "rows.parquet", row_group_size=16_384)
    command = [options.python, SCRIPT, model, folder / "rows.parquet"]
    command += ["--output", folder / "scored", "--workers", options.workers, "--keep"]
    command += ["--columns", *names]
    began = time.perf_counter()
    subprocess.run([str(word) for word in command], check=True)
    seconds = time.perf_counter() - began
    parts = [pd.read_parquet(path) for path in sorted((folder / "scored").glob("part-*.parquet"))]
    found = pd.concat(parts, ignore_index=True)
    if not np.array_equal(np.sort(found["row"]), np.arange(len(x))):
        sys.exit("error: rows were lost or doubled.")
    return np.stack(found.sort_values("row")["mean"]), seconds


def row(method, processes, count, seconds):
    """Return a row of the table."""
    return {
        "method": method,
        "processes": processes,
        "rows": f"{count:,}",
        "seconds": round(seconds, 1),
        "rows a second": f"{count / seconds:,.0f}",
    }
