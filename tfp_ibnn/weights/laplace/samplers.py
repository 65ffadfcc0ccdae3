"""The linearized network: output samples, or the probit approximation; sampled networks."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from keras import ops

from tfp_ibnn._core.backend import Tensor, jvp
from tfp_ibnn._core.protocols import Chunks
from tfp_ibnn._core.rows import in_blocks
from tfp_ibnn._core.unrolling import map_first_axis
from tfp_ibnn.prediction.samplers import WeightSampler
from tfp_ibnn.weights.laplace.blocks import Block
from tfp_ibnn.weights.laplace.curvature import linearized
from tfp_ibnn.weights.laplace.positions import ROWS
from tfp_ibnn.weights.vectors import split


class LinearizedSampler(WeightSampler):
    """Draws f(x) + J(x) (w - w*), w from the posterior, each the same for all examples.

    What comes before the first uncertain layer runs once for a batch; every draw takes a
    Jacobian-vector product, about two passes.
    """

    def draw(self, inputs: Any, key: Tensor, number: Tensor) -> Tensor:
        outputs_of = self._runner(inputs, key)
        return outputs_of(ops.reshape(number, (1,)))

    def unrolled(self, inputs: Any, key: Tensor) -> Chunks:
        numbers = ops.arange(self.samples, dtype="int32")
        outputs_of = self._runner(inputs, key)
        return Chunks(lambda _: outputs_of(numbers), self.samples, 1)

    def _runner(self, inputs: Any, key: Tensor) -> Callable[[Tensor], Tensor]:
        prepared = self._prepared(inputs)
        return lambda numbers: self._outputs(self._logits(prepared, key, numbers))

    def _prepared(self, inputs: Any) -> Any:
        """Return what all draws have in common."""
        return self._posterior.logit_network.prefix(inputs)

    def _logits(self, prepared: Any, key: Tensor, numbers: Tensor) -> Tensor:
        """Return the logits (S, N, K) of draws by their numbers (S,)."""
        posterior = self._posterior
        mean = posterior.mean()

        def logits_at(weights: list[Tensor]) -> Tensor:
            with self._in_place(weights):
                return posterior.logit_network.logits(prepared)

        def logits_of_draw(number: Tensor) -> Tensor:
            at_mean, change = jvp(logits_at, mean, posterior.deviation(key, number))
            return at_mean + change

        return map_first_axis(logits_of_draw, numbers)

    def _outputs(self, logits: Tensor) -> Tensor:
        network = self._posterior.logit_network
        return ops.cast(network.likelihood.outputs(logits), network.dtype)


class _Prepared(NamedTuple):
    """What sampled networks have in common on a batch."""

    values: dict[int, Tensor]  # what comes before the first uncertain layer
    tap: Tensor | None  # what the matrix of that layer multiplies, if draws can share it


class NetworkSampler(LinearizedSampler):
    """Networks with sampled weights. The first layers of a few are one matrix product."""

    def _prepared(self, inputs: Any) -> _Prepared:
        values = super()._prepared(inputs)
        first = self._first_block()
        if self._posterior.is_last_layer:
            return _Prepared(values, first.tap(self._features(values)))
        if len(values) != 1 or not _is_whole_matrix(first):
            return _Prepared(values, None)
        (x,) = values.values()
        return _Prepared(values, first.tap(x))

    def _features(self, values: dict[int, Tensor]) -> Tensor:
        """Return the input of a last layer."""
        return self._posterior.logit_network.features(values)

    def _first_block(self) -> Block:
        return self._posterior.structure.blocks[0]

    def _logits(self, prepared: _Prepared, key: Tensor, numbers: Tensor) -> Tensor:
        posterior = self._posterior
        sets = posterior.draw(key, numbers)
        products = None
        if prepared.tap is not None:
            products = _products(self._first_block(), prepared.tap, sets)
            if posterior.is_last_layer:
                return self._at_positions(ops.moveaxis(products, 2, 0), prepared)

        def logits_of_draw(place: Tensor) -> Tensor:
            runs = {}
            if products is not None:
                runs = self._run_of_first(products[:, :, place])
            with self._in_place(split(sets[place], posterior.sampled)):
                return posterior.logit_network.logits(prepared.values, runs)

        places = ops.arange(numbers.shape[0], dtype="int32")
        return map_first_axis(logits_of_draw, places)

    def _at_positions(self, rows: Tensor, prepared: _Prepared) -> Tensor:
        """Return numbers (S, N, positions, K) of a last layer in the shape of its outputs."""
        network = self._posterior.logit_network
        sizes = network.positions(self._features(prepared.values))
        draws, examples, _, width = ops.shape(rows)
        return ops.reshape(rows, (draws, examples, *sizes, width))

    def _run_of_first(self, product: Tensor) -> dict[Any, Callable[..., Tensor]]:
        """Return what runs the first layer, by the layer: its product (N, positions, outputs)."""
        first = self._first_block()

        def run(is_stripped: bool, x: Tensor, **_: Any) -> Tensor:
            output, after = first.run(is_stripped, x)  # for its shape
            return after(ops.reshape(product, (-1, *output.shape[1:])))

        return {first.layer: run}


class ProbitSampler(NetworkSampler):
    """One distribution instead of draws: the logits divided by sqrt(1 + pi / 8 * variance)."""

    def _logits(self, prepared: _Prepared, key: Tensor, numbers: Tensor) -> Tensor:
        logits, variance = self._moments(prepared)
        softened = logits / ops.sqrt(1 + math.pi / 8 * variance)
        return softened[None]

    def _moments(self, prepared: _Prepared) -> tuple[Tensor, Tensor]:
        """Return the mean and the variance (N, K) of the linearized logits."""
        posterior = self._posterior
        network = posterior.logit_network
        structure = posterior.structure
        if posterior.is_last_layer:
            return self._moments_of_last_layer(prepared)
        logits, _, slopes_of = linearized(network, structure.blocks, prepared.values)

        def variance_of_logit(unit: Tensor) -> Tensor:
            cotangent = ops.broadcast_to(unit, ops.shape(logits))
            return structure.row_variance(slopes_of(cotangent), posterior.scale)

        units = ops.eye(logits.shape[-1], dtype=logits.dtype)
        variances = map_first_axis(variance_of_logit, units)
        return logits, ops.transpose(variances)

    def _moments_of_last_layer(self, prepared: _Prepared) -> tuple[Tensor, Tensor]:
        posterior = self._posterior
        mean = _products(self._first_block(), prepared.tap, posterior.center()[None])
        logits = ops.moveaxis(mean, 2, 0)

        def variance(rows: Tensor) -> Tensor:
            return posterior.structure.variance(rows, posterior.scale)

        features = ops.reshape(prepared.tap, (-1, prepared.tap.shape[-1]))
        if posterior.logit_network.has_positions:
            variances = in_blocks(variance, features, ROWS)
        else:
            variances = variance(features)
        variances = ops.reshape(variances, ops.shape(logits))
        return tuple(self._at_positions(x, prepared)[0] for x in (logits, variances))


def _products(block: Block, tap: Tensor, sets: Tensor) -> Tensor:
    """Return the products of the matrices of all draws, (N, positions, S, outputs)."""
    values = ops.cast(sets[:, : block.size], tap.dtype)
    shape = (-1, block.inputs, block.outputs)
    matrices = ops.reshape(values, shape)
    return ops.tensordot(tap, matrices, [[2], [1]])


def _is_whole_matrix(block: Block) -> bool:
    """Whether draws of a block are matrices that multiply its tap and give the layer's output."""
    layer = block.layer
    is_usual = getattr(layer, "data_format", "channels_last") == "channels_last"
    is_whole = len(block.variables) == len(layer.weights)
    return block.is_linear and is_usual and is_whole
