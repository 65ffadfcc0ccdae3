"""Find the network behind a model that predicts, and what its output means."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
from keras import layers, losses, ops

from tfp_ibnn._core import checks, keras_internals
from tfp_ibnn._core.protocols import WeightPosterior
from tfp_ibnn._core.serialization import naming_unknown_classes
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.layers import StochasticLayer, stochastic_layers
from tfp_ibnn.layers.heads import DistributionNLL, GaussianHead, GaussianNLL
from tfp_ibnn.prediction import predictive
from tfp_ibnn.prediction.predictive import Predictive
from tfp_ibnn.prediction.several import Several, by_name

_REMEDY = (
    'Write ibnn.MonteCarlo(model, head="softmax", from_logits=True) for logits of classes, '
    "from_logits=False for their probabilities; other heads are "
    '"sigmoid" for yes or no, "point" for numbers, "gaussian" for numbers and their standard '
    "deviations."
)

_CATEGORICAL = (losses.CategoricalCrossentropy, losses.CategoricalFocalCrossentropy)
_ABSOLUTE = (losses.MeanAbsoluteError, losses.MeanAbsolutePercentageError)
_SQUARED = (losses.MeanSquaredError, losses.MeanSquaredLogarithmicError)
_LOSSES = {
    "softmax": (*_CATEGORICAL, losses.SparseCategoricalCrossentropy),
    "sigmoid": (losses.BinaryCrossentropy, losses.BinaryFocalCrossentropy),
    "gaussian": (GaussianNLL,),
    "point": (*_ABSOLUTE, *_SQUARED, losses.Huber, losses.LogCosh),
}

_TRANSPARENT = (layers.Dropout, layers.Flatten, layers.Identity, layers.Permute, layers.Reshape)

_ENDING_IN_ACTIVATION = (
    layers.Activation,
    layers.Dense,
    layers.EinsumDense,
    *(layers.Conv1D, layers.Conv2D, layers.Conv3D),
    *(layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose),
    *(layers.DepthwiseConv1D, layers.DepthwiseConv2D),
    *(layers.SeparableConv1D, layers.SeparableConv2D),
)
_KERAS_ACTIVATIONS = {
    "linear": (keras.activations.linear,),
    "softmax": (keras.activations.softmax, ops.softmax),
    "log_softmax": (keras.activations.log_softmax, ops.log_softmax),
    "sigmoid": (keras.activations.sigmoid, ops.sigmoid),
}


class PredictionWrapper:
    """A Keras model that takes the inputs of another one, `inner`: its argument `model`."""

    inner: keras.Model

    def get_config(self) -> dict[str, Any]:
        """Return the model inside; a subclass adds its own arguments."""
        return {**super().get_config(), "model": keras.saving.serialize_keras_object(self.inner)}

    @classmethod
    @naming_unknown_classes()
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> keras.Model:
        """Return a model from what `get_config` gave."""
        config = keras_internals.readable(config)
        load = keras.saving.deserialize_keras_object
        parts = {name: config[name] for name in ("model", "head") if name in config}
        made = {name: load(part, custom_objects=custom_objects) for name, part in parts.items()}
        return cls(**{**config, **made})


class ScaledModel(PredictionWrapper):
    """A classifier whose outputs are those of `inner`, each passed through `scale`."""

    returns_logits: bool | None  # None if it is not known before the model has run
    scale: Callable[[Any], Any]


def unscaled(model: keras.Model) -> keras.Model:
    """Return the classifier that a scaled model scales, if it has a graph, or else the model."""
    has_graph = isinstance(model, ScaledModel) and functional_graph(model.inner) is not None
    return model.inner if has_graph else model


def innermost(model: keras.Model) -> keras.Model:
    """Return the network inside of all wrappers; it has their inputs."""
    while isinstance(model, PredictionWrapper):
        model = model.inner
    return model.network if isinstance(model, WeightPosterior) else model


def check_model(model: Any, dropout: bool) -> keras.Model:
    """Return the network that is averaged, or raise for a model that cannot be."""
    network = model.network if isinstance(model, WeightPosterior) else model
    if not isinstance(network, keras.Model):
        raise ValueError(f"`model` must be a Keras model; got {model!r}.")
    if not network.built or not all(layer.built for layer in stochastic_layers(network)):
        raise ValueError(f"Model {network.name!r} is not built: call it on data, or build it.")
    if any(getattr(x, "stateful", False) for x in keras_internals.nested_layers(network)):
        raise ValueError(f"Model {network.name!r} has a layer with `stateful=True`: leave it out.")
    if dropout and functional_graph(unscaled(network)) is None:
        kind = f"{network.name!r}, a {type(network).__name__}"
        raise ValueError(f"`dropout` is for Functional and Sequential models, not for {kind}.")
    return network


def output_names(model: keras.Model) -> list[str]:
    """Return the names of a model's outputs, in order, if there are several and they are known."""
    graph = functional_graph(unscaled(model))
    if graph is None or len(graph.outputs) == 1:
        return []
    if not isinstance(graph.output, dict) or len(graph.output) != len(graph.outputs):
        names = graph.output_names
        return names if len(set(names)) == len(names) else [f"{i}" for i in range(len(names))]
    if any(isinstance(part, (dict, list, tuple)) for part in graph.output.values()):
        raise ValueError(f"The outputs of {model.name!r} are nested: give them as one flat dict.")
    return [name for (name,), _ in keras.tree.flatten_with_path(graph.output)]


def named_outputs(model: keras.Model, outputs: Any) -> Any:
    """Return a network's output in full precision; of several, a dict by their names."""
    if ops.is_tensor(outputs):
        dtype = keras.backend.standardize_dtype(outputs.dtype)
        return ops.cast(outputs, checks.full_precision(dtype))
    if not isinstance(outputs, Mapping):
        names = output_names(model) or map(str, range(len(outputs)))
        outputs = dict(zip(names, outputs, strict=True))
    return {name: named_outputs(model, outputs[name]) for name in outputs}


def predictive_of(
    model: keras.Model, head: Any = None, from_logits: Any = None, remedy: str = _REMEDY
) -> Predictive:
    """Return what a model predicts, by what is given, its last layer or its loss, or raise."""
    names, graph = output_names(model), functional_graph(unscaled(model))
    if graph is None and isinstance(head, Mapping):
        names = sorted(head, key=int) if all(map(str.isdecimal, head)) else list(head)
    if not names:
        return _one_predictive(model, head, from_logits, remedy)
    heads = by_name("head", head, names, for_all=True)
    logits = by_name("from_logits", from_logits, names, for_all=True)
    parts = dict.fromkeys(names, model)
    if graph is not None:
        loss = model.loss if model.compiled else None
        loss = {**dict.fromkeys(names), **loss} if isinstance(loss, Mapping) else loss
        loss = by_name("loss", loss, names, for_all=True)
        for name, output in zip(names, graph.outputs, strict=True):
            parts[name] = keras.Model(graph.inputs, output, name=name)
            parts[name].compile(loss=loss[name])
    return Several({n: _one_predictive(parts[n], heads[n], logits[n], remedy) for n in names})


def check_one_output(kind: Predictive, what: str) -> None:
    """Raise if a model has several outputs, or a likelihood of TFP's."""
    if isinstance(kind, (Several, predictive.Distribution)):
        plain = "one output of classes, answers or numbers: keras.Model(model.inputs, output)"
        raise ValueError(f"{what} is for models with {plain}.")


def _one_predictive(
    model: keras.Model, head: Any, from_logits: bool | None, remedy: str
) -> Predictive:
    if isinstance(head, Mapping):
        raise ValueError(f"`head` is a dict, but model {model.name!r} has one output.")
    if head is not None and not callable(head):
        checks.one_of("head", head, tuple(_LOSSES))
    given, activation = head, activation_of(model)
    contradiction = f"`from_logits` is {from_logits}, but model {model.name!r}"
    known = model.returns_logits if isinstance(model, ScaledModel) else None
    if activation in ("softmax", "sigmoid"):
        known = False
    if from_logits not in (None, known) and known is not None:
        kind = "logits" if known else f"probabilities, those of a {activation or 'scaled model'}"
        raise ValueError(f"{contradiction} returns {kind}: leave it out.")
    from_logits = from_logits if known is None else known
    graph = functional_graph(unscaled(model))
    width = None if graph is None else graph.outputs[0].shape[-1]
    loss = _one_loss(model)
    loss_head, loss_logits = _head_of_loss(loss)
    if activation == "log_softmax":
        # The softmax of its output is the same as that of its input.
        loss_head, loss_logits = "softmax", True
    if head is None:
        head = activation if activation in _LOSSES else loss_head
    if head is None and from_logits is not None:
        head = "sigmoid" if width == 1 else "softmax"
    if head is None:
        kind = repr(loss) if isinstance(loss, str) else type(loss).__name__
        name = getattr(loss, "__name__", kind)
        cause = "it is not compiled" if loss is None else f"its loss is {name}"
        raise ValueError(
            f"It is unknown what the output of model {model.name!r} means: its last layer "
            f"({activation or 'unknown'}) has no softmax or sigmoid, and {cause}. {remedy}"
        )
    if callable(head):
        return predictive.Distribution(head)
    if head in ("gaussian", "point"):
        if from_logits is not None and given is None:
            raise ValueError(f"{contradiction} is for regression: take head='softmax' or 'sigmoid'")
        if head == "gaussian" and width is not None and width % 2:
            raise ValueError(f"A 'gaussian' `head` has an even size; {model.name!r} has {width}.")
        return predictive.Gaussian() if head == "gaussian" else predictive.Point()
    if from_logits is None:
        from_logits = loss_logits
        if not from_logits and activation == "linear":
            remedy = "Say from_logits=True, or compile the model with such a loss."
            raise ValueError(f"The output of {model.name!r} is linear: is it logits? {remedy}")
    kind = predictive.Categorical if head == "softmax" else predictive.Labels
    return kind(from_logits)


def activation_of(model: keras.Model) -> str | None:
    """Return the activation of a model's one output, not a linear cast's; "gaussian"; or None."""
    layer = output_layer(model)
    while isinstance(layer, (StochasticLayer, layers.TimeDistributed)):
        layer = layer.layer
    if isinstance(layer, GaussianHead):
        return "gaussian"
    kind = type(layer).__name__  # the operations of keras.ops have no public classes
    if kind in ("Softmax", "Sigmoid"):
        return kind.lower() + " over another axis" * (getattr(layer, "axis", -1) != -1)
    return getattr(getattr(layer, "activation", None), "__name__", None)


def own_activation(layer: Any) -> str | None:
    """Return the activation that a layer or operation ends in, if it is known exactly.

    That is Keras's own "linear", "softmax", "log_softmax" or "sigmoid", over the last axis, or
    "gaussian"; a function of the user's with such a name is not.
    """
    if isinstance(layer, GaussianHead):
        return "gaussian"
    if type(layer) is layers.Softmax or _is_keras_operation(layer):
        kinds = {"Softmax": "softmax", "LogSoftmax": "log_softmax", "Sigmoid": "sigmoid"}
        is_last_axis = getattr(layer, "axis", -1) == -1
        return kinds.get(type(layer).__name__) if is_last_axis else None
    layer = layer.layer if isinstance(layer, StochasticLayer) else layer
    if not any(type(layer).call is kind.call for kind in _ENDING_IN_ACTIVATION):
        return None
    for name, functions in _KERAS_ACTIVATIONS.items():
        if any(layer.activation is function for function in functions):
            return name
    return None


def _is_keras_operation(layer: Any) -> bool:
    """Whether it is an operation of `keras.ops`, which have no public classes."""
    is_operation = isinstance(layer, keras.Operation) and not isinstance(layer, keras.Layer)
    return is_operation and type(layer).__module__.startswith("keras.")


def output_layer(model: keras.Model) -> Any:
    """Return the layer or operation that gives a model's one output its meaning, or None."""
    return output_call(model)[0]


def output_call(model: keras.Model) -> tuple[Any, Any]:
    """Return `output_layer` and the node of its call, Nones if the model has no graph."""
    graph = functional_graph(model)
    if graph is None or len(graph.outputs) != 1:
        return None, None
    layer, node = keras_internals.origin(graph.outputs[0])
    while is_transparent(layer):
        layer, node = keras_internals.origin(node.input_tensors[0])
    return output_call(layer) if isinstance(layer, keras.Model) else (layer, node)


def is_transparent(layer: Any) -> bool:
    """Whether a layer leaves the meaning of its input as it is."""
    is_cast = isinstance(layer, layers.Activation) and layer.activation is keras.activations.linear
    return is_cast or isinstance(layer, _TRANSPARENT)


def is_loss(loss: Any, kind: type) -> bool:
    """Whether a loss is one of a Keras class, or the function of that class."""
    return isinstance(loss, kind) or (loss is not None and getattr(kind(), "fn", None) is loss)


def _one_loss(model: keras.Model) -> Any:
    """Return the loss that a model is compiled with; of one output it may be in a list or dict."""
    loss = keras.tree.flatten(getattr(model, "loss", None) if model.compiled else None)
    return loss[0] if len(loss) == 1 else loss


def logits_by_loss(model: keras.Model) -> bool | None:
    """Return whether a classifier returns logits by its loss; None if that does not say so."""
    head, from_logits = _head_of_loss(_one_loss(model))
    return from_logits if head in ("softmax", "sigmoid") else None


def predicts_numbers(model: keras.Model) -> bool:
    """Whether a model is a regression, by its last layer or its loss."""
    activation = activation_of(model)
    if activation in ("softmax", "log_softmax", "sigmoid", "gaussian"):
        return activation == "gaussian"
    return _head_of_loss(_one_loss(model))[0] in ("gaussian", "point")


def _head_of_loss(loss: Any) -> tuple[Any, bool | None]:
    """Return the head that goes with a loss, and its `from_logits`."""
    loss = losses.get(loss) if isinstance(loss, str) else loss
    if isinstance(loss, DistributionNLL):
        return loss.make, None
    for head, kinds in _LOSSES.items():
        if any(is_loss(loss, kind) for kind in kinds):
            return head, getattr(loss, "from_logits", False)
    return None, None
