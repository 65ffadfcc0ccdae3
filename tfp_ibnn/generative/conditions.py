"""What the densities of `FlowDensity` are conditioned on: vectors, or a model that gives them."""

from typing import Any

import keras
import numpy as np

from tfp_ibnn._core import checks
from tfp_ibnn.data.examples import check_finite
from tfp_ibnn.generative.unsupervised import is_nested


def size_of_condition(condition: Any) -> int | None:
    """Return the size of the vectors that flows are conditioned on.

    Args:
        condition: that size; a Keras model that gives such vectors; or None.

    Returns:
        The size, or None if there is no condition.

    Raises:
        ValueError: if it is none of these, or a model whose output shape is not known.
    """
    if condition is None:
        return None
    if not isinstance(condition, keras.Model):
        return checks.positive_integer("condition", condition, checks.LARGEST_SIZE)
    if not (condition.built and hasattr(condition, "output_shape")):
        raise ValueError(
            "`condition` must be a model of known shape, as "
            f"keras.Sequential([keras.Input((3,)), ...]) is; got {condition.name!r}."
        )
    return condition.output_shape[-1]


def checked_condition(values: Any, condition: Any, count: int) -> Any:
    """Return the values of a condition as arrays.

    Args:
        values: vectors (count, size), or inputs of a model in any nested structure.
        condition: the size, or the model.
        count: how many examples there are.

    Returns:
        The values; a list of numbers as an array.

    Raises:
        ValueError: if shapes are wrong, or values not finite.
    """
    if is_nested(values):
        values = np.asarray(values)
    is_vector = not isinstance(condition, keras.Model)
    for part in keras.tree.flatten(values):
        shape = np.shape(part)
        has_count = shape[:1] == (count,)
        if not has_count or (is_vector and shape[1:] != (condition,)):
            raise ValueError(
                "`condition` must have the shape "
                f"({count}, {condition if is_vector else '...'}); got {shape}."
            )
        check_finite(np.asarray(part), "values of `condition`")
    return values
