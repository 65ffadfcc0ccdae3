"""Models that train and evaluate as the user's class of the original says."""

import warnings
from typing import Any

import keras

from tfp_ibnn._core import keras_internals
from tfp_ibnn.conversion.transfer import Copied
from tfp_ibnn.layers.carried import carrying, own_methods, settings
from tfp_ibnn.layers.model import StochasticModel, StochasticSubclass, class_around

_PARTS = (keras.layers.Layer, keras.metrics.Metric, keras.Variable)
"""What a model's own methods may use, and no copy of its graph has."""


def stochastic_model(copied: Copied, train_samples: int) -> StochasticModel | StochasticSubclass:
    """Return the stochastic model for a copy with stochastic layers, by the original's class.

    Args:
        copied: the original, whose class may define how to train and evaluate, and the copy.
        train_samples: samples of z for each example in training.

    Returns:
        A model of the copy's graph or, where the original has a `call` of its own, around the copy.
    """
    methods = own_methods(type(copied.model))
    options = {"train_samples": train_samples, "name": copied.model.name}
    if methods:
        return _with_methods(copied, methods, options)
    if copied.is_rebuilt:
        return StochasticModel(copied.copy.input, copied.copy.output, **options)
    return class_around(copied.copy)(copied.copy, **options)


def _with_methods(
    copied: Copied, methods: list[str], options: dict[str, Any]
) -> StochasticModel | StochasticSubclass:
    """Return the stochastic model for a copy, with methods of the user's class, or warn.

    Args:
        copied: the original and the copy.
        methods: what the original's class defines to train and evaluate.
        options: `train_samples` and `name`.
    """
    users_class = type(copied.model)
    if copied.is_rebuilt:
        parts = "copy.inputs, copy.outputs"
        stochastic = None
        if keras_internals.is_functional(copied.model):
            kind = carrying(StochasticModel, users_class, is_around=False)
            stochastic = _model_like(copied.model, kind, copied.copy, options)
        if stochastic is None:
            stochastic = StochasticModel(copied.copy.input, copied.copy.output, **options)
    else:
        parts = "copy.model"
        stochastic = class_around(copied.copy)(copied.copy, **options)
    if stochastic.carried is None:
        warnings.warn(
            "The copy trains and evaluates as Keras's models do, without what "
            f"{users_class.__name__} defines: {', '.join(methods)}. Define them in a subclass of "
            f"ibnn.{type(stochastic).__name__}, and make one: Subclass({parts}).",
            stacklevel=4,
        )
    return stochastic


def model_like(model: keras.Model, copied: Copied) -> keras.Model:
    """Return the model for a copy that is as stochastic as the original, of the original's class.

    Args:
        model: with stochastic layers.
        copied: its network, which a `StochasticSubclass` has inside, and the copy of that.

    Returns:
        A model that is not compiled; a `StochasticModel` of a graph that is a plain one.
    """
    options = {"name": model.name}
    if isinstance(model, (StochasticModel, StochasticSubclass)):
        options["train_samples"] = model.train_samples
    if isinstance(model, StochasticSubclass):
        return class_around(copied.copy)(copied.copy, **options)
    if not copied.is_rebuilt:
        return copied.copy
    kind = type(model) if isinstance(model, StochasticModel) else StochasticModel
    like = _model_like(model, kind, copied.copy, options)
    return like or StochasticModel(copied.copy.input, copied.copy.output, **options)


def deterministic_model(model: keras.Model, folded: keras.Model) -> keras.Model:
    """Return a folded copy of a stochastic model as one of the user's class, if there is one.

    Args:
        model: the stochastic model.
        folded: its copy without stochastic layers.

    Returns:
        The folded copy itself, where its class is the right one or, with a warning, no other can
        be made.
    """
    if isinstance(model, StochasticSubclass):  # its copy already has the user's class
        return folded
    methods = own_methods(type(model))
    if not methods or not keras_internals.is_functional(folded):
        return folded
    users_class = getattr(model, "carried", None) or type(model)
    if users_class is not type(model):
        plain = _model_like(model, users_class, folded, {"name": model.name})
        if plain is not None:
            return plain
    warnings.warn(
        f"The deterministic copy is a keras.Model, without what {users_class.__name__} defines: "
        f"{', '.join(methods)}. Define them in a subclass of keras.Model, and make one of "
        "`copy.inputs, copy.outputs`.",
        stacklevel=3,
    )
    return folded


def _model_like(model: keras.Model, kind: Any, copy: keras.Model, options: dict[str, Any]) -> Any:
    """Return a model of a class with a copy's graph and a model's settings, or None."""
    try:
        candidate = kind(copy.input, copy.output, **options)
    except Exception:  # the constructor may take other arguments
        return None
    if not keras_internals.is_functional(candidate) or _lacks_parts(candidate, model):
        return None
    for name, value in settings(model).items():
        setattr(candidate, name, value)
    return candidate


def _lacks_parts(candidate: keras.Model, model: keras.Model) -> bool:
    """Whether a user's model has layers, metrics or variables as attributes that another lacks."""
    if isinstance(model, StochasticModel):  # which was made from inputs and outputs itself
        return False
    of_keras = keras_internals.bookkeeping()
    for name, value in vars(model).items():
        if name in of_keras:
            continue
        has_parts = any(isinstance(part, _PARTS) for part in keras.tree.flatten(value))
        if has_parts and name not in vars(candidate):
            return True
    return False
