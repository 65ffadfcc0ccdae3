r"""Which flow draws what? Densities in the plane, in nats, against the true ones where known.

Every task, data and a flow and a seed, has a process of its own and becomes a line of runs.jsonl in
--output; tasks that are there are skipped, so the same command resumes. Then table.md is written
from all of them.

Examples:
    python scripts/study.py density --quick --pairs moons --seeds 0
    python scripts/study.py density --backend jax --jobs 2
    python scripts/study.py density --tables
"""

from studies.command import Study

STUDY = Study("density")
