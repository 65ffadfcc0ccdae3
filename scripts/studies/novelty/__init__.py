r"""Show networks what they have never seen, and score how well they notice it.

Fashion-MNIST with each class left out in turn, under every method (fashion-0 to fashion-9), and
networks of CIFAR-10 without cats and ships against OOD inputs, by every score of `OODDetector`.
Every task becomes a line of runs.jsonl in --output; tasks that are there are skipped, so the same
command resumes. Then the tables are written. `python scripts/reproduce.py novelty` does the same.

Examples:
    python scripts/study.py novelty --backend jax --jobs 14
    python scripts/study.py novelty --pairs fashion-7 cifar_lenet --seeds 0
    python scripts/study.py novelty --tables
"""

from studies.command import Study

STUDY = Study("novelty")
