"""The linearised network: output samples, or the probit approximation; sampled networks."""

import math
from collections.abc import Callable
from typing import Any

from keras import ops

from tfp_ibnn._core.backend import Tensor, jvp
from tfp_ibnn.prediction.samplers import WeightSampler
from tfp_ibnn.weights.flat import split
from tfp_ibnn.weights.laplace.curvature import linearized


class LinearizedSampler(WeightSampler):
    """Draws f(x) + J(x) (w - w*), w from the posterior, each the same for all examples.

    What comes before the first uncertain layer runs once for a batch; every draw takes a
    Jacobian-vector product, about two passes.
    """

    def draw(self, inputs: Any, key: Tensor, number: Tensor) -> Tensor:
        return self._runner(inputs, key)(ops.reshape(number, (1,)))

    def _runner(self, inputs: Any, key: Tensor) -> Callable[[Tensor], Tensor]:
        values = self._prepared(inputs)
        return lambda numbers: self._outputs(self._logits(values, key, numbers))

    def _prepared(self, inputs: Any) -> Any:
        """Return what all draws have in common."""
        return self._posterior.logit_network.prefix(inputs)

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
    """Networks with sampled weights. The first layers of a few are one matrix product."""

    def _prepared(self, inputs: Any) -> Any:
        """Return the inputs of the first uncertain layer, and its tap if draws can share it."""
        values, first = super()._prepared(inputs), self._posterior.structure.blocks[0]
        is_usual = getattr(first.layer, "data_format", "channels_last") == "channels_last"
        is_whole = len(first.variables) == len(first.layer.weights)
        is_shared = first.is_linear and is_usual and is_whole and len(values) == 1
        return values, first.tap(*values.values()) if is_shared else None

    def _logits(self, values: Any, key: Tensor, numbers: Tensor) -> Tensor:
        (values, tap), first = values, self._posterior.structure.blocks[0]
        sets = self._posterior.draw(key, numbers)
        if tap is not None:
            matrices = ops.reshape(sets[:, : first.size], (-1, first.inputs, first.outputs))
            shared = ops.tensordot(tap, ops.cast(matrices, tap.dtype), [[2], [1]])
            if self._posterior.is_last_layer:
                return ops.moveaxis(shared[:, 0], 1, 0)

        def of_one(place: Tensor) -> Tensor:
            def run(is_stripped: bool, x: Tensor, **_: Any) -> Tensor:
                usual, after = first.run(is_stripped, x)  # for its shape
                return after(ops.reshape(shared[:, :, place], (-1, *usual.shape[1:])))

            others = {} if tap is None else {first.layer: run}
            with self._in_place(split(sets[place], self._posterior.sampled)):
                return self._posterior.logit_network.logits(values, others)

        return ops.map(of_one, ops.arange(numbers.shape[0], dtype="int32"))


class ProbitSampler(NetworkSampler):
    """One distribution instead of draws: the logits divided by sqrt(1 + pi / 8 * variance)."""

    def _logits(self, values: Any, key: Tensor, numbers: Tensor) -> Tensor:
        logits, variance = self._moments(*values)
        return (logits / ops.sqrt(1 + math.pi / 8 * variance))[None]

    def _moments(self, values: dict[int, Tensor], tap: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the mean and the variance (N, K) of the linearised logits."""
        posterior = self._posterior
        network, structure = posterior.logit_network, posterior.structure
        if posterior.is_last_layer:
            return network.logits(values), structure.variance(tap[:, 0], posterior.scale)
        logits, taps, pull = linearized(network, structure.blocks, values)

        def of_logit(unit: Tensor) -> Tensor:
            g = pull(ops.broadcast_to(unit, ops.shape(logits)))
            return structure.row_variance(taps, g, posterior.scale)

        units = ops.eye(logits.shape[-1], dtype=logits.dtype)
        return logits, ops.transpose(ops.map(of_logit, units))
