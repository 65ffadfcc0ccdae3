r"""Does one pass do what many draws do? Students of `ibnn.distill` beside their teachers.

Every task, a pair of data and network, a seed and a teacher, has a process of its own and becomes a
line of runs.jsonl in --output; tasks that are there are skipped, so the same command resumes. Then
table.md is written from all of them. `fashion_lenet` and `cifar_vgg16` are for a GPU.

Examples:
    python scripts/study.py distill --quick --pairs digits --seeds 0
    python scripts/study.py distill --pairs digits diabetes
    python scripts/study.py distill --backend jax --jobs 2 --pairs fashion_lenet cifar_vgg16
    python scripts/study.py distill --tables
"""

from studies.command import Study

STUDY = Study("distill")
