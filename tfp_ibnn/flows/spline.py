"""Rational-quadratic splines: element by element, as couplings, and autoregressive."""

from typing import Any, ClassVar

import keras
from keras import ops

from tfp_ibnn._core import checks, constraints
from tfp_ibnn._core.backend import Tensor, matmul
from tfp_ibnn.flows._conditional import Conditioner
from tfp_ibnn.flows.autoregressive import AutoregressiveBijector, InverseAutoregressive
from tfp_ibnn.flows.coupling import Coupling, CouplingBijector, MovesBijector
from tfp_ibnn.flows.flow import Flow, FlowBijector, total

_LARGEST_LIMIT = 20  # slopes are up to its exponential, and ratios of sizes up to their square


class SplineBijector(FlowBijector):
    """A monotone spline for each channel; the identity outside of [-interval, interval].

    In a bin of width w, height h, mean slope s = h / w, with the slopes d0 and d1 at its ends and
    t = (x - x0) / w, y = y0 + h (s t^2 + d0 t (1 - t)) / (s + (d0 + d1 - 2 s) t (1 - t)).
    Log-determinant: the sum of log dy/dx. Always invertible: the inverse solves a quadratic.
    Cost: O(channels * bins) per draw, both ways.

    Args:
        knots: (..., 3 * bins - 1, channels): logarithms, bounded, of the bins' widths and heights,
            up to a common factor, and of the slopes at the inner knots. All 0 is the identity.
        interval: half the length of the interval.
    """

    parameter_ndims: ClassVar[dict[str, int]] = {"knots": 2}

    def inverse_and_log_det(self, y: Tensor) -> tuple[Tensor, Tensor]:
        x, log_slope = _spline(y, self.knots, self.interval, back=True)
        return x, -total(log_slope)

    def forward_and_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, log_slope = _spline(x, self.knots, self.interval)
        return y, total(log_slope)


class _SplineMoves:
    """Splines in place of a shift and a scale; mix it in first."""

    def move(self, x: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        return _spline(x, parameters, self.interval)

    def move_back(self, y: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        return _spline(y, parameters, self.interval, back=True)


class SplineCouplingBijector(_SplineMoves, CouplingBijector):
    """Keep one part of the channels; map the other by splines whose knots the first decides.

    Args:
        network: maps (..., kept) to knots (..., 3 * bins - 1, moved), those of `SplineBijector`.
        interval: half the length of the interval.
        **others: those of `CouplingBijector`.
    """


class SplineAutoregressiveBijector(_SplineMoves, AutoregressiveBijector):
    """The same for all channels, by an autoregressive network."""


class _KnotNetwork(Conditioner):
    """One hidden ReLU layer, then bounded knots (..., parts, outputs), which start at 0."""

    def call(self, inputs: Tensor, condition: Tensor | None = None) -> Tensor:
        hidden, kernel, bias = self.last_layer(inputs, condition)
        kernel = ops.reshape(ops.swapaxes(kernel, 0, 1), (self.hidden, -1))
        shape = (*ops.shape(hidden)[:-1], self.parts, self.outputs)
        knots = ops.reshape(matmul(hidden, kernel), shape) + bias
        return constraints.bounded(knots, self.limit)


class _Splines(Flow):
    """What these flows have: the number of bins, the interval, the bound."""

    def __init__(
        self, *args: Any, bins: int = 8, interval: float = 5.0, limit: float = 2.0, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.bins = checks.positive_integer("bins", bins, checks.LARGEST_SIZE)
        self.interval = checks.scale("interval", interval)
        self.limit = checks.positive("limit", limit)
        if self.limit > _LARGEST_LIMIT:
            raise ValueError(
                f"`limit` must be at most {_LARGEST_LIMIT}, or slopes leave the range of float32; "
                f"got {checks.shown(limit)}."
            )
        if self.bins == 1:
            raise ValueError("`bins` must be 2 or more: a spline of 1 bin is the identity.")

    def make_network(self, outputs: int, **options: Any) -> Conditioner:
        options["parts"] = 3 * self.bins - 1
        return _KnotNetwork(outputs, self.hidden, self.limit, **options)

    def make_bijector(self, **options: Any) -> MovesBijector:
        return self.bijector_kind(interval=self.interval, **options)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Spline(_Splines):
    """Element-wise monotone rational-quadratic spline: the identity far out, and at the start.

    It changes the shape of each channel's distribution (skewness, tails, several modes), but not
    how the channels depend on each other.

    Args:
        bins: number of bins between -interval and interval.
        interval: beyond it, on either side, the map is the identity.
        limit: bound of the logarithms of slopes, and of widths and heights relative to each other,
            at most 20. Beyond 4 a bin may be so flat that float32 hardly determines its inverse.

    References:
        Durkan et al., Neural Spline Flows, arXiv 1906.04032.
    """

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        self.knots = self.add_parameter("knots", (3 * self.bins - 1, self.channels), "zeros")

    def bijector(self, condition: Tensor | None = None) -> SplineBijector:
        knots = constraints.bounded(self.parameter(self.knots, condition), self.limit)
        return SplineBijector(knots=knots, interval=self.interval)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class SplineCoupling(_Splines, Coupling):
    """Coupling flow whose moved channels go through monotone rational-quadratic splines.

    The network's last layer starts at 0, so the flow starts as the identity. `bins`, `interval` and
    `limit` are those of `Spline`, the others those of `AffineCoupling`.
    """

    bijector_kind = SplineCouplingBijector


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class SplineAutoregressive(_Splines, InverseAutoregressive):
    """Autoregressive flow of rational-quadratic splines: y_i = spline_i(x_i), given x_<i.

    Log-determinant: the sum of the log-slopes. Always invertible, and the identity at the start.
    Forward takes one pass of the masked network, the inverse one for each channel; densities take
    `Inverse(SplineAutoregressive())`. `bins`, `interval` and `limit` are those of `Spline`,
    `hidden` and `reverse` those of `InverseAutoregressive`.

    References:
        Durkan et al., Neural Spline Flows, arXiv 1906.04032.
    """

    bijector_kind = SplineAutoregressiveBijector


def _spline(
    values: Tensor, knots: Tensor, interval: float, back: bool = False
) -> tuple[Tensor, Tensor]:
    """Return splines at values (..., channels), or where they take them, and log dy/dx there."""
    near, x0, y0, width, height, d0, d1 = _bin_of(values, knots, interval, int(back))
    slope = height / width
    if back:
        t, rest = _shares_of_width(ops.clip((near - y0) / height, 0.0, 1.0), slope, d0, d1)
        found = x0 + width * t
    else:
        t = ops.clip((near - x0) / width, 0.0, 1.0)
        rest = 1 - t
    # Sums of positive terms, which lose no digits however different these are.
    ahead = slope * t * t + d0 * t * rest
    below = ahead + d1 * t * rest + slope * rest * rest
    if not back:
        found = y0 + height * (ahead / below)
    rise = d1 * t * t + 2 * slope * t * rest + d0 * rest * rest
    log_slope = ops.log(rise) + 2 * ops.log(slope / below)
    inside = ops.abs(values) < interval
    return ops.where(inside, found, values), ops.where(inside, log_slope, ops.zeros_like(log_slope))


def _shares_of_width(up: Tensor, slope: Tensor, d0: Tensor, d1: Tensor) -> tuple[Tensor, Tensor]:
    """Return t and 1 - t at which a bin reaches a share of its height.

    r = t / (1 - t) solves slope (1 - up) r^2 + b r - slope up = 0 with b = d0 (1 - up) - d1 up.
    Its discriminant is a sum of positive terms, and so is one of the two forms of its root.
    """
    down = 1 - up
    b = d0 * down - d1 * up
    root = ops.sqrt(b * b + 4 * slope * slope * up * down)
    before = ops.where(b > 0, 2 * slope * up, root - b)
    behind = ops.where(b > 0, root + b, 2 * slope * down)
    whole = before + behind
    return before / whole, behind / whole


def _bin_of(x: Tensor, knots: Tensor, interval: float, axis: int) -> tuple[Tensor, ...]:
    """Return x, moved into the interval, and the bin that holds it.

    The bin is its corner x0, y0, its width and height, and the slopes at its ends; `axis` is 0 if x
    lies on the axis of the widths, and 1 if on that of the heights.
    """
    bins = (knots.shape[-2] + 1) // 3
    sizes = (ops.exp(part) for part in (knots[..., :bins, :], knots[..., bins : 2 * bins, :]))
    sizes = [part * (2 * interval / ops.sum(part, axis=-2, keepdims=True)) for part in sizes]
    ends = ops.cumsum(sizes[axis][..., :-1, :], axis=-2) - interval
    near = ops.clip(x, -interval, interval)
    passed = ops.cast(near[..., None, :] >= ends, knots.dtype)
    one = ops.ones_like(passed[..., :1, :])
    passed = ops.concatenate([one, passed, 0 * one], axis=-2)
    # 1 at the bin, 0 elsewhere: a sum over all bins is quicker than to look one up.
    before, chosen = passed[..., 1:, :], passed[..., :-1, :] - passed[..., 1:, :]
    corner = (ops.sum(before * part, axis=-2) - interval for part in sizes)
    size = (ops.sum(chosen * part, axis=-2) for part in sizes)
    logs, ends = knots[..., 2 * bins :, :], (chosen[..., 1:, :], chosen[..., :-1, :])
    slopes = (ops.exp(ops.sum(end * logs, axis=-2)) for end in ends)
    return near, *corner, *size, *slopes
