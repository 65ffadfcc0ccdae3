"""The networks of couplings and autoregressive flows: one hidden layer, or one that is given."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import constraints
from tfp_ibnn._core.backend import Tensor, matmul
from tfp_ibnn._core.checks import positive_integer
from tfp_ibnn.flows._conditional import Conditional
from tfp_ibnn.flows.flow import Flow

Masks = tuple[np.ndarray, np.ndarray]
"""(inputs, hidden): which inputs a unit sees; (hidden, outputs): which outputs it serves."""


class Conditioner(Conditional):
    """One hidden ReLU layer, then shifts and bounded log-scales, which both start at 0.

    Weights are of order 1 and are divided by the root of their fan-in when used, so that one step
    of an adaptive optimizer moves the outputs of a wide layer no more than those of a narrow one.
    A condition shifts both biases.

    Args:
        outputs: int, the number of outputs: of channels that the flow moves.
        hidden: int, units of the hidden layer.
        limit: float, bound of |log scale|.
        masks: `Masks`, or (), the default, for a dense network.
        given: `GivenNetwork` in place of the hidden layer, or None, the default.
        parts: int, numbers per output; 1 leaves the log-scales out. Defaults to 2.
        **kwargs: arguments of `Conditional`.
    """

    def __init__(
        self,
        outputs: int,
        hidden: int,
        limit: float,
        masks: Masks | tuple[()] = (),
        given: "GivenNetwork | None" = None,
        parts: int = 2,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.outputs = outputs
        self.hidden = hidden
        self.limit = limit
        self.masks = masks
        self.inner = given
        self.parts = parts

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        # Made for a given network too: it takes a seed, and the next ones would be others.
        normal = keras.initializers.RandomNormal(stddev=1.0)
        if self.inner is None:
            self._add_hidden_layer(input_shape[-1], normal)
        else:
            self.inner.build(input_shape)
            self.hidden = self.inner.features
        self.output_kernel = self.add_parameter(
            "output_kernel", (self.parts, self.hidden, self.outputs), "zeros", conditional=False
        )
        self.output_bias = self.add_parameter("output_bias", (self.parts, self.outputs), "zeros")

    def _add_hidden_layer(self, inputs: int, normal: keras.initializers.Initializer) -> None:
        self.kernel = self.add_parameter(
            "kernel",
            (inputs, self.hidden),
            normal,
            conditional=False,
        )
        # With biases at 0 every ReLU would have its kink at 0; with a wider range the biases alone
        # would decide which units are on.
        limit = inputs**-0.5
        self.bias = self.add_parameter(
            "bias",
            (self.hidden,),
            keras.initializers.RandomUniform(-limit, limit),
        )

    def with_condition(self, condition: Tensor | None) -> Callable[[Tensor], Any]:
        """Return the network as a function of its inputs alone."""
        if condition is None:
            return self
        return partial(self, condition=condition)

    def call(self, inputs: Tensor, condition: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the shifts and the log-scales, (..., outputs) each.

        Args:
            inputs: tensor (..., inputs).
            condition: tensor (..., condition_size), or None, the default.

        Returns:
            The shifts and the log-scales; the latter are 0 where there is one number per output.
        """
        hidden = self.hidden_units(inputs, condition)
        kernel, bias = self.last_layer(condition)
        shift = matmul(hidden, kernel[0])
        shift = shift + bias[..., 0, :]
        if self.parts == 1:
            return shift, ops.zeros_like(shift)
        log_scale = matmul(hidden, kernel[1])
        log_scale = log_scale + bias[..., 1, :]
        return shift, constraints.bounded(log_scale, self.limit)

    def hidden_units(self, inputs: Tensor, condition: Tensor | None) -> Tensor:
        """Return the hidden units (..., hidden) of inputs (..., inputs).

        Args:
            inputs: tensor (..., inputs).
            condition: tensor (..., condition_size), or None.

        Returns:
            Tensor (..., hidden).
        """
        if self.inner is not None:
            return self.inner(inputs, condition)
        kernel = ops.convert_to_tensor(self.kernel)
        if self.masks:
            sees, _ = self.masks
            kernel = kernel * ops.cast(sees, kernel.dtype)
        kernel = kernel / kernel.shape[0] ** 0.5
        bias = self.parameter(self.bias, condition)
        return ops.relu(matmul(inputs, kernel) + bias)

    def last_layer(self, condition: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the kernel (parts, hidden, outputs) and the bias (..., parts, outputs)."""
        kernel = ops.convert_to_tensor(self.output_kernel)
        kernel = kernel / self.hidden**0.5
        if self.masks:
            _, serves = self.masks
            kernel = kernel * ops.cast(serves, kernel.dtype)
        return kernel, self.parameter(self.output_bias, condition)


def masks_before(
    channels: int, hidden: int, reverse: bool, width: int = 1, spread: bool = True
) -> Masks:
    """Return masks of a `Conditioner` whose outputs depend on the channels before their own.

    Args:
        channels: int, the number of channels.
        hidden: int, units of the hidden layer.
        reverse: bool, let outputs depend on the channels after their own instead.
        width: int, numbers per channel. Defaults to 1.
        spread: bool, spread hidden units, if fewer than channels, over all of these; otherwise they
            see the first ones only. Defaults to True.

    Returns:
        Two masks, (channels * width, hidden) and (hidden, channels * width).
    """
    order = np.repeat(np.arange(channels), width)
    if reverse:
        order = order[::-1]
    # A hidden unit of degree d sees the channels up to d and serves those after d.
    degrees = np.arange(hidden) % max(1, channels - 1)
    if spread and hidden < channels - 1:
        degrees = np.linspace(0, channels - 2, hidden)
        degrees = np.round(degrees)
    sees = order[:, None] <= degrees
    serves = order > degrees[:, None]
    return sees, serves


class GivenNetwork(Conditional):
    """A copy, with new weights, of the network whose config `network_to_json` gave.

    It runs as in inference, on the last `ndims` axes of the inputs, with the condition, if there is
    one, as further channels.

    Args:
        network: str, the network's config as JSON.
        ndims: int, how many of the last axes the network sees at once. Defaults to 1.
        **kwargs: arguments of `Conditional`.
    """

    def __init__(self, network: str, ndims: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.network = keras.saving.deserialize_keras_object(json.loads(network))
        self.ndims = ndims

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        *axes, channels = input_shape[-self.ndims :]
        inputs = channels + (self.condition_size or 0)
        shape = (None, *axes, inputs)
        outputs = self.network(keras.KerasTensor(shape, self.dtype))
        output_shape = tuple(outputs.shape)
        if output_shape[:-1] != shape[:-1]:
            raise ValueError(
                f"`network` must map the shape {shape} to {(*shape[:-1], 'features')}; got "
                f"{output_shape}."
            )
        self.features = output_shape[-1]

    def call(self, inputs: Tensor, condition: Tensor | None = None) -> Tensor:
        """Return features (..., features).

        Args:
            inputs: tensor (..., inputs).
            condition: tensor (..., condition_size), or None, the default.

        Returns:
            Tensor (..., features), of the layer's own type.
        """
        if condition is not None:
            # Adding zeros of the common shape gives both the same leading axes.
            leading_axes = inputs[..., :1] + condition[..., :1]
            zeros = ops.zeros_like(leading_axes)
            parts = [inputs + zeros, condition + zeros]
            inputs = ops.concatenate(parts, axis=-1)
        shape = ops.shape(inputs)
        seen_at_once = shape[-self.ndims :]
        batch = ops.reshape(inputs, (-1, *seen_at_once))
        features = self.network(batch, training=False)
        rows_and_features = (*shape[:-1], self.features)
        features = ops.reshape(features, rows_and_features)
        return ops.cast(features, self.dtype)


class NetworkFlow(Flow):
    """Base of flows that take a Keras network in place of their hidden layer.

    Args:
        network: Keras layer or model, or None, the default, for a hidden layer of the flow's own.
        event_ndims: int, how many of the last axes the network sees at once. Defaults to 1.
        **kwargs: arguments of `Flow`.
    """

    def __init__(
        self, *, network: keras.layers.Layer | None = None, event_ndims: int = 1, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self._network = network_to_json(network)
        self.event_ndims = positive_integer("event_ndims", event_ndims)

    def copy_network(self) -> GivenNetwork | None:
        """Return a copy of the network, unbuilt; None if there is none."""
        if self._network is None:
            return None
        return GivenNetwork(
            self._network,
            self.event_ndims,
            condition_size=self.condition_size,
            dtype=self.dtype,
            name="given",
        )

    def get_config(self) -> dict[str, Any]:
        network = None
        if self._network is not None:
            network = json.loads(self._network)
        return {**super().get_config(), "network": network}


def network_to_json(network: Any) -> str | None:
    """Return the config of a Keras network, or of its config, as JSON; None for None."""
    if network is None:
        return None
    if not isinstance(network, (dict, keras.layers.Layer)):
        raise ValueError(
            "`network` must be a Keras model or layer, such as keras.Sequential([...]); got "
            f"{network!r}."
        )
    return json.dumps(keras.saving.serialize_keras_object(network))
