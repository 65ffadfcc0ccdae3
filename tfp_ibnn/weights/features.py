"""A network cut before some of its layers, without the activation of its output."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.backend import Tensor, compiled
from tfp_ibnn.conversion.graph import Graph, functional_graph, infer
from tfp_ibnn.data.examples import check_finite, labelled_batches
from tfp_ibnn.layers import StochasticLayer, stochastic_layers
from tfp_ibnn.layers.base import CONVOLUTIONS
from tfp_ibnn.likelihoods.infer import likelihood_for_weights
from tfp_ibnn.likelihoods.last_layer import is_transparent, output_call, own_activation
from tfp_ibnn.weights.vectors import precision_of


class LogitNetwork:
    """A built Functional or Sequential model that gives logits, (N, K), with its likelihood.

    Args:
        model: the model; it is not copied.
        is_chosen: whether a layer has weights that are uncertain; what stands before all such
            layers runs in `prefix`.
        head: what the output means, as for `MonteCarlo`.
        from_logits: whether it is logits, as for `MonteCarlo`.

    Attributes:
        output_positions: sizes of the axes of positions, None where unknown; () without positions.
    """

    def __init__(
        self,
        model: keras.Model,
        is_chosen: Callable[[Any], bool],
        head: str | None = None,
        from_logits: bool | None = None,
    ) -> None:
        self.model = model
        self.likelihood = likelihood_for_weights(model, head, from_logits)
        self.graph = Graph(model, is_chosen)
        self.prefix = self.graph.prefix
        shape = tuple(functional_graph(model).outputs[0].shape)
        self.check_shape(shape)
        self.output_positions = shape[1:-1]
        self.width = shape[-1]
        self.dtype = precision_of(model)
        self.stripped = stripped_layer(model, self.graph, self.likelihood.end)
        for layer in filter(is_chosen, self.graph.layers):
            _check_precision(layer)

    @property
    def has_positions(self) -> bool:
        """Whether the output has positions, (N, ..., K)."""
        return bool(self.output_positions)

    def check_shape(self, shape: tuple[int | None, ...]) -> None:
        """Raise unless an output has a shape that is taken."""
        check_rows(shape)

    def cache(self, x: Any, y: Any = None, batch_size: int = 256, verbose: Any = "auto") -> Any:
        """Run `prefix` for all examples.

        Args:
            x: inputs, or a dataset of batches (x, y).
            y: targets; None with a dataset.
            batch_size: examples at a time, 256 by default.
            verbose: 0 shows no progress.

        Returns:
            What `prefix` gives, arrays in full precision, and the targets, all checked.
        """
        prefix = compiled(self.prefix, self.model.weights)
        parts = []
        for inputs, labels in labelled_batches(x, y, batch_size, verbose):
            values = keras.tree.map_structure(self.wide, prefix(inputs))
            lengths = {len(value) for value in values.values()}
            if lengths != {len(labels)}:
                raise ValueError("`model` has a tensor whose first axis is not that of examples.")
            targets = self.likelihood.targets(labels)
            parts.append((values, targets))
        return joined(parts)

    def wide(self, value: Tensor) -> np.ndarray:
        """Return a cached tensor in full precision, checked."""
        if keras.backend.is_float_dtype(value.dtype):
            value = ops.cast(value, self.dtype)
        array = ops.convert_to_numpy(value)
        check_finite(array, "inputs of the layers whose weights are uncertain")
        return array

    def logits(self, values: dict[int, Tensor], runs: dict[Any, Any] | None = None) -> Tensor:
        """Return the logits (N, K).

        Args:
            values: what `prefix` gave.
            runs: functions `(is_stripped, *args, **kwargs)` that run some layers, by layer; the
                first argument says whether to leave out the layer's activation.
        """
        runs = runs or {}

        def run(layer: Any, *args: Any, **kwargs: Any) -> Any:
            is_stripped = layer is self.stripped
            if is_stripped and not _weights(layer):
                return args[0] if args else kwargs["inputs"]
            if layer in runs:
                return runs[layer](is_stripped, *args, **kwargs)
            output_of = without_activation if is_stripped else infer
            return output_of(layer, *args, **kwargs)

        return ops.cast(self.graph.suffix(values, run), self.dtype)


class LastLayer(LogitNetwork):
    """A network whose last layer with weights gives the logits; only dropout and the like follow.

    It is a Dense one. With `positions`, the output may have positions, (N, ..., K), such as pixels
    or time steps, and the layer may also be a Dense one in a `TimeDistributed`, or a convolution.

    Args:
        model: a built Functional or Sequential model; it is not copied.
        head: what the output means, as for `MonteCarlo`.
        from_logits: whether it is logits, as for `MonteCarlo`.
        positions: whether the output may have positions, False by default.

    Attributes:
        layer: the last layer with weights.
        kernel_layer: the one that has the kernel, which may be in a `TimeDistributed`.
    """

    def __init__(
        self,
        model: keras.Model,
        head: str | None = None,
        from_logits: bool | None = None,
        positions: bool = False,
    ) -> None:
        layer = last_weighted_layer(model)
        self.layer = layer
        self._may_have_positions = positions
        super().__init__(model, lambda x: x is layer, head, from_logits)
        self.kernel_layer = layer
        if self.has_positions:
            self.kernel_layer = at_each_step(layer)
        check_dense(layer, self.graph, self.stripped, (*self.output_positions, self.width))

    def check_shape(self, shape: tuple[int | None, ...]) -> None:
        if not self._may_have_positions or len(shape) < 3 or shape[-1] is None:
            check_rows(shape)

    def features(self, values: dict[int, Tensor]) -> Tensor:
        """Return the input of the layer.

        Args:
            values: what `prefix` gave. A mask may be among them, which a Dense layer does not use.
        """
        (features,) = (x for x in values.values() if not _is_mask(x))
        return features

    def positions(self, features: Tensor) -> tuple[Any, ...]:
        """Return the sizes of the axes of positions, for an input of the layer (N, ..., F)."""
        known = self.output_positions
        sizes = ops.shape(features)[1:-1]
        if None not in known:
            return known
        if len(known) == len(sizes):
            pairs = zip(known, sizes, strict=True)
            return tuple(size if k is None else k for k, size in pairs)
        rest = math.prod(k for k in known if k is not None)
        missing = math.prod(sizes) // rest
        return tuple(missing if k is None else k for k in known)


def at_each_step(layer: Any) -> Any:
    """Return the layer that a `TimeDistributed` runs at each step; others as they are."""
    return layer.layer if isinstance(layer, keras.layers.TimeDistributed) else layer


def logit_layer(model: keras.Model) -> keras.layers.Layer:
    """Return the layer whose output is the logits of a classifier, or raise.

    It is a Dense one; for an output with positions, it is one that `LastLayer` takes for them.
    """
    layer = last_weighted_layer(model)
    graph = Graph(model, lambda x: x is layer)
    activation = own_activation(at_each_step(output_call(model)[0]))
    end = activation if activation in ("softmax", "log_softmax") else "linear"
    shape = functional_graph(model).outputs[0].shape
    check_dense(layer, graph, stripped_layer(model, graph, end), shape[1:])
    return layer


def stripped_layer(model: keras.Model, graph: Graph, end: str) -> Any:
    """Return the layer or operation whose activation makes the output of logits.

    Args:
        model: a Functional or Sequential model.
        graph: its graph.
        end: the activation as which the output is read, "linear" for logits.

    Returns:
        The layer or operation; None if the output is the logits, and no linear layer gives them,
        which would give them in full precision.

    Raises:
        ValueError: if the model does not end in that activation over all outputs.
    """
    layer, node = output_call(model)
    is_alone = graph.noisy_layers.count(layer) == 1 and len(node.input_tensors) == 1
    shape = functional_graph(model).outputs[0].shape
    ending = layer
    if len(shape) > 2 and at_each_step(layer) is not layer:
        ending = at_each_step(layer)
        is_alone = graph.noisy_layers.count(layer) == 1  # a mask changes nothing at a step
    if end == "linear":
        return layer if is_alone and own_activation(ending) == "linear" else None
    name = getattr(layer, "name", model.name)
    if own_activation(ending) != end:
        raise ValueError(
            f"The output of model {model.name!r} is read as that of a {end}, but layer {name!r} "
            f"does not end in Keras's own {end}. End the model in one, or in logits, and say so "
            "with from_logits=True."
        )
    if not is_alone:
        raise ValueError(
            f"Layer {name!r} gives the output of model {model.name!r}, and has other calls or "
            f"inputs, such as a mask: end the model in a {end} of its own."
        )
    if end != "sigmoid" and node.outputs[0].shape[-1] != shape[-1]:
        raise ValueError(
            f"The {end} of layer {name!r} must be over all {shape[-1]} outputs of model "
            f"{model.name!r}; it is over the last axis of {tuple(node.outputs[0].shape)}."
        )
    return layer


def check_dense(layer: Any, graph: Graph, stripped: Any, shape: tuple[int | None, ...]) -> None:
    """Raise unless the output of a layer, the last one with weights, is the logits themselves.

    Args:
        layer: the layer.
        graph: the graph of its model.
        stripped: the layer or operation whose activation makes the output of logits, or None.
        shape: of the output for one example, (K,) or, with positions, (..., K).

    Raises:
        ValueError: with what is wrong with the layer.
    """
    problem = _problem_of_dense(layer, graph, stripped, shape)
    if problem is None:
        return
    if len(shape) > 1:
        raise ValueError(
            "The last layer with weights of `model` must be a Dense layer, in a TimeDistributed or "
            "not, or a convolution, whose output (N, ..., K) is the logits or the prediction "
            f"itself; got {(None, *shape)}, for which {layer.name!r}, a "
            f"{type(layer).__name__}, is {problem}. For such outputs take ibnn.TemperatureScaling, "
            "or ibnn.to_stochastic with ibnn.MonteCarlo."
        )
    raise ValueError(
        "The last layer with weights of `model` must be a Dense one whose output (N, K) is the "
        f"logits or the prediction itself; {layer.name!r}, a {type(layer).__name__}, is "
        f"{problem}."
    )


def _problem_of_dense(
    layer: Any, graph: Graph, stripped: Any, shape: tuple[int | None, ...]
) -> str | None:
    """Return why the output of a layer is not the logits; None if it is."""
    calls = graph.layers.count(layer)
    if calls != 1:
        return f"called {calls} times"
    kinds = (keras.layers.Dense,)
    inner = layer
    if len(shape) > 1 and at_each_step(layer) is not layer:
        inner = at_each_step(layer)
    elif len(shape) > 1:
        kinds = (keras.layers.Dense, *CONVOLUTIONS)
    if type(inner) not in kinds or inner.kernel.shape[-1] != shape[-1]:
        return "of another kind or size"
    if getattr(inner, "groups", 1) != 1 or _has_channels_first(inner):
        return "of several groups, or has its channels first"
    if inner.lora_enabled or inner.quantization_mode is not None:
        return "quantized, or has LoRA enabled"
    if layer is not stripped and inner.activation is not keras.activations.linear:
        return f"followed by {getattr(inner.activation, '__name__', inner.activation)}"
    for other in graph.noisy_layers:
        if other not in (layer, stripped) and not _keeps_order(other):
            return f"followed by {other.name}"
    return None


def _has_channels_first(layer: Any) -> bool:
    return getattr(layer, "data_format", None) == "channels_first"


def _keeps_order(layer: Any) -> bool:
    """Whether a layer leaves numbers as they are, and in their order."""
    if isinstance(layer, keras.layers.Permute):
        return False
    if _has_channels_first(layer):  # of Flatten
        return False
    return is_transparent(layer)


def _check_precision(layer: Any) -> None:
    """Raise if the weights of a layer are of half precision, coarser than what is uncertain."""
    halves = [w.dtype for w in _weights(layer) if w.dtype in ("float16", "bfloat16")]
    if halves:
        raise ValueError(
            f"Layer {layer.name!r} has {halves[0]} weights, too coarse for a posterior over them: "
            f"build the model after keras.config.set_dtype_policy('mixed_{halves[0]}'), which "
            "keeps weights in float32, and copy them with `set_weights`."
        )


def last_weighted_layer(model: Any) -> keras.layers.Layer:
    """Return the layer with weights that stands last in a model's graph, or raise."""
    check_network(model)
    weighted = [x for x in Graph(model, lambda _: True).layers if _weights(x)]
    if not weighted:
        raise ValueError(f"Model {model.name!r} has no weights.")
    return weighted[-1]


def check_network(model: Any, stochastic: bool = False) -> None:
    """Raise unless a model is built, and has a graph with one output.

    Args:
        model: what should be such a model.
        stochastic: whether it may have stochastic layers, False by default.
    """
    if not isinstance(model, keras.Model):
        raise ValueError(f"`model` must be a Keras model; got {model!r}.")
    graph = functional_graph(model)
    if graph is None:
        if not model.built:
            raise ValueError(
                "`model` must be built, and Functional or Sequential; it is not built."
            )
        raise ValueError(
            f"`model` must be a Functional or Sequential one; {model.name!r} has a `call` of its "
            "own. ibnn.TemperatureScaling, ibnn.calibrate, ibnn.to_stochastic and "
            "ibnn.MonteCarlo take it."
        )
    if len(graph.outputs) != 1:
        raise ValueError(f"`model` must have one output; got {len(graph.outputs)}.")
    if not stochastic and stochastic_layers(model):
        raise ValueError("`model` has stochastic layers: give ibnn.to_deterministic(model).")


def check_rows(shape: tuple[int | None, ...]) -> None:
    """Raise unless an output is one vector for each example."""
    if len(shape) > 2:
        raise ValueError(
            f"`model` must have one output of shape (N, K); got {shape}. For outputs at each "
            "position, such as pixels, take ibnn.TemperatureScaling, ibnn.Laplace of the last "
            "layer, or ibnn.to_stochastic with ibnn.MonteCarlo."
        )
    if len(shape) != 2 or shape[-1] is None:
        raise ValueError(f"`model` must have one output of shape (N, K); got {shape}.")


def joined(parts: Sequence[Any]) -> Any:
    """Return nested structures of arrays as one, joined along the first axis."""
    return keras.tree.map_structure(lambda *arrays: np.concatenate(arrays), *parts)


def without_activation(layer: keras.layers.Layer, x: Tensor) -> Tensor:
    """Return what a layer gives to its activation, in the precision of its weights.

    Args:
        layer: a layer with an argument `activation`, or a stochastic one around it.
        x: its input.
    """
    if isinstance(layer, StochasticLayer):  # the pass knows its z by the layer itself, not a copy
        inner = layer.layer
        activation = inner.activation
        try:
            inner.activation = keras.activations.linear
            return layer(x, training=False)
        finally:
            inner.activation = activation
    x = ops.cast(x, layer.variable_dtype)
    return keras_internals.call_with(layer, x, activation=keras.activations.linear)


def _is_mask(x: Tensor) -> bool:
    return keras.backend.standardize_dtype(x.dtype) == "bool"


def _weights(layer: Any) -> list[keras.Variable]:
    return getattr(layer, "weights", [])  # an operation has none
