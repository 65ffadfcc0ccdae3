"""The model that a candidate becomes: its draws, each at the fitted parameter, averaged."""

from typing import Any

import keras

from tfp_ibnn._core.protocols import WeightPosterior
from tfp_ibnn.likelihoods import Likelihood
from tfp_ibnn.likelihoods.class_scaling import Isotonic, Vector
from tfp_ibnn.prediction import IsotonicScaling, MonteCarlo, TemperatureScaling, VectorScaling
from tfp_ibnn.weights import ScaledPosterior

_OF_CLASSES = {Vector: VectorScaling, Isotonic: IsotonicScaling}


def scaled_model(likelihood: Likelihood, inner: Any, parameter: Any, **options: Any) -> MonteCarlo:
    """Return the model that averages scaled draws of a network or a posterior over weights.

    Args:
        likelihood: what the outputs mean.
        inner: a Keras model, or a posterior over weights.
        parameter: the temperature, the scales or their factor, or those of each class, as
            `likelihood.parameter` returns it.
        **options: those of `MonteCarlo`.
    """
    scaling = _scaling(likelihood, parameter)
    if isinstance(inner, WeightPosterior):
        inner = ScaledPosterior(inner, scaling)
    else:
        inner = keras.Model(inner.input, scaling(inner.outputs[0]), name=inner.name)
    return MonteCarlo(inner, **likelihood.scaled_head, **options)


def _scaling(likelihood: Likelihood, parameter: Any) -> keras.Model:
    """Return a model that applies the parameter to outputs (N, width)."""
    outputs = keras.Input((likelihood.width,))
    if not likelihood.is_classifier:
        return keras.Model(outputs, likelihood.scaled(outputs, parameter))
    identity = keras.Model(outputs, keras.layers.Identity(dtype="float32")(outputs))
    kind = _OF_CLASSES.get(type(parameter), TemperatureScaling)
    scaling = kind(identity, from_logits=likelihood.from_logits, dtype="float32")
    scaling.assign(parameter)
    return keras.Model(outputs, scaling(outputs))
