r"""Time a training step of VGG16 with noise that is written by hand in JAX: the floor.

Neither Keras nor TensorFlow Probability nor this library takes part: what `make bench` measures on
a GPU cannot be much less than this. Operations and sizes are those of the library: convolutions
and batch normalization in bfloat16, noise and KL in float32, momentum, 50 steps in one `lax.scan`.

    gaussian     a factor for each example and channel in all layers, and the KL of each layer
    merged       the same with one call for all random numbers, and one KL for all layers
    flow         planar flows and 1x1 convolutions in four layers, Gaussians elsewhere

Prints, for each batch size, milliseconds and the ratio to the step without noise: the least of
rounds that take turns. It takes a GPU, and some minutes to compile.

Examples:
    python scripts/study.py step_by_hand
    python scripts/study.py step_by_hand --batch-sizes 256 --rounds 24
    python scripts/study.py step_by_hand --quick
"""

from studies.command import Command


def options(add):
    add("--batch-sizes", type=int, nargs="+", default=[128, 256])
    add("--rounds", type=int, default=12, help="default 12")
    add("--quick", action="store_true", help="a smoke test: a narrow network")


STUDY = Command("step_by_hand", options)
