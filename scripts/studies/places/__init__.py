r"""Where should the noise sit in a transformer, or in an LSTM? Compare places, none of them tuned.

Networks are trained and kept in models/ of --output. Every task has a process of its own and
becomes a line of runs.jsonl in --output; tasks that are there are skipped, so the same command
resumes. The costs of a step are measured last, one after the other. Then table.md is written from
all of them. The mails and speeches of one pair come from packages, by `npm`.

Examples:
    python scripts/study.py places --quick
    python scripts/study.py places --backend jax --jobs 14
    python scripts/study.py places --tables
"""

from studies.command import Study

STUDY = Study("places")
