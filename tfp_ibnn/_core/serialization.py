"""Configs, and random states in files: without these a loaded model draws old noise again."""

import contextlib
import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import keras_internals

_KEY = "random_state_"


class UnknownClassError(ValueError):
    """A file holds a class or a function that is not known.

    Attributes:
        what: that, in words.
    """

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(f"{what}{advice}")
        self.what = what


@contextlib.contextmanager
def naming_unknown_classes() -> Iterator[None]:
    """Raise one line with the class that is not known, where Keras prints the whole config."""
    try:
        yield
    except TypeError as error:
        unknown = re.search(r"Could not locate (class|function) '([^']*)'", str(error))
        if unknown is None:
            raise
        kind, name = unknown.groups()
        short = name.split(">")[-1]
        raise UnknownClassError(
            f"The file holds the {kind} {name!r}, which is not known",
            ": import what defines it with @keras.saving.register_keras_serializable() first, or "
            "load the file by keras.models.load_model(path, "
            f"custom_objects={{{name!r}: {short}}}).",
        ) from None


def load_in_shell(path: str) -> keras.Model:
    """Return the model in a file, or raise one line for a class that a shell cannot import."""
    try:
        with naming_unknown_classes():
            return keras.saving.load_model(path)
    except UnknownClassError as error:
        advice = (
            ", and cannot be imported from a shell: do the same in Python, where it is defined."
        )
        raise UnknownClassError(error.what, advice) from None


class Configured:
    """Has the arguments of its constructor as attributes, and so a config; mix it in first."""

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        names = inspect.signature(type(self)).parameters
        arguments = {name: getattr(self, name) for name in names}
        return keras.saving.serialize_keras_object(arguments)

    @classmethod
    @naming_unknown_classes()
    def from_config(cls, config: dict[str, Any]) -> "Configured":
        """Return an object from what `get_config` gave."""
        return cls(**keras.saving.deserialize_keras_object(config))


class ConfiguredLayer:
    """Gives a Keras layer its `get_config`; mix it in first.

    It has the arguments of its constructor, and of those it is derived from, that are attributes of
    the same name. What Keras says of them comes first.
    """

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        arguments = {}
        for kind in type(self).__mro__:
            if not issubclass(kind, ConfiguredLayer):
                continue
            for name in inspect.signature(kind.__init__).parameters:
                if hasattr(self, name):
                    arguments[name] = getattr(self, name)
        return {**arguments, **super().get_config()}


class SavesRandomState:
    """Makes a layer save the state of its own generators, in any model; mix it in before Layer."""

    def save_own_variables(self, store: Any) -> None:
        """Save the weights, and the random state."""
        super().save_own_variables(store)
        save(store, states_of([self]))

    def load_own_variables(self, store: Any) -> None:
        """Load the weights, and the random state if there is one."""
        super().load_own_variables(load(store, states_of([self]), self.name))


def states_of(layers: Iterable[keras.layers.Layer]) -> list[keras.Variable]:
    """Return the states of the generators that these layers themselves own."""
    states = []
    for layer in layers:
        generators = keras_internals.seed_generators(layer)
        states += [generator.state for generator in generators]
    return states


def save(store: Any, states: list[keras.Variable]) -> None:
    """Add random states to what a layer saves.

    Args:
        store: arrays by name, as Keras hands it to `save_own_variables`.
        states: variables, in an order that is the same where they are loaded.
    """
    for position, state in enumerate(states):
        store[f"{_KEY}{position}"] = ops.convert_to_numpy(state)


def load(store: Any, states: list[keras.Variable], owner: str) -> dict[str, Any]:
    """Give random states the values that were saved, if any.

    Args:
        store: arrays by name, as Keras hands it to `load_own_variables`.
        states: variables, in the order in which they were saved.
        owner: name of the layer, for errors.

    Returns:
        The rest of what was saved.

    Raises:
        ValueError: If the values are of another number, type or shape.
    """
    arrays = {key: store[key] for key in store.keys()}
    saved = [key for key in arrays if key.startswith(_KEY)]
    values = {key: np.asarray(arrays.pop(key)) for key in saved}
    if not values:
        return arrays
    variables = {f"{_KEY}{position}": state for position, state in enumerate(states)}
    if values.keys() != variables.keys():
        raise ValueError(
            f"The file holds {len(values)} random states for {owner!r}, which has "
            f"{len(variables)}: it is another model's, or damaged."
        )
    for key, value in values.items():
        _assign_state(variables[key], value, owner)
    return arrays


def _assign_state(state: keras.Variable, value: np.ndarray, owner: str) -> None:
    """Give a random state the value that was saved, or raise if it is not one."""
    shape = tuple(state.shape)
    dtype = keras.backend.standardize_dtype(state.dtype)
    if value.shape != shape or not fits(value, dtype):
        raise ValueError(
            f"A random state of {owner!r} is not whole numbers of {dtype} in the shape {shape}: "
            "the file is damaged."
        )
    state.assign(value.astype(dtype))


def fits(value: np.ndarray, dtype: str) -> bool:
    """Whether a saved array can be assigned; backends keep random states in different types.

    Args:
        value: the array.
        dtype: name of the variable's type.
    """
    if keras.backend.is_float_dtype(dtype):
        return value.dtype.kind == "f"
    is_whole = value.dtype.kind in "iub"
    return is_whole and np.array_equal(value, value.astype(dtype))


def storable(variable: keras.Variable) -> np.ndarray:
    """Return a value that numpy can store: it has no name for bfloat16, which fits in float32."""
    value = ops.convert_to_numpy(variable.value)
    return value.astype("float32") if value.dtype.kind == "V" else value
