r"""Time a training step of a small ViT with noise that is written by hand in JAX: the floor.

Neither Keras nor this library takes part. Sizes and operations are those of the ViT of
`scripts/study.py places`: 4 blocks of width 64 with 4 heads on 49 patches, dropout, Adam, float32,
50 steps in one `lax.scan`. Noise is a factor for each example and feature, at the input of a layer:

    attention    at query, key, value and output projections, 16 layers
    MLPs         at both layers of each MLP, 8 layers
    both         at all of these

Prints milliseconds and the ratio to the step without noise: the least of rounds that take turns.
It takes a GPU.

Examples:
    python scripts/study.py transformer_by_hand
    python scripts/study.py transformer_by_hand --quick
"""

from studies.command import Command


def options(add):
    add("--batch-size", type=int, default=128, help="default 128")
    add("--rounds", type=int, default=12, help="default 12")
    add("--quick", action="store_true", help="a smoke test")


STUDY = Command("transformer_by_hand", options)
