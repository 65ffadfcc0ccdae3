"""Layers whose parameters may depend on a condition: the base of flows and of their networks."""

import math
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor, matmul
from tfp_ibnn._core.serialization import ConfiguredLayer


class Conditional(ConfiguredLayer, keras.layers.Layer):
    """A layer whose trainable parameters are weight + linear(condition).

    The linear maps start at 0, where the condition makes no difference, and are divided by the root
    of its size when used: else one step of an adaptive optimizer would move a flow with a wide
    condition, such as the units of an encoder, too far, and many such flows would not converge.

    Args:
        condition_size: int or None, the size of the last axis of conditions; None, the default,
            for a layer without a condition.
        **kwargs: arguments of `keras.layers.Layer`.
    """

    def __init__(self, *, condition_size: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if condition_size is not None:
            condition_size = checks.positive_integer(
                "condition_size", condition_size, checks.LARGEST_SIZE
            )
        self.condition_size = condition_size
        self._parameters: dict[str, keras.Variable] = {}
        self._linear_maps: dict[str, keras.Variable] = {}

    __getattr__ = checks.missing_attribute

    def add_parameter(
        self,
        name: str,
        shape: Sequence[int],
        initializer: Any,
        conditional: bool = True,
        **kwargs: Any,
    ) -> keras.Variable:
        """Add a weight that keeps its precision inside mixed-precision models.

        If it is trainable and `conditional`, the linear map of the condition is added as well.

        Args:
            name: str, unique in the layer; `bijector_of` takes the value by this name.
            shape: sequence of ints, the shape of the weight.
            initializer: Keras initializer, or its name.
            conditional: bool, whether the value depends on the condition. Defaults to True.
            **kwargs: further arguments of `keras.layers.Layer.add_weight`, such as `trainable`.

        Returns:
            The weight, a `keras.Variable`.
        """
        kwargs["autocast"] = False
        weight = self.add_weight(shape, initializer, name=name, **kwargs)
        self._parameters[name] = weight
        if weight.trainable and conditional and self.condition_size is not None:
            kwargs["name"] = f"{name}_of_condition"
            size = (self.condition_size, math.prod(shape))
            self._linear_maps[name] = self.add_weight(size, "zeros", **kwargs)
        return weight

    def parameter(self, weight: keras.Variable, condition: Tensor | None) -> Tensor:
        """Return the value of a weight of `add_parameter`, for each row of the condition.

        Args:
            weight: keras.Variable, as `add_parameter` returned it.
            condition: tensor (..., condition_size); None without `condition_size`.

        Returns:
            Tensor (..., *weight.shape), or (*weight.shape) if it does not depend on a condition.
        """
        value = ops.cast(weight, weight.dtype)  # read once, however often it is used
        condition = self.checked_condition(condition)
        if weight.name not in self._linear_maps:
            return value
        linear = self._linear_maps[weight.name]
        linear = ops.convert_to_tensor(linear) / self.condition_size**0.5
        shift = matmul(condition, linear)
        rows = ops.shape(condition)[:-1]
        shift = ops.reshape(shift, (*rows, *weight.shape))
        return value + shift

    def parameters(self, condition: Tensor | None) -> dict[str, Tensor]:
        """Return the values of all weights of `add_parameter` by name, as `parameter` does."""
        return {
            name: self.parameter(weight, condition) for name, weight in self._parameters.items()
        }

    def checked_condition(self, condition: Tensor | None) -> Tensor | None:
        """Return the condition as a tensor of this layer's type, or raise if it does not fit."""
        size = self.condition_size
        shape = None
        if condition is not None:
            condition = ops.convert_to_tensor(condition, dtype=self.dtype)
            shape = tuple(condition.shape)
        if size is None and shape is not None:
            fitting_size = shape[-1] if shape else 1
            raise ValueError(
                "`condition` must be None without `condition_size`; got a tensor of shape "
                f"{shape}: set condition_size={fitting_size}."
            )
        if size is not None and (not shape or shape[-1] != size):
            raise ValueError(
                f"A flow with condition_size={size} needs `condition`, which must have the shape "
                f"(..., {size}); got {shape}."
            )
        return condition

    def get_build_config(self) -> None:
        """Leave building to the owner, so that weight paths are the same after loading."""
