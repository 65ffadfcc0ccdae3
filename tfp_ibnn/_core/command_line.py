"""The arguments of `python -m tfp_ibnn`, which are read before slow imports."""

import argparse
import sys
from collections.abc import Sequence

__all__ = ["is_command", "parse"]

ABOUT = "The library from a shell: `python -m tfp_ibnn calibrate --help`."
EXAMPLES = """data.npz holds the arrays x_train, y_train, x_val, y_val and, to score candidates on
test data, x_test, y_test. Without x_val, a fifth of the training examples is taken.

example:
  python -m tfp_ibnn calibrate model.keras data.npz --output calibrated --effort minutes
"""


def is_command() -> bool:
    """Return whether Python was started as `python -m tfp_ibnn` and is importing the package.

    Until the package is imported, "-m" stands in the place of the program's name.
    """
    return sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] == "tfp_ibnn"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; print the help, or what is wrong with them, and exit.

    Args:
        arguments: What follows the package's name in the shell; None reads `sys.argv`.

    Returns:
        `command`, and the options of that command by their names.
    """
    parser = argparse.ArgumentParser(prog="python -m tfp_ibnn", description=ABOUT)
    command = parser.add_subparsers(dest="command", required=True).add_parser(
        "calibrate",
        help="calibrate a trained model's probabilities",
        description="Calibrate a trained model's probabilities by the cheapest method that is as\n"
        "good as the best, and write the model, the tables, a figure and a model card.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("model", help="a .keras file")
    command.add_argument("data", help="an .npz file")
    command.add_argument("--output", required=True, metavar="FOLDER", help="to write to")
    command.add_argument(
        "--effort",
        default="seconds",
        help="seconds (default), minutes or trainings; what each takes is printed first",
    )
    command.add_argument("--epochs", type=int, help="of the fine-tuning; effort minutes or more")
    command.add_argument("--minutes", type=float, help="after which nothing more is trained")
    command.add_argument("--loss", help="of a model that is saved without one")
    command.add_argument("--samples", type=int, default=32, help="draws of a prediction (32)")
    command.add_argument("--batch-size", type=int, default=32, help="of the training (32)")
    command.add_argument("--seed", type=int, default=0, help="of splits, order and draws (0)")
    return parser.parse_args(arguments)
