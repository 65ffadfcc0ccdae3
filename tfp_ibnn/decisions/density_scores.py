"""The scores of `OODDetector`, one class each, that need the densities of inputs."""

from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.protocols import Density
from tfp_ibnn.decisions.feature_scores import Arrays, FeatureScore


class DensityScore(FeatureScore):
    """How unusual inputs are, by features log p(x), (N, 1), or (N, 2) with a background.

    A new score is a subclass with `of_features`, and an entry in `DENSITY_SCORES`.
    """

    features = "log-densities"
    needs_background = False
    """Whether the score compares two densities."""

    def learn(self, features: np.ndarray, y: Any, layer: None) -> Arrays:
        return {}


class NegativeLogDensity(DensityScore):
    """Minus the log-density."""

    name = "density"

    def of_features(self, features: Tensor, arrays: Arrays) -> Tensor:
        return -features[:, 0]


class Typicality(DensityScore):
    """The distance of the log-density to its mean over the data of `fit` (1906.02994)."""

    name = "typicality"

    def of_features(self, features: Tensor, arrays: Arrays) -> Tensor:
        return ops.abs(features[:, 0] - arrays["center"][0])


class LikelihoodRatio(DensityScore):
    """The log-density under the background, less that under the model (1906.02845)."""

    name = "likelihood_ratio"
    needs_background = True

    def of_features(self, features: Tensor, arrays: Arrays) -> Tensor:
        return features[:, 1] - features[:, 0]


DENSITY_SCORES: dict[str, type[DensityScore]] = {
    score.name: score for score in (NegativeLogDensity, Typicality, LikelihoodRatio)
}


class LogDensities(keras.Model):
    """The log-densities of inputs under a model, and beside it under a background, if any.

    Args:
        model: a density.
        background: another one, or None.
    """

    def __init__(self, model: Density, background: Density | None) -> None:
        super().__init__(dtype="float32", autocast=False)
        self.densities = [model] if background is None else [model, background]
        self.built = True

    def call(self, inputs: Any, training: bool = False) -> Tensor:
        """Return log-densities (N, 1), or (N, 2).

        Args:
            inputs: a batch, or a pair of that and a condition.
            training: as in Keras.
        """
        columns = [density(inputs, training=training) for density in self.densities]
        return ops.stack(columns, axis=1)

    def predict(self, x: Any, *args: Any, **kwargs: Any) -> np.ndarray:
        """Predict as Keras does; arrays are checked."""
        x = self.densities[0].checked_data(x)
        with keras_internals.values_kept(self.variables):
            return super().predict(x, *args, **kwargs)


def check_densities(score: str, model: Any, background: Any) -> None:
    """Raise unless a score has the models that it needs.

    Args:
        score: its name.
        model: the first argument of the detector.
        background: another density, or None.
    """
    is_density = isinstance(model, Density)
    if score not in DENSITY_SCORES:
        if is_density:
            raise ValueError(
                "`model` is a density: take score='density', 'typicality' or 'likelihood_ratio'; "
                f"got {score!r}."
            )
    elif not is_density:
        raise ValueError(
            f"score={score!r} needs a density of the data as `model`, such as an ibnn.FlowDensity; "
            f"got a {type(model).__name__}."
        )
    elif not model.built:
        raise ValueError("The density `model` is not built yet: call its `fit` first.")
    needs_background = score in DENSITY_SCORES and DENSITY_SCORES[score].needs_background
    if needs_background:
        _check_background(model, background)
    elif background is not None:
        raise ValueError(
            f"`background` is for score='likelihood_ratio' only; got score={score!r}: leave it out."
        )


def _check_background(model: Density, background: Any) -> None:
    if not isinstance(background, Density) or not background.built:
        raise ValueError(
            "score='likelihood_ratio' needs another trained density as `background`, such as an "
            f"ibnn.FlowDensity of perturbed data; got {background!r}."
        )
    takes_pairs = model.condition is not None
    if background.event != model.event or (background.condition is not None) != takes_pairs:
        raise ValueError(
            f"`background` must take the inputs of `model`, of the shape {model.event}; it takes "
            f"{background.event}, and either both have a condition or none."
        )
