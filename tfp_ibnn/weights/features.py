"""A network cut before some of its layers, without the activation of its output."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.backend import Tensor, compiled
from tfp_ibnn.conversion.graph import Graph, functional_graph, infer
from tfp_ibnn.data.examples import check_finite, labelled_batches
from tfp_ibnn.layers import StochasticLayer, stochastic_layers
from tfp_ibnn.likelihoods.infer import likelihood_for_weights
from tfp_ibnn.likelihoods.last_layer import is_transparent, output_call, own_activation
from tfp_ibnn.weights.flat import precision_of


class LogitNetwork:
    """A built Functional or Sequential model that gives logits, (N, K), with its likelihood.

    What stands before the layers that `is_chosen` picks runs in `prefix`; `head` and `from_logits`
    are those of `MonteCarlo`.
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
        check_rows(shape)
        self.width = shape[-1]
        self.dtype = precision_of(model)
        self.stripped = stripped_layer(model, self.graph, self.likelihood.end)
        for layer in filter(is_chosen, self.graph.layers):
            _check_precision(layer)

    def cache(self, x: Any, y: Any = None, batch_size: int = 256, verbose: Any = "auto") -> Any:
        """Return what `prefix` gives for all examples, and their targets, all checked."""
        run, found = compiled(self.prefix, self.model.weights), []
        for inputs, labels in labelled_batches(x, y, batch_size, verbose):
            values = keras.tree.map_structure(self.wide, run(inputs))
            if any(len(value) != len(labels) for value in values.values()):
                raise ValueError("`model` has a tensor whose first axis is not that of examples.")
            found.append((values, self.likelihood.targets(labels)))
        return keras.tree.map_structure(lambda *parts: np.concatenate(parts), *found)

    def wide(self, value: Tensor) -> np.ndarray:
        """Return a cached tensor in full precision, checked."""
        is_float = keras.backend.is_float_dtype(value.dtype)
        value = ops.convert_to_numpy(ops.cast(value, self.dtype) if is_float else value)
        check_finite(value, "inputs of the layers whose weights are uncertain")
        return value

    def logits(self, values: dict[int, Tensor], others: dict[Any, Any] | None = None) -> Tensor:
        """Return the logits from what `prefix` gave.

        `others` run some layers: functions `(without_activation, *args, **kwargs)` by layer.
        """

        def run(layer: Any, *args: Any, **kwargs: Any) -> Any:
            is_stripped = layer is self.stripped
            if is_stripped and not _weights(layer):
                return args[0] if args else kwargs["inputs"]
            if layer in (others or {}):
                return others[layer](is_stripped, *args, **kwargs)
            return (without_activation if is_stripped else infer)(layer, *args, **kwargs)

        return ops.cast(self.graph.suffix(values, run), self.dtype)


class LastLayer(LogitNetwork):
    """A network whose last layer, but for dropout and the like, is a Dense one, `layer`."""

    def __init__(
        self, model: keras.Model, head: str | None = None, from_logits: bool | None = None
    ) -> None:
        self.layer = last_weighted_layer(model)
        super().__init__(model, lambda x: x is self.layer, head, from_logits)
        check_dense(self.layer, self.graph, self.stripped, self.width)


def logit_layer(model: keras.Model) -> keras.layers.Dense:
    """Return the Dense layer whose output is the logits of a classifier, or raise."""
    layer = last_weighted_layer(model)
    graph = Graph(model, lambda x: x is layer)
    activation = own_activation(output_call(model)[0])
    end = activation if activation in ("softmax", "log_softmax") else "linear"
    width = functional_graph(model).outputs[0].shape[-1]
    check_dense(layer, graph, stripped_layer(model, graph, end), width)
    return layer


def stripped_layer(model: keras.Model, graph: Graph, end: str) -> Any:
    """Return the layer or operation whose activation makes the output of logits, or raise.

    None if the output is the logits, and no linear layer gives them, which would give them in full
    precision.
    """
    layer, node = output_call(model)
    is_alone = graph.noisy_layers.count(layer) == 1 and len(node.input_tensors) == 1
    if end == "linear":
        return layer if is_alone and own_activation(layer) == "linear" else None
    name = getattr(layer, "name", model.name)
    if own_activation(layer) != end:
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
    width = functional_graph(model).outputs[0].shape[-1]
    if end != "sigmoid" and node.outputs[0].shape[-1] != width:
        raise ValueError(
            f"The {end} of layer {name!r} must be over all {width} outputs of model "
            f"{model.name!r}; it is over the last axis of {tuple(node.outputs[0].shape)}."
        )
    return layer


def check_dense(layer: Any, graph: Graph, stripped: Any, width: int) -> None:
    """Raise unless the output of a layer, the last one with weights, is the logits themselves."""
    kind = type(layer).__name__
    behind = [x for x in graph.noisy_layers if x not in (layer, stripped)]
    changing = [x.name for x in behind if not _keeps_order(x)]
    if graph.layers.count(layer) != 1:
        problem = f"called {graph.layers.count(layer)} times"
    elif type(layer) is not keras.layers.Dense or layer.units != width:
        problem = "of another kind or size"
    elif layer.lora_enabled or layer.quantization_mode is not None:
        problem = "quantized, or has LoRA enabled"
    elif layer is not stripped and layer.activation is not keras.activations.linear:
        problem = f"followed by {getattr(layer.activation, '__name__', layer.activation)}"
    elif changing:
        problem = f"followed by {changing[0]}"
    else:
        return
    raise ValueError(
        "The last layer with weights of `model` must be a Dense one whose output (N, K) is the "
        f"logits or the prediction itself; {layer.name!r}, a {kind}, is {problem}."
    )


def _keeps_order(layer: Any) -> bool:
    """Whether a layer leaves numbers as they are, and in their order."""
    is_permuted = isinstance(layer, keras.layers.Permute)
    is_permuted |= getattr(layer, "data_format", None) == "channels_first"  # of Flatten
    return is_transparent(layer) and not is_permuted


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
    """Raise unless a model is built, plain or not, and has a graph with one output."""
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
            "own. ibnn.TemperatureScaling, ibnn.to_stochastic and ibnn.MonteCarlo take it."
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
            "position, such as pixels, take ibnn.TemperatureScaling, or ibnn.to_stochastic with "
            "ibnn.MonteCarlo."
        )
    if len(shape) != 2 or shape[-1] is None:
        raise ValueError(f"`model` must have one output of shape (N, K); got {shape}.")


def without_activation(layer: keras.layers.Layer, x: Tensor) -> Tensor:
    """Return what a layer gives to its activation, in the precision of its weights."""
    if isinstance(layer, StochasticLayer):  # the pass knows its z by the layer itself, not a copy
        inner, activation = layer.layer, layer.layer.activation
        try:
            inner.activation = keras.activations.linear
            return layer(x, training=False)
        finally:
            inner.activation = activation
    x = ops.cast(x, layer.variable_dtype)
    return keras_internals.call_with(layer, x, activation=keras.activations.linear)


def _weights(layer: Any) -> list[keras.Variable]:
    return getattr(layer, "weights", [])  # an operation has none
