"""The command `python -m tfp_ibnn export`."""

import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfp_ibnn._core.serialization import load_in_shell
from tfp_ibnn.conversion.wrappers import PredictionWrapper
from tfp_ibnn.export.exporting import export
from tfp_ibnn.layers import stochastic_layers
from tfp_ibnn.prediction import MonteCarlo

_ENDINGS = {"saved_model": "", "onnx": ".onnx", "litert": ".tflite"}


class UsageError(ValueError):
    """Options that do not go together."""


def run(
    model: str,
    output: str | None = None,
    *,
    format: str = "saved_model",
    head: str | None = None,
    from_logits: bool | None = None,
    representative_data: str | None = None,
    **options: Any,
) -> None:
    """Export the model of a `.keras` file, and print the path.

    Args:
        model: path of the file.
        output: path to write to; None is the path of the model with the suffix of the format.
        format: as for `export`.
        head: what the output means, as for `MonteCarlo`; None infers it.
        from_logits: whether the output is logits; None infers it.
        representative_data: path of an .npy file of typical inputs, or of an .npz file of those of
            several inputs, by name.
        **options: further arguments of `export`.

    Raises:
        UsageError: If `head` or `from_logits` is given for a model that already has it.
    """
    path = Path(model).with_suffix(_ENDINGS[format]) if output is None else Path(output)
    loaded = load_in_shell(model)
    if head is not None or from_logits is not None:
        if isinstance(loaded, PredictionWrapper):
            raise UsageError(
                f"--head and --from-logits are already set in a {type(loaded).__name__}: omit them."
            )
        is_plain = isinstance(loaded, keras.Model) and not stochastic_layers(loaded)
        draws = options.get("draws") or (1 if is_plain else 128)
        loaded = MonteCarlo(loaded, draws, head=head, from_logits=from_logits)
    if representative_data is not None:
        options["representative_data"] = _arrays_of(representative_data)
    export(loaded, path, format=format, **options)
    print(f"Written to {path}.")


def _arrays_of(path: str) -> Any:
    """Return the array of an .npy file, or those of an .npz file by name, or raise."""
    try:
        arrays = np.load(path, allow_pickle=False)
        return arrays if isinstance(arrays, np.ndarray) else dict(arrays)
    except (EOFError, ValueError, zipfile.BadZipFile) as error:
        raise UsageError(
            f"--representative-data must be an .npy file of numbers; {path} is damaged or another "
            "file: write one with np.save."
        ) from error
