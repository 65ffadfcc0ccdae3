r"""Flow posteriors of variational autoencoders on binarised MNIST, beside the published numbers.

A task is a pair, a seed and a posterior: conv, the gated convolutions of the paper of Sylvester
flows with four posteriors; mlp, one layer of 400 units with none to 80 planar flows. Every task has
a process of its own and becomes a line of runs.jsonl in --output; tasks that are there are skipped,
so the same command resumes. Then table.md is written from all of them. A run is over after --epochs
or --minutes, whichever comes first; warm-up and learning rate follow what share of it is over.
`python scripts/reproduce.py vae` does the same.

Examples:
    python scripts/study.py vae --quick --seeds 0
    python scripts/study.py vae --backend jax --jobs 9 --seeds 0 --minutes 11
    python scripts/study.py vae --pairs mlp --methods Gaussian "10 planar" --seeds 0 1
    python scripts/study.py vae --tables
"""

from studies.command import Study

STUDY = Study(
    "vae",
    options={
        "methods": {"nargs": "+", "metavar": "METHOD", "help": "posteriors (default: all)"},
        "epochs": {"type": int, "help": "of training, at most (default: 400)"},
        "minutes": {"type": float, "help": "of training, at most, compilation included"},
        "weights": {"type": int, "default": 500, "help": "importance weights (default: 500)"},
    },
)
