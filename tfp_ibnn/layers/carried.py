"""Training and evaluation as a user's model class defines them, in stochastic models too."""

import functools
import inspect
from collections.abc import Collection
from typing import Any

import keras

from tfp_ibnn._core import keras_internals

METHODS = (
    *("compile", "compute_loss", "compute_metrics", "evaluate", "fit", "metrics", "predict"),
    *("predict_step", "test_step", "train_step"),
)
"""What a class of models may define to train and evaluate in its own way."""

_STRUCTURE = (
    *("__init__", "build", "build_from_config", "compute_mask", "compute_output_shape"),
    *("compute_output_spec", "from_config", "get_build_config", "get_config"),
    *("load_own_variables", "save_own_variables"),
)
"""What a wrapping model takes from Keras, whatever the class of the model inside defines."""

_OURS = ("keras.", "tfp_ibnn.")


def own_methods(kind: type) -> list[str]:
    """Return which of the `METHODS` a class has from a user's class."""
    defined = set()
    for owner in kind.__mro__:
        if not owner.__module__.startswith(_OURS):
            defined.update(vars(owner))
    return [name for name in METHODS if name in defined]


def settings(layer: keras.layers.Layer) -> dict[str, Any]:
    """Return the numbers, texts and containers of these that a class of the user's own keeps."""
    kind = getattr(layer, "carried", None) or type(layer)
    if kind.__module__.startswith(_OURS):
        return {}
    of_keras = {*keras_internals.bookkeeping(), "train_samples"}
    # Private attributes are Keras's more often, but for those that keep an argument.
    private = {f"_{name}" for name in arguments(layer)}
    values = {}
    for name, value in vars(layer).items():
        is_private = name.startswith("_") and name not in private
        if name in of_keras or is_private:
            continue
        if _is_setting(value):
            values[name] = _plain(value)
    return values


def _is_setting(value: Any) -> bool:
    """Whether a value is a number or a text, or holds nothing else but None."""
    if isinstance(value, (dict, list, tuple)):
        parts = list(value)
        if isinstance(value, dict):
            parts += value.values()
        return all(part is None or _is_setting(part) for part in parts)
    return isinstance(value, (bool, int, float, str))


def _plain(value: Any) -> Any:
    """Return a copy of a setting, without Keras's containers, which belong to one layer."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return value


def arguments(layer: keras.layers.Layer) -> Collection[str]:
    """Return the names of what the constructor of a layer takes."""
    constructor = type(layer).__init__
    signature = inspect.signature(constructor)
    return signature.parameters


@functools.cache
def carrying(kind: type, own: type, is_around: bool) -> type:
    """Return `kind`, a class of this library, with the methods of `own`, a user's model class.

    Args:
        kind: a class of stochastic models.
        own: the user's class.
        is_around: whether models of `kind` have one of `own` inside, as `model`; else they are
            constructed as those of `own` are.
    """
    attributes = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "carried": own,
    }
    bases = (_Around, kind, _structure_of_keras(), own) if is_around else (kind, own)
    carrier = type(kind.__name__, bases, attributes)
    # Files name the class of this library, which loads them.
    register = keras.saving.register_keras_serializable("tfp_ibnn", kind.__name__)
    register(carrier)
    register(kind)
    return carrier


def _structure_of_keras() -> type[keras.Model]:
    """Return a class with what a wrapping model takes from Keras, not from the model inside."""
    structure = {name: inspect.getattr_static(keras.Model, name) for name in _STRUCTURE}
    return type("Structure", (keras.Model,), structure)


class _Around:
    """A model around another one, whose attributes it has too."""

    def __getattr__(self, name: str) -> Any:
        inner = vars(self).get("model")
        if inner is None or name not in vars(inner):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")
        return getattr(inner, name)

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        """All metrics: Keras leaves out those of a model inside, the class may omit others."""
        metrics = [*super().metrics]
        metrics += keras_internals.own_metrics(self.model)
        metrics += keras_internals.own_metrics(self)
        by_identity = {id(metric): metric for metric in metrics}
        return list(by_identity.values())
