"""Arrays of strings: Keras takes tensors, and few of numpy's arrays."""

from typing import Any

import keras
import numpy as np
from keras import ops


def with_strings(x: Any) -> Any:
    """Return inputs, with arrays of strings as tensors; datasets are left as they are."""
    return keras.tree.map_structure(lambda a: ops.convert_to_tensor(a) if _is_text(a) else a, x)


def _is_text(values: Any) -> bool:
    if not isinstance(values, np.ndarray):
        return False
    is_object = values.dtype.kind == "O" and values.size > 0
    return values.dtype.kind in "SU" or (is_object and isinstance(values.flat[0], (str, bytes)))


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
