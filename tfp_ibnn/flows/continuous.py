"""Continuous flow: a neural ordinary differential equation."""

import json
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import backend, checks
from tfp_ibnn._core.backend import Tensor, fori_loop, matmul, pullback, tanh
from tfp_ibnn.flows._conditional import GivenNetwork, json_of
from tfp_ibnn.flows.flow import Flow, FlowBijector, like_rows


class ContinuousBijector(FlowBijector):
    """y = x(1), where x(0) = x and dx/dt = velocity(x, t); the inverse integrates back.

    `velocity` returns dx/dt and the trace of its Jacobian J, or None for a trace by products: with
    each unit vector, or v'Jv with random signs v if there is a `key`.
    """

    def _inverse(self, y: Tensor) -> Tensor:
        return self._solve(y, -1)[0]

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
        return state[..., :size], state[..., size]


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Continuous(Flow):
    """Continuous flow (neural ODE, FFJORD): dx/dt = W tanh(V x + a t + b), for t from 0 to 1.

    Log-determinant: the integral of the trace of the Jacobian, which has a closed form. Always
    invertible, by integrating back. W starts at 0: the identity. Cost: 4 * steps evaluations, both
    ways, which a gradient keeps in memory. Error, of the inverse too: O(steps^-4).

    Args:
        hidden: units of the hidden layer.
        steps: of the Runge-Kutta method of order 4.
        tolerance: relative and absolute, of an adaptive solver to be used instead: Dormand and
            Prince's, of TensorFlow Probability. It is for evaluation, and can be set after training
            (`flow.tolerance = 1e-6`); JAX has no gradient of it.
        trace: "exact", which takes a product with the Jacobian per channel for a given network; or
            "hutchinson", which takes one, for an unbiased random log-determinant.
        network: a Keras model or layer in place of the built-in one; the flow has a copy with new
            weights. It maps x, t and the condition, concatenated, to dx/dt.

    References:
        Grathwohl et al., FFJORD, arXiv 1810.01367.
    """

    def __init__(
        self,
        hidden: int = 32,
        steps: int = 8,
        tolerance: float | None = None,
        trace: str = "exact",
        network: keras.layers.Layer | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.hidden = checks.positive_integer("hidden", hidden, checks.LARGEST_SIZE)
        self.steps = checks.positive_integer("steps", steps, checks.LARGEST_SIZE)
        self.tolerance = None if tolerance is None else checks.positive("tolerance", tolerance)
        self.trace = checks.one_of("trace", trace, ("exact", "hutchinson"))
        self.exact_log_det = trace == "exact"
        self.seed_generator = None if self.exact_log_det else backend.SeedGenerator()
        self._given = json_of(network)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        shape, fixed = (self.channels + 1, self.hidden), {"conditional": False}
        if self._given != "null":
            options = {"condition_size": self.condition_size, "dtype": self.dtype}
            self.network = GivenNetwork(self._given, self.channels, name="network", **options)
            return self.network.build((None, shape[0]))
        spread, last = keras.initializers.RandomNormal(stddev=1.0), (self.hidden, self.channels)
        self.kernel = self.add_parameter("kernel", shape, spread, **fixed)
        self.bias = self.add_parameter("bias", (self.hidden,), "zeros")
        self.output_kernel = self.add_parameter("output_kernel", last, "zeros", **fixed)

    def bijector(self, condition: Tensor | None = None) -> ContinuousBijector:
        condition = self.checked_condition(condition)
        options = {"steps": self.steps, "tolerance": self.tolerance, "key": self.key()}
        options |= {"condition": condition, "dtype": self.dtype}
        return ContinuousBijector(velocity=self._velocity(condition), **options)

    def _velocity(self, condition: Tensor | None) -> Callable[..., tuple[Tensor, Tensor | None]]:
        if is_built_in := self._given == "null":
            weights, bias = (self.kernel, self.output_kernel), self.parameter(self.bias, condition)
            kernel, last_kernel = (ops.cast(w, w.dtype) / w.shape[0] ** 0.5 for w in weights)
            products = ops.sum(kernel[:-1] * ops.transpose(last_kernel), axis=0)

        def velocity(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
            x = ops.concatenate([x, t + ops.zeros_like(x[..., :1])], axis=-1)
            if not is_built_in:
                return self.network(x, condition), None
            hidden = tanh(matmul(x, kernel) + bias)
            return matmul(hidden, last_kernel), matmul(1 - hidden * hidden, products)

        return velocity

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "network": json.loads(self._given)}
