"""Random states in Keras's files, which hold none by themselves.

Without them a model that is loaded draws again the noise with which it was trained.
"""

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
from keras import ops

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
    return [generator.state for layer in layers for generator in layer._seed_generators]


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
        # The backends keep the same numbers in different types.
        state.assign(np.asarray(value).astype(keras.backend.standardize_dtype(state.dtype)))
    return saved


def _position(key: str) -> int:
    return int(key.removeprefix(_KEY)) if key.startswith(_KEY) else -1
