"""The linearised network: output samples, or the probit approximation; sampled networks."""

import math
from typing import Any

from keras import ops

from tfp_ibnn._core.backend import Tensor, jvp
from tfp_ibnn._core.protocols import Chunks
from tfp_ibnn.prediction.samplers import WeightSampler
from tfp_ibnn.weights.flat import split
from tfp_ibnn.weights.laplace.curvature import linearized


class LinearizedSampler(WeightSampler):
    """Draws f(x) + J(x) (w - w*), w from the posterior, each the same for all examples.

    What comes before the first uncertain layer runs once for a batch; every draw takes a
    Jacobian-vector product, about two passes.
    """

    def chunks(self, inputs: Any, key: Tensor) -> Chunks:
        size = min(self._chunk_size, self.samples)
        values = self._posterior.logit_network.prefix(inputs)

        def run(first: int | Tensor) -> Tensor:
            return self._outputs(self._logits(values, key, first + ops.arange(size, dtype="int32")))

        return Chunks(run, size, -(-self.samples // size))

    def draw(self, inputs: Any, key: Tensor, number: Tensor) -> Tensor:
        values = self._posterior.logit_network.prefix(inputs)
        return self._outputs(self._logits(values, key, ops.reshape(number, (1,))))

    def _features(self, values: dict[int, Tensor]) -> Tensor:
        """Return what the matrix of a last layer multiplies, (N, inputs)."""
        return self._posterior.structure.blocks[0].tap(*values.values())[:, 0]

    def _logits(self, values: Any, key: Tensor, numbers: Tensor) -> Tensor:
        """Return the logits (S, N, K) of draws by their numbers (S,)."""

        def logits(weights: list[Tensor]) -> Tensor:
            with self._in_place(weights):
                return self._posterior.logit_network.logits(values)

        mean, step = self._posterior.mean(), self._posterior.deviation
        return ops.map(lambda i: sum(jvp(logits, mean, step(key, i))), numbers)

    def _outputs(self, logits: Tensor) -> Tensor:
        network = self._posterior.logit_network
        return ops.cast(network.likelihood.outputs(logits), network.dtype)


class NetworkSampler(LinearizedSampler):
    """Networks with sampled weights; those of a last layer are one matrix product."""

    def _logits(self, values: Any, key: Tensor, numbers: Tensor) -> Tensor:
        posterior, sets = self._posterior, self._posterior.draw(key, numbers)
        if posterior.is_last_layer:
            (block,), inputs = posterior.structure.blocks, self._features(values)
            matrices = ops.reshape(sets, (-1, block.inputs, block.outputs))
            shared = ops.tensordot(inputs, ops.cast(matrices, inputs.dtype), [[1], [1]])
            return ops.moveaxis(shared, 1, 0)

        def of_one(weights: Tensor) -> Tensor:
            with self._in_place(split(weights, posterior.sampled)):
                return posterior.logit_network.logits(values)

        return ops.map(of_one, sets)


class ProbitSampler(LinearizedSampler):
    """One distribution instead of draws: the logits divided by sqrt(1 + pi / 8 * variance)."""

    def _logits(self, values: Any, key: Tensor, numbers: Tensor) -> Tensor:
        logits, variance = self._moments(values)
        return (logits / ops.sqrt(1 + math.pi / 8 * variance))[None]

    def _moments(self, values: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the mean and the variance (N, K) of the linearised logits."""
        posterior = self._posterior
        network, structure = posterior.logit_network, posterior.structure
        if posterior.is_last_layer:
            variance = structure.variance(self._features(values), posterior.scale)
            return network.logits(values), variance
        logits, taps, pull = linearized(network, structure.blocks, values)

        def of_logit(unit: Tensor) -> Tensor:
            g = pull(ops.broadcast_to(unit, ops.shape(logits)))
            return structure.row_variance(taps, g, posterior.scale)

        units = ops.eye(logits.shape[-1], dtype=logits.dtype)
        return logits, ops.transpose(ops.map(of_logit, units))
