r"""How far from the true posterior of a last layer are its approximations, flows among them?

NUTS gives the truth. Every task, a problem and a seed, has a process of its own and becomes a line
of runs.jsonl in --output; tasks that are there are skipped, so the same command resumes. Then
table.md is written from all of them.

Examples:
    python scripts/study.py quality --quick --pairs diabetes_40 --seeds 0
    python scripts/study.py quality --backend jax --jobs 12
    python scripts/study.py quality --tables
"""

from studies.command import Study

STUDY = Study("quality")
