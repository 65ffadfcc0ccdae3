"""Layers whose parameters may depend on a condition: the base of flows, and their networks."""

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks, constraints
from tfp_ibnn._core.backend import Tensor, matmul
from tfp_ibnn._core.serialization import ConfiguredLayer


class Conditional(ConfiguredLayer, keras.layers.Layer):
    """A layer whose trainable parameters are weight + linear(condition).

    The linear maps start at 0, where the condition makes no difference.
    """

    def __init__(self, *, condition_size: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if condition_size is not None:
            most = checks.LARGEST_SIZE
            condition_size = checks.positive_integer("condition_size", condition_size, most)
        self.condition_size = condition_size
        self._linear_maps: dict[str, keras.Variable] = {}

    def add_parameter(
        self, name: str, shape: Sequence[int], initializer: Any, conditional: bool = True, **kw: Any
    ) -> keras.Variable:
        """Add a weight that keeps its precision inside mixed-precision models.

        If it is trainable and `conditional`, add the linear map of the condition as well.
        """
        kw["autocast"] = False
        weight = self.add_weight(shape, initializer, name=name, **kw)
        if weight.trainable and conditional and self.condition_size is not None:
            size = (self.condition_size, math.prod(shape))
            kw["name"] = f"{name}_of_condition"
            self._linear_maps[name] = self.add_weight(size, "zeros", **kw)
        return weight

    def parameter(self, weight: keras.Variable, condition: Tensor | None) -> Tensor:
        """Return the value of a weight of `add_parameter`, for each row of the condition.

        A condition (..., condition_size) gives it the shape (..., *weight.shape).
        """
        value = ops.cast(weight, weight.dtype)  # read once, however often it is used
        condition = self.checked_condition(condition)
        if condition is None:
            return value
        shift = matmul(condition, ops.convert_to_tensor(self._linear_maps[weight.name]))
        return value + ops.reshape(shift, (*ops.shape(condition)[:-1], *weight.shape))

    def checked_condition(self, condition: Tensor | None) -> Tensor | None:
        """Return the condition as a tensor of this layer's type, or raise if it does not fit."""
        if condition is not None:
            condition = ops.convert_to_tensor(condition, dtype=self.dtype)
        size = self.condition_size
        shape = None if condition is None else tuple(condition.shape)
        if size is None and shape is not None:
            got = f"a tensor of shape {shape}: set condition_size={shape[-1] if shape else 1}"
            raise ValueError(f"`condition` must be None without `condition_size`; got {got}.")
        if size is not None and (not shape or shape[-1] != size):
            wanted = f"needs `condition`, which must have the shape (..., {size})"
            raise ValueError(f"A flow with condition_size={size} {wanted}; got {shape}.")
        return condition

    def get_build_config(self) -> None:
        """Leave building to the owner, so that weight paths are the same after loading."""


class Conditioner(Conditional):
    """One hidden ReLU layer, then shifts and bounded log-scales, which both start at 0.

    Weights are of order 1 and are divided by the root of their fan-in when used, so that one step
    of an adaptive optimizer moves the outputs of a wide layer no more than those of a narrow one.
    A condition shifts both biases. `limit` is the bound of |log scale|. `masks` say which inputs
    each hidden unit sees, (inputs, hidden), and which outputs it serves, (hidden, outputs).
    """

    parts = 2  # numbers per output; 1 leaves the log-scales out
    inner: "GivenNetwork | None" = None  # gives these numbers instead

    def __init__(
        self, outputs: int, hidden: int, limit: float, masks: Sequence[np.ndarray] = (), **kw: Any
    ) -> None:
        super().__init__(**kw)
        self.outputs, self.hidden, self.limit, self.masks = outputs, hidden, limit, masks

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        if self.inner is not None:
            return self.inner.build(input_shape)
        inputs, hidden, outputs = input_shape[-1], self.hidden, self.outputs
        normal, fixed = keras.initializers.RandomNormal(stddev=1.0), {"conditional": False}
        self.kernel = self.add_parameter("kernel", (inputs, hidden), normal, **fixed)
        self.bias = self.add_parameter("bias", (hidden,), "zeros")
        shape = (self.parts, hidden, outputs)
        self.output_kernel = self.add_parameter("output_kernel", shape, "zeros", **fixed)
        self.output_bias = self.add_parameter("output_bias", (self.parts, outputs), "zeros")

    def given(self, condition: Tensor | None) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Return the network as a function of its inputs alone."""
        return self if condition is None else partial(self, condition=condition)

    def call(self, inputs: Tensor, condition: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the shifts and the log-scales for `inputs` of shape (..., inputs)."""
        shift, *raw = self.numbers(inputs, condition)
        return shift, constraints.bounded(raw[0], self.limit) if raw else ops.zeros_like(shift)

    def numbers(self, inputs: Tensor, condition: Tensor | None) -> list[Tensor]:
        """Return `parts` tensors (..., outputs)."""
        if self.inner is not None:
            return ops.split(self.inner(inputs, condition), self.parts, axis=-1)
        hidden, kernel, bias = self.last_layer(inputs, condition)
        return [matmul(hidden, kernel[i]) + bias[..., i, :] for i in range(self.parts)]

    def last_layer(self, inputs: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the hidden units, and the kernel and bias of the layer after them."""
        kernel, last_kernel = map(ops.convert_to_tensor, (self.kernel, self.output_kernel))
        if self.masks:
            sees, serves = (ops.cast(mask, kernel.dtype) for mask in self.masks)
            kernel, last_kernel = kernel * sees, last_kernel * serves
        bias, last_bias = (self.parameter(b, condition) for b in (self.bias, self.output_bias))
        hidden = ops.relu(matmul(inputs, kernel / kernel.shape[0] ** 0.5) + bias)
        return hidden, last_kernel / self.hidden**0.5, last_bias


class GivenNetwork(Conditional):
    """A copy, with new weights, of the network whose config `json_of` gave.

    It sees the inputs, followed by the condition if there is one, as one vector per row.
    """

    def __init__(self, network: str, outputs: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.network = keras.saving.deserialize_keras_object(json.loads(network))
        self.outputs = outputs

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        shape = (None, input_shape[-1] + (self.condition_size or 0))
        found = tuple(self.network(keras.KerasTensor(shape, self.dtype)).shape)
        if found != (None, self.outputs):
            wanted = f"must map the shape {shape} to {(None, self.outputs)}"
            raise ValueError(f"`network` {wanted}; got {found}: change its last layer.")

    def call(self, inputs: Tensor, condition: Tensor | None = None) -> Tensor:
        if condition is not None:
            rows = ops.zeros_like(inputs[..., :1] + condition[..., :1])
            inputs = ops.concatenate([inputs + rows, condition + rows], axis=-1)
        found = self.network(ops.reshape(inputs, (-1, inputs.shape[-1])), training=False)
        return ops.cast(ops.reshape(found, (*ops.shape(inputs)[:-1], self.outputs)), self.dtype)


def json_of(network: Any) -> str:
    """Return the config of a Keras network that the user gives, or "null" for None."""
    if not isinstance(network, (dict, keras.layers.Layer, type(None))):
        wanted = "must be a Keras model or layer, such as keras.Sequential([...])"
        raise ValueError(f"`network` {wanted}; got {network!r}.")
    return json.dumps(keras.saving.serialize_keras_object(network))
