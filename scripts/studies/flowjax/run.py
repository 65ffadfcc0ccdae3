"""Densities in the plane, and FlowJAX's of the same data."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from lib import files, provenance
from lib.tasks import apart, append, read, task_of
from studies.density import STUDY as DENSITY
from studies.density import run as density
from studies.flowjax import RESULTS, tables

PEER = Path(__file__).with_name("peer.py")
FLOWS = ("8 affine couplings", "6 spline couplings", "8 autoregressive (MAF)")


def execute(options):
    """Do what the command line says."""
    options.output = options.output or ("outputs/quick/density" if options.quick else RESULTS)
    options.pairs = options.pairs or list(density.PAIRS)
    if unknown := set(options.pairs) - density.PAIRS.keys():
        known = ", ".join(density.PAIRS)
        print(f"error: --pairs must be some of {known}; got {unknown.pop()}", file=sys.stderr)
        return 2
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    path = Path(options.output) / "peers.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    done = set(map(task_of, read(path.parent, path.name)))
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
        files.fill_tables(DENSITY.report, "flowjax", tables.tables(read(RESULTS, path.name)))


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
