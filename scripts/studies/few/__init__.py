r"""Which posterior pays with few data? LeNet and VGG16 on 5,000 images, every method tuned.

Four settings of every method are tried on a draw of images of their own; then all seeds are run at
the best one, and tested on 50,000 images. --jobs processes share the tasks; each task becomes a
line of runs.jsonl in --output; tasks that are there are skipped, so the same command resumes. Then
table.md is written from all of them. Predictions for the ensembles are kept in predictions/.

Examples:
    python scripts/study.py few --quick --pairs few_lenet
    python scripts/study.py few --backend jax --jobs 8
    python scripts/study.py few --tables
"""

from studies.command import Study

STUDY = Study(
    "few",
    seeds=8,
)
