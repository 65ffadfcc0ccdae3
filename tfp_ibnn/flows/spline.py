"""Rational-quadratic splines: element by element, as couplings, and autoregressive."""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import keras
from keras import ops

from tfp_ibnn._core import checks, constraints
from tfp_ibnn._core.backend import Tensor, matmul
from tfp_ibnn.flows._networks import Conditioner, GivenNetwork, Masks
from tfp_ibnn.flows._rows import total
from tfp_ibnn.flows._splines import SplineTransform
from tfp_ibnn.flows.autoregressive import AutoregressiveBijector, InverseAutoregressive
from tfp_ibnn.flows.bijector import FlowBijector
from tfp_ibnn.flows.coupling import Coupling, CouplingBijector
from tfp_ibnn.flows.flow import Flow

_LARGEST_LIMIT = 20  # slopes are up to its exponential, and ratios of sizes up to their square


class SplineBijector(FlowBijector):
    """A monotone spline for each channel; the identity outside of [-interval, interval].

    In a bin of width w, height h, mean slope s = h / w, with the slopes d0 and d1 at its ends and
    t = (x - x0) / w, y = y0 + h (s t^2 + d0 t (1 - t)) / (s + (d0 + d1 - 2 s) t (1 - t)).
    Log-determinant: the sum of log dy/dx. Always invertible: the inverse solves a quadratic.
    Cost: O(channels * bins) per draw, both ways.

    Args:
        knots: tensor (..., 3 * bins - 1, channels): logarithms, bounded, of the bins' widths and
            heights, up to a common factor, and of the slopes at the inner knots. All 0 is the
            identity.
        interval: float, half the length of the interval.
    """

    parameter_ndims: ClassVar[dict[str, int]] = {"knots": 2}

    def inverse_and_log_det(self, y: Tensor) -> tuple[Tensor, Tensor]:
        x, log_slopes = SplineTransform(self.knots, self.interval).inverse(y)
        return x, total(log_slopes)

    def forward_and_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, log_slopes = SplineTransform(self.knots, self.interval).forward(x)
        return y, total(log_slopes)


class SplineCouplingBijector(CouplingBijector):
    """A coupling whose moved channels go through splines, whose knots the kept ones decide.

    Args:
        network: function of the kept channels (..., kept) that returns knots
            (..., 3 * bins - 1, moved), those of `SplineBijector`.
        interval: float, half the length of the interval.
        **others: the other arguments of `CouplingBijector`.
    """

    def __init__(self, *, interval: float, **others: Any) -> None:
        others["transform"] = partial(SplineTransform, interval=interval)
        super().__init__(interval=interval, **others)


class _KnotNetwork(Conditioner):
    """One hidden ReLU layer, then bounded knots (..., parts, outputs), which start at 0."""

    def call(self, inputs: Tensor, condition: Tensor | None = None) -> Tensor:
        hidden = self.hidden_units(inputs, condition)
        kernel, bias = self.last_layer(condition)
        # One product for all knots, not one for each part.
        kernel = ops.swapaxes(kernel, 0, 1)
        kernel = ops.reshape(kernel, (self.hidden, -1))
        knots = matmul(hidden, kernel)
        *rows, _ = ops.shape(hidden)
        shape = (*rows, self.parts, self.outputs)
        knots = ops.reshape(knots, shape) + bias
        return constraints.bounded(knots, self.limit)


def _knots_per_channel(bins: int) -> int:
    """Return how many numbers make a spline: widths, heights, and slopes at the inner knots."""
    return 3 * bins - 1


def _checked_bins(bins: Any) -> int:
    bins = checks.positive_integer("bins", bins, checks.LARGEST_SIZE)
    if bins == 1:
        raise ValueError("`bins` must be 2 or more: a spline of 1 bin is the identity.")
    return bins


def _checked_limit(limit: Any) -> float:
    checked = checks.positive("limit", limit)
    if checked > _LARGEST_LIMIT:
        raise ValueError(
            f"`limit` must be at most {_LARGEST_LIMIT}, or slopes overflow in float32; "
            f"got {checks.shown(limit)}."
        )
    return checked


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Spline(Flow):
    """Element-wise monotone rational-quadratic spline: the identity far out, and at the start.

    It changes the shape of each channel's distribution (skewness, tails, several modes), but not
    how the channels depend on each other.

    In a bin of width w, height h, mean slope s = h / w, with the slopes d0 and d1 at its ends and
    t = (x - x0) / w, y = y0 + h (s t^2 + d0 t (1 - t)) / (s + (d0 + d1 - 2 s) t (1 - t)).
    Log-determinant: the sum of log dy/dx. Always invertible: the inverse solves a quadratic.
    Cost: O(channels * bins) per draw, both ways.

    Args:
        bins: int, number of bins between -interval and interval, 2 or more. Defaults to 8.
        interval: positive float; beyond it, on either side, the map is the identity. Defaults to 5.
        limit: positive float, bound of the logarithms of slopes, and of widths and heights relative
            to each other, at most 20. Beyond 4 a bin may be so flat that float32 hardly determines
            its inverse. Defaults to 2.
        **kwargs: arguments of `Flow`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> flow = ibnn.flows.Spline(bins=4)
        >>> flow(keras.ops.ones((2, 3))).shape[-1], tuple(flow.knots.shape)
        (3, (11, 3))

    References:
        Durkan et al., Neural Spline Flows, arXiv 1906.04032.
    """

    def __init__(
        self, *, bins: int = 8, interval: float = 5.0, limit: float = 2.0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.bins = _checked_bins(bins)
        self.interval = checks.scale("interval", interval)
        self.limit = _checked_limit(limit)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        shape = (_knots_per_channel(self.bins), self.channels)
        self.knots = self.add_parameter("knots", shape, "zeros")

    def bijector(self, condition: Tensor | None = None) -> SplineBijector:
        knots = self.parameter(self.knots, condition)
        return SplineBijector(
            knots=constraints.bounded(knots, self.limit),
            interval=self.interval,
        )


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class SplineCoupling(Coupling):
    """Coupling flow whose moved channels go through monotone rational-quadratic splines.

    The network's last layer starts at 0, so the flow starts as the identity. Log-determinant: the
    sum of the log-slopes. Always invertible. Cost: one pass of the network, both ways.

    Args:
        hidden: positive int, units of the network's hidden layer. Defaults to 32.
        swap: bool, keep the last half and move the first, or keep what the mask would move.
            Defaults to False.
        limit: positive float, bound of the knots, as that of `Spline`. Defaults to 2.
        mask: "halves", the default, "alternating", or a sequence of booleans (channels,), as that
            of `AffineCoupling`.
        bins: int, number of bins, 2 or more. Defaults to 8.
        interval: positive float; beyond it, on either side, the map is the identity. Defaults to 5.
        network: Keras model or layer in place of the hidden layer, or None, the default, as that of
            `AffineCoupling`.
        event_ndims: int, how many of the last axes the network sees at once. Defaults to 1.
        **kwargs: arguments of `Flow`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> flow = ibnn.flows.SplineCoupling(hidden=8, bins=4)
        >>> flow.build((None, 3))
        >>> y, log_det = flow.forward_and_log_det(keras.ops.ones((2, 3)))
        >>> y.shape[-1], log_det.shape[0]
        (3, 2)

    References:
        Durkan et al., Neural Spline Flows, arXiv 1906.04032.
    """

    def __init__(
        self,
        hidden: int = 32,
        swap: bool = False,
        limit: float = 2.0,
        mask: str | Sequence[bool] = "halves",
        *,
        bins: int = 8,
        interval: float = 5.0,
        network: keras.layers.Layer | None = None,
        event_ndims: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            hidden,
            swap,
            _checked_limit(limit),
            mask,
            network=network,
            event_ndims=event_ndims,
            **kwargs,
        )
        self.bins = _checked_bins(bins)
        self.interval = checks.scale("interval", interval)

    def make_network(self, moved: int, given: GivenNetwork | None, **options: Any) -> Conditioner:
        parts = _knots_per_channel(self.bins)
        return _KnotNetwork(moved, self.hidden, self.limit, given=given, parts=parts, **options)

    def make_bijector(self, **options: Any) -> SplineCouplingBijector:
        return SplineCouplingBijector(interval=self.interval, **options)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class SplineAutoregressive(InverseAutoregressive):
    """Autoregressive flow of rational-quadratic splines: y_i = spline_i(x_i), given x_<i.

    Log-determinant: the sum of the log-slopes. Always invertible, and the identity at the start.
    Forward takes one pass of the masked network, the inverse one for each channel; densities take
    `Inverse(SplineAutoregressive())`.

    Args:
        hidden: positive int, units of the hidden layer. Defaults to 32.
        reverse: bool, let each channel depend on those after it instead of those before it.
            Defaults to False.
        limit: positive float, bound of the knots, as that of `Spline`. Defaults to 2.
        spread: bool, as that of `InverseAutoregressive`. Defaults to True.
        bins: int, number of bins, 2 or more. Defaults to 8.
        interval: positive float; beyond it, on either side, the map is the identity. Defaults to 5.
        **kwargs: arguments of `Flow`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> flow = ibnn.flows.SplineAutoregressive(hidden=8, bins=4)
        >>> flow(keras.ops.ones((2, 3))).shape[-1]
        3

    References:
        Durkan et al., Neural Spline Flows, arXiv 1906.04032.
    """

    def __init__(
        self,
        hidden: int = 32,
        reverse: bool = False,
        limit: float = 2.0,
        spread: bool = True,
        *,
        bins: int = 8,
        interval: float = 5.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(hidden, reverse, _checked_limit(limit), spread, **kwargs)
        self.bins = _checked_bins(bins)
        self.interval = checks.scale("interval", interval)

    def make_network(self, masks: Masks, **options: Any) -> Conditioner:
        parts = _knots_per_channel(self.bins)
        return _KnotNetwork(self.channels, self.hidden, self.limit, masks, parts=parts, **options)

    def make_bijector(self, **options: Any) -> AutoregressiveBijector:
        transform = partial(SplineTransform, interval=self.interval)
        return AutoregressiveBijector(transform=transform, **options)
