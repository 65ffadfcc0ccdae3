"""What a file serves: a prediction with fixed draws, its inputs by name, and facts about it."""

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.conversion.wrappers import PredictionWrapper, innermost
from tfp_ibnn.decisions import Conformal, OODDetector
from tfp_ibnn.export.inputs import Inputs
from tfp_ibnn.likelihoods import (
    Beta,
    Categorical,
    Dirichlet,
    Gaussian,
    Labels,
    Likelihood,
    Point,
    SpreadGaussian,
    SpreadPoint,
)
from tfp_ibnn.prediction import MonteCarlo
from tfp_ibnn.prediction.scaling import FittedScaling
from tfp_ibnn.weights import ScaledPosterior

KINDS: dict[str, type[Likelihood]] = {
    "softmax": Categorical,
    "sigmoid": Labels,
    "gaussian": Gaussian,
    "point": Point,
}
"""The likelihoods whose scores follow from what a file serves, by their names in a file."""

_OF_STUDENTS: dict[type[Likelihood], str] = {
    Dirichlet: "softmax",
    Beta: "sigmoid",
    SpreadGaussian: "gaussian",
    SpreadPoint: "point",
}
"""The names of likelihoods that have the same scores as one of those."""

_PACKAGES = ("tfp_ibnn", "keras", "tensorflow")
"""The packages whose versions a file records."""

_SCALES = ("temperature", "scales", "biases")
"""The parameters of a scaling that a file records."""

_OPTIONS_OF_SETS = ("method", "coverage", "by", "randomized", "k", "penalty", "per", "share")
"""The arguments of `Conformal` that a file records."""

_RATES = (0.9, 0.95, 0.99)
"""The shares of known inputs for which a file records the threshold of an `OODDetector`."""


class Served(NamedTuple):
    """A prediction as a file returns it."""

    model: Any  # a `MonteCarlo` with a seed, or a decision whose `inner` is one
    inputs: Inputs
    threshold: float | None = None  # of the confidence below which to refuse
    class_names: tuple[str, ...] | None = None

    @property
    def average(self) -> MonteCarlo:
        """The `MonteCarlo` of the prediction."""
        return self.model if isinstance(self.model, MonteCarlo) else self.model.inner

    @property
    def network(self) -> keras.Model:
        """The network inside all wrappers."""
        return innermost(self.model)

    def serve(self, **tensors: Any) -> dict[str, Tensor]:
        """Return the outputs by name.

        Args:
            **tensors: a batch, by the names of the inputs.
        """
        prediction = self.model.serve(self.inputs.pack(tensors))
        self._check_class_names(prediction)
        if self.threshold is not None:
            prediction = {**prediction, "refuse": self._refuse(prediction["mean"])}
        return flat(prediction)

    def _check_class_names(self, prediction: Any) -> None:
        """Raise if the names are not as many as the classes of an output."""
        if self.class_names is None:
            return
        counts = set()
        likelihood = self.average.likelihood
        predictions = likelihood.split(prediction)
        for name, part in likelihood.parts.items():
            width = predictions[name]["mean"].shape[-1]
            if part.is_classifier:
                counts |= {1, 2} if width == 1 else {width}
        if len(self.class_names) not in counts:
            raise ValueError(
                "`class_names` must be as many as the classes, or be left out for numbers; got "
                f"{len(self.class_names)} names, and outputs of {sorted(counts)} classes."
            )

    def _refuse(self, mean: Tensor) -> Tensor:
        """Return whether the largest probability is below the threshold, for each example."""
        width = mean.shape[-1]
        if width != 1 and not self.average.likelihood.is_softmax:
            raise ValueError(
                f"`threshold` refuses examples with one answer, and this model has {width} labels: "
                "leave it out, and compare each label's max(p, 1 - p), of the output `mean`."
            )
        confidence = ops.max(mean, axis=-1)
        if width == 1:
            confidence = ops.maximum(confidence, 1 - confidence)
        is_enough = confidence >= self.threshold
        return ops.logical_not(is_enough)  # NaN is not

    def facts(self, *packages: str) -> dict[str, Any]:
        """Return the metadata of a file, in types of JSON.

        Args:
            *packages: further packages whose versions to record, such as a converter.
        """
        packages = (*_PACKAGES, *packages)
        average = self.average
        parts = average.likelihood.parts
        scaling = _scaling_of(self.model)
        return {
            "format": 1,
            "model": self.network.name,
            "samples": average.samples,
            "sampling": average.sampling,
            "seed": average.seed,
            "inputs": {
                name: {"shape": list(spec.shape), "dtype": spec.dtype}
                for name, spec in self.inputs.specs.items()
            },
            "outputs": {name: _kind_of(part) for name, part in parts.items()},
            "temperature": scaling.get("temperature"),
            "scaling": scaling or None,
            "threshold": self.threshold,
            "class_names": self.class_names,
            "decision": _decision_of(self.model),
            "versions": {name: importlib.import_module(name).__version__ for name in packages},
        }


def flat(prediction: Mapping[str, Any]) -> dict[str, Any]:
    """Return a prediction as one flat dict: for an output "digit", keys such as "digit_mean".

    Args:
        prediction: the dict that `MonteCarlo` returns.

    Raises:
        ValueError: If two entries would have one name.
    """
    entries: dict[str, Any] = {}
    for name, value in prediction.items():
        of_output = {name: value}
        if isinstance(value, dict):
            of_output = {f"{name}_{key}": part for key, part in value.items()}
        if entries.keys() & of_output.keys():
            raise ValueError(
                f"Rename outputs: entries of {[*prediction]} would have the same name in a file."
            )
        entries |= of_output
    return entries


def _kind_of(likelihood: Likelihood) -> str | None:
    """Return the name of a likelihood in a file; None if it has none."""
    names = {kind: name for name, kind in KINDS.items()} | _OF_STUDENTS
    return names.get(type(likelihood))


def _scaling_of(model: Any) -> dict[str, Any]:
    """Return the kind of the outermost scaling inside a model, with its parameters; {} if none.

    `calibrate` has it as a layer of the network, or behind a posterior over weights. Where several
    outputs have their own, none is returned.
    """
    while isinstance(model, PredictionWrapper) and not isinstance(model, FittedScaling):
        model = model.inner
    if isinstance(model, ScaledPosterior):
        model = model.scaling
    layers = getattr(model, "layers", ())
    within = [layer for layer in layers if isinstance(layer, FittedScaling)]
    scaling = within[0] if len(within) == 1 else model
    if not isinstance(scaling, FittedScaling):
        return {}
    facts = {"kind": type(scaling).__name__}
    for name in _SCALES:
        if hasattr(scaling, name):
            facts[name] = ops.convert_to_numpy(getattr(scaling, name)).tolist()
    return facts


def _decision_of(model: Any) -> dict[str, Any] | None:
    """Return the kind of a decision, with its options and thresholds."""
    if isinstance(model, Conformal):
        options = {name: getattr(model, name) for name in _OPTIONS_OF_SETS}
        thresholds = np.ravel(model.thresholds).tolist()
        return {"kind": "Conformal", **options, "thresholds": thresholds}
    if isinstance(model, OODDetector):
        # Scores of outputs need no `fit`, without which there is no threshold.
        thresholds = {}
        if model.is_fitted:
            thresholds = {str(rate): model.threshold(rate) for rate in _RATES}
        return {
            "kind": "OODDetector",
            "score": model.kind,
            "reduction": model.reduction,
            "threshold": thresholds.get("0.95"),
            "thresholds": thresholds,
        }
    return None
