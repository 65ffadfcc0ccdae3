"""The arguments of `python -m tfp_ibnn`, which are read before slow imports."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["choose_backend", "is_command", "parse"]

ABOUT = "The library from a shell: `python -m tfp_ibnn calibrate --help`, or `export --help`."
EXAMPLES = """data.npz holds the arrays x_train, y_train, x_val, y_val and, to score candidates on
test data, x_test, y_test. Without x_val, a fifth of the training examples is taken.

example:
  python -m tfp_ibnn calibrate model.keras data.npz --output calibrated --effort minutes
"""
DRAWS = """networks to average (the model's, or 128; of the formats onnx and litert at most 32, or
all networks of an ensemble)"""
EXPORT_EXAMPLES = """examples:
  python -m tfp_ibnn export model.keras --format onnx --draws 32
  python -m tfp_ibnn export model.keras model.tflite --format litert --quantization float16
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
    commands = parser.add_subparsers(dest="command", required=True)
    _add_calibrate(commands)
    _add_export(commands)
    return parser.parse_args(arguments)


def choose_backend(options: argparse.Namespace) -> None:
    """Set the one backend that a command runs on, before Keras is imported.

    Args:
        options: What `parse` has returned.
    """
    if options.command == "export":
        os.environ["KERAS_BACKEND"] = "tensorflow"


def _add_calibrate(commands: Any) -> None:
    command = commands.add_parser(
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
    command.add_argument(
        "--batch-size", type=int, help="of the training (that of the model, or 32)"
    )
    command.add_argument("--seed", type=int, default=0, help="of splits, order and draws (0)")


def _add_export(commands: Any) -> None:
    command = commands.add_parser(
        "export",
        help="write a model to a file that predicts without this library",
        description="Write a model, with its uncertainty, to a file for TensorFlow, onnxruntime\n"
        "or LiteRT. It runs on TensorFlow, and takes .keras files made on JAX too.",
        epilog=EXPORT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("model", help="a .keras file")
    command.add_argument("output", nargs="?", help="path to write to (that of the model)")
    formats = ("saved_model", "onnx", "litert")
    command.add_argument("--format", choices=formats, default="saved_model")
    command.add_argument("--draws", type=int, help=DRAWS)
    command.add_argument("--seed", type=int, help="of the draws (the model's, or a random one)")
    command.add_argument("--threshold", type=float, help="the confidence below which to refuse")
    command.add_argument("--class-names", nargs="+", metavar="NAME", help="for the metadata")
    quantizations = ("dynamic", "float16", "int8")
    command.add_argument("--quantization", choices=quantizations, help="of a LiteRT file")
    command.add_argument(
        "--representative-data",
        metavar="FILE.npy",
        help="typical inputs, by which --quantization int8 chooses its ranges",
    )
    heads = ("softmax", "sigmoid", "gaussian", "point")
    command.add_argument("--head", choices=heads, help="what the output means (found out)")
    command.add_argument(
        "--from-logits",
        action=argparse.BooleanOptionalAction,
        help="whether the output is logits (found out)",
    )
    command.add_argument("--overwrite", action="store_true", help="replace what is there")
