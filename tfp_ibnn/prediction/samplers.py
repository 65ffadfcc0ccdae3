"""What runs many sampled networks: draws of the noise, or sets of weights."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import layers, ops

from tfp_ibnn import noise
from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.protocols import Chunks, Sampler, WeightPosterior
from tfp_ibnn.conversion.graph import Graph, infer
from tfp_ibnn.conversion.wrappers import PredictionWrapper, ScaledModel, unscaled
from tfp_ibnn.layers import inside, stochastic_layers
from tfp_ibnn.layers.rows import check_rows, may_move_examples
from tfp_ibnn.likelihoods.several import named_outputs
from tfp_ibnn.noise.counter import SOBOL_BITS

_CHUNK_ELEMENTS = 2**22
"""How many numbers the largest tensor of a chunk may have."""

_each = keras.tree.map_structure
_SPATIAL = (layers.SpatialDropout1D, layers.SpatialDropout2D, layers.SpatialDropout3D)
_DROPOUTS = (layers.Dropout, layers.GaussianDropout, *_SPATIAL)


class NoiseSampler(Sampler):
    """Many draws of a model's noise, or one if all are alike; `MonteCarlo` has its arguments."""

    def __init__(
        self,
        model: keras.Model,
        samples: int,
        *,
        portable: bool = True,
        sampling: str = "iid",
        independent: bool = False,
        chunk_size: int | None = None,
        dropout: bool = False,
    ) -> None:
        self._model = unscaled(model)
        self._scaled = None if self._model is model else model
        self._sampling, self._portable = sampling, portable
        self._independent, self._chunk_size, self._dropout = independent, chunk_size, dropout
        self._graph = Graph(self._model, self._is_noisy)
        self._first = {} if independent else self._graph.first()
        # The noise of a MonteCarlo inside is its own.
        nested = keras_internals.nested_layers
        wrappers = [x for x in nested(model) if isinstance(x, PredictionWrapper)]
        averaged = [x for x in wrappers if not isinstance(x, ScaledModel)]
        quiet = {id(layer) for x in averaged for layer in nested(x)}
        self._layers = [x for x in stochastic_layers(self._model) if id(x) not in quiet]
        self._inside = [x for x in inside.called_inside(self._model) if id(x) not in quiet]
        is_random = self._graph.is_noisy and (dropout or self._layers)
        self._may_move_examples = may_move_examples(self._model)
        if is_random:
            check_rows(self._model, self._note_dropout if dropout else None)
        self.samples = samples if is_random else 1
        reached = {id(layer) for layer in self._graph.layers}
        hidden = [
            layer.name
            for layer in (nested(self._model) if dropout else [])
            if getattr(layer, "dropout", 0)
            or getattr(layer, "recurrent_dropout", 0)
            or isinstance(layer, layers.AlphaDropout)
            or (isinstance(layer, _DROPOUTS) and id(layer) not in reached)
        ]
        if hidden:
            warnings.warn(
                f"The dropout inside {', '.join(hidden)} stays off: only dropout layers of the "
                "graph, not AlphaDropout, can stay on. In place of the `dropout` of a recurrent "
                "layer, train the model with a keras.layers.Dropout before and after it.",
                stacklevel=3,
            )
        # What is scaled needs no noise, unless it was asked for.
        if self.samples < samples and (dropout or not isinstance(model, ScaledModel)):
            missing = f"no stochastic layer{' and no dropout' * dropout}"
            message = f"Model {model.name!r} has {missing}: all samples are alike, one is enough."
            warnings.warn(message, stacklevel=3)

    def chunks(self, inputs: Any, key: Tensor) -> Chunks:
        size = self._chunk_size
        if size is None:
            # The largest activations, or a draw of all weights; each example may have its own.
            batch = ops.shape(keras.tree.flatten(inputs)[0])[0]
            drawn = sum(x.draw_size for x in self._layers if not x.draws_ahead)
            at_once = batch * self._graph.largest + drawn * (batch if self._independent else 1)
            at_least = max if isinstance(at_once, int) else ops.maximum
            size = at_least(1, _CHUNK_ELEMENTS // at_least(1, at_once))
        count = (self.samples + size - 1) // size
        size = (self.samples + count - 1) // count
        numbers = ops.arange(size * count, dtype="int32")
        return Chunks(self._runner(inputs, key, numbers, size), size, count)

    def draw(self, inputs: Any, key: Tensor, number: Tensor) -> Tensor:
        number = ops.cast(number, "int32")
        if self._sampling == "qmc":
            # Where the points begin to repeat, others take over.
            lap = ops.right_shift(number, SOBOL_BITS)
            key = ops.stack([key[0] + lap, key[1]])
            number = ops.bitwise_and(number, 2**SOBOL_BITS - 1)
        return self._runner(inputs, key, ops.reshape(number, (1,)), 1)(0)

    def at_mean(self, inputs: Any) -> Tensor:
        with noise.scope(off=True, losses=False) as forward_pass:
            inside.draw_ahead(self._inside, forward_pass, 1)
            values = self._graph.prefix(inputs)
            return _each(lambda x: x[None], self._checked(self._graph.suffix(values)))

    def _runner(
        self, inputs: Any, key: Tensor, numbers: Tensor, size: int | Tensor
    ) -> Callable[[int | Tensor], Tensor]:
        """Return what runs `size` of the networks, from a position on; the prefix runs here."""
        batch = ops.shape(keras.tree.flatten(inputs)[0])[0]
        values = self._graph.prefix(inputs)
        # What all draws have in common pays if there are several.
        first = self._first if numbers.shape[0] != 1 else {}
        shared = {layer: layer.shared(values[number]) for layer, number in first.items()}
        ahead, used = {}, 0
        if not self._independent:
            # Latents for each position may be large; only the others are drawn for all chunks.
            count = ops.shape(numbers)[0]
            drawn = noise.Pass(groups=count, seed=key, sampling=self._sampling, sample=numbers)
            ahead = {x: x.draw(drawn, count).z for x in self._layers if x.draws_ahead}
            used = drawn.source.used

        def run(start: int | Tensor) -> Tensor:
            places = start + ops.arange(size, dtype="int32")
            sample = ops.take(numbers, places)
            options = {"groups": size, "sample": sample}
            if self._independent:
                # Sample number and example number of each row of the repeated batch.
                pairs = ops.meshgrid(sample, ops.arange(batch, dtype="int32"), indexing="ij")
                sample, stream = (ops.reshape(part, (-1,)) for part in pairs)
                options = {"sample": sample, "stream": stream, "portable": self._portable}
            options["draws"] = {layer: ops.take(z, places, axis=0) for layer, z in ahead.items()}
            repeated = self._graph.repeat(values, size)
            with noise.scope(
                sampling=self._sampling, seed=key, skip=used, losses=False, **options
            ) as forward_pass:
                if self._independent and self._may_move_examples:
                    forward_pass.examples = ops.shape(sample)[0]
                inside.draw_ahead(self._inside, forward_pass, ops.shape(sample)[0])

                def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
                    if layer in shared:
                        return shared[layer](options["draws"][layer])
                    if self._dropout and isinstance(layer, _DROPOUTS):
                        return drop(layer, args[0] if args else kwargs["inputs"], forward_pass)
                    return infer(layer, *args, **kwargs)

                outputs = self._checked(self._graph.suffix(repeated, call))
            return _each(lambda x: ops.reshape(x, (size, batch, *ops.shape(x)[1:])), outputs)

        return run

    def _note_dropout(self, inputs: Any, forward_pass: noise.Pass) -> None:
        """Run the model, and note what dropout layers see as well."""

        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(layer, _DROPOUTS):
                forward_pass.seen.append((layer, args[0] if args else kwargs["inputs"]))
            return infer(layer, *args, **kwargs)

        self._graph.suffix(self._graph.prefix(inputs), call)

    def _checked(self, outputs: Any) -> Any:
        outputs = named_outputs(self._model, outputs)
        return outputs if self._scaled is None else self._scaled.scale(outputs)

    def _is_noisy(self, layer: Any) -> bool:
        if self._dropout and isinstance(layer, _DROPOUTS):
            return True
        return isinstance(layer, layers.Layer) and bool(stochastic_layers(layer))


class WeightSampler(Sampler):
    """The networks that a posterior over weights gives; they run one after the other.

    A network with stochastic layers draws its noise too, anew for each number. `samples` is the
    number of networks; of a posterior with fewer weight sets, all of them. If they have noise it is
    the next multiple of their number, so that each is drawn as often.
    `chunk_size` is of how many networks to keep the outputs at once; None keeps all.
    """

    def __init__(
        self, posterior: WeightPosterior, samples: int, chunk_size: int | None = None
    ) -> None:
        self._posterior, self._chunk_size, self._noise = posterior, chunk_size, None
        if stochastic_layers(posterior.network):
            self._noise = NoiseSampler(posterior.network, samples)
        self.samples = samples
        if posterior.count is not None and self._noise is None:
            self.samples = min(samples, posterior.count)
        elif posterior.count is not None:
            self.samples = _multiple(samples, posterior.count)

    def chunks(self, inputs: Any, key: Tensor) -> Chunks:
        size, run = min(self._chunk_size or self.samples, self.samples), self._runner(inputs, key)
        numbers = ops.arange(size, dtype="int32")
        count = -(-self.samples // size)
        return Chunks(lambda first: run(ops.cast(first, "int32") + numbers), size, count)

    def _runner(self, inputs: Any, key: Tensor) -> Callable[[Tensor], Any]:
        """Return what runs the networks of some numbers, (S,)."""
        one = lambda number: _each(lambda x: x[0], self.draw(inputs, key, number))  # noqa: E731
        return lambda numbers: ops.map(one, numbers)

    def draw(self, inputs: Any, key: Tensor, number: Tensor) -> Tensor:
        number = ops.cast(number, "int32")
        with self._in_place(self._posterior.sample(key, number)):
            if self._noise is None:
                return self._plain(inputs)
            return self._noise.draw(inputs, key, number)

    def at_mean(self, inputs: Any) -> Tensor:
        with self._in_place(self._posterior.mean()):
            return self._plain(inputs) if self._noise is None else self._noise.at_mean(inputs)

    def _in_place(self, values: list[Tensor]) -> Any:
        return keras_internals.values_in_place(zip(self._posterior.sampled, values, strict=True))

    def _plain(self, inputs: Any) -> Tensor:
        network = self._posterior.network
        outputs = named_outputs(network, network(inputs, training=False))
        return _each(lambda x: x[None], outputs)


class MixtureSampler(WeightSampler):
    """The networks of several samplers, one per member of a mixture, in turn, each as often."""

    def __init__(
        self, samplers: Sequence[Sampler], samples: int, chunk_size: int | None = None
    ) -> None:
        self._samplers, self._chunk_size = samplers, chunk_size
        # Sets that are fewer than those of another member repeat, until all are even.
        even = len(samplers) * math.lcm(*(x.samples for x in samplers))
        self.samples = min(_multiple(samples, len(samplers)), even)

    def draw(self, inputs: Any, key: Tensor, number: Tensor) -> Tensor:
        number, count = ops.cast(number, "int32"), len(self._samplers)

        def drawing(place: int, sampler: Sampler) -> Callable[[], Tensor]:
            # A key of its own: members of one size would have the same noise otherwise.
            own = ops.stack([ops.bitwise_xor(key[0], place), key[1]])
            return lambda: sampler.draw(inputs, own, number // count)

        return ops.switch(number % count, [drawing(*x) for x in enumerate(self._samplers)])

    def at_mean(self, inputs: Any) -> Tensor:
        """Return the outputs (1, batch, ...) of the first member's network that stands for all."""
        return self._samplers[0].at_mean(inputs)


def _multiple(number: int, of: int) -> int:
    """Return the smallest multiple that is not below a number."""
    return -(-number // of) * of


def drop(layer: keras.layers.Layer, inputs: Tensor, forward_pass: noise.Pass) -> Tensor:
    """Do as a dropout layer does in training; the examples of a draw share the mask."""
    rate, sizes = layer.rate, ops.shape(inputs)
    if not rate:
        return inputs
    shape = (getattr(layer, "noise_shape", None) or (None,) * len(sizes))[1:]
    shape = tuple(y if x is None else x for x, y in zip(shape, sizes[1:], strict=True))
    if isinstance(layer, _SPATIAL):
        ones = (1,) * (len(shape) - 1)
        is_first = getattr(layer, "data_format", None) == "channels_first"
        shape = (shape[0], *ones) if is_first else (*ones, shape[-1])
    count = sizes[0] if forward_pass.groups is None else forward_pass.groups
    blocks = ops.reshape(inputs, (count, sizes[0] // count, *sizes[1:]))
    # In float32 whatever the input: a rate has few digits in half precision.
    if isinstance(layer, layers.GaussianDropout):
        noise_scale = (rate / (1 - rate)) ** 0.5
        factor = 1 + noise_scale * forward_pass.source.normal(count, shape, "float32", None)
    else:
        kept = forward_pass.source.uniform(count, shape, "float32") >= rate
        factor = ops.cast(kept, "float32") / (1 - rate)
    dropped = blocks * ops.cast(factor, inputs.dtype)[:, None]
    return ops.reshape(dropped, sizes)
