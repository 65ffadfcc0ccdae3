"""What the models of data share: Keras's verbs for x alone, without targets."""

from typing import Any, Self

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import backend, keras_internals
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.serialization import naming_unknown_classes
from tfp_ibnn.data.datasets import is_dataset


class Unsupervised(keras.Model):
    """A Keras model of x alone, trained by a loss per example; its `_checked` checks arrays."""

    condition = None

    def fit(self, x: Any = None, y: Any = None, **kwargs: Any) -> keras.callbacks.History:
        """Train as Keras does, without targets; arrays are checked.

        Args:
            x: data (examples, ...), or a pair of data and a condition, or a dataset of such.
            y: None: there are no targets.
            **kwargs: those of `keras.Model.fit`; `validation_data` is like `x`, and may have
                weights at the end.

        Returns:
            The history, as Keras's `fit` does.
        """
        weights = self._targets(y, **kwargs)
        x = self.checked_data(x)
        validation = _parts(kwargs.get("validation_data"))
        are_arrays = bool(validation) and validation[0] is not None
        if are_arrays and len(validation) <= 3:
            kwargs["validation_data"] = self._validation(*validation)
        if isinstance(x, (tuple, np.ndarray)):
            self._begin(x)
        variables = list(self.variables)
        if self.compiled:
            variables += self.optimizer.variables
        with keras_internals.values_kept(variables):
            return super().fit(x, weights, **kwargs)

    def _validation(
        self, x: Any, condition: Any = None, weights: Any = None
    ) -> tuple[Any, Any, Any]:
        """Return checked arrays as Keras takes them, whose weights are in the place of targets.

        They come as (x, condition, weights), or as in Keras ((x, condition), None, weights).
        """
        if condition is not None:
            x = (x, condition)
        return self.checked_data(x), weights, weights

    def evaluate(self, x: Any = None, y: Any = None, **kwargs: Any) -> Any:
        """Score as Keras does, without targets; arrays are checked.

        Args:
            x: data, as for `fit`.
            y: None: there are no targets.
            **kwargs: those of `keras.Model.evaluate`.

        Returns:
            The loss and the metrics, as Keras's `evaluate` does.
        """
        x = self.checked_data(x)
        weights = self._targets(y, **kwargs)
        with keras_internals.values_kept(self.variables):
            return super().evaluate(x, weights, **kwargs)

    def predict(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Predict as Keras does; arrays are checked."""
        x = self.checked_data(x)
        with keras_internals.values_kept(self.variables):
            return super().predict(x, *args, **kwargs)

    def _targets(self, y: Any, sample_weight: Any = None, **_: Any) -> Any:
        """Return the weights: Keras drops those of data without targets."""
        if y is not None and not np.array_equal(y, sample_weight):
            raise ValueError("There are no targets: give `x`, or `(x, condition)`, alone.")
        compiled = self.get_compile_config() or {}
        if any(compiled.get(name) for name in ("loss", "metrics", "weighted_metrics")):
            raise ValueError("Losses and metrics are the model's own: write `compile(optimizer)`.")
        return sample_weight

    def checked_data(self, x: Any) -> Any:
        """Return arrays as the model takes them, or raise; datasets are left as they are.

        Args:
            x: data (examples, ...), or a pair of data and a condition, or a dataset.
        """
        parts = _parts(x)
        if parts is None:
            return x
        parts = [part for part in parts if part is not None]
        if self.condition is None and len(parts) != 1:
            raise ValueError(
                "This model takes `x` alone, without condition or targets; got "
                f"{len(parts)} array(s)."
            )
        if self.condition is not None and len(parts) != 2:
            raise ValueError(
                f"This model needs a `condition`: `(x, condition)`; got {len(parts)} array(s)."
            )
        return self._checked(*parts)

    def _begin(self, data: Any) -> None:
        """Take what is needed from the arrays of a training."""

    def example_losses(self, outputs: Any) -> Tensor:
        """Return the losses (examples,) from what `call` gives: log p(x), by default."""
        return -outputs

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Tensor:
        """Return the mean of the losses, times their weights if any, and what layers add to it.

        Args:
            x: the batch, which is not used.
            y: None: there are no targets.
            y_pred: what `call` gives.
            sample_weight: (examples,), or None.

        Returns:
            The loss, a scalar, of this replica's share.
        """
        losses = self.example_losses(y_pred)
        if sample_weight is not None:
            weight = ops.cast(sample_weight, losses.dtype)
            losses *= ops.reshape(weight, ops.shape(losses))
        total = backend.mean(losses) + sum(self.losses)
        return total / backend.replica_count()

    @classmethod
    @naming_unknown_classes()
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Self:
        return cls(**keras.saving.deserialize_keras_object(config, custom_objects))


def is_nested(x: Any) -> bool:
    """Whether x is a list of numbers, or of such lists, and not of arrays."""
    if not isinstance(x, list):
        return False
    return all(isinstance(part, (list, float, int)) for part in x)


def _parts(x: Any) -> tuple | None:
    """Return the arrays that a user gives as one or several, or None for a dataset."""
    if x is None or hasattr(x, "shape") or is_nested(x):
        return (x,)
    if isinstance(x, (tuple, list)):
        return tuple(x)
    return None


def as_numbers(x: Any, dtype: str) -> np.ndarray:
    """Return data as an array.

    Args:
        x: an array, or what NumPy makes one of.
        dtype: of the array.

    Returns:
        An array.

    Raises:
        ValueError: If it is a dataset, which NumPy may take for an array of another shape.
    """
    if is_dataset(x):
        raise ValueError(
            f"`x` must be an array; got a {type(x).__name__}. `fit`, `evaluate` and `predict` take "
            "datasets."
        )
    return np.asarray(x, dtype=dtype)
