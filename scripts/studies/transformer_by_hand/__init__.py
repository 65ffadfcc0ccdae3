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

import argparse


def parse(argv=None):
    about = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(**about)
    parser.add_argument("--batch-size", type=int, default=128, help="default 128")
    parser.add_argument("--rounds", type=int, default=12, help="default 12")
    parser.add_argument("--quick", action="store_true", help="a smoke test")
    return parser.parse_args(argv)


def main(argv=None):
    options = parse(argv)  # first: the imports below take seconds
    from studies.transformer_by_hand.run import execute

    execute(options)
