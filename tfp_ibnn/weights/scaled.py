"""A posterior over weights whose outputs are scaled, such as by a temperature."""

import functools
from typing import Any

import keras
from keras import ops

from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.protocols import Chunks, Sampler
from tfp_ibnn._core.serialization import ConfiguredLayer
from tfp_ibnn.conversion.graph import extended, functional_graph
from tfp_ibnn.likelihoods.several import symbolic_outputs
from tfp_ibnn.weights.base import WeightPosterior


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class ScaledPosterior(ConfiguredLayer, WeightPosterior, keras.layers.Layer):
    """A posterior over weights with each draw's output at a temperature, or with a scale.

    Args:
        posterior: over the weights of a Functional or Sequential model, of any kind.
        scaling: a built Functional model that takes the outputs of that network; of several, a dict
            by their names.
        **kwargs: those of `keras.layers.Layer`.
    """

    def __init__(self, posterior: WeightPosterior, scaling: keras.Model, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.posterior = posterior
        self.scaling = scaling
        self.count = posterior.count
        self.built = True

    @functools.cached_property
    def network(self) -> keras.Model:
        """The network with the scaling behind it."""
        inner = functional_graph(self.posterior.network)
        outputs = self.scaling(symbolic_outputs(inner))
        return extended(inner, outputs, inner.name)

    @property
    def modes(self) -> int:
        return self.posterior.modes

    def mean_network(self) -> keras.Model:
        """Return the network behind the scaling, which changes no features."""
        return self.posterior.mean_network()

    def materialize(self, *args: Any, **options: Any) -> "ScaledPosterior":
        finite = self.posterior.materialize(*args, **options)
        return ScaledPosterior(finite, self.scaling)

    def sampler(self, samples: int, **options: Any) -> Sampler:
        sampler = self.posterior.sampler(samples, **options)
        return _ScaledSampler(sampler, self.scaling)


class _ScaledSampler(Sampler):
    """Runs the networks of another sampler, and scales their outputs."""

    def __init__(self, sampler: Sampler, scaling: keras.Model) -> None:
        self._sampler = sampler
        self._scaling = scaling
        self.samples = sampler.samples

    def chunks(self, inputs: Any, key: Tensor) -> Chunks:
        chunks = self._sampler.chunks(inputs, key)
        return chunks._replace(run=lambda first: self._scaled(chunks.run(first)))

    def unrolled(self, inputs: Any, key: Tensor) -> Chunks:
        chunks = self._sampler.unrolled(inputs, key)

        def run(first: int) -> Tensor:
            outputs = chunks.run(first)
            return self._scaled(outputs)

        return chunks._replace(run=run)

    def draw(self, inputs: Any, key: Tensor, number: Tensor) -> Tensor:
        return self._scaled(self._sampler.draw(inputs, key, number))

    def at_mean(self, inputs: Any) -> Tensor:
        return self._scaled(self._sampler.at_mean(inputs))

    def _scaled(self, outputs: Tensor) -> Tensor:
        """Return outputs (draws, batch, ...) scaled."""
        first, *_ = keras.tree.flatten(outputs)
        draws, batch = ops.shape(first)[:2]

        def merged(x: Tensor) -> Tensor:
            shape = ops.shape(x)[2:]
            return ops.reshape(x, (-1, *shape))

        def by_draw(x: Tensor) -> Tensor:
            shape = ops.shape(x)[1:]
            return ops.reshape(x, (draws, batch, *shape))

        rows = keras.tree.map_structure(merged, outputs)
        scaled = self._scaling(rows)
        return keras.tree.map_structure(by_draw, scaled)
