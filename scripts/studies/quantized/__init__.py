r"""What does a smaller file cost? One posterior in each format, scored in the runtime of each.

A network with a Gaussian over z is trained and kept in outputs/quantized, or taken from there. Then
32 of its draws are exported to ONNX, and to LiteRT in 32, 16 and 8 bits, and each file is scored.
Every network becomes a line of runs.jsonl in --output; networks that are there are skipped. Then
table.md is written from all of them. With --backend jax networks are trained and kept, on a GPU for
example, and nothing is exported: TensorFlow writes the files.

Examples:
    python scripts/study.py quantized --quick --pairs digits --seeds 0
    python scripts/study.py quantized --pairs digits fashion_lenet
    python scripts/study.py quantized --backend jax --jobs 3 --pairs cifar_vgg16
    python scripts/study.py quantized --tables
"""

from studies.command import Study

STUDY = Study("quantized")
