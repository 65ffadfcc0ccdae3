r"""Calibrate networks on several data sets by `ibnn.calibrate`, and test what comes out.

A network is trained as usual, then calibrated with --effort; all candidates are scored on test
data. Every run has a process of its own and becomes a line of runs.jsonl in --output; runs that are
there are skipped, so the same command resumes. Then table.md is written from all of them.

Examples:
    python scripts/study.py calibrate --pairs digits cancer
    python scripts/study.py calibrate --pairs unseen --seeds 0 1 --schedule cosine
    python scripts/study.py calibrate --pairs cifar_vgg16 --backend jax --jobs 5
    python scripts/study.py calibrate --tables
"""

from studies.command import Study

STUDY = Study(
    "calibrate",
    seeds=5,
    options={
        "effort": {
            "choices": ("seconds", "minutes", "trainings"),
            "default": "trainings",
            "help": "of the calibration; the choice of each effort before is stored, too "
            "(default trainings)",
        },
        "schedule": {
            "choices": ("own", "cosine"),
            "default": "own",
            "help": "of the learning rate in training (default own)",
        },
    },
    groups=("TUNED", "UNSEEN"),
)
