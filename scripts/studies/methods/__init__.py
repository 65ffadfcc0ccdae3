r"""Compare every method of the library on the same networks and data, none of them tuned.

Networks are trained and kept in models/ of --output; Laplace, SWAG, ensembles and posteriors of the
last layer begin with them; SG-MCMC, MC dropout and posteriors of z train their own. Every task has
a process of its own and becomes a line of runs.jsonl in --output; tasks that are there are skipped,
so the same command resumes. Then table.md is written from all of them.

Examples:
    python scripts/study.py methods --pairs digits --seeds 0 1 2
    python scripts/study.py methods --backend jax --jobs 14
    python scripts/study.py methods --tables
"""

from studies.command import Study

STUDY = Study("methods")
