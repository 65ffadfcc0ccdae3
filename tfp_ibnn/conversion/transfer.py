"""What a copy of a model gets from the original: weights, settings, vocabularies."""

import contextlib
import math
from collections.abc import Collection
from typing import Any, NamedTuple

import keras
from keras import ops

from tfp_ibnn._core import keras_internals
from tfp_ibnn.layers import StochasticLayer, folding, inside
from tfp_ibnn.layers.base import is_quantized
from tfp_ibnn.layers.carried import arguments, settings
from tfp_ibnn.layers.inside import Place, Steps

Places = dict[Steps, Place]

_IGNORED_KEYS = ("name", "trainable", "shared_object_id", "vocabulary", "vocabulary_size")
"""What may differ in the config of a copy: its name, its vocabulary, and Keras's numbers."""


class Copied(NamedTuple):
    """A model and a copy of its structure, and the layers inside of both."""

    model: keras.Model
    copy: keras.Model

    is_rebuilt: bool
    """Whether the copy was made layer by layer, and not by the model's own config."""

    old: Places
    """The layers inside of the original, by their places."""

    new: Places
    """The layers inside of the copy, by their places."""

    def pairs(self) -> list[tuple[Place, Place]]:
        """Return the places that both models have, after those of the models themselves."""
        inner = [(place, self.new[steps]) for steps, place in self.old.items() if steps in self.new]
        return [(Place((), (), self.model), Place((), (), self.copy)), *inner]

    def check_counterparts(self, lone: Collection[Steps]) -> None:
        """Raise if a layer with weights is among those that one of the models has not."""
        for steps in sorted(lone, key=len):
            place = self.old.get(steps) or self.new[steps]
            if place.layer.weights:
                raise cannot_copy(place.owners[-1], f"{place.path!r} is not in both, or was shared")


def carry_over(copied: Copied) -> None:
    """Give a copy the weights and settings of the original, layer by layer, by their places.

    Args:
        copied: both models.

    Raises:
        ValueError: If a layer is in one of them only, or was made with other options.
    """
    copied.check_counterparts(copied.old.keys() ^ copied.new.keys())
    pairs = copied.pairs()
    _fill_lookups(pairs)
    for place, other in pairs:
        _match_lora(place, other.layer)
        _check_options(place, other, copied.model)
        _check_used(place, other.layer, copied.model)
        _copy_weights_and_settings(place.layer, other.layer)


def carry_over_folded(copied: Copied) -> dict[Steps, keras.layers.Layer]:
    """Give a copy weights and settings as `carry_over` does, the means of stochastic layers too.

    Args:
        copied: both models; the graph of the copy has plain layers in place of stochastic ones.

    Returns:
        Plain layers for the stochastic ones that the copy still has, by their places.

    Raises:
        ValueError: If a layer is in the original only, or a stochastic one cannot be folded away.
    """
    copied.check_counterparts(copied.old.keys() - copied.new.keys())  # folding may add some
    pairs = copied.pairs()
    _fill_lookups(pairs)
    swaps: dict[Steps, keras.layers.Layer] = {}
    for place, other in pairs:
        _match_lora(place, other.layer)
        layer = place.layer
        if isinstance(layer, StochasticLayer):
            if copied.is_rebuilt and place.in_graph:  # it is folded already
                continue
            layer = layer.fold()
            folding.adapt(other.layer, layer)
            if isinstance(other.layer, StochasticLayer):
                swaps[place.steps] = layer
                continue
            if type(layer) is not type(other.layer):
                raise cannot_fold(place)
        _check_used(place, other.layer, copied.model)
        _copy_weights_and_settings(layer, other.layer)
    return swaps


def _fill_lookups(pairs: list[tuple[Place, Place]]) -> None:
    """Give the lookup layers of a copy their vocabularies: before Keras 3.14 TF-IDF needs them."""
    for place, other in pairs:
        if place.steps:
            keras_internals.copy_vocabulary(place.layer, other.layer)


def _match_lora(place: Place, copy: keras.layers.Layer) -> None:
    """Give a copy LoRA where the layer has it; raise if the copy has lost the quantization."""
    folding.adapt(copy, place.layer)
    if is_quantized(place.layer) and not is_quantized(copy):
        raise ValueError(
            f"{place.path!r} is quantized, but the config of the layer around it does not record "
            "it: quantize the model that ibnn.to_stochastic returns instead."
        )


def _check_options(place: Place, other: Place, model: keras.Model) -> None:
    """Raise if the layer around a layer has made its copy with other options.

    Args:
        place: where the layer is.
        other: where its copy is.
        model: the original model.
    """
    is_made_by_owner = bool(place.steps) and not other.in_graph
    if is_made_by_owner and _options(place.layer) != _options(other.layer):
        raise cannot_copy(model, f"{place.layer.name!r} was made with other options in the copy")


def _options(layer: keras.layers.Layer) -> str | None:
    """Return the options of a layer; None if there are none, or are layers inside."""
    with contextlib.suppress(NotImplementedError):
        if not keras_internals.nested_layers(layer, include_self=False):
            return str(_without_names(layer.get_config()))
    return None


def _without_names(config: Any) -> Any:
    """Return a config, or a part of one, without what differs in a copy."""
    if isinstance(config, dict):
        return {k: _without_names(v) for k, v in config.items() if k not in _IGNORED_KEYS}
    return config


def _check_used(place: Place, copy: keras.layers.Layer, model: keras.Model) -> None:
    """Raise if a copy has weights that the original does not have yet."""
    layer = place.layer
    if isinstance(layer, inside.LEAVES) and copy.built and not layer.built:
        raise ValueError(
            f"{place.path!r} in model {model.name!r} is not built, which `build` of a model with a "
            "`call` of its own leaves to the first call: use the model once, as in "
            "model(x_train[:1])."
        )


def _copy_weights_and_settings(layer: keras.layers.Layer, copy: keras.layers.Layer) -> None:
    """Give a copy the weights of a layer and, if it is of the same class, its settings."""
    is_same_class = type(layer) is type(copy)
    if is_same_class:
        copy.trainable = layer.trainable
        _copy_settings(layer, copy)
    if isinstance(layer, inside.LEAVES):
        folding.copy_weights(copy, layer)
    elif is_same_class:
        store: dict[str, Any] = {}
        layer.save_own_variables(store)
        # Arrays of their own: JAX's trainer frees those that it has replaced.
        arrays = {key: ops.convert_to_numpy(value).copy() for key, value in store.items()}
        copy.load_own_variables(arrays)


def _copy_settings(layer: keras.layers.Layer, copy: keras.layers.Layer) -> None:
    """Give a copy what was set after the constructor; raise on what its constructor did not get."""
    values = settings(copy)
    parameters = arguments(layer)
    for name, value in settings(layer).items():
        is_known = name in values
        if is_known and _is_equal(values[name], value):
            continue
        is_argument = name.removeprefix("_") in parameters
        if is_argument and isinstance(value, (dict, list, tuple)):
            continue  # which the constructor may have in another form
        if is_known and is_argument:
            other = values[name]
            raise cannot_copy(
                layer, f"`{name}` of {layer.name!r} is {value!r}, and {other!r} in the copy"
            )
        setattr(copy, name, value)


def _is_equal(first: Any, second: Any) -> bool:
    """Whether two settings are equal; NaN is equal to NaN."""
    are_numbers = isinstance(first, float) and isinstance(second, float)
    if are_numbers and math.isnan(first):
        return math.isnan(second)
    return first == second


def owner_of(place: Place) -> keras.layers.Layer:
    """Return the outermost layer of the model around a layer, or the model if there is none."""
    return place.owners[1] if len(place.owners) > 1 else place.owners[0]


def cannot_copy(layer: keras.layers.Layer, reason: Any) -> ValueError:
    """Return the error for a layer of which no copy can be made.

    Args:
        layer: which one.
        reason: what is wrong, a text or an error.
    """
    owner = type(layer).__name__
    line = " ".join(str(reason).split())
    return ValueError(
        f"{layer.name!r} ({owner}) cannot be copied: it needs a `get_config` of which "
        f"`{owner}.from_config` makes the same, and `keras.saving.register_keras_serializable` "
        f"for what it uses. What is wrong: {line[:300]}"
    )


def cannot_fold(place: Place) -> ValueError:
    """Return the error for a stochastic layer that another layer makes again."""
    owner = owner_of(place)
    return ValueError(
        f"The stochastic layer inside {owner.name!r} ({type(owner).__name__}) cannot be folded "
        "away."
    )
