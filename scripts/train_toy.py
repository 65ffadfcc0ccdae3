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
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

FULL = {"points": 1_000, "test_points": 100_000, "lengths": (0, 3, 6, 9, 12, 15)}
FULL |= {"flow_length": 12, "epochs": 50, "converged_epochs": 300, "samples": 128}
QUICK = {"points": 60, "test_points": 500, "lengths": (0, 1), "flow_length": 1, "samples": 4}
QUICK |= {"epochs": 2, "converged_epochs": 4}


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", help="of the flows, from 0 (default 0 3 6 9 12 15)")
    add("--flow-length", type=int, help="from the converged network (default 12, or the longest)")
    add("--points", type=int, help=f"to train on (default {FULL['points']})")
    add("--epochs", type=int, help=f"of a stochastic network (default {FULL['epochs']})")
    add("--samples", type=int, help=f"draws at test time (default {FULL['samples']})")
    add("--seeds", "--seed", type=int, nargs="+", default=[0], help="one or more (default 0)")
    add(
        "--quick",
        action="store_true",
        help="a smoke test, under a minute; its numbers mean nothing",
    )
    add("--output", default="outputs/toy2d", help="folder for figures and numbers")
    options = parser.parse_args(argv)
    if min(options.seeds) < 0 or len(set(options.seeds)) < len(options.seeds):
        parser.error(f"--seeds must differ and be at least 0; got {options.seeds}")
    return options


if __name__ == "__main__":
    parse()  # --help need not wait for the imports below, which take seconds

import matplotlib

matplotlib.use("Agg")
import pandas as pd

from lib import Settings, figures, provenance, study, toy
from lib.markdown import spread
from lib.plan import PLANS
from lib.store import history

# TensorFlow counts the functions that it traces, and takes one for each model to be a mistake.
logging.getLogger("tensorflow").setLevel(logging.ERROR)

SCORES = ("accuracy", "nll", "brier", "ece")
EARLY = 5


def main(argv=None):
    options = parse(argv)
    settings, output = settings_of(options), Path(options.output)
    try:
        plan = toy2d(**settings)
        output.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.quick:
        print("A smoke test: the numbers mean nothing.")
    with tempfile.TemporaryDirectory() as runs:
        records = study.study(plan, runs, options.seeds, log=show).records
        print()
        print_table(pd.DataFrame(records))
        files = [
            *figures.save(figures.toy2d(records, runs, output), output),
            save_histories(records, runs, output / "histories.json"),
            save_metrics(records, options, settings, output / "metrics.json"),
        ]
    print("\nWritten:", *files, sep="\n  ")
    return 0


def settings_of(options):
    """Return the settings of the experiment that the options give."""
    given = {k: v for k, v in vars(options).items() if k in FULL and v is not None}
    if options.lengths is not None and options.flow_length is None:
        preferred = FULL["flow_length"]
        given["flow_length"] = preferred if preferred in options.lengths else max(options.lengths)
    return {**FULL, **(QUICK if options.quick else {}), **given}


def toy2d(**settings):
    """Return the plan of the experiment with other numbers."""
    points, test_points, lengths, flow_length, epochs, converged, samples = settings.values()
    if len(lengths) < 2 or lengths[0] != 0 or list(lengths) != sorted(set(lengths)):
        raise ValueError(f"`lengths` must rise from 0, the Gaussian, as in 0 3 6; got {lengths}.")
    if flow_length not in lengths[1:]:
        good = f"one of `lengths` above 0, such as {lengths[-1]}"
        raise ValueError(f"`flow_length` must be {good}; got {flow_length!r}.")
    if points < 1:
        raise ValueError(f"`points` must be at least 1; got {points}.")
    plan = PLANS["toy2d"]
    changes = {"train_size": points, "samples": samples, "epochs": epochs}
    if test_points != FULL["test_points"]:
        changes["limit"] = test_points
    base = {**plan.parts["report"].base, **changes}
    Settings(**base, dataset="four_clusters")

    def copies(start, lengths):
        flows = {n: {".*": {"posterior": "NormalPlanar1d", "depth": n}} for n in lengths[1:]}
        posteriors = {"gaussian": "gaussian", **{f"flow_{n}": flow for n, flow in flows.items()}}
        return {name: {"posterior": p, "pretrain_epochs": start} for name, p in posteriors.items()}

    runs = {
        "report": {
            "deterministic": {"epochs": EARLY},
            "deterministic_continued": {"epochs": EARLY + epochs},
            **copies(EARLY, lengths),
        },
        "equal": {
            "deterministic": {"epochs": converged + epochs},
            **copies(converged, (0, flow_length)),
        },
    }
    return plan._replace(
        parts={name: plan.parts[name]._replace(runs=of, base=base) for name, of in runs.items()}
    )


def show(text):
    """Write one line of progress over the last."""
    print(f"\r{text:78}", end="", flush=True)


def print_table(rows):
    """Print the means over the seeds, and the standard deviations where there are several."""
    print(f"\n{'budget':8}{'method':26}{'epochs':>6}", *(f"{name:>18}" for name in SCORES), sep="")
    for (budget, method, epochs), group in rows.groupby(["budget", "method", "epochs"], sort=False):
        cells = (spread(group[name], 4) for name in SCORES)
        print(f"{budget:8}{method:26}{epochs:>6}", *(f"{cell:>18}" for cell in cells), sep="")
    best = {**toy.bayes_scores(), "ece": 0.0}
    print(f"{'Bayes rule, expected':40}", *(f"{best[name]:>18.4f}" for name in SCORES), sep="")
    print(f"Posteriors: mean of the probabilities of {rows['samples'].max()} draws.")


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
    sys.exit(main())
