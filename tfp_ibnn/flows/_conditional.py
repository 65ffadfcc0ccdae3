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

    The linear maps start at 0, where the condition makes no difference, and are divided by the root
    of its size when used: else one step of an adaptive optimizer would move a flow whose condition
    is wide, such as the units of an encoder, too far, and many such flows would not settle.
    """

    def __init__(self, *, condition_size: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if condition_size is not None:
            most = checks.LARGEST_SIZE
            condition_size = checks.positive_integer("condition_size", condition_size, most)
        self.condition_size = condition_size
        self._parameters: dict[str, keras.Variable] = {}
        self._linear_maps: dict[str, keras.Variable] = {}

    __getattr__ = checks.missing_attribute

    def add_parameter(
        self, name: str, shape: Sequence[int], initializer: Any, conditional: bool = True, **kw: Any
    ) -> keras.Variable:
        """Add a weight that keeps its precision inside mixed-precision models.

        If it is trainable and `conditional`, add the linear map of the condition as well.
        """
        kw["autocast"] = False
        weight = self._parameters[name] = self.add_weight(shape, initializer, name=name, **kw)
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
        linear = ops.convert_to_tensor(self._linear_maps[weight.name])
        shift = matmul(condition, linear / self.condition_size**0.5)
        return value + ops.reshape(shift, (*ops.shape(condition)[:-1], *weight.shape))

    def parameters(self, condition: Tensor | None) -> dict[str, Tensor]:
        """Return the values of all weights of `add_parameter` by name, as `parameter` does."""
        return {name: self.parameter(w, condition) for name, w in self._parameters.items()}

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
    each hidden unit sees, (inputs, hidden), and which outputs it serves, (hidden, outputs). There
    are `parts` numbers per output; 1 leaves the log-scales out.
    """

    def __init__(
        self,
        outputs: int,
        hidden: int,
        limit: float,
        masks: Sequence[np.ndarray] = (),
        given: "GivenNetwork | None" = None,
        parts: int = 2,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.outputs, self.hidden, self.limit, self.masks = outputs, hidden, limit, masks
        self.inner, self.parts = given, parts

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        normal, fixed = keras.initializers.RandomNormal(stddev=1.0), {"conditional": False}
        if self.inner is None:
            shape = (input_shape[-1], self.hidden)
            self.kernel = self.add_parameter("kernel", shape, normal, **fixed)
            end = shape[0] ** -0.5  # wider biases would decide alone which units are on
            spread = keras.initializers.RandomUniform(-end, end)  # or all kinks were at 0
            self.bias = self.add_parameter("bias", (self.hidden,), spread)
        else:
            self.inner.build(input_shape)
            self.hidden = self.inner.features
        shape = (self.parts, self.hidden, self.outputs)
        self.output_kernel = self.add_parameter("output_kernel", shape, "zeros", **fixed)
        self.output_bias = self.add_parameter("output_bias", shape[::2], "zeros")

    def given(self, condition: Tensor | None) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Return the network as a function of its inputs alone."""
        return self if condition is None else partial(self, condition=condition)

    def call(self, inputs: Tensor, condition: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the shifts and the log-scales for `inputs` of shape (..., inputs)."""
        hidden, kernel, bias = self.last_layer(inputs, condition)
        shift, *raw = (matmul(hidden, kernel[i]) + bias[..., i, :] for i in range(self.parts))
        return shift, constraints.bounded(raw[0], self.limit) if raw else ops.zeros_like(shift)

    def last_layer(self, inputs: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the hidden units, and the kernel and bias of the layer after them."""
        last_kernel = ops.convert_to_tensor(self.output_kernel) / self.hidden**0.5
        last_bias = self.parameter(self.output_bias, condition)
        if self.inner is not None:
            return self.inner(inputs, condition), last_kernel, last_bias
        kernel = ops.convert_to_tensor(self.kernel)
        if self.masks:
            sees, serves = (ops.cast(mask, kernel.dtype) for mask in self.masks)
            kernel, last_kernel = kernel * sees, last_kernel * serves
        bias = self.parameter(self.bias, condition)
        hidden = ops.relu(matmul(inputs, kernel / kernel.shape[0] ** 0.5) + bias)
        return hidden, last_kernel, last_bias


def masks_before(
    channels: int, hidden: int, reverse: bool, width: int = 1, spread: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Return masks of a `Conditioner` whose outputs depend on the channels before their own."""
    order = np.repeat(np.arange(channels), width)[:: -1 if reverse else 1]
    # A hidden unit of degree d sees the channels up to d and serves those after d.
    degrees = np.arange(hidden) % max(1, channels - 1)
    if spread and hidden < channels - 1:
        degrees = np.round(np.linspace(0, channels - 2, hidden))
    return order[:, None] <= degrees, order > degrees[:, None]


class GivenNetwork(Conditional):
    """A copy, with new weights, of the network whose config `json_of` gave, as in inference.

    It sees the last `ndims` axes of the inputs, with the condition, if any, as further channels.
    """

    def __init__(self, network: str, ndims: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.network = keras.saving.deserialize_keras_object(json.loads(network))
        self.ndims = ndims

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        *axes, channels = input_shape[-self.ndims :]
        shape = (None, *axes, channels + (self.condition_size or 0))
        found = tuple(self.network(keras.KerasTensor(shape, self.dtype)).shape)
        if found[:-1] != shape[:-1]:
            wanted = f"must map the shape {shape} to {(*shape[:-1], 'features')}"
            raise ValueError(f"`network` {wanted}; got {found}.")
        self.features = found[-1]

    def call(self, inputs: Tensor, condition: Tensor | None = None) -> Tensor:
        if condition is not None:
            rows = ops.zeros_like(inputs[..., :1] + condition[..., :1])
            inputs = ops.concatenate([inputs + rows, condition + rows], axis=-1)
        shape = ops.shape(inputs)
        found = self.network(ops.reshape(inputs, (-1, *shape[-self.ndims :])), training=False)
        return ops.cast(ops.reshape(found, (*shape[:-1], self.features)), self.dtype)


def json_of(network: Any) -> str | None:
    """Return the config of a Keras network that the user gives, if any."""
    if not isinstance(network, (dict, keras.layers.Layer, type(None))):
        wanted = "must be a Keras model or layer, such as keras.Sequential([...])"
        raise ValueError(f"`network` {wanted}; got {network!r}.")
    return network and json.dumps(keras.saving.serialize_keras_object(network))
