"""Many sampled networks at once: their draws, and how they are run in portions."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import keras
from keras import ops

from tfp_ibnn import noise
from tfp_ibnn._core import checks, keras_internals
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.protocols import Chunks, Sampler
from tfp_ibnn.conversion.graph import Graph
from tfp_ibnn.layers import StochasticLayer, stochastic_layers
from tfp_ibnn.noise.counter import SOBOL_BITS
from tfp_ibnn.prediction.dropout import DROPOUTS, drop
from tfp_ibnn.prediction.wrapping import unscaled

__all__ = ["NoiseSampler"]

_CHUNK_ELEMENTS = 2**22
"""How many numbers the largest tensor of a chunk may have."""


class NoiseSampler(Sampler):
    """A model with many draws of its noise.

    Args:
        model: a Keras model with one output.
        samples: number of draws.
        sampling: how they are drawn; see `noise.Pass`.
        independent: draw anew for each example instead of once for all.
        chunk_size: how many draws to run at once; None chooses.
        dropout: whether dropout layers are a source of noise.
        portable: see `noise.Pass`.
        quiet: layers whose noise is not drawn here, such as those of a `MonteCarlo` inside.
    """

    def __init__(
        self,
        model: keras.Model,
        samples: int,
        *,
        sampling: str,
        independent: bool,
        chunk_size: int | None,
        dropout: bool,
        portable: bool,
        quiet: Sequence[keras.layers.Layer] = (),
    ) -> None:
        self.samples = samples
        self._model = unscaled(model)
        self._scale = _same if self._model is model else model.scale
        self._quiet = {id(layer) for layer in quiet}
        self._sampling = sampling
        self._independent = independent
        self._chunk_size = chunk_size
        self._dropout = dropout
        self._portable = portable
        self._graph = Graph(self._model, self._is_noisy)
        self._first = {} if independent else self._graph.first(_separates)

    @property
    def is_random(self) -> bool:
        """Whether the draws differ at all."""
        return self._graph.is_noisy and bool(self._dropout or self._stochastic_layers())

    @property
    def hidden_dropout(self) -> list[str]:
        """Names of the layers whose dropout is out of reach."""
        reached = {id(layer) for layer in self._graph.layers}
        return [
            layer.name
            for layer in keras_internals.nested_layers(self._model)
            if getattr(layer, "dropout", 0)
            or getattr(layer, "recurrent_dropout", 0)
            or (isinstance(layer, DROPOUTS) and id(layer) not in reached)
        ]

    def chunks(self, inputs: Any, key: Tensor) -> Chunks:
        """Prepare the networks that a key gives for a batch.

        What comes before the first noisy layer runs here, once for each example.
        """
        values = self._graph.prefix(inputs, _call)
        separate = self._separate(values)
        size, count = self._sizes(_batch_of(inputs))
        ahead, used = self._draw_ahead(key, ops.arange(size * count, dtype="int32"))

        def run(first: int | Tensor) -> Tensor:
            sample = first + ops.arange(size, dtype="int32")
            draws = {layer: ops.take(z, sample, axis=0) for layer, z in ahead.items()}
            return self._run(inputs, values, key, sample, draws, used, separate)

        return Chunks(run, size, count)

    def draw(self, inputs: Any, key: Tensor, number: Tensor) -> Tensor:
        """Return the outputs (1, batch, ...) of one of the networks that a key gives.

        Those of `chunks` have the numbers from 0 on; there are more.
        """
        values = self._graph.prefix(inputs, _call)
        number = ops.cast(number, "int32")
        if self._sampling == "qmc":
            # Where the points begin to repeat, others take over.
            lap = ops.right_shift(number, SOBOL_BITS)
            key = ops.stack([key[0] + lap, key[1]])
            number = ops.bitwise_and(number, 2**SOBOL_BITS - 1)
        sample = ops.reshape(number, (1,))
        draws, used = self._draw_ahead(key, sample)
        return self._run(inputs, values, key, sample, draws, used)

    def at_mean(self, inputs: Any) -> Tensor:
        """Return the outputs (1, batch, ...) of the network without noise."""
        with noise.scope(off=True, losses=False):
            values = self._graph.prefix(inputs, _call)
            return self._checked(self._graph.suffix(values, inputs, _call))[None]

    def _run(
        self,
        inputs: Any,
        values: dict[int, Tensor],
        key: Tensor,
        sample: Tensor,
        draws: dict[Any, Tensor],
        used: int,
        separate: Mapping[Any, Callable[[Tensor], Tensor]] = MappingProxyType({}),
    ) -> Tensor:
        """Return the outputs (samples, batch, ...) of the networks with the numbers `sample`."""
        batch, size = _batch_of(inputs), ops.shape(sample)[0]
        options = {"sampling": self._sampling, "seed": key, "skip": used, "losses": False}
        if self._independent:
            options["sample"], options["stream"] = _all_pairs(sample, batch)
            options["portable"] = self._portable
        else:
            options["groups"], options["sample"] = size, sample
        repeated = self._graph.repeat(values, size)
        with noise.scope(**options, draws=draws) as forward_pass:
            call = self._call_in(forward_pass, draws, separate)
            outputs = self._checked(self._graph.suffix(repeated, inputs, call))
        return ops.reshape(outputs, (size, batch, *ops.shape(outputs)[1:]))

    def _checked(self, outputs: Any) -> Tensor:
        """Return a network's output in full precision, or raise if there are several."""
        if not ops.is_tensor(outputs):
            raise ValueError(
                f"Model {self._model.name!r} returns {type(outputs).__name__}; MonteCarlo "
                "needs one output, a tensor, not several outputs."
            )
        dtype = checks.full_precision(keras.backend.standardize_dtype(outputs.dtype))
        return self._scale(ops.cast(outputs, dtype))

    def _is_noisy(self, layer: Any) -> bool:
        if not isinstance(layer, keras.layers.Layer):
            return False
        if self._dropout and isinstance(layer, DROPOUTS):
            return True
        return bool(stochastic_layers(layer))

    def _stochastic_layers(self) -> list[StochasticLayer]:
        return [x for x in stochastic_layers(self._model) if id(x) not in self._quiet]

    def _sizes(self, batch: int | Tensor) -> tuple[int | Tensor, int | Tensor]:
        """Return how many draws to run at once, and how often."""
        size = self._chunk_size
        if size is None:
            at_once = batch * self._graph.largest
            if isinstance(at_once, int):
                size = max(1, _CHUNK_ELEMENTS // max(1, at_once))
            else:
                size = ops.maximum(1, _CHUNK_ELEMENTS // ops.maximum(1, at_once))
        count = (self.samples + size - 1) // size
        return (self.samples + count - 1) // count, count

    def _draw_ahead(self, key: Tensor, sample: Tensor) -> tuple[dict[Any, Tensor], int]:
        """Draw the latents that need no input; return them, and how many numbers that took.

        They are small. With noise for each position they may not be, so those are drawn chunk by
        chunk.
        """
        if self._independent:
            return {}, 0
        count = ops.shape(sample)[0]
        forward_pass = noise.Pass(groups=count, seed=key, sampling=self._sampling, sample=sample)
        layers = [x for x in self._stochastic_layers() if x.draws_ahead]
        return {
            layer: layer.draw(forward_pass, count).z for layer in layers
        }, forward_pass.source.used

    def _separate(self, values: dict[int, Tensor]) -> dict[Any, Callable[[Tensor], Tensor]]:
        """Prepare the layers whose work can be shared by all draws."""
        return {layer: layer.shared(values[number]) for layer, number in self._first.items()}

    def _call_in(
        self,
        forward_pass: noise.Pass,
        draws: Mapping[Any, Tensor],
        separate: Mapping[Any, Callable[[Tensor], Tensor]],
    ) -> Callable[..., Any]:
        """Return how to call a layer behind the first noisy one."""
        if not self._dropout and not separate:
            return _call

        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if layer in separate:
                return separate[layer](draws[layer])
            if self._dropout and isinstance(layer, DROPOUTS):
                return drop(layer, args[0] if args else kwargs["inputs"], forward_pass)
            return _call(layer, *args, **kwargs)

        return call


def _same(outputs: Tensor) -> Tensor:
    return outputs


def _separates(layer: Any, inputs: Any) -> bool:
    return isinstance(layer, StochasticLayer) and layer.shares_work(inputs)


def _call(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a layer as in inference."""
    if isinstance(layer, keras.layers.Layer):
        kwargs["training"] = False
    return layer(*args, **kwargs)


def _batch_of(inputs: Any) -> int | Tensor:
    return ops.shape(keras.tree.flatten(inputs)[0])[0]


def _all_pairs(sample: Tensor, batch: int | Tensor) -> tuple[Tensor, Tensor]:
    """Return sample number and example number of each row of a repeated batch."""
    shape = (ops.shape(sample)[0], batch)
    example = ops.arange(batch, dtype="int32")
    return tuple(
        ops.reshape(ops.broadcast_to(part, shape), (-1,))
        for part in (sample[:, None], example[None])
    )
