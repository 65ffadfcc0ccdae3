"""The linearised network: output samples, or the probit approximation in closed form."""

import math
from typing import Any

from keras import ops

from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.backend import Tensor, jvp
from tfp_ibnn._core.protocols import Chunks
from tfp_ibnn.prediction.samplers import WeightSampler
from tfp_ibnn.weights.features import LogitNetwork
from tfp_ibnn.weights.laplace.curvature import linearized


class _Prefix(dict):
    """What `LogitNetwork.prefix` returned, in the place of inputs."""


class LinearizedSampler(WeightSampler):
    """Draws f(x) + J(x) (w - w*), w from the posterior, each the same for all examples.

    What comes before the first uncertain layer runs once for a batch. A last layer is linear
    already; of other weights every draw takes a Jacobian-vector product, about two passes.
    """

    @property
    def _network(self) -> LogitNetwork:
        return self._posterior.logit_network

    def chunks(self, inputs: Any, key: Tensor) -> Chunks:
        return super().chunks(_Prefix(self._network.prefix(inputs)), key)

    def draw(self, inputs: Any, key: Tensor, number: Tensor) -> Tensor:
        posterior, network = self._posterior, self._network
        values = inputs if isinstance(inputs, _Prefix) else network.prefix(inputs)
        means, steps = posterior.mean(), posterior.deviation(key, ops.cast(number, "int32"))

        def logits(weights: list[Tensor]) -> Tensor:
            with keras_internals.values_in_place(zip(posterior.sampled, weights, strict=True)):
                return network.logits(values)

        if posterior.is_last_layer:
            found = logits([mean + step for mean, step in zip(means, steps, strict=True)])
        else:
            found = sum(jvp(logits, means, steps))
        return self._outputs(found)[None]

    def at_mean(self, inputs: Any) -> Tensor:
        return self._outputs(self._network.logits(self._network.prefix(inputs)))[None]

    def _outputs(self, logits: Tensor) -> Tensor:
        return ops.cast(self._network.likelihood.outputs(logits), self._network.dtype)


class ProbitSampler(LinearizedSampler):
    """One distribution instead of draws: the logits divided by sqrt(1 + pi / 8 * variance)."""

    def chunks(self, inputs: Any, key: Tensor) -> Chunks:
        return Chunks(lambda _: self.draw(inputs, key, 0), 1, 1)

    def draw(self, inputs: Any, key: Tensor, number: Tensor) -> Tensor:
        logits, variance = self.moments(inputs)
        return self._outputs(logits / ops.sqrt(1 + math.pi / 8 * variance))[None]

    def moments(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """Return the mean and the variance (N, K) of the linearised logits."""
        posterior, structure = self._posterior, self._posterior.structure
        if posterior.is_last_layer:
            values = self._network.prefix(inputs)
            (features,) = values.values()
            (block,) = structure.blocks
            features = block.matrix_input(features)[:, 0]
            return self._network.logits(values), structure.variance(features, posterior.scale)
        logits, taps, pull = linearized(self._network, structure.blocks, inputs)

        def of_logit(unit: Tensor) -> Tensor:
            g = pull(ops.broadcast_to(unit, ops.shape(logits)))
            return structure.row_variance(taps, g, posterior.scale)

        units = ops.eye(logits.shape[-1], dtype=logits.dtype)
        return logits, ops.transpose(ops.map(of_logit, units))
