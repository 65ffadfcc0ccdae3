"""Models that predict by another model."""

import keras

from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.protocols import WeightPosterior
from tfp_ibnn.conversion.graph import functional_graph

__all__ = ["PredictionWrapper", "ScaledModel", "innermost", "unscaled"]


class PredictionWrapper:
    """A Keras model that takes the inputs of another one, `inner`."""

    inner: keras.Model


class ScaledModel(PredictionWrapper):
    """A classifier whose outputs are those of `inner`, scaled one by one."""

    @property
    def returns_logits(self) -> bool | None:
        """Whether the output is logits; None if that is not known before the model has run."""
        raise NotImplementedError

    def scale(self, outputs: Tensor) -> Tensor:
        """Return an output of `inner`, scaled."""
        raise NotImplementedError


def unscaled(model: keras.Model) -> keras.Model:
    """Return the classifier that is scaled, if the model is scaled and the classifier has a graph.

    Else return the model itself.
    """
    if isinstance(model, ScaledModel) and functional_graph(model.inner) is not None:
        return model.inner
    return model


def innermost(model: keras.Model) -> keras.Model:
    """Return the network inside of all wrappers; it has their inputs."""
    while isinstance(model, PredictionWrapper):
        model = model.inner
    return model.network if isinstance(model, WeightPosterior) else model
