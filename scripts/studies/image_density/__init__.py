r"""How many bits does a pixel of MNIST take? Flows as densities of whole images.

Every task, a method and a seed, has a process of its own and becomes a line of runs.jsonl in
--output; tasks that are there are skipped, so the same command resumes. Training stops after
--minutes, which include compilation, and the weights that were best on validation images are
tested. Then table.md is written. `python scripts/reproduce.py mnist_density` does the same.

Examples:
    python scripts/study.py image_density --quick --methods RealNVP
    python scripts/study.py image_density --backend jax --jobs 7 --minutes 15
    python scripts/study.py image_density --tables
"""

from studies.command import Study

STUDY = Study(
    "image_density",
    seeds=1,
    options={
        "minutes": {"type": float, "default": 10.0, "help": "of each task (default 10)"},
        "methods": {
            "nargs": "+",
            "metavar": "METHOD",
            "help": "such as MAF (default: all)",
        },
    },
)
