"""The layer whose parameters may depend on a condition: the base of flows and of their networks."""

import math
from typing import Any

import keras
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor, matmul
from tfp_ibnn._core.serialization import ConfiguredLayer

__all__ = ["Conditional"]


class Conditional(ConfiguredLayer, keras.layers.Layer):
    """A layer whose trainable parameters are weight + linear(condition).

    The linear maps start at 0, where the condition makes no difference.

    Args:
        condition_size: size of the last axis of conditions; None for a layer that takes none.
    """

    arguments = ("condition_size",)

    def __init__(self, *, condition_size: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if condition_size is not None:
            condition_size = checks.positive_integer(
                "condition_size", condition_size, checks.LARGEST_SIZE
            )
        self.condition_size = condition_size
        self._linear_maps: dict[str, keras.Variable] = {}

    def add_parameter(
        self,
        name: str,
        shape: tuple[int, ...],
        initializer: Any,
        trainable: bool = True,
        dtype: str | None = None,
        conditional: bool = True,
        **kwargs: Any,
    ) -> keras.Variable:
        """Add a weight that keeps its precision inside mixed-precision models.

        If it is trainable and `conditional`, add the linear map of the condition as well.
        """
        weight = self.add_weight(
            shape=shape,
            initializer=initializer,
            trainable=trainable,
            dtype=dtype,
            autocast=False,
            name=name,
            **kwargs,
        )
        if trainable and conditional and self.condition_size is not None:
            self._linear_maps[name] = self.add_weight(
                shape=(self.condition_size, math.prod(shape)),
                initializer="zeros",
                dtype=dtype,
                autocast=False,
                name=f"{name}_of_condition",
            )
        return weight

    def parameter(self, weight: keras.Variable, condition: Tensor | None) -> Tensor:
        """Return the value of a weight of `add_parameter`, for each row of the condition.

        Args:
            weight: of any shape.
            condition: (..., condition_size), which gives the value the shape (..., *weight.shape).
        """
        value = ops.convert_to_tensor(weight)
        condition = self.checked_condition(condition)
        if condition is None:
            return value
        shift = matmul(condition, ops.convert_to_tensor(self._linear_maps[weight.name]))
        return value + ops.reshape(shift, (*ops.shape(condition)[:-1], *weight.shape))

    def checked_condition(self, condition: Tensor | None) -> Tensor | None:
        """Return the condition as a tensor of this layer's type, or raise if it does not fit."""
        size = self.condition_size
        if condition is None:
            if size is not None:
                raise ValueError(
                    f"A flow with condition_size={size} needs `condition`, a tensor of shape "
                    f"(..., {size}); got None."
                )
            return None
        condition = ops.convert_to_tensor(condition, dtype=self.dtype)
        shape = tuple(condition.shape)
        if size is None:
            raise ValueError(
                "`condition` must be None for a flow without `condition_size`; got a tensor of "
                f"shape {shape}. Make the flow with condition_size={shape[-1] if shape else 1}."
            )
        if not shape or shape[-1] != size:
            raise ValueError(f"`condition` must have the shape (..., {size}); got {shape}.")
        return condition
