"""Scores of exported files."""

import os
from typing import Any

import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn.export.reading import Exported, open_exported
from tfp_ibnn.export.served import KINDS
from tfp_ibnn.likelihoods import Categorical, Likelihood
from tfp_ibnn.likelihoods.several import Several
from tfp_ibnn.metrics.detection import ood_scores


def exported_scores(
    path: str | os.PathLike,
    x: Any,
    y: Any,
    *,
    ood: Any = None,
    sample_weight: Any = None,
    batch_size: int = 256,
) -> dict[str, float]:
    """Run an exported file in its own runtime, and return the scores of `MonteCarlo.evaluate`.

    Use it to see what a format or a quantization costs. ONNX files run in onnxruntime, LiteRT files
    in ai-edge-litert, and SavedModels in TensorFlow.

    Args:
        path: of a file or folder written by `ibnn.export`.
        x: input arrays, in a dict by the names of the file's inputs, or as the model takes them.
        y: labels or targets; for several outputs, a dict or list of them.
        ood: out-of-distribution inputs, to be separated from `x`.
        sample_weight: weights of the examples, or of each of their positions: 0 for padding.
        batch_size: number of examples at a time.

    Returns:
        A dict of `loss` and the scores that `MonteCarlo.evaluate` has for the output, such as
        `accuracy`, `nll`, `brier` and `ece`. With `ood`, `auroc` too: how well the `score` of an
        `OODDetector`, else the entropy of classes, else the epistemic variance of numbers,
        separates `ood` from `x`.

    Raises:
        ValueError: If the file was not written by `ibnn.export`, it has a custom likelihood, or
            inputs and targets do not match.

    Example:
        >>> import keras, numpy as np, tempfile, tfp_ibnn as ibnn
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Softmax()])
        >>> x, y = 3 * np.eye(3), np.arange(3)
        >>> if keras.backend.backend() == "tensorflow":
        ...     path = ibnn.export(model, tempfile.mkdtemp() + "/1")
        ...     assert ibnn.exported_scores(path, x, y)["accuracy"] == 1
    """
    batch_size = checks.positive_integer("batch_size", batch_size)
    exported = open_exported(path)
    likelihood = _likelihood_of(exported, path)
    outputs = exported.predict(x, batch_size)
    scores = _scores(likelihood, outputs, y, sample_weight)
    if ood is not None:
        known = _unusual(likelihood, outputs)
        unknown = _unusual(likelihood, exported.predict(ood, batch_size))
        scores["auroc"] = ood_scores(known, unknown)["auroc"]
    return scores


def _likelihood_of(exported: Exported, path: Any) -> Likelihood:
    """Return what the outputs of a file mean, or raise if it does not record that."""
    kinds = exported.facts.get("outputs")
    if kinds is None:
        raise ValueError(
            f"{path} does not record what its outputs mean, like all files of version 0.1.0: "
            "export the model again."
        )
    parts = {}
    for name, kind in kinds.items():
        if kind not in KINDS:
            raise ValueError(
                f"{path} has a custom likelihood, which a file cannot name: compute scores from "
                "its outputs yourself."
            )
        likelihood = KINDS[kind]
        is_classifier = issubclass(likelihood, Categorical)
        parts[name] = likelihood(from_logits=False) if is_classifier else likelihood()
    return parts[""] if [*parts] == [""] else Several(parts)


def _scores(
    likelihood: Likelihood, outputs: dict[str, np.ndarray], y: Any, sample_weight: Any
) -> dict[str, float]:
    """Return the scores of predictions, those of several outputs by their names."""
    targets = likelihood.split_given("y", y)
    weights = likelihood.split_given("sample_weight", sample_weight, for_all=True)
    metrics = likelihood.split(likelihood.scores())
    loss = 0.0
    scores = {}
    for name, part in likelihood.parts.items():
        prediction = _prediction(outputs, name)
        target = np.asarray(targets[name])
        count = len(prediction["mean"])
        if len(target) != count:
            raise ValueError(
                f"`x` and `y` must have the same length; got {count} and {len(target)}."
            )
        part.update(metrics[name], target, prediction, weights[name])
        loss += float(part.mean_loss(target, prediction, weights[name]))
        scores |= {metric.name: float(metric.result()) for metric in metrics[name]}
    return {"loss": loss, **scores}


def _prediction(outputs: dict[str, np.ndarray], name: str) -> dict[str, Any]:
    """Return the prediction of one output."""
    prefix = f"{name}_" if name else ""
    tensors = {}
    for key in ("mean", "total_variance"):
        tensors[key] = ops.convert_to_tensor(outputs[prefix + key])
    return tensors


def _unusual(likelihood: Likelihood, outputs: dict[str, np.ndarray]) -> np.ndarray:
    """Return how unusual each example is, (N,)."""
    if isinstance(likelihood, Several):
        raise ValueError("`ood` is for models with one output: leave it out.")
    usual = "entropy" if likelihood.is_classifier else "epistemic"
    scores = outputs["score" if "score" in outputs else usual]
    positions = tuple(range(1, scores.ndim))
    if "score" in outputs and positions:  # those of positions, NaN at padding
        return np.nanmean(scores, axis=positions)
    return scores.sum(axis=positions)
