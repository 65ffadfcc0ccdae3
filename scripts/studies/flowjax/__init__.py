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

import os

from studies.command import Command

os.environ.setdefault("KERAS_BACKEND", "jax")

RESULTS = "results/density"


def options(add):
    add("--pairs", nargs="+", help="data (default: all)")
    add("--seeds", type=int, nargs="+", default=range(3), help="default: 0 to 2")
    add("--threads", type=int, default=1, help="of both, by the cores they may use (default 1)")
    add("--peer-python", default=".venv-peers/bin/python", help="Python with FlowJAX")
    add("--output", help=f"default: {RESULTS}, or outputs/quick/density")
    add("--quick", action="store_true", help="a smoke test, with numbers that mean nothing")


STUDY = Command("flowjax", options, {"threads": 1})
