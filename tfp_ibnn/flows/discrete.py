"""Flows of categories and of whole numbers: permutations, whose log-determinant is 0."""

import math
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.flows._conditional import Conditional, Conditioner, masks_before
from tfp_ibnn.flows.flow import times_matrix


class DiscreteFlow(Conditional):
    """A permutation of discrete data, y_i = _move(x_i, network_i(y_<i)), so that p(y) = p(x).

    It starts as the identity. Gradients pass roundings and choices straight through. `inverse`,
    from data to noise, takes one pass of a masked network with `hidden` units, `forward` one for
    each channel. With `reverse` each depends on those after it. `levels` is the number of
    categories, or the scale of whole numbers.

    References:
        Tran et al., arXiv 1905.10347. Hoogeboom et al., arXiv 1905.07376.
    """

    width = 1  # numbers per channel

    def __init__(self, levels: int, hidden: int = 32, reverse: bool = False, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "dtype": checks.full_precision(kwargs.get("dtype"))})
        self.levels = checks.positive_integer("levels", levels, 2**16, least=2)
        self.hidden = checks.positive_integer("hidden", hidden, checks.LARGEST_SIZE)
        self.reverse = bool(reverse)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        size = checks.channels_of(type(self).__name__, input_shape)
        self.passes = size // self.width
        if size % self.width:
            raise ValueError(f"`x` must have {self.width} numbers per channel; got {size} in all.")
        masks = masks_before(self.passes, self.hidden, self.reverse, self.width)
        options = {"condition_size": self.condition_size, "dtype": self.dtype, "name": "network"}
        self.network = Conditioner(size, self.hidden, 2.0, masks, **options)
        self.network.build(input_shape)

    def forward(self, x: Tensor, condition: Any = None) -> Tensor:
        """Map noise (..., channels * width) to data."""
        x = ops.cast(x, self.dtype)
        return ops.fori_loop(0, self.passes, lambda _, y: self._mapped(x, y, condition, False), x)

    def inverse(self, y: Tensor, condition: Any = None) -> Tensor:
        """Map data (..., channels * width) to noise."""
        return self._mapped(ops.cast(y, self.dtype), y, condition, True)

    def _mapped(self, x: Tensor, y: Tensor, condition: Any, back: bool) -> Tensor:
        network = self.network.given(self.checked_condition(condition))
        return self._move(x, *network(ops.cast(y, self.dtype) * (self.width / self.levels)), back)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class IntegerAdditive(DiscreteFlow):
    """Whole numbers: y_i = x_i + round(levels * shift_i(y_<i / levels))."""

    def _move(self, x: Tensor, first: Tensor, second: Tensor, back: bool) -> Tensor:
        shift = self.levels * first
        shift = shift + ops.stop_gradient(ops.round(shift) - shift)
        return x - shift if back else x + shift


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class ModuloAffine(DiscreteFlow):
    """Categories: y_i = (scale_i * x_i + shift_i) mod levels; the scales are coprime to levels.

    Scale and shift are those with the largest outputs of the network. x and y are one-hot vectors,
    side by side, as in `Argmax`. Cost: O(levels^3) per channel.
    """

    width = property(lambda self: self.levels)

    def _move(self, x: Tensor, first: Tensor, second: Tensor, back: bool) -> Tensor:
        places, split = np.arange(self.levels), (*ops.shape(x)[:-1], self.passes, self.levels)
        scales = [a for a in range(1, self.levels) if math.gcd(a, self.levels) == 1]
        scaled, matrices = np.outer(np.resize(scales, self.levels), places), []
        for raw, targets in ((second, scaled), (first, places[:, None] + places)):
            soft = ops.softmax(10 * ops.reshape(raw, split))  # has the gradient of the choice
            hard = ops.one_hot(ops.argmax(soft, axis=-1), self.levels, dtype=self.dtype)
            table = ops.cast(np.eye(self.levels)[targets % self.levels], self.dtype)
            matrices.append(ops.tensordot(hard + (soft - ops.stop_gradient(soft)), table, 1))
        y = ops.reshape(x, split)
        for matrix in reversed(matrices) if back else matrices:
            y = times_matrix(y, matrix, transpose=back)
        return ops.reshape(y, ops.shape(x))
