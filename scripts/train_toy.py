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
import dataclasses
import json
import logging
import os
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import matplotlib

matplotlib.use("Agg")
import numpy as np

from experiments import figures, toy2d, toy2d_figures
from experiments.provenance import provenance
from tfp_ibnn.data import toy

# TensorFlow counts the functions that it traces, and takes one for each model to be a mistake.
logging.getLogger("tensorflow").setLevel(logging.ERROR)

SCORES = ("accuracy", "nll", "brier", "ece")


def main(argv=None):
    options, settings = parse(argv)
    output = Path(options.output)
    results = []
    for seed in options.seeds:
        began = time.perf_counter()
        results.append(toy2d.run(seed, settings, show))
        show(f"seed {seed}: {time.perf_counter() - began:.0f} s")
        print()

    rows = [row for result in results for row in result.rows]
    print_table(rows)
    files = [
        *figures.save(toy2d_figures.figures(results), output),
        save_histories(results, output / "histories.json"),
        save_metrics(rows, options, settings, output / "metrics.json"),
    ]
    print("\nWritten:", *files, sep="\n  ")


def parse(argv):
    """Return the options, and the settings of the experiment that they give."""
    full = toy2d.Settings()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", help="of the flows, from 0 (default 0 3 6 9 12 15)")
    add("--flow-length", type=int, help="from the converged network (default 12, or the longest)")
    add("--points", type=int, help=f"to train on (default {full.points})")
    add("--epochs", type=int, help=f"of a stochastic network (default {full.epochs})")
    add("--samples", type=int, help=f"draws at test time (default {full.samples})")
    add("--seeds", "--seed", type=int, nargs="+", default=[0], help="one or more (default 0)")
    add("--quick", action="store_true", help="a run of seconds, whose numbers mean nothing")
    add("--output", default="outputs/toy2d", help="folder for figures and numbers")
    options = parser.parse_args(argv)
    if min(options.seeds) < 0 or len(set(options.seeds)) < len(options.seeds):
        parser.error(f"--seeds must differ and be at least 0; got {options.seeds}")
    names = [field.name for field in dataclasses.fields(full)]
    given = {k: v for k, v in vars(options).items() if k in names and v is not None}
    if options.lengths is not None:
        given["lengths"] = tuple(options.lengths)
        if options.flow_length is None:
            preferred = full.flow_length in options.lengths
            given["flow_length"] = full.flow_length if preferred else max(options.lengths)
    try:
        settings = toy2d.Settings.quick(**given) if options.quick else toy2d.Settings(**given)
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
    for (budget, method), group in by_name(rows).items():
        cells = (spread([row[name] for row in group]) for name in SCORES)
        print(f"{budget:8}{method:26}{group[0]['epochs']:>6}", *(f"{c:>18}" for c in cells), sep="")
    best = {**toy.bayes_scores(), "ece": 0.0}
    print(f"{'Bayes rule, expected':40}", *(f"{best[name]:>18.4f}" for name in SCORES), sep="")
    print(f"Posteriors: mean of the probabilities of {rows[-1]['samples']} draws.")


def by_name(rows):
    groups = {}
    for row in rows:
        groups.setdefault((row["budget"], row["method"]), []).append(row)
    return dict(sorted(groups.items(), key=lambda item: item[0][0], reverse=True))


def spread(values):
    mean = f"{np.mean(values):.4f}"
    return f"{mean} ± {np.std(values, ddof=1):.4f}" if len(values) > 1 else mean


def save_histories(results, path):
    runs = [
        {"seed": result.seed, "budget": budget, "method": method, **history}
        for result in results
        for (budget, method), history in result.histories.items()
    ]
    lines = ",\n".join(json.dumps(run) for run in runs)
    path.write_text(f"[\n{lines}\n]\n")
    return path


def save_metrics(rows, options, settings, path):
    record = {
        "results": rows,
        "bayes": toy.bayes_scores(),
        "settings": dataclasses.asdict(settings),
        **provenance(vars(options)),
    }
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


if __name__ == "__main__":
    main()
