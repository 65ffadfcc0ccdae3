"""Whether a file says in its runtime what the model says in Python."""

import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
from keras import ops

from tfp_ibnn.export.frozen import in_float32
from tfp_ibnn.export.inputs import Inputs
from tfp_ibnn.export.reading import open_exported
from tfp_ibnn.export.served import Served

_TOLERANCE = 1e-3
"""How far numbers may differ, as a share of the largest one of an output, or of 1."""

_OPEN_SIZES = (8, 32, 128)
"""Sizes of open axes, of which the first that the model takes is tried, and twice that size."""

_LARGE = 5_000_000
"""Number of weights above which one example is enough."""


class _Example(NamedTuple):
    """Inputs of a file, and the outputs that it should have."""

    batch: int  # number of examples
    inputs: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]


def check_file_answers(served: Served, path: Path, *, is_exact: bool = True) -> None:
    """Run a file on made-up inputs, and compare its outputs with those of the model.

    Args:
        served: what the file predicts.
        path: of the file.
        is_exact: whether numbers must agree; quantized ones need not.

    Raises:
        ValueError: If the file fails in its runtime, or its outputs differ.
    """
    try:
        run = open_exported(path).run
    except Exception as error:  # runtimes raise anything
        raise _refusal(served, f"cannot be loaded: {_line_of(error)}") from error
    for example in _examples(served):
        try:
            found = run(**example.inputs)
        except Exception as error:
            reason = f"fails for a batch of {example.batch}: {_line_of(error)}"
            raise _refusal(served, reason) from error
        if is_exact:
            _compare(served, found, example.expected)


def _line_of(error: Exception) -> str:
    """Return the start of what an error says, in one line."""
    words = str(error).split()
    return " ".join(words)[:200]


def _refusal(served: Served, what: str) -> ValueError:
    """Return the error for a file that is not written, which names the remedy."""
    has_open_axes = any(None in spec.shape[1:] for spec in served.inputs.specs.values())
    if has_open_axes:
        return ValueError(
            f"The file was not written, since it {what}. Give the inputs a fixed size, such as "
            "keras.Input((20, 3)) instead of keras.Input((None, 3)), or export a SavedModel."
        )
    return ValueError(
        f"The file was not written, since it {what}. Export a SavedModel instead, which holds any "
        "model."
    )


def _examples(served: Served) -> list[_Example]:
    """Return batches of different sizes with what Python says of them; one for a large model.

    Where the model itself takes none of them, there is a warning, and nothing to compare.
    """
    reason = ""
    for size in _OPEN_SIZES:
        try:
            return _examples_of_size(served, size)
        except Exception as error:  # models that need other inputs raise anything
            reason = _line_of(error)
    warnings.warn(
        f"The file was not compared with the model, which takes no random inputs: {reason}. Call "
        "ibnn.exported_scores(path, x, y).",
        stacklevel=5,
    )
    return []


def _examples_of_size(served: Served, size: int) -> list[_Example]:
    is_large = served.network.count_params() > _LARGE
    examples = []
    for batch in (1,) if is_large else (1, 2):
        inputs = _made_up(served.inputs, batch, batch * size)
        examples.append(_Example(batch, inputs, _in_python(served, inputs)))
    return examples


def _in_python(served: Served, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    tensors = {name: ops.convert_to_tensor(array) for name, array in inputs.items()}
    with in_float32(served.model):
        outputs = served.serve(**tensors)
    return {name: ops.convert_to_numpy(value) for name, value in outputs.items()}


def _made_up(inputs: Inputs, batch: int, size: int) -> dict[str, np.ndarray]:
    """Return random inputs between 0 and 1, which are in the range of most models.

    Args:
        inputs: those of the model.
        batch: number of examples.
        size: of all axes of open size.
    """
    random = np.random.default_rng(batch)
    arrays = {}
    for name, spec in inputs.specs.items():
        shape = [batch]
        for length in spec.shape[1:]:
            shape.append(size if length is None else length)
        is_float = "float" in spec.dtype
        values = random.random(shape) if is_float else random.integers(0, 2, shape)
        arrays[name] = values.astype(spec.dtype)
    return arrays


def _compare(served: Served, found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Raise if an output differs by more than rounding."""
    for name, value in expected.items():
        if found[name].shape != value.shape:
            raise _refusal(
                served,
                f"returns {name!r} in the shape {found[name].shape} instead of {value.shape}",
            )
        if value.dtype == bool:
            is_same = _is_nearly_the_same(found[name], value)
            difference = np.mean(found[name] != value)
        else:
            difference = _difference(found[name], value)
            is_same = difference <= _TOLERANCE * _scale_of(name, expected)
        if not is_same:
            raise _refusal(served, f"returns another {name!r} than the model, by {difference:.2g}")


def _is_nearly_the_same(found: np.ndarray, value: np.ndarray) -> bool:
    """Whether at most one of a hundred answers differ, which rounding decides where it is close."""
    count = np.count_nonzero(found != value)
    return count <= max(1, value.size // 100)


def _difference(found: np.ndarray, value: np.ndarray) -> float:
    """Return the largest difference; it is infinite where one alone is NaN or infinite."""
    is_equal = (found == value) | (np.isnan(found) & np.isnan(value))
    with np.errstate(invalid="ignore"):
        differences = np.abs(found.astype("float64") - value)
    differences = np.where(is_equal, 0, np.nan_to_num(differences, nan=np.inf))
    return float(differences.max(initial=0))


def _scale_of(name: str, expected: dict[str, np.ndarray]) -> float:
    """Return the scale of an output, to which rounding is compared.

    Variances of numbers far from 0 have the rounding of their draws, so it counts in them too.
    """
    scale = max(1, _largest(expected[name]))
    if name.endswith("mean"):
        return scale
    means = [_largest(value) for key, value in expected.items() if key.endswith("mean")]
    return scale + _TOLERANCE * max(means) ** 2


def _largest(value: np.ndarray) -> float:
    """Return the largest finite size."""
    sizes = np.abs(value[np.isfinite(value)])
    return float(sizes.max(initial=0))
