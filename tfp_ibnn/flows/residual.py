"""Residual flow: the identity plus a contraction."""

import math
from typing import Any, ClassVar

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import SeedGenerator, Tensor, fori_loop, matmul, normal, tanh
from tfp_ibnn.flows.flow import Flow, FlowBijector, like_rows, total

_SURE = 4  # terms of a series of random length that are always there


class ResidualBijector(FlowBijector):
    """y = x + tanh(x A + b) C, where the norms of A and C have a product of at most `lipschitz`.

    Args:
        a: (channels, hidden)
        b: (..., hidden)
        c: (hidden, channels)
        lipschitz: below 1.
        key: of the noise of the log-determinant; None if it is to be exact.
    """

    parameter_ndims: ClassVar[dict[str, int]] = {"a": 2, "b": 1, "c": 2}

    def _inverse(self, y: Tensor) -> Tensor:
        y = like_rows(y, self.b)
        times = math.ceil(math.log(1e-8) / math.log(self.lipschitz))
        return fori_loop(0, times, lambda _, x: y - matmul(self._hidden(x), self.c), y)

    def forward_and_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self._hidden(x)
        log_det = self._log_det if self.key is None else self._estimate
        return x + matmul(hidden, self.c), log_det(1 - hidden * hidden, x)

    def _hidden(self, x: Tensor) -> Tensor:
        return tanh(matmul(x, self.a) + self.b)

    def _log_det(self, slopes: Tensor, x: Tensor) -> Tensor:
        channels, units = self.a.shape
        if channels <= units:
            jacobian = matmul(self.a * slopes[..., None, :], self.c)
        else:  # by Sylvester's identity
            jacobian = slopes[..., None] * matmul(self.c, self.a)
        jacobian = jacobian + ops.cast(np.eye(min(channels, units)), x.dtype)
        # XLA compiles no determinants on TensorFlow.
        square = matmul(jacobian, ops.swapaxes(jacobian, -1, -2))
        return total(ops.log(ops.diagonal(ops.cholesky(square), axis1=-2, axis2=-1)))

    def _estimate(self, slopes: Tensor, x: Tensor) -> Tensor:
        """Return log det(I + J) = -sum_k tr((-J)^k) / k, with v'(-J)^k v for a trace, v signs.

        The term k > _SURE is there with the probability lipschitz^(k - _SURE), and divided by it.
        The gradient is that of v'MJv, where M is the sum of the same (-J)^k, from k = 0.
        """
        signs = ops.sign(normal(ops.shape(like_rows(x, slopes)), x.dtype, self.key))
        held = [ops.stop_gradient(part) for part in (self.a, slopes, self.c)]
        # Half the square of two normal numbers is exponential; its whole part is geometric.
        chance = 0.5 * ops.sum(ops.square(normal((2,), x.dtype, self.key + 1)))
        terms = _SURE + ops.cast(chance / -math.log(self.lipschitz), "int32")

        def add(k: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            power, powers, log_det = state
            power = -_product(power, *held)
            power = ops.where(k > _SURE, power / self.lipschitz, power)
            return power, powers + power, log_det - total(power * signs) / ops.cast(k, x.dtype)

        start = signs, signs, ops.zeros_like(signs[..., 0])
        _, powers, log_det = map(ops.stop_gradient, fori_loop(1, terms + 1, add, start))
        surrogate = total(_product(powers, self.a, slopes, self.c) * signs)
        return log_det + surrogate - ops.stop_gradient(surrogate)


def _product(v: Tensor, a: Tensor, slopes: Tensor, c: Tensor) -> Tensor:
    """Return v'J, where J is the Jacobian of tanh(x A + b) C."""
    return matmul(matmul(v, a) * slopes, c)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Residual(Flow):
    """Residual flow (i-ResNet): y = x + g(x), g(x) = tanh(x A + b) C, of Lipschitz constant < 1.

    A and C are divided by bounds of their spectral norms that are above 1. C starts at 0: the
    identity. Always invertible, by fixed point iteration: 175 passes for 0.9, which a gradient
    keeps in memory. Exact log-determinant: O(min(channels, hidden)^3) per draw; a random one: 4 +
    lipschitz / (1 - lipschitz) passes on average.

    Args:
        hidden: units of the hidden layer.
        lipschitz: bound of the Lipschitz constant of g, below 1.
        log_det: "exact", or "unbiased" for a random one, by a series of random length.

    References:
        Behrmann et al., Invertible Residual Networks, arXiv 1811.00995. Chen et al., Residual Flows
        for Invertible Generative Modeling, arXiv 1906.02735.
    """

    def __init__(
        self, hidden: int = 32, lipschitz: float = 0.9, log_det: str = "exact", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.hidden = checks.positive_integer("hidden", hidden, checks.LARGEST_SIZE)
        self.lipschitz = checks.probability("lipschitz", lipschitz)
        self.log_det = checks.one_of("log_det", log_det, ("exact", "unbiased"))
        self.exact_log_det = log_det == "exact"
        self.seed_generator = None if self.exact_log_det else SeedGenerator()

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        shape, fixed = (self.channels, self.hidden), {"conditional": False}
        spread = keras.initializers.RandomNormal(stddev=1.0)
        self.kernel = self.add_parameter("kernel", shape, spread, **fixed)
        self.bias = self.add_parameter("bias", shape[1:], "zeros")
        self.output_kernel = self.add_parameter("output_kernel", shape[::-1], "zeros", **fixed)

    def bijector(self, condition: Tensor | None = None) -> ResidualBijector:
        a, c = _contraction(self.kernel), self.lipschitz * _contraction(self.output_kernel)
        b = self.parameter(self.bias, condition)
        return ResidualBijector(a=a, b=b, c=c, lipschitz=self.lipschitz, key=self.key())


def _contraction(weight: keras.Variable) -> Tensor:
    """Return a matrix, made smaller if its spectral norm may be above 1.

    The norm is at most tr(G^n)^(1 / 2n), G = W'W, n = 32, which has a gradient everywhere and is
    too large by a factor of at most rank^(1 / 2n).
    """
    matrix = ops.cast(weight, weight.dtype) / weight.shape[0] ** 0.5
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else ops.transpose(matrix)
    power, log_norm = matmul(wide, ops.transpose(wide)), 0
    for doublings in range(6):
        size = ops.maximum(ops.trace(power), 1e-15)  # whose square is not 0
        log_norm = log_norm + 0.5**doublings / 2 * ops.log(size)
        power = matmul(power / size, power / size)
    return matrix / ops.exp(ops.relu(log_norm))
