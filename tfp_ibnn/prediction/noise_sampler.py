"""What runs a model with many draws of its noise."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
from keras import layers, ops

from tfp_ibnn import noise
from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.protocols import Chunks, Sampler
from tfp_ibnn.conversion.graph import Graph, infer
from tfp_ibnn.conversion.wrappers import PredictionWrapper, ScaledModel, unscaled
from tfp_ibnn.layers import inside, stochastic_layers
from tfp_ibnn.layers.rows import check_rows, may_move_examples
from tfp_ibnn.likelihoods.several import named_outputs
from tfp_ibnn.noise.counter import SOBOL_BITS
from tfp_ibnn.prediction.dropout import DROPOUTS, drop

_CHUNK_ELEMENTS = 2**22
"""How many numbers the largest tensor of a chunk may have."""


class _Prepared(NamedTuple):
    """What the sampled networks on a batch have in common."""

    key: Tensor
    numbers: Tensor  # of all networks, in the order in which they run
    size: int | Tensor  # how many of them run at once
    batch: int | Tensor  # number of examples
    values: dict[int, Tensor]  # what comes before the first noisy layer
    shared: dict[Any, Callable[[Tensor], Tensor]]  # the first noisy layers, as functions of z
    latents: dict[Any, Tensor]  # z of all networks, for layers that draw ahead
    used: int  # how many random numbers of each draw these latents took


class _LayerCalls(NamedTuple):
    """How to run the layers behind the prefix in one chunk."""

    forward_pass: noise.Pass
    has_dropout: bool
    shared: Mapping[Any, Callable[[Tensor], Tensor]]
    latents: Mapping[Any, Tensor]

    def __call__(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        if layer in self.shared:
            return self.shared[layer](self.latents[layer])
        if self.has_dropout and isinstance(layer, DROPOUTS):
            return drop(layer, _input_of_call(args, kwargs), self.forward_pass)
        return infer(layer, *args, **kwargs)


class NoiseSampler(Sampler):
    """Runs many draws of a model's noise, or one if the model has none.

    What comes before the first noisy layer runs once for a batch, and the rest in chunks of draws.

    Args:
        model: a built Keras model, perhaps a `ScaledModel` around one.
        samples: number of draws.
        portable: whether `independent` draws are the same on every backend, which takes longer.
        sampling: "iid", "antithetic" or "qmc".
        independent: draw for each example, not for the whole batch.
        chunk_size: how many draws to run at once; None chooses by their memory.
        dropout: leave the dropout layers on.

    Attributes:
        samples: number of draws, 1 for a model without noise.
    """

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
        self._portable = portable
        self._sampling = sampling
        self._independent = independent
        self._chunk_size = chunk_size
        self._dropout = dropout
        self._graph = Graph(self._model, self._is_noisy)
        self._first = {} if independent else self._graph.first()
        quiet = _ids_of_averaged(model)
        self._layers = [x for x in stochastic_layers(self._model) if id(x) not in quiet]
        self._inside = [x for x in inside.called_inside(self._model) if id(x) not in quiet]
        self._may_move_examples = may_move_examples(self._model)
        is_random = self._graph.is_noisy and (dropout or self._layers)
        if is_random:
            check_rows(self._model, self._note_dropout if dropout else None)
        self.samples = samples if is_random else 1
        if dropout:
            self._warn_of_dropout_off()
        # What is scaled needs no noise, unless it was asked for.
        if self.samples < samples and (dropout or not isinstance(model, ScaledModel)):
            _warn_of_no_noise(model, dropout)

    def chunks(self, inputs: Any, key: Tensor) -> Chunks:
        size = self._chunk_size
        if size is None:
            size = self._size_of_chunk(inputs)
        return self._in_chunks(inputs, key, size)

    def unrolled(self, inputs: Any, key: Tensor) -> Chunks:
        return self._in_chunks(inputs, key, self.samples)

    def _in_chunks(self, inputs: Any, key: Tensor, size: int | Tensor) -> Chunks:
        """Return the sampled networks in chunks of at most a size."""
        count = (self.samples + size - 1) // size
        # As even as can be: the last chunk may go beyond the samples by less than `count`.
        size = (self.samples + count - 1) // count
        numbers = ops.arange(size * count, dtype="int32")
        prepared = self._prepare(inputs, key, numbers, size)

        def run(start: int | Tensor) -> Tensor:
            return self._run(prepared, start)

        return Chunks(run, size, count)

    def draw(self, inputs: Any, key: Tensor, number: Tensor) -> Tensor:
        number = ops.cast(number, "int32")
        if self._sampling == "qmc":
            # Where the points begin to repeat, others take over.
            lap = ops.right_shift(number, SOBOL_BITS)
            number = ops.bitwise_and(number, 2**SOBOL_BITS - 1)
            key = ops.stack([key[0] + lap, key[1]])
        numbers = ops.reshape(number, (1,))
        prepared = self._prepare(inputs, key, numbers, size=1)
        return self._run(prepared, 0)

    def at_mean(self, inputs: Any) -> Tensor:
        with noise.scope(off=True, losses=False) as forward_pass:
            inside.draw_ahead(self._inside, forward_pass, 1)
            values = self._graph.prefix(inputs)
            outputs = self._finish(self._graph.suffix(values))
        return keras.tree.map_structure(lambda x: x[None], outputs)

    def _size_of_chunk(self, inputs: Any) -> int | Tensor:
        """Return how many draws to run at once.

        What counts are the largest activations, and a draw of all weights, which each example may
        have of its own.
        """
        batch = _count_of_examples(inputs)
        drawn = sum(layer.draw_size for layer in self._layers if not layer.draws_ahead)
        if self._independent:
            drawn = drawn * batch
        elements = batch * self._graph.largest + drawn
        at_least = max if isinstance(elements, int) else ops.maximum
        elements = at_least(1, elements)
        return at_least(1, _CHUNK_ELEMENTS // elements)

    def _prepare(self, inputs: Any, key: Tensor, numbers: Tensor, size: int | Tensor) -> _Prepared:
        """Run the prefix, and draw what is small enough to be drawn for all networks."""
        batch = _count_of_examples(inputs)
        values = self._graph.prefix(inputs)
        shared = {}
        if numbers.shape[0] != 1:  # it pays only if there are several draws
            for layer, number in self._first.items():
                shared[layer] = layer.shared(values[number])
        latents = {}
        used = 0
        if not self._independent:
            # Latents for each position may be large: those are drawn chunk by chunk.
            count = ops.shape(numbers)[0]
            ahead = noise.Pass(groups=count, seed=key, sampling=self._sampling, sample=numbers)
            latents = {x: x.draw(ahead, count).z for x in self._layers if x.draws_ahead}
            used = ahead.source.used
        return _Prepared(key, numbers, size, batch, values, shared, latents, used)

    def _run(self, prepared: _Prepared, start: int | Tensor) -> Tensor:
        """Return the outputs (size, batch, ...) of the networks from a place on."""
        size = prepared.size
        places = start + ops.arange(size, dtype="int32")
        latents = {x: ops.take(z, places, axis=0) for x, z in prepared.latents.items()}
        options = self._options_of_draws(prepared, places)
        count = ops.shape(options["sample"])[0]
        values = self._graph.repeat(prepared.values, size)
        with noise.scope(
            sampling=self._sampling,
            seed=prepared.key,
            skip=prepared.used,
            losses=False,
            draws=latents,
            **options,
        ) as forward_pass:
            if self._independent and self._may_move_examples:
                forward_pass.examples = count
            inside.draw_ahead(self._inside, forward_pass, count)
            call = _LayerCalls(forward_pass, self._dropout, prepared.shared, latents)
            outputs = self._finish(self._graph.suffix(values, call))

        def by_draw(output: Tensor) -> Tensor:
            sizes = ops.shape(output)[1:]
            return ops.reshape(output, (size, prepared.batch, *sizes))

        return keras.tree.map_structure(by_draw, outputs)

    def _options_of_draws(self, prepared: _Prepared, places: Tensor) -> dict[str, Any]:
        """Return the options of the pass that choose its draws: which sample, for which example."""
        sample = ops.take(prepared.numbers, places)
        if not self._independent:
            return {"groups": prepared.size, "sample": sample}
        # Sample number and example number of each row of the repeated batch.
        examples = ops.arange(prepared.batch, dtype="int32")
        sample, examples = ops.meshgrid(sample, examples, indexing="ij")
        return {
            "sample": ops.reshape(sample, (-1,)),
            "stream": ops.reshape(examples, (-1,)),
            "portable": self._portable,
        }

    def _finish(self, outputs: Any) -> Any:
        """Return the model's outputs by name, at the temperature of what scales it."""
        outputs = named_outputs(self._model, outputs)
        if self._scaled is None:
            return outputs
        return self._scaled.scale(outputs)

    def _is_noisy(self, layer: Any) -> bool:
        if self._dropout and isinstance(layer, DROPOUTS):
            return True
        return isinstance(layer, layers.Layer) and bool(stochastic_layers(layer))

    def _note_dropout(self, inputs: Any, forward_pass: noise.Pass) -> None:
        """Run the model, and note what dropout layers see as well."""

        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(layer, DROPOUTS):
                forward_pass.seen.append((layer, _input_of_call(args, kwargs)))
            return infer(layer, *args, **kwargs)

        values = self._graph.prefix(inputs)
        self._graph.suffix(values, call)

    def _warn_of_dropout_off(self) -> None:
        """Warn of dropout that no call of the graph can leave on."""
        reached = {id(layer) for layer in self._graph.layers}
        names = []
        for layer in keras_internals.nested_layers(self._model):
            drops_inside = getattr(layer, "dropout", 0) or getattr(layer, "recurrent_dropout", 0)
            is_hidden = isinstance(layer, DROPOUTS) and id(layer) not in reached
            if drops_inside or is_hidden or isinstance(layer, layers.AlphaDropout):
                names.append(layer.name)
        if names:
            warnings.warn(
                f"The dropout inside {', '.join(names)} stays off: only dropout layers of the "
                "graph, not AlphaDropout, can stay on. In place of the `dropout` of a recurrent "
                "layer, train the model with a keras.layers.Dropout before and after it.",
                stacklevel=5,
            )


def _ids_of_averaged(model: keras.Model) -> set[int]:
    """Return the ids of the layers inside a `MonteCarlo` inside, which draws their noise itself."""
    ids = set()
    for layer in keras_internals.nested_layers(model):
        if isinstance(layer, PredictionWrapper) and not isinstance(layer, ScaledModel):
            ids |= {id(part) for part in keras_internals.nested_layers(layer)}
    return ids


def _warn_of_no_noise(model: keras.Model, dropout: bool) -> None:
    missing = "stochastic layer and no dropout" if dropout else "stochastic layer"
    warnings.warn(
        f"Model {model.name!r} has no {missing}: all samples are alike, one is enough.",
        stacklevel=5,
    )


def _count_of_examples(inputs: Any) -> int | Tensor:
    return ops.shape(keras.tree.flatten(inputs)[0])[0]


def _input_of_call(args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return what a dropout layer is called on."""
    return args[0] if args else kwargs["inputs"]
