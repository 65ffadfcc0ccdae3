"""Continuous flow: a neural ordinary differential equation."""

from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import backend, checks
from tfp_ibnn._core.backend import Tensor, fori_loop, matmul, pullback, tanh
from tfp_ibnn.flows.flow import FlowBijector, NetworkFlow, like_rows, total


class ContinuousBijector(FlowBijector):
    """y = x(1), where x(0) = x and dx/dt = velocity(x, t); the inverse integrates back.

    `velocity` returns dx/dt and the trace of its Jacobian J, or None for a trace by products: with
    each unit vector, or v'Jv with random signs v if there is a `key`.
    """

    def inverse_and_log_det(self, y: Tensor) -> tuple[Tensor, Tensor]:
        return self._solve(y, -1)

    def forward_and_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._solve(x, 1)

    def _solve(self, x: Tensor, sign: int) -> tuple[Tensor, Tensor]:
        x, size = like_rows(x, self.condition), x.shape[-1]
        probes = np.eye(size, dtype=keras.backend.standardize_dtype(x.dtype))
        if self.key is not None:
            probes = [ops.sign(backend.normal(ops.shape(x), x.dtype, self.key))]

        def rate(t: Tensor, state: Tensor) -> Tensor:
            x, t = state[..., :size], t if sign > 0 else 1 - t
            speed, trace, pull = pullback(lambda points: self.velocity(points[0], t), [x])
            if trace is None or self.key is not None:
                traces = (probe * pull(probe + ops.zeros_like(x))[0] for probe in probes)
                trace = ops.sum(sum(traces), axis=-1)
            return sign * ops.concatenate([speed, trace[..., None]], axis=-1)

        def runge_kutta(number: Tensor, state: Tensor) -> Tensor:
            t, end, change = ops.cast(number, x.dtype) / self.steps, state, 0
            for part, weight in ((0, 1 / 6), (1 / 2, 1 / 3), (1 / 2, 1 / 3), (1, 1 / 6)):
                change = rate(t + part / self.steps, state + part / self.steps * change)
                end = end + weight / self.steps * change
            return end

        state = ops.concatenate([x, ops.zeros_like(x[..., :1])], axis=-1)
        if self.tolerance is None:
            state = fori_loop(0, self.steps, runge_kutta, state)
        else:
            solver = backend.tfp.math.ode.DormandPrince(rtol=self.tolerance, atol=self.tolerance)
            state = solver.solve(rate, 0.0, state, solution_times=[1.0]).states[0]
        return state[..., :size], ops.sum(state[..., size], tuple(range(1 - self.event_ndims, 0)))


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Continuous(NetworkFlow):
    """Continuous flow (neural ODE, FFJORD): dx/dt = W tanh(V x + a t + b), for t from 0 to 1.

    Log-determinant: the integral of the trace of the Jacobian, which has a closed form. Always
    invertible, by integrating back. W starts at 0: the identity. Cost: 4 * steps evaluations, both
    ways, which a gradient keeps in memory. Error, of the inverse too: O(steps^-4). It grows with
    the weights: at random ones of size 3 eight steps were off by 5e-5 nats, at size 10 by 5.6.
    Compare the densities with those of `tolerance=1e-6` before you rely on them.

    Args:
        hidden: units of the hidden layer.
        steps: of the Runge-Kutta method of order 4.
        tolerance: relative and absolute, of an adaptive solver to be used instead: Dormand and
            Prince's, of TensorFlow Probability. It is for evaluation, as JAX has no gradient of it:
            set `density.flows[0].tolerance`, then `density.make_predict_function(force=True)`.
        trace: "exact", which takes a product with the Jacobian per channel for a given network; or
            "hutchinson", which takes one, for an unbiased random log-determinant.
        network: a Keras model or layer in place of tanh(V x + a t + b), which turns x, t and the
            condition, concatenated, into any number of features. The flow has a copy with new
            weights, which runs as in inference.
        event_ndims: how many of the last axes the network sees at once: 3 for convolutions of
            images (..., height, width, channels), whose trace must be "hutchinson".

    References:
        Grathwohl et al., FFJORD, arXiv 1810.01367.
    """

    def __init__(
        self,
        hidden: int = 32,
        steps: int = 8,
        tolerance: float | None = None,
        trace: str = "exact",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.hidden = checks.positive_integer("hidden", hidden, checks.LARGEST_SIZE)
        self.steps = checks.positive_integer("steps", steps, checks.LARGEST_SIZE)
        self.tolerance = None if tolerance is None else checks.positive("tolerance", tolerance)
        self.trace = checks.one_of("trace", trace, ("exact", "hutchinson"))
        self.exact_log_det = trace == "exact"
        self.seed_generator = None if self.exact_log_det else backend.SeedGenerator()
        if self.event_ndims > 1 and self.exact_log_det:
            raise ValueError("`trace` must be 'hutchinson' for networks of several axes.")

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        features, fixed = self.hidden, {"conditional": False}
        self.network, shape = self.own_network(), (*input_shape[:-1], self.channels + 1)
        if self.network is None:
            spread = keras.initializers.RandomNormal(stddev=1.0)
            self.kernel = self.add_parameter("kernel", (shape[-1], features), spread, **fixed)
            self.bias = self.add_parameter("bias", (features,), "zeros")
        else:
            self.network.build(shape)
            features = self.network.features
        shape = (features, self.channels)
        self.output_kernel = self.add_parameter("output_kernel", shape, "zeros", **fixed)

    def bijector(self, condition: Tensor | None = None) -> ContinuousBijector:
        condition = self.checked_condition(condition)
        last_kernel = ops.cast(self.output_kernel, self.dtype) / self.output_kernel.shape[0] ** 0.5
        if self.network is None:
            kernel = ops.cast(self.kernel, self.dtype) / self.kernel.shape[0] ** 0.5
            bias = self.parameter(self.bias, condition)
            products = ops.sum(kernel[:-1] * ops.transpose(last_kernel), axis=0)

        def velocity(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
            x = ops.concatenate([x, t + ops.zeros_like(x[..., :1])], axis=-1)
            if self.network is not None:
                return matmul(self.network(x, condition), last_kernel), None
            hidden = tanh(matmul(x, kernel) + bias)
            return matmul(hidden, last_kernel), total((1 - hidden * hidden) * products)

        options = {"steps": self.steps, "tolerance": self.tolerance, "key": self.key()}
        options |= {"condition": condition, "event_ndims": self.event_ndims, "dtype": self.dtype}
        return ContinuousBijector(velocity=velocity, **options)
