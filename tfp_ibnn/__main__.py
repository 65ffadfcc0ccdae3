"""The library from a shell: `python -m tfp_ibnn calibrate --help`."""

import sys
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import keras
import numpy as np

from tfp_ibnn._core.command_line import parse
from tfp_ibnn.calibration import calibrate


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    options = vars(parse(arguments))
    model, data, folder = (options.pop(name) for name in ("model", "data", "output"))
    del options["command"]
    try:
        _run(model, data, folder, options)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    return 0


def _run(model: str, data: str, folder: str, options: dict) -> None:
    try:
        with np.load(data) as file:
            arrays = {name: file[name] for name in file.files}
    except (EOFError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        remedy = "write one with np.savez, of arrays of numbers"
        raise ValueError(f"{data} is damaged or not an .npz file: {remedy}.") from error
    pairs = {part: (f"x_{part}", f"y_{part}") for part in ("train", "val", "test")}
    found = {part: tuple(map(arrays.get, names)) for part, names in pairs.items()}
    for part, (x, y) in found.items():
        if (x is None) != (y is None) or (part == "train" and x is None):
            names, held = " and ".join(pairs[part]), ", ".join(arrays) or "nothing"
            raise ValueError(f"{data} must hold {names}; it holds {held}.")
    validation, test = (None if found[part][0] is None else found[part] for part in ("val", "test"))
    Path(folder).mkdir(parents=True, exist_ok=True)  # rather an error now than at the end
    report = calibrate(keras.models.load_model(model), found["train"], validation, **options)
    print(f"\n{report.table()}\n")
    if test is not None:
        report.decide(test)  # for the model card
    report.save(folder)
    if test is not None:
        table = str(report.evaluate(test))
        print(f"{table}\n")
        (Path(folder) / "test.md").write_text(f"{table}\n")
    print(f"Written to {folder}.")


if __name__ == "__main__":
    sys.exit(main())
