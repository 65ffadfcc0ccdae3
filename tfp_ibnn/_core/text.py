"""Arrays of strings: Keras takes tensors, and few of numpy's arrays."""

from typing import Any

import keras
import numpy as np
from keras import ops


def refuse_single_strings(x: Any, name: str) -> None:
    """Raise if inputs are lists of strings.

    Args:
        x: inputs, in any structure.
        name: what the user calls them.
    """
    if any(isinstance(part, (str, bytes)) for part in keras.tree.flatten(x)):
        raise ValueError(f"`{name}` holds single strings; give an array of them: np.array(x).")


def with_strings(x: Any) -> Any:
    """Return inputs, with arrays of strings as tensors; datasets are left as they are."""

    def converted(value: Any) -> Any:
        return ops.convert_to_tensor(value) if _is_text(value) else value

    return keras.tree.map_structure(converted, x)


def _is_text(values: Any) -> bool:
    """Whether a value is an array of strings, by its type or by its first entry."""
    if not isinstance(values, np.ndarray):
        return False
    if values.dtype.kind != "O":
        return values.dtype.kind in "SU"
    return values.size > 0 and isinstance(values.flat[0], (str, bytes))


class TakesStrings:
    """Makes a Keras model take arrays of strings; mix it in before Model. `fit` is not in it."""

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Return the scores; the arguments are Keras's."""
        args, kwargs = with_strings((args, kwargs))
        return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the predictions; the arguments are Keras's."""
        args, kwargs = with_strings((args, kwargs))
        return super().predict(*args, **kwargs)

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Do one step; the arguments are Keras's."""
        args, kwargs = with_strings((args, kwargs))
        return super().train_on_batch(*args, **kwargs)

    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Return the scores of one batch; the arguments are Keras's."""
        args, kwargs = with_strings((args, kwargs))
        return super().test_on_batch(*args, **kwargs)

    def predict_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Return the predictions of one batch; the arguments are Keras's."""
        args, kwargs = with_strings((args, kwargs))
        return super().predict_on_batch(*args, **kwargs)
