"""Residual flow: the identity plus a contraction."""

import math
from typing import Any, ClassVar, NamedTuple

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import SeedGenerator, Tensor, fori_loop, matmul, normal, tanh
from tfp_ibnn.flows._rows import like_rows, total
from tfp_ibnn.flows.bijector import FlowBijector
from tfp_ibnn.flows.flow import Flow

_SURE = 4  # terms of a series of random length that are always there
_INVERSE_ERROR = 1e-8  # of fixed point iteration, relative to that at its start
_DOUBLINGS = 6  # of the power by which a spectral norm is bounded


class _Jacobian(NamedTuple):
    """J of tanh(x A + b) C, where `slopes` (..., hidden) are those of tanh: v'J = ((v'A) s) C."""

    a: Tensor
    slopes: Tensor
    c: Tensor

    def product(self, v: Tensor) -> Tensor:
        """Return v'J for vectors v (..., channels)."""
        hidden = matmul(v, self.a) * self.slopes
        return matmul(hidden, self.c)

    def without_gradients(self) -> "_Jacobian":
        """Return it as a constant."""
        return _Jacobian(
            a=ops.stop_gradient(self.a),
            slopes=ops.stop_gradient(self.slopes),
            c=ops.stop_gradient(self.c),
        )


class _Series(NamedTuple):
    """The series of a log-determinant so far: v'(-J)^k, their sum over k, and the sum of terms."""

    power: Tensor
    sum_of_powers: Tensor
    log_det: Tensor


class ResidualBijector(FlowBijector):
    """y = x + tanh(x A + b) C, where the norms of A and C have a product of at most `lipschitz`.

    Log-determinant: that of I + J, exact, or an unbiased estimate by a series of random length.
    Inverse: the fixed point of x = y - tanh(x A + b) C.

    Args:
        a: tensor (channels, hidden).
        b: tensor (..., hidden).
        c: tensor (hidden, channels).
        lipschitz: float, below 1.
        key: tensor, of the noise of the log-determinant; None if it is to be exact.
    """

    parameter_ndims: ClassVar[dict[str, int]] = {"a": 2, "b": 1, "c": 2}

    def _inverse(self, y: Tensor) -> Tensor:
        y = like_rows(y, self.b)
        log_error = math.log(_INVERSE_ERROR)
        iterations = math.ceil(log_error / math.log(self.lipschitz))

        def iterate(_: Tensor, x: Tensor) -> Tensor:
            hidden = self._hidden(x)
            return y - matmul(hidden, self.c)

        return fori_loop(0, iterations, iterate, y)

    def forward_and_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self._hidden(x)
        y = x + matmul(hidden, self.c)
        slopes = 1 - hidden * hidden
        jacobian = _Jacobian(self.a, slopes, self.c)
        if self.key is None:
            return y, _log_det(jacobian)
        return y, self._estimate(jacobian, x)

    def _hidden(self, x: Tensor) -> Tensor:
        inputs = matmul(x, self.a)
        return tanh(inputs + self.b)

    def _estimate(self, jacobian: _Jacobian, x: Tensor) -> Tensor:
        """Return log det(I + J) = -sum_k tr((-J)^k) / k, with v'(-J)^k v for a trace, v signs.

        The term k > _SURE is there with the probability lipschitz^(k - _SURE), and divided by it.
        The gradient is that of v'MJv, where M is the sum of the same (-J)^k, from k = 0.
        """
        x = like_rows(x, jacobian.slopes)
        signs = ops.sign(normal(ops.shape(x), x.dtype, self.key))
        held = jacobian.without_gradients()

        def add_term(k: Tensor, series: _Series) -> _Series:
            power = -held.product(series.power)
            power = ops.where(k > _SURE, power / self.lipschitz, power)
            term = total(power * signs) / ops.cast(k, x.dtype)
            return _Series(
                power=power,
                sum_of_powers=series.sum_of_powers + power,
                log_det=series.log_det - term,
            )

        start = _Series(
            power=signs,
            sum_of_powers=signs,
            log_det=ops.zeros_like(signs[..., 0]),
        )
        series = fori_loop(1, self._terms(x.dtype) + 1, add_term, start)
        sum_of_powers = ops.stop_gradient(series.sum_of_powers)
        surrogate = total(jacobian.product(sum_of_powers) * signs)
        log_det = ops.stop_gradient(series.log_det)
        return log_det + surrogate - ops.stop_gradient(surrogate)

    def _terms(self, dtype: str) -> Tensor:
        """Return the random length of the series."""
        # Half the square of two normal numbers is exponential; its whole part is geometric.
        pair = normal((2,), dtype, self.key + 1)
        squares = ops.square(pair)
        exponential = 0.5 * ops.sum(squares)
        rate = -math.log(self.lipschitz)
        geometric = ops.cast(exponential / rate, "int32")
        return _SURE + geometric


def _log_det(jacobian: _Jacobian) -> Tensor:
    """Return log det(I + J), by Sylvester's identity of the smaller of two matrices."""
    a, slopes, c = jacobian
    channels, units = a.shape
    if channels <= units:
        matrix = matmul(a * slopes[..., None, :], c)
    else:
        matrix = slopes[..., None] * matmul(c, a)
    eye = np.eye(min(channels, units))
    eye = ops.cast(eye, slopes.dtype)
    matrix = matrix + eye
    # XLA compiles no determinants on TensorFlow.
    transposed = ops.swapaxes(matrix, -1, -2)
    square = matmul(matrix, transposed)
    factor = ops.cholesky(square)
    diagonal = ops.diagonal(factor, axis1=-2, axis2=-1)
    return total(ops.log(diagonal))


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Residual(Flow):
    """Residual flow (i-ResNet): y = x + g(x), g(x) = tanh(x A + b) C, of Lipschitz constant < 1.

    A and C are divided by bounds of their spectral norms that are above 1. C starts at 0: the
    identity. Always invertible, by fixed point iteration: 175 passes for 0.9, which a gradient
    keeps in memory. Exact log-determinant: O(min(channels, hidden)^3) per draw; a random one: 4 +
    lipschitz / (1 - lipschitz) passes on average.

    Args:
        hidden: positive int, units of the hidden layer. Defaults to 32.
        lipschitz: float between 0 and 1, bound of the Lipschitz constant of g. Defaults to 0.9.
        log_det: "exact", the default, or "unbiased" for a random one, by a series of random length.
        **kwargs: arguments of `Flow`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> flow = ibnn.flows.Residual(hidden=8)
        >>> flow.build((None, 3))
        >>> y, log_det = flow.forward_and_log_det(keras.ops.ones((2, 3)))
        >>> float(y[0, 0]), float(log_det[0])
        (1.0, 0.0)

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
        self.seed_generator = None
        if not self.exact_log_det:
            self.seed_generator = SeedGenerator()

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        self.kernel = self.add_parameter(
            "kernel",
            (self.channels, self.hidden),
            keras.initializers.RandomNormal(stddev=1.0),
            conditional=False,
        )
        self.bias = self.add_parameter("bias", (self.hidden,), "zeros")
        self.output_kernel = self.add_parameter(
            "output_kernel",
            (self.hidden, self.channels),
            "zeros",
            conditional=False,
        )

    def bijector(self, condition: Tensor | None = None) -> ResidualBijector:
        return ResidualBijector(
            a=_contraction(self.kernel),
            b=self.parameter(self.bias, condition),
            c=self.lipschitz * _contraction(self.output_kernel),
            lipschitz=self.lipschitz,
            key=self.key(),
        )


def _contraction(weight: keras.Variable) -> Tensor:
    """Return a matrix, made smaller if its spectral norm may be above 1.

    The norm is at most tr(G^n)^(1 / 2n), G = W'W, n = 32, which has a gradient everywhere and is
    too large by a factor of at most rank^(1 / 2n).
    """
    rows, columns = weight.shape
    matrix = ops.cast(weight, weight.dtype) / rows**0.5
    wide = matrix
    if rows > columns:
        wide = ops.transpose(matrix)
    power = matmul(wide, ops.transpose(wide))
    log_norm = 0
    for doublings in range(_DOUBLINGS):
        size = ops.trace(power)
        size = ops.maximum(size, 1e-15)  # whose square is not 0
        share = 0.5**doublings / 2
        log_norm = log_norm + share * ops.log(size)
        power = matmul(power / size, power / size)
    divisor = ops.exp(ops.relu(log_norm))
    return matrix / divisor
