"""A posterior over weights whose outputs pass through one more model."""

import functools
from typing import Any

import keras
from keras import ops

from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.protocols import Chunks, Sampler
from tfp_ibnn._core.serialization import ConfiguredLayer
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.weights.base import WeightPosterior


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class ScaledPosterior(ConfiguredLayer, WeightPosterior, keras.layers.Layer):
    """A posterior over weights with each draw's output at a temperature, or with a scale.

    `posterior` is over the weights of a Functional or Sequential model, of any kind; `scaling`, a
    built Functional model, takes the outputs (N, K) of that network.
    """

    def __init__(self, posterior: WeightPosterior, scaling: keras.Model, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.posterior, self.scaling, self.count = posterior, scaling, posterior.count
        self.built = True

    @functools.cached_property
    def network(self) -> keras.Model:
        """The network with the scaling behind it."""
        inner = functional_graph(self.posterior.network)
        return keras.Model(inner.input, self.scaling(inner.outputs[0]), name=inner.name)

    def materialize(self, *args: Any, **options: Any) -> "ScaledPosterior":
        return ScaledPosterior(self.posterior.materialize(*args, **options), self.scaling)

    def sampler(self, samples: int, **options: Any) -> Sampler:
        return _ScaledSampler(self.posterior.sampler(samples, **options), self.scaling)


class _ScaledSampler(Sampler):
    def __init__(self, sampler: Sampler, scaling: keras.Model) -> None:
        self._sampler, self._scaling = sampler, scaling
        self.samples, self.is_random = sampler.samples, sampler.is_random

    def chunks(self, inputs: Any, key: Tensor) -> Chunks:
        chunks = self._sampler.chunks(inputs, key)
        return chunks._replace(run=lambda first: self._scaled(chunks.run(first)))

    def draw(self, inputs: Any, key: Tensor, number: Tensor) -> Tensor:
        return self._scaled(self._sampler.draw(inputs, key, number))

    def at_mean(self, inputs: Any) -> Tensor:
        return self._scaled(self._sampler.at_mean(inputs))

    def _scaled(self, outputs: Tensor) -> Tensor:
        """Return outputs (draws, batch, width) scaled."""
        rows = self._scaling(ops.reshape(outputs, (-1, outputs.shape[-1])))
        return ops.reshape(rows, (*ops.shape(outputs)[:2], rows.shape[-1]))
