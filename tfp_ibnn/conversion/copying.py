"""Copies of models: new layers, with the same weights."""

import contextlib
import inspect
from collections.abc import Collection, Mapping
from typing import Any

import keras

from tfp_ibnn._core import keras_internals, keras_layers
from tfp_ibnn.conversion import transfer
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.conversion.transfer import Copied
from tfp_ibnn.layers import StochasticLayer, inside, stochastic_layers
from tfp_ibnn.layers.base import CONVERTIBLE
from tfp_ibnn.layers.model import StochasticModel


def check_built(model: Any) -> None:
    """Raise if something is not a built Keras model."""
    if not isinstance(model, keras.Model):
        raise ValueError(f"`model` must be a Keras model; got {model!r}.")
    if not model.built:
        raise ValueError(
            f"Model {model.name!r} is not built: begin it with a keras.Input, or call "
            "`model.build(input_shape)`, or use it once."
        )


def rebuild(model: keras.Model, fold: bool = False) -> Copied:
    """Return a built copy of a model, of new layers that do not have its weights yet.

    The copy of a graph is made layer by layer, and is a graph of plain `keras.Model`. A model with
    a `call` of its own is made again by its config.

    Args:
        model: a built model.
        fold: whether stochastic layers that a graph calls become plain ones at their means.

    Returns:
        Both models, and the layers inside of them.

    Raises:
        ValueError: If a layer cannot be made from its config.
    """
    graph = _opened(model)
    if graph is not None:
        copy = _Rebuilder(fold).model(graph, model.name)
    else:
        copy = _copy_layer(model)
        config = model.get_build_config()
        if config and not copy.built:
            copy.build_from_config(config)
            copy.built = True  # as where Keras loads a model: it builds only the layers inside
    is_rebuilt = graph is not None
    return Copied(model, copy, is_rebuilt, old=inside.places(model), new=inside.places(copy))


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
    return exact_copy(model).copy


def exact_copy(model: keras.Model) -> Copied:
    """Return a model and what `copy_of` gives for it, with the layers inside of both.

    Args:
        model: a built model.
    """
    copied = rebuild(model)
    inside.restore(copied.copy, inside.configs(model))
    restored = copied._replace(new=inside.places(copied.copy))
    transfer.carry_over(restored)
    return restored


def copy_with(
    model: keras.Model, layers: Mapping[keras.layers.Layer, keras.layers.Layer]
) -> keras.Model:
    """Return a copy of a graph in which some layers are others, not compiled.

    Args:
        model: a Functional or Sequential model.
        layers: unbuilt layers, by those of the graph in whose place they are. The copy builds them,
            for what comes before; their weights are left to the caller.

    Returns:
        A `keras.Model` with the weights of all other layers.
    """
    rebuilder = _Rebuilder(fold=False)
    for old, new in layers.items():
        rebuilder.use(old, new)
    copy = rebuilder.model(functional_graph(model), model.name)
    old_places = _places_without(model, layers.keys())
    new_places = _places_without(copy, layers.values())
    transfer.carry_over(Copied(model, copy, is_rebuilt=True, old=old_places, new=new_places))
    return copy


def _places_without(
    model: keras.Model, layers: Collection[keras.layers.Layer]
) -> dict[inside.Steps, inside.Place]:
    """Return the layers inside of a model, less some."""
    ids = {id(layer) for layer in layers}
    places = inside.places(model).items()
    return {steps: place for steps, place in places if id(place.layer) not in ids}


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
    copied = rebuild(model, fold=True)
    swaps = transfer.carry_over_folded(copied)
    places = copied.new
    inside.replace(copied.copy, places, swaps)
    for steps in swaps:
        # The constructor of the layer around it may make what was replaced just now.
        if stochastic_layers(_copy_layer(transfer.owner_of(places[steps]))):
            raise transfer.cannot_fold(places[steps])
    return copied.copy


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


def _opened(model: Any) -> keras.Model | None:
    """Return the graph of a model to copy layer by layer; None if its own config makes the copy."""
    graph = functional_graph(model)
    if graph is None or keras_internals.is_plain_graph(model) or isinstance(model, StochasticModel):
        return graph
    # A class of its own may know how to make layers that do not know it themselves.
    has_all = all(_has_config(layer) for layer in model.layers)
    return graph if has_all or not _has_config(model) else None


def _has_config(layer: keras.layers.Layer) -> bool:
    """Whether a layer can be made again from its config."""
    with contextlib.suppress(Exception):  # whatever is wrong with it
        return type(layer).from_config(layer.get_config()) is not None
    return False


class _Rebuilder:
    """Rebuilds Functional models, nested ones included, with one copy of each layer.

    What is shared, even among nested models, stays shared.
    """

    def __init__(self, fold: bool) -> None:
        self._fold = fold
        self._copies: dict[int, Any] = {}

    def use(self, layer: Any, copy: Any) -> None:
        """Let another layer be the copy of one.

        Args:
            layer: of a graph.
            copy: not built.
        """
        self._copies[id(layer)] = copy

    def model(self, graph: keras.Model, name: str) -> keras.Model:
        """Return a model of copies, with its calls in the same order.

        Args:
            graph: the Functional model to copy.
            name: of the copy.
        """
        # An alias of the same layers, since Keras would compile the clone of a compiled model.
        alias = keras.Model(graph.input, graph.output)
        inputs = keras.tree.map_structure(_fresh_input, alias.input)
        rebuilt = keras.models.clone_model(
            alias, input_tensors=inputs, clone_function=self._copy, call_function=_call
        )
        return keras.Model(rebuilt.input, rebuilt.output, name=name)

    def _copy(self, layer: Any) -> Any:
        """Return the copy of a layer or operation, a new one the first time."""
        if id(layer) in self._copies:
            return self._copies[id(layer)]
        graph = _opened(layer)
        if graph is not None:
            copy = self.model(graph, layer.name)
        elif not isinstance(layer, keras.layers.Layer):  # an operation such as x + y
            copy = type(layer).from_config(layer.get_config())
        elif self._fold and isinstance(layer, StochasticLayer):
            copy = layer.fold()
        else:
            copy = _copy_layer(layer)
        self._copies[id(layer)] = copy
        return copy


def _fresh_input(tensor: Any) -> Any:
    """Return a symbolic input like another one, by the same name."""
    input_layer, _ = keras_internals.origin(tensor)
    return keras.Input(batch_shape=tensor.shape, dtype=tensor.dtype, name=input_layer.name)


def _call(layer: Any, *args: Any, mask: Any = None, **kwargs: Any) -> Any:
    """Call a layer of a new graph, with the mask of the old one if it can take one."""
    if mask is not None and "mask" in inspect.signature(layer.call).parameters:
        kwargs["mask"] = mask
    return layer(*args, **kwargs)
