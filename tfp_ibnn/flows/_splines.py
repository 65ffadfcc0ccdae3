"""Monotone rational-quadratic splines of numbers, one by one."""

from typing import NamedTuple

from keras import ops

from tfp_ibnn._core.backend import Tensor


class SplineTransform(NamedTuple):
    """Splines between -interval and interval, by knots; beyond, the identity.

    `knots` (..., 3 * bins - 1, channels) are those of `SplineBijector`.
    """

    knots: Tensor
    interval: float

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return y and log dy/dx."""
        inner = self._clip(x)
        bins = _bins_at(inner, self.knots, self.interval)
        t = inner - bins.left
        t = ops.clip(t / bins.width, 0.0, 1.0)
        up, log_slopes = _heights_and_log_slopes(bins, t, 1 - t)
        y = bins.bottom + bins.height * up
        return self._with_identity(x, y, log_slopes)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return x and log dx/dy."""
        inner = self._clip(y)
        bins = _bins_at(inner, self.knots, self.interval, by_height=True)
        up = inner - bins.bottom
        up = ops.clip(up / bins.height, 0.0, 1.0)
        t, rest = _shares_of_width(bins, up)
        x = bins.left + bins.width * t
        _, log_slopes = _heights_and_log_slopes(bins, t, rest)
        return self._with_identity(y, x, -log_slopes)

    def _clip(self, values: Tensor) -> Tensor:
        return ops.clip(values, -self.interval, self.interval)

    def _with_identity(
        self, values: Tensor, mapped: Tensor, log_slopes: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the mapped values and log-slopes, beyond the interval those of the identity."""
        is_inside = ops.abs(values) < self.interval
        mapped = ops.where(is_inside, mapped, values)
        slopes_outside = ops.zeros_like(log_slopes)
        return mapped, ops.where(is_inside, log_slopes, slopes_outside)


class _Bins(NamedTuple):
    """For each number the bin that holds it: its corner, its size, and the slopes at its ends."""

    left: Tensor
    bottom: Tensor
    width: Tensor
    height: Tensor
    slope: Tensor  # the mean one, height / width
    left_slope: Tensor
    right_slope: Tensor


def _heights_and_log_slopes(bins: _Bins, t: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shares of the bins' heights at shares t of their widths, and log dy/dx there.

    With `rest` = 1 - t, the mean slope s, and the slopes d0 and d1 at the ends of a bin,

        share = (s t^2 + d0 t rest) / (s t^2 + d0 t rest + d1 t rest + s rest^2),
        dy/dx = s^2 (d1 t^2 + 2 s t rest + d0 rest^2) / (the same denominator)^2.

    All sums are of positive terms: they lose no digits, however different these are.
    """
    slope = bins.slope
    left = bins.left_slope
    right = bins.right_slope
    ahead = slope * t * t + left * t * rest
    behind = slope * rest * rest
    whole = ahead + right * t * rest + behind
    share_of_height = ahead / whole
    rise_at_right = right * t * t
    rise_between = 2 * slope * t * rest
    rise_at_left = left * rest * rest
    rise = rise_at_right + rise_between + rise_at_left
    log_rise = ops.log(rise)
    log_slopes = log_rise + 2 * ops.log(slope / whole)
    return share_of_height, log_slopes


def _shares_of_width(bins: _Bins, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return t and 1 - t at which a spline reaches shares `up` of the bins' heights.

    r = t / (1 - t) solves s (1 - up) r^2 + b r - s up = 0, with the mean slope s and
    b = d0 (1 - up) - d1 up. Its discriminant is a sum of positive terms, and so is one of the two
    forms of its root: r = 2 s up / (root + b) = (root - b) / (2 s (1 - up)).
    """
    slope = bins.slope
    down = 1 - up
    b_of_left = bins.left_slope * down
    b = b_of_left - bins.right_slope * up
    discriminant = b * b + 4 * slope * slope * up * down
    root = ops.sqrt(discriminant)
    is_positive = b > 0
    first_numerator = 2 * slope * up
    second_denominator = 2 * slope * down
    numerator = ops.where(is_positive, first_numerator, root - b)
    denominator = ops.where(is_positive, root + b, second_denominator)
    whole = numerator + denominator
    return numerator / whole, denominator / whole


def _bins_at(inner: Tensor, knots: Tensor, interval: float, by_height: bool = False) -> _Bins:
    """Return the bins that hold x (..., channels), or y where it is `by_height`."""
    bins = (knots.shape[-2] + 1) // 3
    widths = _sizes(knots[..., :bins, :], interval)
    heights = _sizes(knots[..., bins : 2 * bins, :], interval)
    sizes = heights if by_height else widths
    is_before, is_chosen = _bin_indicators(inner, sizes, interval)
    width = _sum_over_bins(is_chosen, widths)
    height = _sum_over_bins(is_chosen, heights)
    # The slopes at both ends of the interval are 1, their logarithms 0.
    log_slopes = knots[..., 2 * bins :, :]
    left_log_slope = _sum_over_bins(is_chosen[..., 1:, :], log_slopes)
    right_log_slope = _sum_over_bins(is_chosen[..., :-1, :], log_slopes)
    return _Bins(
        left=_sum_over_bins(is_before, widths) - interval,
        bottom=_sum_over_bins(is_before, heights) - interval,
        width=width,
        height=height,
        slope=height / width,
        left_slope=ops.exp(left_log_slope),
        right_slope=ops.exp(right_log_slope),
    )


def _bin_indicators(inner: Tensor, sizes: Tensor, interval: float) -> tuple[Tensor, Tensor]:
    """Return numbers (..., bins, channels): 1 for bins that end before it, and for its own bin."""
    all_but_last = sizes[..., :-1, :]
    inner_knots = ops.cumsum(all_but_last, axis=-2)
    inner_knots = inner_knots - interval
    has_passed = inner[..., None, :] >= inner_knots
    has_passed = ops.cast(has_passed, sizes.dtype)
    first = has_passed[..., :1, :]
    ones = ops.ones_like(first)
    # All are past the first knot of the interval, and none past the last.
    has_passed = [ones, has_passed, 0 * ones]
    has_passed = ops.concatenate(has_passed, axis=-2)
    is_before = has_passed[..., 1:, :]
    is_before_or_chosen = has_passed[..., :-1, :]
    is_chosen = is_before_or_chosen - is_before
    return is_before, is_chosen


def _sum_over_bins(indicators: Tensor, values: Tensor) -> Tensor:
    """Return what a bin has, (..., channels): a sum is quicker than to look it up."""
    return ops.sum(indicators * values, axis=-2)


def _sizes(logs: Tensor, interval: float) -> Tensor:
    """Return the bins' widths or heights, (..., bins, channels), which fill the interval."""
    sizes = ops.exp(logs)
    whole = ops.sum(sizes, axis=-2, keepdims=True)
    return sizes * (2 * interval / whole)
