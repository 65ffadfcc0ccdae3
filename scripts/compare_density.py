r"""Compare densities in the plane with FlowJAX's: the same data, sizes, steps and trials.

Affine couplings, spline couplings and masked autoregressive flows, on the data of study_density.py.
Ours and FlowJAX's, in the environment of `make peers`, train in turns, each in a process of its
own, on as many cores; ours on JAX too, unless KERAS_BACKEND says otherwise. Every pair of runs
becomes a line of peers.jsonl in --output; those that are there are skipped. Then the tables are
written.

Examples:
    python scripts/compare_density.py --quick
    python scripts/compare_density.py --threads 1
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from study_density import PAGES, RESULTS


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--pairs", nargs="+", help="data (default: all)")
    add("--seeds", type=int, nargs="+", default=range(3), help="default: 0 to 2")
    add("--threads", type=int, default=1, help="of both, by the cores they may use (default 1)")
    add("--peer-python", default=".venv-peers/bin/python", help="Python with FlowJAX")
    add("--output", help=f"default: {RESULTS}, or outputs/quick/density")
    add("--quick", action="store_true", help="a smoke test, with numbers that mean nothing")
    options = parser.parse_args(argv)
    if options.threads < 1:
        parser.error(f"--threads must be at least 1; got {options.threads}")
    options.output = options.output or ("outputs/quick/density" if options.quick else RESULTS)
    return options


if __name__ == "__main__":
    parse()  # --help need not wait for the imports below, which take seconds

import numpy as np

from experiments import density_study, density_tables, provenance
from experiments.calibrate_study import apart

PEER = Path(__file__).parent / "experiments" / "benchmark" / "flowjax_peer.py"
FLOWS = ("8 affine couplings", "6 spline couplings", "8 autoregressive (MAF)")


def main(argv=None):
    options = parse(argv)
    options.pairs = options.pairs or list(density_study.PAIRS)
    if unknown := set(options.pairs) - density_study.PAIRS.keys():
        known = ", ".join(density_study.PAIRS)
        print(f"error: --pairs must be some of {known}; got {unknown.pop()}", file=sys.stderr)
        return 2
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    path = Path(options.output) / "peers.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {(row["pair"], row["seed"], row["group"]) for row in density_tables.read_peers(path)}
    for flow in FLOWS:
        for pair in options.pairs:
            for seed in options.seeds:
                if (pair, seed, flow) in done:
                    continue
                row = compared(pair, seed, flow, options)
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row, allow_nan=False) + "\n")
                both = (row[name] for name in ("ours", "peer"))
                shown = (f"{x['log-likelihood']:.4f} nats, {x['seconds']:.0f} s" for x in both)
                print(f"{flow}, {pair}, seed {seed}: ours {'; FlowJAX '.join(shown)}", flush=True)
    density_tables.write_tables(options.output, *(PAGES if options.output == RESULTS else ()))


def compared(pair, seed, flow, options):
    """Return the scores of both on the same data."""
    ours = apart(density_study.run, pair, seed, flow, options.quick)
    train, test, held_out = density_study.points(pair, seed, options.quick)
    task = {"train": train, "test": test, "validation": held_out, "flow": flow, "seed": seed}
    task |= {"hidden": 32, "batch": density_study.BATCH, "rates": density_study.RATES}
    with tempfile.TemporaryDirectory() as folder:
        steps = density_study.QUICK if options.quick else density_study.STEPS
        np.savez(Path(folder) / "task.npz", steps=steps, **task)
        only = {"JAX_PLATFORMS": "cpu"}
        subprocess.run([options.peer_python, PEER, folder], check=True, env=os.environ | only)
        peer = json.loads((Path(folder) / "peer.json").read_text(encoding="utf-8"))
    peer["milliseconds"] = density_study.milliseconds(peer.pop("epochs"), len(train))
    about = provenance({"quick": options.quick, "threads": options.threads})
    about = {"pair": pair, "seed": seed, "group": flow, **about}
    return {**about, "ours": ours["scores"], "peer": peer}


if __name__ == "__main__":
    sys.exit(main())
