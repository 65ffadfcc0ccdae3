"""Flows of categories and of whole numbers: permutations, whose log-determinant is 0."""

import math
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.flows._conditional import Conditional
from tfp_ibnn.flows._networks import Conditioner, masks_before
from tfp_ibnn.flows._rows import times_matrix

_SHARPNESS = 10
"""By how much outputs of a network are multiplied before the softmax that passes gradients."""


class DiscreteFlow(Conditional):
    """A permutation of discrete data, y_i = move(x_i, network_i(y_<i)), so that p(y) = p(x).

    It starts as the identity. Gradients pass roundings and choices straight through. `inverse`,
    from data to noise, takes one pass of a masked network, `forward` one for each channel.

    Args:
        levels: int, 2 or more, the number of categories, or the scale of whole numbers.
        hidden: positive int, units of the network's hidden layer. Defaults to 32.
        reverse: bool, let each channel depend on those after it. Defaults to False.
        **kwargs: arguments of `keras.layers.Layer`, and `condition_size` as that of `Flow`.

    References:
        Tran et al., arXiv 1905.10347. Hoogeboom et al., arXiv 1905.07376.
    """

    width = 1  # numbers per channel

    def __init__(self, levels: int, hidden: int = 32, reverse: bool = False, **kwargs: Any) -> None:
        kwargs["dtype"] = checks.full_precision(kwargs.get("dtype"))
        super().__init__(**kwargs)
        self.levels = checks.positive_integer("levels", levels, 2**16, least=2)
        self.hidden = checks.positive_integer("hidden", hidden, checks.LARGEST_SIZE)
        self.reverse = bool(reverse)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        size = checks.channels_of(type(self).__name__, input_shape)
        if size % self.width:
            raise ValueError(f"`x` must have {self.width} numbers per channel; got {size} in all.")
        self.channels = size // self.width
        self.network = Conditioner(
            outputs=size,
            hidden=self.hidden,
            limit=2.0,
            masks=masks_before(self.channels, self.hidden, self.reverse, self.width),
            condition_size=self.condition_size,
            dtype=self.dtype,
            name="network",
        )
        self.network.build(input_shape)

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        """Map noise to data.

        Args:
            x: tensor (..., channels * width).
            condition: tensor (..., condition_size); None, the default, without `condition_size`.

        Returns:
            Tensor (..., channels * width).
        """
        x = ops.cast(x, self.dtype)

        def find_next_channel(_: Tensor, y: Tensor) -> Tensor:
            shift, scale = self._outputs(y, condition)
            return self._move(x, shift, scale)

        return ops.fori_loop(0, self.channels, find_next_channel, x)

    def inverse(self, y: Tensor, condition: Tensor | None = None) -> Tensor:
        """Map data to noise.

        Args:
            y: tensor (..., channels * width).
            condition: tensor (..., condition_size); None, the default, without `condition_size`.

        Returns:
            Tensor (..., channels * width).
        """
        y = ops.cast(y, self.dtype)
        shift, scale = self._outputs(y, condition)
        return self._move_back(y, shift, scale)

    def _outputs(self, y: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what the network says of y, scaled to order 1: for shifts, and for scales."""
        network = self.network.with_condition(self.checked_condition(condition))
        return network(y * (self.width / self.levels))

    def _move(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define `_move`.")

    def _move_back(self, y: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define `_move_back`.")


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class IntegerAdditive(DiscreteFlow):
    """Whole numbers: y_i = x_i + round(levels * shift_i(y_<i / levels)).

    The arguments are those of `DiscreteFlow`; `levels` is the scale of the numbers.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> flow = ibnn.flows.IntegerAdditive(levels=256)
        >>> flow.build((None, 2))
        >>> flow.inverse(keras.ops.array([[3.0, 7.0]])).shape[-1]
        2
    """

    def _move(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return x + self._shift(shift)

    def _move_back(self, y: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return y - self._shift(shift)

    def _shift(self, output: Tensor) -> Tensor:
        shift = self.levels * output
        return shift + ops.stop_gradient(ops.round(shift) - shift)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class ModuloAffine(DiscreteFlow):
    """Categories: y_i = (scale_i * x_i + shift_i) mod levels; the scales are coprime to levels.

    Scale and shift are those with the largest outputs of the network. x and y are one-hot vectors,
    side by side, as in `Argmax`. Cost: O(levels^3) per channel. The arguments are those of
    `DiscreteFlow`; `levels` is the number of categories.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> flow = ibnn.flows.ModuloAffine(levels=3)
        >>> flow.build((None, 2 * 3))
        >>> y = keras.ops.reshape(keras.ops.one_hot([[1, 2]], 3), (1, 6))
        >>> bool(keras.ops.all(flow.forward(flow.inverse(y)) == y))
        True
    """

    @property
    def width(self) -> int:
        """Numbers per channel: one for each category."""
        return self.levels

    def _move(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        scaling = self._scaling(scale)
        shifting = self._shifting(shift)
        y = self._apart(x)
        y = times_matrix(y, scaling)
        y = times_matrix(y, shifting)
        return ops.reshape(y, ops.shape(x))

    def _move_back(self, y: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        scaling = self._scaling(scale)
        shifting = self._shifting(shift)
        # The matrices are permutations, whose inverses are their transposes.
        x = self._apart(y)
        x = times_matrix(x, shifting, transpose=True)
        x = times_matrix(x, scaling, transpose=True)
        return ops.reshape(x, ops.shape(y))

    def _apart(self, x: Tensor) -> Tensor:
        """Return x (..., channels * levels) as (..., channels, levels)."""
        *rows, _ = ops.shape(x)
        shape = (*rows, self.channels, self.levels)
        return ops.reshape(x, shape)

    def _scaling(self, outputs: Tensor) -> Tensor:
        """Return the permutations x -> scale * x mod levels, by the chosen scales."""
        scales = []
        for scale in range(1, self.levels):
            if math.gcd(scale, self.levels) == 1:
                scales.append(scale)
        # Repeated, so that each output stands for one.
        scales = np.resize(scales, self.levels)
        places = np.arange(self.levels)
        targets = np.outer(scales, places)
        return self._chosen(outputs, targets)

    def _shifting(self, outputs: Tensor) -> Tensor:
        """Return the permutations x -> x + shift mod levels, by the chosen shifts."""
        places = np.arange(self.levels)
        targets = places[:, None] + places
        return self._chosen(outputs, targets)

    def _chosen(self, outputs: Tensor, targets: np.ndarray) -> Tensor:
        """Return the permutation matrices (..., channels, levels, levels) of largest output.

        Row k of `targets` (levels, levels) says where choice k takes each category, mod levels.
        """
        outputs = self._apart(outputs)
        soft = ops.softmax(_SHARPNESS * outputs)  # has the gradient of the choice
        largest = ops.argmax(soft, axis=-1)
        hard = ops.one_hot(largest, self.levels, dtype=self.dtype)
        no_value = soft - ops.stop_gradient(soft)
        choice = hard + no_value
        eye = np.eye(self.levels)
        matrices = eye[targets % self.levels]
        matrices = ops.cast(matrices, self.dtype)
        return ops.tensordot(choice, matrices, 1)
