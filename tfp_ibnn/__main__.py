"""The library from a shell: `python -m tfp_ibnn --help`."""

import sys
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tfp_ibnn._core.command_line import parse
from tfp_ibnn._core.serialization import load_in_shell
from tfp_ibnn.calibration import calibrate
from tfp_ibnn.calibration.record import folder_for_report
from tfp_ibnn.export.command import run as export

Pair = tuple[np.ndarray, np.ndarray]
"""Inputs and targets."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: What follows the package's name in the shell; None reads `sys.argv`.

    Returns:
        The exit code: 0, or 1 after an error, or 130 after an interrupt.
    """
    options = vars(parse(arguments))
    command = options.pop("command")
    run = {"calibrate": _calibrate, "export": export}[command]
    try:
        run(**options)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    return 0


class _Data(NamedTuple):
    """The arrays of a file, each part as (x, y); those that need not be there may be None."""

    train: Pair
    validation: Pair | None
    test: Pair | None


def _calibrate(model: str, data: str, output: str, **options: Any) -> None:
    """Calibrate a model, and write what comes of it.

    Args:
        model: path of a .keras file.
        data: path of an .npz file.
        output: path of the folder to write to.
        **options: those of `calibrate`.
    """
    train, validation, test = _read(data)
    path = folder_for_report(output)  # rather an error now than at the end
    network = load_in_shell(model)
    inputs = getattr(network, "inputs", None)  # None of a model with its own `call`
    if inputs is not None and len(inputs) > 1:
        raise ValueError(f"{model} has several inputs: use ibnn.calibrate in Python.")
    report = calibrate(network, train, validation, **options)
    print(f"\n{report}\n")
    if test is not None:
        report.decide(test)  # for the model card
    report.save(output)
    if test is not None:
        table = report.evaluate(test)
        print(f"{table}\n")
        (path / "test.md").write_text(f"{table.all()}\n")
    print(f"Written to {output}.")


def _read(path: str) -> _Data:
    """Return the arrays of an .npz file, or raise."""
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
    except (EOFError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        if "Object arrays" in str(error):
            raise ValueError(
                f"{path} holds arrays of objects: save texts as x.astype(str). For a model with "
                "several inputs, use ibnn.calibrate in Python."
            ) from error
        raise ValueError(
            f"{path} is damaged or not an .npz file: write one with np.savez."
        ) from error
    train = _pair(arrays, "train", path)
    if train is None:
        raise ValueError(
            f"{path} must hold x_train and y_train; it holds {', '.join(arrays) or 'nothing'}."
        )
    return _Data(train, _pair(arrays, "val", path), _pair(arrays, "test", path))


def _pair(arrays: dict[str, np.ndarray], part: str, path: str) -> Pair | None:
    """Return x and y of a part of the data, or None if neither is there."""
    x = arrays.get(f"x_{part}")
    y = arrays.get(f"y_{part}")
    if x is None and y is None:
        return None
    if x is None or y is None:
        raise ValueError(f"{path} must hold x_{part} and y_{part}; it holds {', '.join(arrays)}.")
    return x, y


if __name__ == "__main__":
    sys.exit(main())
