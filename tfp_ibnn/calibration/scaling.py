"""The model of a candidate: the average of its draws, each at the fitted parameter."""

from typing import Any

import keras

from tfp_ibnn._core.protocols import WeightPosterior
from tfp_ibnn.conversion.graph import extended, functional_graph
from tfp_ibnn.likelihoods import Likelihood
from tfp_ibnn.likelihoods.class_scaling import Isotonic, Vector
from tfp_ibnn.likelihoods.several import symbolic_outputs
from tfp_ibnn.prediction import IsotonicScaling, MonteCarlo, TemperatureScaling, VectorScaling
from tfp_ibnn.weights import ScaledPosterior

_OF_CLASSES = {Vector: VectorScaling, Isotonic: IsotonicScaling}


def scaled_model(likelihood: Likelihood, inner: Any, parameter: Any, **options: Any) -> MonteCarlo:
    """Return the model that averages scaled draws of a network or a posterior over weights.

    Args:
        likelihood: what the outputs mean.
        inner: a Keras model, or a posterior over weights.
        parameter: the temperature, the scales or their factor, or those of each class, from
            `likelihood.parameter`.
        **options: those of `MonteCarlo`.
    """
    network = inner.network if isinstance(inner, WeightPosterior) else inner
    outputs = symbolic_outputs(network)
    if isinstance(inner, WeightPosterior):
        inputs = keras.tree.map_structure(lambda x: keras.Input(x.shape[1:]), outputs)
        scaled = _scaled(likelihood, inputs, parameter)
        scaling = keras.Model(inputs, scaled)
        inner = ScaledPosterior(inner, scaling)
    else:
        # Not as a separate model, which would lose the mask.
        scaled = _scaled(likelihood, outputs, parameter)
        inner = extended(functional_graph(inner), scaled, inner.name)
    return MonteCarlo(inner, **likelihood.scaled_head, **options)


def _scaled(likelihood: Likelihood, outputs: Any, parameter: Any) -> Any:
    """Return symbolic outputs with the fitted parameters; for several, a dict of them."""
    outputs = likelihood.split(outputs)
    parameters = likelihood.split(parameter)
    scaled = {}
    for name, part in likelihood.parts.items():
        scaled[name] = _scaled_output(part, outputs[name], parameters[name])
    return likelihood.join(scaled)


def _scaled_output(part: Likelihood, outputs: Any, parameter: Any) -> Any:
    """Return one symbolic output with its parameter."""
    if not part.is_classifier:
        return part.scaled(outputs, parameter)
    in_full_precision = keras.layers.Identity(dtype="float32")
    if outputs.shape[-1:] != part.row_shapes["outputs"]:  # several binary labels
        return part.scaled(in_full_precision(outputs), float(parameter))
    inputs = keras.Input(outputs.shape[1:])
    cast = in_full_precision(inputs)
    identity = keras.Model(inputs, cast)
    identity.supports_masking = True
    kind = _OF_CLASSES.get(type(parameter), TemperatureScaling)
    scaling = kind(identity, from_logits=part.from_logits, dtype="float32")
    scaling.assign(parameter)
    return scaling(outputs)
