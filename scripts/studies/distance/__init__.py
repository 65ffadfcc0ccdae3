r"""How close do methods come to Hamiltonian Monte Carlo on CIFAR-10? The reference is published.

The reference is not part of this project: give the file by --reference, or in TFP_IBNN_HMC. Every
task has a process of its own and becomes a line of runs.jsonl in --output; tasks that are there are
skipped, so the same command resumes. The better of two trials is repeated with other seeds, and
averages are made from the predictions, which are kept beside it. Then table.md is written.

Examples:
    python scripts/study.py distance --quick --pairs map laplace
    python scripts/study.py distance --backend jax --jobs 6 --reference hmc_cifar10_probs.npz
    python scripts/study.py distance --tables
"""

from studies.command import Study

STUDY = Study(
    "distance",
    options={
        "reference": {"metavar": "PATH", "help": "predictions of HMC (default: TFP_IBNN_HMC)"},
        "epochs": {
            "type": int,
            "help": "of one network; chains have five times as many (default 50)",
        },
    },
)
