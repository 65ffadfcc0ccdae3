"""Copies of models: new layers, with the same weights."""

import inspect
from collections.abc import Callable
from typing import Any

import keras

from tfp_ibnn._core import keras_internals, keras_layers
from tfp_ibnn.conversion import transfer
from tfp_ibnn.conversion.graph import functional_graph, is_opened
from tfp_ibnn.layers import StochasticLayer, inside, stochastic_layers
from tfp_ibnn.layers.base import CONVERTIBLE

Convert = Callable[[keras.layers.Layer], keras.layers.Layer]
"""What makes a new layer of an old one."""


def check_built(model: Any) -> None:
    """Raise if something is not a built Keras model."""
    if not isinstance(model, keras.Model):
        raise ValueError(f"`model` must be a Keras model; got {model!r}.")
    if not model.built:
        raise ValueError(
            f"Model {model.name!r} is not built: begin it with a keras.Input, or call "
            "`model.build(input_shape)`, or use it once."
        )


def plain_copy_of(model: keras.Model) -> keras.Model:
    """Return a copy of a model without stochastic layers; see `copy_of`.

    Args:
        model: a built model.

    Raises:
        ValueError: If a layer cannot be made from its config.
    """
    copy = _rebuilt(model, _copy_layer)
    transfer.carry_over(model, copy)
    return copy


def copy_of(model: keras.Model) -> keras.Model:
    """Return a copy of a model with new layers and the same weights, not compiled.

    Args:
        model: a built model; its stochastic layers are so in the copy too.

    Returns:
        A `keras.Model` of a Functional or Sequential one, and else a model of the same class.

    Raises:
        ValueError: If it is not a built model, or a layer of it cannot be made from its config.
    """
    check_built(model)
    copy = _rebuilt(model, _copy_layer)
    inside.restore(copy, inside.configs(model))
    transfer.carry_over(model, copy)
    return copy


def folded_copy_of(model: keras.Model) -> keras.Model:
    """Return a copy as `copy_of` does, with plain layers in place of the stochastic ones.

    Those that a graph calls are folded on the way; those inside of other layers, which these
    layers' configs make again, are replaced afterwards.

    Args:
        model: a built model with stochastic layers.

    Returns:
        A built model that computes what the original does with its noise off.

    Raises:
        ValueError: If the constructor of a layer makes a stochastic one inside, so that the copy
            could not be loaded from a file.
    """
    copy = _rebuilt(model, _fold_layer)
    swaps = transfer.carry_over_folded(model, copy, is_rebuilt=is_opened(model))
    places = inside.places(copy)
    inside.replace(copy, swaps)
    for steps in swaps:
        # The constructor of the layer around it may make what was replaced just now.
        if stochastic_layers(_copy_layer(transfer.owner_of(places[steps]))):
            raise transfer.cannot_fold(places[steps])
    return copy


def _copy_layer(layer: keras.layers.Layer) -> keras.layers.Layer:
    """Return a new layer, or raise.

    It is made by the config; or a model by its constructor without arguments, or another layer as a
    copy of all its attributes. That is not for layers that can be converted, whose config the
    stochastic layer around them saves.
    """
    try:
        return type(layer).from_config(layer.get_config())
    except Exception as error:
        try:
            if isinstance(layer, keras.Model):
                return type(layer)()
            if not isinstance(layer, CONVERTIBLE) and layer.built:
                return keras_layers.deep_copy(layer)
        except Exception as other:
            reason = f"{error} Without the config: {other}"
            raise transfer.cannot_copy(layer, reason) from error
        raise transfer.cannot_copy(layer, error) from error


def _fold_layer(layer: keras.layers.Layer) -> keras.layers.Layer:
    """Return a new layer; of a stochastic one, a plain layer at the means."""
    if isinstance(layer, StochasticLayer):
        return layer.fold()
    return _copy_layer(layer)


def _rebuilt(model: keras.Model, convert: Convert) -> keras.Model:
    """Return a built model of new layers, whose weights are not the original's yet."""
    if is_opened(model):
        return _Rebuilder(convert).model(model)
    copy = _copy_layer(model)
    config = model.get_build_config()
    if config and not copy.built:
        copy.build_from_config(config)
        copy.built = True  # as where Keras loads a model: it builds only the layers inside
    return copy


class _Rebuilder:
    """Rebuilds Functional models, nested ones included, with one copy of each layer.

    What is shared, even among nested models, stays shared.
    """

    def __init__(self, convert: Convert) -> None:
        self._convert = convert
        self._copies: dict[int, Any] = {}

    def model(self, model: keras.Model) -> keras.Model:
        """Return a model of copies, with its calls in the same order."""
        graph = functional_graph(model)
        # An alias of the same layers, since Keras would compile the clone of a compiled model.
        alias = keras.Model(graph.input, graph.output)
        inputs = keras.tree.map_structure(_fresh_input, alias.input)
        rebuilt = keras.models.clone_model(
            alias, input_tensors=inputs, clone_function=self._copy, call_function=_call
        )
        return keras.Model(rebuilt.input, rebuilt.output, name=model.name)

    def _copy(self, layer: Any) -> Any:
        """Return the copy of a layer or operation, a new one the first time."""
        if id(layer) not in self._copies:
            self._copies[id(layer)] = self._fresh(layer)
        return self._copies[id(layer)]

    def _fresh(self, layer: Any) -> Any:
        if not isinstance(layer, keras.layers.Layer):  # an operation such as x + y
            return type(layer).from_config(layer.get_config())
        if is_opened(layer):
            return self.model(layer)
        return self._convert(layer)


def _fresh_input(tensor: Any) -> Any:
    """Return a symbolic input like another one, by the same name."""
    input_layer, _ = keras_internals.origin(tensor)
    return keras.Input(batch_shape=tensor.shape, dtype=tensor.dtype, name=input_layer.name)


def _call(layer: Any, *args: Any, mask: Any = None, **kwargs: Any) -> Any:
    """Call a layer of a new graph, with the mask of the old one if it can take one."""
    if mask is not None and "mask" in inspect.signature(layer.call).parameters:
        kwargs["mask"] = mask
    return layer(*args, **kwargs)
