"""Export of predictions to files that need no Python code of this library."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from tfp_ibnn._core import backend, checks
from tfp_ibnn._core.protocols import Density, WeightPosterior
from tfp_ibnn.conversion.wrappers import PredictionWrapper, innermost
from tfp_ibnn.export.inputs import inputs_of
from tfp_ibnn.export.litert import write_litert
from tfp_ibnn.export.onnx import write_onnx
from tfp_ibnn.export.saved_model import write_saved_model
from tfp_ibnn.export.served import Served
from tfp_ibnn.layers import stochastic_layers
from tfp_ibnn.prediction.exporting import Exports
from tfp_ibnn.prediction.monte_carlo import MonteCarlo, fixed_seed

FORMATS = ("saved_model", "onnx", "litert")

_DRAWS = 128  # by default, as in a `MonteCarlo`
_FIXED_DRAWS = 32  # at most by default, in a file without random numbers


def export(
    model: keras.Model,
    path: str | os.PathLike,
    *,
    format: str = "saved_model",
    draws: int | None = None,
    seed: int | None = None,
    threshold: float | None = None,
    class_names: Sequence[str] | None = None,
    input_signature: Any = None,
    quantization: str | None = None,
    representative_data: Any = None,
    overwrite: bool = False,
    samples: int | None = None,
) -> Path:
    """Write a file that predicts the mean and its uncertainty without this library.

    It takes the model's inputs by name, in batches of any size, and returns everything that
    `MonteCarlo.predict` returns, by name. The sampled networks are fixed in the file: equal inputs
    have equal outputs. A `Conformal` adds its `set` or `interval`, an `OODDetector` its `score`,
    and `threshold` adds `refuse`.

    - "saved_model": a folder for TensorFlow. The signature `serve`, also the default, returns the
      prediction; `sample` returns `mean` and `aleatoric` of one sampled network, chosen by the
      further input `seed`, an integer (0 to `draws` - 1 are those that `serve` averages);
      `deterministic` returns those of the network at the posterior mean, without noise.
      `assets.extra/tfp_ibnn.json` has versions, seed, signatures and the SHA-256 of each file.
    - "onnx": a file for onnxruntime, in any language or a browser. Draws of z are a few numbers per
      layer, so all draws take about as much space as one network; a posterior over weights takes
      as much space as all its networks. `metadata_props` has the entry `tfp_ibnn`, as JSON.
    - "litert": a file for phones and small devices, with the same entry in its metadata.

    The backend must be TensorFlow; `python -m tfp_ibnn export` exports `.keras` files saved on JAX.

    Args:
        model: a `MonteCarlo`, `Conformal` or `OODDetector`, or a model or posterior to average.
        path: of a folder, or of a file that ends in ".onnx" or ".tflite". It is written
            completely or not at all.
        format: "saved_model", "onnx" or "litert".
        draws: number of draws; None takes that of the `MonteCarlo`, or 128. ONNX and LiteRT files
            have at most 32 by default, or all networks of a posterior with a finite number of them.
        seed: of the draws; None takes that of the `MonteCarlo`, or a random one.
        threshold: a confidence, such as that of `decisions.error_threshold`; the output `refuse` is
            true if the largest probability is below it.
        class_names: a list of the names of all classes or labels, for the metadata.
        input_signature: `keras.InputSpec` or arrays, by name or in a list as in Keras, for a model
            whose inputs are unknown because it has its own `call`.
        quantization: for "litert": "dynamic" stores weights in 8 bits, "float16" in 16, and "int8"
            also computes in 8 bits; None keeps everything in 32.
        representative_data: a few hundred typical inputs, from which "int8" chooses its ranges.
        overwrite: replace a folder that is not empty, or a file.
        samples: another name for `draws`.

    Returns:
        The path.

    Raises:
        ValueError: If something else is at the path, the inputs are unknown, `draws` or `seed` is
            given for a decision, whose `fit` has fixed them, `class_names` are not as many as the
            classes, or the format cannot represent the model.

    Example:
        >>> import keras, tempfile, tfp_ibnn as ibnn
        >>> inputs = keras.Input((3,), name="features")
        >>> outputs = ibnn.StochasticDense(2, activation="softmax", train_size=100)(inputs)
        >>> mc = ibnn.MonteCarlo(keras.Model(inputs, outputs), samples=16)
        >>> if keras.backend.backend() == "tensorflow":
        ...     path = ibnn.export(mc, tempfile.mkdtemp() + "/1", seed=0)
    """
    backend.check_exports()
    checks.one_of("format", format, FORMATS)
    if draws is not None and samples is not None:
        raise ValueError(f"`samples` is another name for `draws`: got {samples} and {draws}.")
    draws = samples if draws is None else draws
    if format != "litert" and (quantization is not None or representative_data is not None):
        raise ValueError(
            f"`quantization` and `representative_data` are for format='litert'; got {format!r}."
        )
    predicting = _with_fixed_draws(model, format, draws, seed)
    inputs = inputs_of(innermost(predicting), input_signature)
    threshold = _checked_threshold(predicting, threshold)
    served = Served(predicting, inputs, threshold, _checked_names(class_names))
    path = Path(path)
    if format == "onnx":
        write_onnx(served, path, overwrite)
    elif format == "litert":
        write_litert(served, path, overwrite, quantization, representative_data)
    else:
        write_saved_model(served, path, overwrite)
    if isinstance(served.average.inner, WeightPosterior):
        _print_size(path, served.average.samples)
    return path


def _with_fixed_draws(model: Any, format: str, draws: int | None, seed: int | None) -> Any:
    """Return a `MonteCarlo` with a seed, or a decision around one."""
    if isinstance(model, PredictionWrapper) and isinstance(model.inner, Density):
        raise ValueError(
            "A detector by densities cannot be exported: write density.export(path), and compute "
            "the score from its `log_prob`."
        )
    if isinstance(model, PredictionWrapper) and hasattr(model, "serve"):
        if not isinstance(model, MonteCarlo):  # a decision
            if draws is not None or seed is not None:
                raise ValueError(
                    "`draws`, `samples` and `seed` are fixed by `fit`: leave them out, "
                    "or fit the decision to ibnn.MonteCarlo(model, draws, seed=seed)."
                )
            return model
        if draws is None:
            draws = _default_draws(model.inner, model.options()["samples"], format)
        return model.with_fixed_draws(draws, seed)
    is_plain = isinstance(model, keras.Model) and not stochastic_layers(model)
    if draws is None:
        draws = 1 if is_plain else _default_draws(model, _DRAWS, format)
    return MonteCarlo(model, draws, seed=fixed_seed(seed))


def _default_draws(model: Any, requested: int, format: str) -> int:
    """Return the number of draws in a file, if the user gives none.

    Args:
        model: what is averaged.
        requested: number of draws in Python.
        format: of the file. Where draws are constants, they are few, but no network of a finite
            number of them is left out.
    """
    if format == "saved_model":
        return requested
    most = _FIXED_DRAWS
    if isinstance(model, WeightPosterior):
        most = max(most, model.modes, model.count or 1)
    return min(requested, most)


def _checked_threshold(model: Any, threshold: float | None) -> float | None:
    """Return a threshold of the confidence, or raise if predictions have no confidence."""
    if threshold is None:
        return None
    average = model if isinstance(model, MonteCarlo) else model.inner
    (first, *others) = average.likelihood.parts.values()
    if others or not first.is_classifier:
        raise ValueError(
            "`threshold` is for the confidence of a classifier with one output: leave it out for "
            "regression and for several outputs."
        )
    return checks.finite("threshold", threshold)


def _checked_names(class_names: Any) -> tuple[str, ...] | None:
    """Return the names of classes, or raise for a single string."""
    if class_names is None:
        return None
    if isinstance(class_names, str):
        raise ValueError(
            "`class_names` must be a list of names, such as ['cat', 'dog']; got the string "
            f"{class_names!r}."
        )
    return tuple(map(str, class_names))


def _print_size(path: Path, networks: int) -> None:
    """Print the size of a file that contains several networks."""
    files = [path] if path.is_file() else [x for x in path.rglob("*") if x.is_file()]
    megabytes = sum(x.stat().st_size for x in files) / 1e6
    noun = "network" if networks == 1 else "networks"
    print(f"{path}: {networks} {noun}, {megabytes:.3g} MB.")


Exports.writer = staticmethod(export)
