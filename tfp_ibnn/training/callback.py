"""What the library's callbacks have in common."""

from typing import Any

import keras

__all__ = ["Callback"]


class Callback(keras.callbacks.Callback):
    """A callback that Keras can write down as a config and make again, as it can layers."""

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Callback":
        """Return a callback from what `get_config` gave."""
        return cls(**keras.saving.deserialize_keras_object(config))
