"""Affine coupling."""

from typing import Any, ClassVar

import keras
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.flows._conditional import Conditioner
from tfp_ibnn.flows._rows import like_rows
from tfp_ibnn.flows.flow import Flow, FlowBijector


class CouplingBijector(FlowBijector):
    """Keep one part of the channels and shift and scale the other, given the first.

    y_kept = x_kept,  y_moved = x_moved * exp(log_scale(x_kept)) + shift(x_kept).
    Log-determinant: sum of log_scale. Always invertible. Cost: one pass of the network, both ways.

    Args:
        network: maps (..., kept) to shifts and log-scales, both (..., moved).
        split_at: how many channels the first part has.
        swap: keep the last part instead of the first.
        condition: (..., condition_size), if the network has one; x is broadcast to its rows.
        dtype: of the tensors it will see.
    """

    condition: Tensor | None = None

    def _forward(self, x: Tensor) -> Tensor:
        kept, moved = self._split(x)
        shift, log_scale = self.network(kept)
        return self._join(kept, moved * ops.exp(log_scale) + shift)

    def _inverse(self, y: Tensor) -> Tensor:
        kept, moved = self._split(y)
        shift, log_scale = self.network(kept)
        return self._join(kept, (moved - shift) * ops.exp(-log_scale))

    def _forward_log_det_jacobian(self, x: Tensor) -> Tensor:
        return ops.sum(self.network(self._split(x)[0])[1], axis=-1)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = like_rows(x, self.condition)
        first, last = x[..., : self.split_at], x[..., self.split_at :]
        return (last, first) if self.swap else (first, last)

    def _join(self, kept: Tensor, moved: Tensor) -> Tensor:
        return ops.concatenate([moved, kept] if self.swap else [kept, moved], axis=-1)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class AffineCoupling(Flow):
    """Affine coupling flow with a small Keras network and a bounded log-scale.

    The channels are cut into halves (an odd one out goes to the last half). The network's last
    layer starts at 0, so the flow starts as the identity.

    Args:
        hidden: units of the network's hidden layer.
        swap: keep the last half and move the first.
        limit: bound of |log scale|.

    Example:
        >>> import keras
        >>> AffineCoupling(hidden=8)(keras.ops.zeros((4, 3))).shape[-1]
        3

    References:
        Dinh et al., Density Estimation Using Real NVP, arXiv 1605.08803.
    """

    min_channels: ClassVar[int] = 2
    arguments = ("hidden", "swap", "limit")

    def __init__(
        self, hidden: int = 32, swap: bool = False, limit: float = 2.0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.hidden = checks.positive_integer("hidden", hidden, checks.LARGEST_SIZE)
        self.swap = bool(swap)
        self.limit = checks.positive("limit", limit)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Build the network for the two parts."""
        super().build(input_shape)
        first = self.channels // 2
        sizes = (first, self.channels - first)
        kept, moved = reversed(sizes) if self.swap else sizes
        options = {"condition_size": self.condition_size, "dtype": self.dtype, "name": "network"}
        self.network = Conditioner(moved, self.hidden, self.limit, **options)
        self.network.build((None, kept))

    def bijector(self, condition: Tensor | None = None) -> CouplingBijector:
        """Return the map for the present weights."""
        condition = self.checked_condition(condition)
        return CouplingBijector(
            network=self.network.given(condition),
            split_at=self.channels // 2,
            swap=self.swap,
            condition=condition,
            dtype=self.dtype,
        )
