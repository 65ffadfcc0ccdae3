"""Models that train and evaluate as the user's class of the original says."""

import contextlib
import warnings
from typing import Any

import keras

from tfp_ibnn._core import keras_internals
from tfp_ibnn.conversion.copying import is_opened, settings
from tfp_ibnn.layers.carried import carrying, own_methods
from tfp_ibnn.layers.model import StochasticModel, StochasticSubclass, class_around


def stochastic_model(
    model: keras.Model, copied: keras.Model, **options: Any
) -> StochasticModel | StochasticSubclass:
    """Return the stochastic model for a copy with stochastic layers, by the original's class."""
    methods, own = own_methods(type(model)), type(model)
    if not is_opened(model):
        kind = class_around(copied)
        if methods and kind.carried is None:
            _warn_of_dropped(methods, own, StochasticSubclass, "copy.model")
        return kind(copied, **options)
    parts = copied.input, copied.output
    if not methods:
        return StochasticModel(*parts, **options)
    if keras_internals.is_functional(model):
        kind = carrying(StochasticModel, own, is_around=False)
        stochastic = _made_of(kind, parts, options, model)
        if stochastic is not None:
            return stochastic
    _warn_of_dropped(methods, own, StochasticModel, "copy.inputs, copy.outputs")
    return StochasticModel(*parts, **options)


def deterministic_model(model: keras.Model, folded: keras.Model) -> keras.Model:
    """Return a folded copy of a stochastic model as one of the user's class, if there is one."""
    if isinstance(model, StochasticSubclass):  # whose copy is of that class
        return folded
    methods = own_methods(type(model))
    own = getattr(model, "carried", None) or type(model)
    if not methods or not keras_internals.is_functional(folded):
        return folded
    if own is not type(model):
        parts, options = (folded.input, folded.output), {"name": model.name}
        plain = _made_of(own, parts, options, model)
        if plain is not None:
            return plain
    warnings.warn(
        f"The deterministic copy is a keras.Model, without what {own.__name__} defines: "
        f"{', '.join(methods)}. Define them in a subclass of keras.Model, and make one of "
        "`copy.inputs, copy.outputs`.",
        stacklevel=3,
    )
    return folded


def _made_of(kind: Any, parts: Any, options: dict[str, Any], like: keras.Model) -> Any:
    """Return a model of a class from inputs and outputs, with the settings of another, or None."""
    with contextlib.suppress(Exception):  # of a constructor that takes something else
        made = kind(*parts, **options)
        kept = (keras.layers.Layer, keras.Variable)
        of_user = [name for name, value in vars(like).items() if isinstance(value, kept)]
        is_ours = isinstance(like, StochasticModel)  # which was made in this way itself
        is_whole = is_ours or all(name in vars(made) for name in of_user)
        if keras_internals.is_functional(made) and is_whole:
            for name, value in settings(like).items():
                setattr(made, name, value)
            return made
    return None


def _warn_of_dropped(methods: list[str], own: type, kind: type, parts: str) -> None:
    warnings.warn(
        f"The copy trains and evaluates as Keras's models do, without what {own.__name__} defines: "
        f"{', '.join(methods)}. Define them in a subclass of ibnn.{kind.__name__}, and make one: "
        f"Subclass({parts}).",
        stacklevel=4,
    )
