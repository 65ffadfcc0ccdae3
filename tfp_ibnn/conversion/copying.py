"""Copies of models: new layers, with the same weights."""

import contextlib
import inspect
from collections.abc import Callable, Collection
from typing import Any

import keras
from keras import ops

from tfp_ibnn._core import keras_internals
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.layers import StochasticLayer, folding, inside, stochastic_layers
from tfp_ibnn.layers.base import CONVERTIBLE, is_quantized
from tfp_ibnn.layers.model import StochasticModel

_NO_OPTIONS = ("name", "trainable", "shared_object_id", "vocabulary", "vocabulary_size")
"""What differs in the config of a copy: its name, what it has adapted to, and Keras's numbers."""


def copy_of(model: keras.Model, fold: bool = False) -> keras.Model:
    """Return a copy of new layers, not compiled; `fold` leaves the means of stochastic ones."""

    def convert(layer: keras.layers.Layer) -> keras.layers.Layer:
        return layer.fold() if fold and isinstance(layer, StochasticLayer) else _copy_layer(layer)

    if not isinstance(model, keras.Model):
        raise ValueError(f"`model` must be a Keras model; got {model!r}.")
    if not model.built:
        remedy = "begin it with a keras.Input, or call `model.build(input_shape)`, or use it once"
        raise ValueError(f"Model {model.name!r} is not built: {remedy}.")
    if is_opened(model):
        copied = keras.Model(*_rebuild(functional_graph(model), convert), name=model.name)
    else:
        copied = _copy_layer(model)
        config = model.get_build_config()
        if config and not copied.built:
            copied.build_from_config(config)
            copied.built = True  # as where Keras loads a model: it builds only the layers inside
    if not fold:
        inside.restore(copied, inside.configs(model))
    _carry_over(model, copied, fold)
    return copied


def is_opened(model: Any) -> bool:
    """Whether a copy of a model is made layer by layer, and not by the model's own config."""
    if functional_graph(model) is None:
        return False
    if keras_internals.is_plain_graph(model) or isinstance(model, StochasticModel):
        return True
    # A class of its own may know how to make layers that do not know it themselves.
    return all(_has_config(layer) for layer in model.layers) or not _has_config(model)


def _has_config(layer: keras.layers.Layer) -> bool:
    with contextlib.suppress(Exception):  # whatever is wrong with it
        return type(layer).from_config(layer.get_config()) is not None
    return False


def _copy_layer(layer: keras.layers.Layer) -> keras.layers.Layer:
    """Return a new layer by its config, or else without one, or raise."""
    try:
        return type(layer).from_config(layer.get_config())
    except Exception as error:
        try:
            if isinstance(layer, keras.Model):
                return type(layer)()
            if not isinstance(layer, CONVERTIBLE) and layer.built:
                return keras_internals.deep_copy(layer)
        except Exception as other:
            raise _cannot_copy(layer, f"{error} Without the config: {other}") from error
        raise _cannot_copy(layer, error) from error


def _cannot_copy(layer: keras.layers.Layer, reason: Any) -> ValueError:
    owner, reason = type(layer).__name__, " ".join(str(reason).split())
    return ValueError(
        f"{layer.name!r} ({owner}) cannot be copied: it needs a `get_config` of which "
        f"`{owner}.from_config` makes the same, and `keras.saving.register_keras_serializable` "
        f"for what it uses. What is wrong: {reason[:300]}"
    )


def _rebuild(
    graph: keras.Model, convert: Callable[[keras.layers.Layer], keras.layers.Layer]
) -> tuple[Any, Any]:
    """Rebuild a Functional model with converted layers; return its inputs and outputs."""
    copies: dict[int, Any] = {}

    def clone(layer: Any) -> Any:
        # One copy for each layer, so that what is shared, even among nested models, stays shared.
        if id(layer) in copies:
            return copies[id(layer)]
        if not isinstance(layer, keras.layers.Layer):  # an operation such as x + y
            copy = type(layer).from_config(layer.get_config())
        elif is_opened(layer):
            copy = keras.Model(*rebuild(functional_graph(layer)), name=layer.name)
        else:
            copy = convert(layer)
        copies[id(layer)] = copy
        return copy

    def fresh_input(x: Any) -> Any:
        name = keras_internals.origin(x)[0].name
        return keras.Input(batch_shape=x.shape, dtype=x.dtype, name=name)

    def rebuild(graph: keras.Model) -> tuple[Any, Any]:
        # An alias of the same layers, since Keras would compile the clone of a compiled model.
        alias = keras.Model(graph.input, graph.output)
        fresh = keras.tree.map_structure(fresh_input, alias.input)
        rebuilt = keras.models.clone_model(
            alias, input_tensors=fresh, clone_function=clone, call_function=_call
        )
        return rebuilt.input, rebuilt.output

    return rebuild(graph)


def _call(layer: Any, *args: Any, mask: Any = None, **kwargs: Any) -> Any:
    """Call a layer of a new graph, with the mask of the old one if it can take one."""
    if mask is not None and "mask" in inspect.signature(layer.call).parameters:
        kwargs["mask"] = mask
    return layer(*args, **kwargs)


def _carry_over(old: keras.Model, new: keras.Model, fold: bool) -> None:
    """Give a copy the weights of the original, layer by layer, by where these are."""
    before, after = inside.places(old), inside.places(new)
    for steps in sorted(before.keys() ^ after.keys(), key=len):
        place = before.get(steps) or after[steps]
        if place.layer.weights and not (fold and steps in after):
            raise _cannot_copy(place.owners[-1], f"{place.path!r} is not in both, or was shared")
    swaps: dict[inside.Steps, keras.layers.Layer] = {}
    pairs = [(x, before[x].layer, after[x].layer) for x in before if x in after]
    for _, layer, copied in pairs:  # before Keras 3.14 TF-IDF weights need a vocabulary
        keras_internals.copy_vocabulary(layer, copied)
    for steps, layer, copied in [((), old, new), *pairs]:
        folding.adapt(copied, layer)
        if is_quantized(layer) and not is_quantized(copied):
            raise _lost_quantization(before[steps])
        inner = steps and not fold and not after[steps].in_graph
        if inner and _options(layer) != _options(copied):
            raise _cannot_copy(old, f"{layer.name!r} was made with other options in the copy")
        if fold and isinstance(layer, StochasticLayer):
            if is_opened(old) and before[steps].in_graph:  # it is folded already
                continue
            layer = layer.fold()
            folding.adapt(copied, layer)
            if isinstance(copied, StochasticLayer):
                swaps[steps] = layer
                continue
            if type(layer) is not type(copied):
                raise _cannot_fold(before[steps])
        if type(layer) is type(copied):
            copied.trainable = layer.trainable
            _carry_settings(layer, copied)
        if isinstance(layer, inside.LEAVES):
            if copied.built and not layer.built:
                raise ValueError(
                    f"{before[steps].path!r} in model {old.name!r} is not built, which `build` of "
                    "a model with a `call` of its own leaves to the first call: use the model "
                    "once, as in model(x_train[:1])."
                )
            folding.copy_weights(copied, layer)
        elif type(layer) is type(copied):
            store: dict[str, Any] = {}
            layer.save_own_variables(store)
            # Arrays of their own: JAX's trainer frees those that it has replaced.
            arrays = {key: ops.convert_to_numpy(value).copy() for key, value in store.items()}
            copied.load_own_variables(arrays)
    inside.replace(new, swaps)
    for steps in swaps:  # an owner's own constructor may make what was replaced just now
        if stochastic_layers(_copy_layer(after[steps].owners[:2][-1])):
            raise _cannot_fold(before[steps])


def _carry_settings(layer: keras.layers.Layer, copied: keras.layers.Layer) -> None:
    """Give a copy what was set after the constructor; raise on what its constructor did not get."""
    present, arguments = settings(copied), _arguments(layer)
    for name, value in settings(layer).items():
        if name in present and present[name] == value:
            continue
        is_argument = name.removeprefix("_") in arguments
        if is_argument and isinstance(value, (dict, list, tuple)):
            continue  # which the constructor may have in another form
        if name in present and is_argument:
            other = present[name]
            reason = f"`{name}` of {layer.name!r} is {value!r}, and {other!r} in the copy"
            raise _cannot_copy(layer, reason)
        setattr(copied, name, value)


def _arguments(layer: keras.layers.Layer) -> Collection[str]:
    """Return the names of what the constructor of a layer takes."""
    return inspect.signature(type(layer).__init__).parameters


def _options(layer: keras.layers.Layer) -> str | None:
    """Return the options of a layer; None if there are none, or are layers inside."""
    with contextlib.suppress(NotImplementedError):
        if not keras_internals.sublayers(layer):
            return str(_without_names(layer.get_config()))
    return None


def settings(layer: keras.layers.Layer) -> dict[str, Any]:
    """Return the numbers, texts and containers of these that a class of the user's own keeps."""
    kind = getattr(layer, "carried", None) or type(layer)
    if kind.__module__.startswith(("keras.", "tfp_ibnn.")):
        return {}
    of_keras = {*keras_internals.bookkeeping(), "train_samples"}
    own = {k: _plain(v) for k, v in vars(layer).items() if _is_setting(v)}
    # Private attributes are left out, which are Keras's more often, but for kept arguments.
    kept = {f"_{name}" for name in _arguments(layer)}
    return {k: v for k, v in own.items() if k not in of_keras and (k[0] != "_" or k in kept)}


def _is_setting(value: Any) -> bool:
    if isinstance(value, (dict, list, tuple)):
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return all(part is None or _is_setting(part) for part in parts)
    return isinstance(value, (bool, int, float, str))


def _plain(value: Any) -> Any:
    """Return a copy of a setting, without Keras's containers, which belong to one layer."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return value


def _without_names(config: Any) -> Any:
    """Return a config, or a part of one, without what differs in a copy."""
    if isinstance(config, dict):
        return {k: _without_names(v) for k, v in config.items() if k not in _NO_OPTIONS}
    return config


def _lost_quantization(place: inside.Place) -> ValueError:
    return ValueError(
        f"{place.path!r} is quantized, of which the config of the layer around it does not know: "
        "quantize the model that ibnn.to_stochastic returns instead."
    )


def _cannot_fold(place: inside.Place) -> ValueError:
    owner = place.owners[:2][-1]
    where = f"{owner.name!r} ({type(owner).__name__})"
    return ValueError(f"The stochastic layer inside {where} cannot be folded away.")
