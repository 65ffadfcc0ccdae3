r"""Compare densities in the plane with FlowJAX's: the same data, sizes, steps and trials.

Affine couplings, spline couplings and masked autoregressive flows, on the data of `density`.
Ours and FlowJAX's, in the environment of `make peers`, train in turns, each in a process of its
own, on as many cores; ours on JAX too, unless KERAS_BACKEND says otherwise. Every pair of runs
becomes a line of peers.jsonl in --output; those that are there are skipped. Then the tables are
written.

Examples:
    python scripts/study.py flowjax --quick
    python scripts/study.py flowjax --threads 1
"""

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np

from lib import files, provenance
from lib.tasks import apart, append, read
from studies.density import STUDY as DENSITY
from studies.density import run as density
from studies.flowjax import tables

PEER = Path(__file__).with_name("peer.py")
RESULTS = DENSITY.results
FLOWS = ("8 affine couplings", "6 spline couplings", "8 autoregressive (MAF)")


def main(argv=None):
    options = parse(argv)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    path = Path(options.output) / "peers.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {(row["pair"], row["seed"], row["group"]) for row in read(path.parent, path.name)}
    for flow in FLOWS:
        for pair in options.pairs:
            for seed in options.seeds:
                if (pair, seed, flow) in done:
                    continue
                row = compared(pair, seed, flow, options)
                append(path.parent, row, path.name)
                both = (row[name] for name in ("ours", "peer"))
                shown = (f"{x['log-likelihood']:.4f} nats, {x['seconds']:.0f} s" for x in both)
                print(f"{flow}, {pair}, seed {seed}: ours {'; FlowJAX '.join(shown)}", flush=True)
    if options.output == RESULTS:
        files.fill_tables(DENSITY.shown_in, "flowjax", tables.tables(read(RESULTS, path.name)))


def compared(pair, seed, flow, options):
    """Return the scores of both on the same data."""
    ours = apart(density.run, pair, seed, flow, options.quick)
    train, test, held_out = density.points(pair, seed, options.quick)
    task = {"train": train, "test": test, "validation": held_out, "flow": flow, "seed": seed}
    task |= {"hidden": 32, "batch": density.BATCH, "rates": density.RATES}
    with tempfile.TemporaryDirectory() as folder:
        steps = density.QUICK if options.quick else density.STEPS
        np.savez(Path(folder) / "task.npz", steps=steps, **task)
        only = {"JAX_PLATFORMS": "cpu"}
        subprocess.run([options.peer_python, PEER, folder], check=True, env=os.environ | only)
        peer = json.loads((Path(folder) / "peer.json").read_text(encoding="utf-8"))
    peer["milliseconds"] = density.milliseconds(peer.pop("epochs"), len(train))
    about = provenance({"quick": options.quick, "threads": options.threads})
    about = {"pair": pair, "seed": seed, "group": flow, **about}
    return {**about, "ours": ours["scores"], "peer": peer}


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--pairs", nargs="+", default=list(density.PAIRS), help="data (default: all)")
    add("--seeds", type=int, nargs="+", default=range(3), help="default: 0 to 2")
    add("--threads", type=int, default=1, help="of both, by the cores they may use (default 1)")
    add("--peer-python", default=".venv-peers/bin/python", help="Python with FlowJAX")
    add("--output", help=f"default: {RESULTS}, or outputs/quick/density")
    add("--quick", action="store_true", help="a smoke test, with numbers that mean nothing")
    options = parser.parse_args(argv)
    if unknown := set(options.pairs) - density.PAIRS.keys():
        known = ", ".join(density.PAIRS)
        parser.error(f"--pairs must be some of {known}; got {unknown.pop()}")
    if options.threads < 1:
        parser.error(f"--threads must be at least 1; got {options.threads}")
    options.output = options.output or ("outputs/quick/density" if options.quick else RESULTS)
    return options
