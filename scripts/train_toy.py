"""Train on four clusters in the plane: planar flows of several lengths, and their baselines.

The original report's first experiment (its figures 3 and 4). A deterministic network is stopped
early, or trained to the end. Stochastic copies start from both: from the early one with each length
of planar flow, where 0 is a Gaussian, and from the converged one with a Gaussian and one flow. The
early network is also trained on without noise for as long as its copies are. All is repeated for
each seed, with training points of its own.

Examples:
    python scripts/train_toy.py
    python scripts/train_toy.py --quick
    python scripts/train_toy.py --lengths 0 2 4 --points 200 --seeds 0 1 2 3 4
    KERAS_BACKEND=jax python scripts/train_toy.py --seeds 0 --output outputs/toy2d_jax
"""

import argparse
import json
import logging
import os
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import matplotlib

matplotlib.use("Agg")
import numpy as np
import pandas as pd

from experiments import figures, provenance, study
from experiments.plan import TOY2D, toy2d
from experiments.report import history
from tfp_ibnn.data import toy

# TensorFlow counts the functions that it traces, and takes one for each model to be a mistake.
logging.getLogger("tensorflow").setLevel(logging.ERROR)

SCORES = ("accuracy", "nll", "brier", "ece")
QUICK = {"points": 200, "test_points": 2_000, "lengths": (0, 2), "flow_length": 2, "samples": 8}
QUICK |= {"epochs": 5, "converged_epochs": 20}


def main(argv=None):
    options, settings = parse(argv)
    output = Path(options.output)
    with tempfile.TemporaryDirectory() as runs:
        records = study.study(toy2d(**settings), runs, options.seeds, log=show).records
        print()
        print_table(pd.DataFrame(records))
        files = [
            *figures.save(figures.toy2d(records, runs, output), output),
            save_histories(records, runs, output / "histories.json"),
            save_metrics(records, options, settings, output / "metrics.json"),
        ]
    print("\nWritten:", *files, sep="\n  ")


def parse(argv):
    """Return the options, and the settings of the experiment that they give."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", help="of the flows, from 0 (default 0 3 6 9 12 15)")
    add("--flow-length", type=int, help="from the converged network (default 12, or the longest)")
    add("--points", type=int, help=f"to train on (default {TOY2D['points']})")
    add("--epochs", type=int, help=f"of a stochastic network (default {TOY2D['epochs']})")
    add("--samples", type=int, help=f"draws at test time (default {TOY2D['samples']})")
    add("--seeds", "--seed", type=int, nargs="+", default=[0], help="one or more (default 0)")
    add("--quick", action="store_true", help="a run of seconds, whose numbers mean nothing")
    add("--output", default="outputs/toy2d", help="folder for figures and numbers")
    options = parser.parse_args(argv)
    if min(options.seeds) < 0 or len(set(options.seeds)) < len(options.seeds):
        parser.error(f"--seeds must differ and be at least 0; got {options.seeds}")
    given = {k: v for k, v in vars(options).items() if k in TOY2D and v is not None}
    if options.lengths is not None and options.flow_length is None:
        preferred = TOY2D["flow_length"]
        given["flow_length"] = preferred if preferred in options.lengths else max(options.lengths)
    settings = {**TOY2D, **(QUICK if options.quick else {}), **given}
    try:
        toy2d(**settings)
        Path(options.output).mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return options, settings


def show(text):
    """Write one line of progress over the last."""
    print(f"\r{text:78}", end="", flush=True)


def print_table(rows):
    """Print the means over the seeds, and the standard deviations where there are several."""
    print(f"\n{'budget':8}{'method':26}{'epochs':>6}", *(f"{name:>18}" for name in SCORES), sep="")
    for (budget, method, epochs), group in rows.groupby(["budget", "method", "epochs"], sort=False):
        cells = (spread(group[name]) for name in SCORES)
        print(f"{budget:8}{method:26}{epochs:>6}", *(f"{cell:>18}" for cell in cells), sep="")
    best = {**toy.bayes_scores(), "ece": 0.0}
    print(f"{'Bayes rule, expected':40}", *(f"{best[name]:>18.4f}" for name in SCORES), sep="")
    print(f"Posteriors: mean of the probabilities of {rows['samples'].max()} draws.")


def spread(values):
    mean = f"{np.mean(values):.4f}"
    return f"{mean} ± {np.std(values, ddof=1):.4f}" if len(values) > 1 else mean


def save_histories(records, runs, path):
    """Write loss, NLL and KL of each stochastic model in every epoch."""
    found = []
    for record in records:
        if "train_kl" in record:
            logged = history(Path(runs) / record["name"])
            about = {key: record[key] for key in ("seed", "budget", "method")}
            found.append({**about, **{key: logged[key] for key in ("loss", "nll", "kl")}})
    path.write_text("[\n" + ",\n".join(json.dumps(run) for run in found) + "\n]\n")
    return path


def save_metrics(records, options, settings, path):
    known = {"results": records, "bayes": toy.bayes_scores(), "settings": settings}
    path.write_text(json.dumps({**known, **provenance(vars(options))}, indent=2) + "\n")
    return path


if __name__ == "__main__":
    main()
