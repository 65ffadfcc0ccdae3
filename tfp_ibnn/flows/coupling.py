"""Couplings: one part of the channels steers a map of the other; the affine one."""

from collections.abc import Sequence
from typing import Any, ClassVar

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.flows._elementwise import Elementwise, shift_and_scale
from tfp_ibnn.flows._networks import Conditioner, GivenNetwork, NetworkFlow
from tfp_ibnn.flows._rows import like_rows
from tfp_ibnn.flows.bijector import FlowBijector


class CouplingBijector(FlowBijector):
    """Keep one part of the channels, and move the other by a map that the first decides.

    y_kept = x_kept,  y_moved = transform(network(x_kept))(x_moved). Log-determinant: the sum of the
    log-slopes. Always invertible, as the kept part is known both ways. Cost: one pass of the
    network, both ways.

    Args:
        network: function of the kept channels (..., kept) that returns what `transform` takes; for
            the default a shift and a log-scale, both (..., moved).
        kept: array of ints (kept,), the channels that stay as they are, in increasing order.
        moved: array of ints (moved,), the other channels, in increasing order.
        transform: function of the network's output that returns the map of the moved channels, with
            `forward` and `inverse`, which return log-slopes too. Defaults to
            y = x * exp(log_scale) + shift.
        condition: tensor (..., condition_size), to whose rows x is broadcast; None, the default, if
            the network has no condition.
        event_ndims: int, how many of the last axes the network sees at once. Defaults to 1.
        dtype: str, the type of the tensors it maps.
    """

    transform = staticmethod(shift_and_scale)
    condition: Tensor | None = None

    def forward_and_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = self._split(x)
        transform = self._transform_by(kept)
        moved, log_slopes = transform.forward(moved)
        return self._merge(kept, moved), self._sum(log_slopes)

    def inverse_and_log_det(self, y: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = self._split(y)
        transform = self._transform_by(kept)
        moved, log_slopes = transform.inverse(moved)
        return self._merge(kept, moved), self._sum(log_slopes)

    def _transform_by(self, kept: Tensor) -> Elementwise:
        parameters = self.network(kept)
        return self.transform(parameters)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = like_rows(x, self.condition)
        return _take(x, self.kept), _take(x, self.moved)

    def _merge(self, kept: Tensor, moved: Tensor) -> Tensor:
        """Return both parts as one tensor, each channel in its own place."""
        parts = [kept, moved]
        channels = [self.kept, self.moved]
        if self.moved[0] < self.kept[0]:  # then halves need no sorting
            parts.reverse()
            channels.reverse()
        x = ops.concatenate(parts, axis=-1)
        places = np.argsort(np.concatenate(channels))
        return _take(x, places)

    def _sum(self, log_slopes: Tensor) -> Tensor:
        event_axes = tuple(range(-self.event_ndims, 0))
        return ops.sum(log_slopes, axis=event_axes)


def _take(x: Tensor, channels: np.ndarray) -> Tensor:
    """Return some channels of x; as a slice, whose gradient is quicker, if they are neighbors."""
    first = int(channels[0])
    stop = first + len(channels)
    if not np.array_equal(channels, np.arange(first, stop)):
        return ops.take(x, channels, axis=-1)
    if len(channels) == x.shape[-1]:
        return x
    return x[..., first:stop]


class Coupling(NetworkFlow):
    """Base of coupling flows: which channels are kept, and the network that sees them.

    A subclass defines `make_network`, and `make_bijector`, which says how the others are moved.
    `AffineCoupling` describes the arguments.
    """

    min_channels: ClassVar[int] = 2

    def __init__(
        self,
        hidden: int = 32,
        swap: bool = False,
        limit: float = 2.0,
        mask: str | Sequence[bool] = "halves",
        *,
        network: keras.layers.Layer | None = None,
        event_ndims: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(network=network, event_ndims=event_ndims, **kwargs)
        self.hidden = checks.positive_integer("hidden", hidden, checks.LARGEST_SIZE)
        self.swap = bool(swap)
        self.limit = checks.positive("limit", limit)
        self.mask = _checked_mask(mask)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        is_kept = self._is_kept()
        self.kept_channels = np.flatnonzero(is_kept)
        self.moved_channels = np.flatnonzero(~is_kept)
        self.network = self.make_network(
            len(self.moved_channels),
            given=self.copy_network(),
            condition_size=self.condition_size,
            dtype=self.dtype,
            name="network",
        )
        self.network.build((*input_shape[:-1], len(self.kept_channels)))

    def _is_kept(self) -> np.ndarray:
        """Return a boolean per channel, true where it is kept."""
        places = np.arange(self.channels)
        if self.mask == "halves":
            mask = places < self.channels // 2
        elif self.mask == "alternating":
            mask = places % 2 == 0
        else:
            mask = np.array(self.mask)
        if len(mask) != self.channels:
            raise ValueError(
                "`mask` must be a boolean per channel, or 'alternating'; got "
                f"{len(mask)} for {self.channels} channels."
            )
        if self.swap:
            return ~mask
        return mask

    def make_network(self, moved: int, given: GivenNetwork | None, **options: Any) -> Conditioner:
        """Return the network, unbuilt.

        Args:
            moved: int, how many channels are moved.
            given: GivenNetwork in place of the hidden layer, or None.
            **options: arguments of `keras.layers.Layer`, and `condition_size`.

        Returns:
            The network, a Conditioner.
        """
        return Conditioner(moved, self.hidden, self.limit, given=given, **options)

    def make_bijector(self, **options: Any) -> CouplingBijector:
        """Return the bijector, from all arguments of `CouplingBijector` but `transform`."""
        return CouplingBijector(**options)

    def bijector(self, condition: Tensor | None = None) -> CouplingBijector:
        condition = self.checked_condition(condition)
        return self.make_bijector(
            network=self.network.with_condition(condition),
            kept=self.kept_channels,
            moved=self.moved_channels,
            condition=condition,
            event_ndims=self.event_ndims,
            dtype=self.dtype,
        )


def _checked_mask(mask: Any) -> str | list[bool]:
    if isinstance(mask, str):
        return checks.one_of("mask", mask, ("halves", "alternating"))
    values = np.asarray(mask)
    if values.ndim != 1 or set(values.tolist()) != {False, True}:
        raise ValueError(
            "`mask` must be 'halves', 'alternating', or a boolean for each channel, some true, "
            f"some false; got {mask!r}."
        )
    return values.astype("bool").tolist()


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class AffineCoupling(Coupling):
    """Affine coupling flow: y_moved = x_moved * exp(log_scale(x_kept)) + shift(x_kept).

    The channels are cut into halves (an odd one out goes to the last half), or as a mask says.
    Shift and bounded log-scale come from a small Keras network, whose last layer starts at 0, so
    the flow starts as the identity. Log-determinant: the sum of the log-scales. Always invertible.
    Cost: one pass of the network, both ways.

    Args:
        hidden: positive int, units of the network's hidden layer. Defaults to 32.
        swap: bool, keep the last half and move the first, or keep what the mask would move.
            Defaults to False.
        limit: positive float, bound of |log scale|. Defaults to 2.
        mask: "halves", the default; "alternating" to keep every second channel; or a sequence of
            booleans (channels,), true where a channel is kept.
        network: Keras model or layer in place of the hidden layer, which turns the kept channels,
            followed by the condition if there is one, into any number of features; None, the
            default, for the hidden layer. The flow has a copy with new weights, which runs as in
            inference.
        event_ndims: int, how many of the last axes the network sees at once: 3 for convolutions of
            images (..., height, width, channels). Defaults to 1.
        **kwargs: arguments of `Flow`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> flow = ibnn.flows.AffineCoupling(hidden=8, swap=True)
        >>> flow(keras.ops.ones((2, 3))).shape[-1], tuple(flow.kept_channels.tolist())
        (3, (1, 2))

    References:
        Dinh et al., Density Estimation Using Real NVP, arXiv 1605.08803.
    """


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class AdditiveCoupling(Coupling):
    """Additive coupling flow (NICE): y_moved = x_moved + shift(x_kept); log-determinant 0.

    The arguments are those of `AffineCoupling`; `limit` has no effect.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> flow = ibnn.flows.AdditiveCoupling(mask="alternating")
        >>> flow.build((None, 3))
        >>> y, log_det = flow.forward_and_log_det(keras.ops.ones((2, 3)))
        >>> log_det.shape[0], float(log_det[0])
        (2, 0.0)

    References:
        Dinh et al., NICE: Non-linear Independent Components Estimation, arXiv 1410.8516.
    """

    def make_network(self, moved: int, given: GivenNetwork | None, **options: Any) -> Conditioner:
        return super().make_network(moved, given, parts=1, **options)
