"""Random states in Keras's files, which hold none by themselves.

Without them a model that is loaded draws again the noise with which it was trained.
"""

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import keras_internals

__all__ = ["SavesRandomState", "load", "save", "states_of"]

_KEY = "random_state_"


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
    owned = keras_internals.seed_generators
    return [generator.state for layer in layers for generator in owned(layer)]


def save(store: Any, states: list[keras.Variable]) -> None:
    """Add random states to what a layer saves."""
    for position, state in enumerate(states):
        store[f"{_KEY}{position}"] = ops.convert_to_numpy(state)


def load(store: Any, states: list[keras.Variable], owner: str) -> dict[str, Any]:
    """Give the states the values that were saved; return the rest of what was saved.

    Files that were written without random states leave the states as they are.
    """
    saved = {key: store[key] for key in store.keys()}
    values = [saved.pop(key) for key in sorted(saved, key=_position) if key.startswith(_KEY)]
    if values and len(values) != len(states):
        raise ValueError(
            f"The file holds {len(values)} random states for {owner!r}, which has {len(states)}: "
            "it was written by another model."
        )
    for state, value in zip(states, values, strict=False):
        state.assign(_converted(np.asarray(value), state, owner))
    return saved


def _converted(value: np.ndarray, state: keras.Variable, owner: str) -> np.ndarray:
    """Return a saved state in the type of a variable: the backends keep it in different ones."""
    if value.dtype.kind in "iu" and value.shape == tuple(state.shape):
        converted = value.astype(keras.backend.standardize_dtype(state.dtype))
        if np.array_equal(converted, value):
            return converted
    raise ValueError(
        f"The file's random state for {owner!r} is no {tuple(state.shape)} whole numbers of "
        f"{keras.backend.standardize_dtype(state.dtype)}: the file is damaged."
    )


def _position(key: str) -> int:
    number = key.removeprefix(_KEY)
    if not key.startswith(_KEY):
        return -1
    if not number.isdecimal():
        raise ValueError(f"The file has the unknown entry {key!r}: it is damaged.")
    return int(number)
