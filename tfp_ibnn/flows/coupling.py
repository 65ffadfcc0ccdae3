"""Couplings: one part of the channels steers a map of the other; the affine one."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.flows._conditional import Conditioner
from tfp_ibnn.flows.flow import FlowBijector, NetworkFlow, like_rows


class MovesBijector(FlowBijector):
    """Base of bijectors that map channels one by one, as a network says that sees others."""

    condition: Tensor | None = None

    def move(self, x: Tensor, parameters: Any) -> tuple[Tensor, Tensor]:
        """Map x (..., moved) by the network's output; return the log-slopes too."""
        shift, log_scale = parameters
        return x * ops.exp(log_scale) + shift, log_scale

    def move_back(self, y: Tensor, parameters: Any) -> tuple[Tensor, Tensor]:
        """Undo `move`; return its log-slopes too."""
        shift, log_scale = parameters
        return (y - shift) * ops.exp(-log_scale), log_scale


class CouplingBijector(MovesBijector):
    """Keep one part of the channels and shift and scale the other, given the first.

    y_kept = x_kept,  y_moved = x_moved * exp(log_scale(x_kept)) + shift(x_kept).
    Log-determinant: sum of log_scale. Always invertible. Cost: one pass of the network, both ways.

    Args:
        network: maps (..., kept) to shifts and log-scales, both (..., moved).
        split_at: how many channels the first part has.
        swap: keep the last part instead of the first.
        order: (channels,), to which the channels are sorted for the split; None leaves them.
        condition: (..., condition_size), if the network has one; x is broadcast to its rows.
        event_ndims: number of last axes that the network sees at once.
        dtype: of the tensors it will see.
    """

    order: np.ndarray | None = None

    def inverse_and_log_det(self, y: Tensor) -> tuple[Tensor, Tensor]:
        x, log_det = self._moved(y, self.move_back)
        return x, -log_det

    def forward_and_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._moved(x, self.move)

    def _moved(self, x: Tensor, move: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        x = like_rows(x, self.condition)
        x = x if self.order is None else ops.take(x, self.order, axis=-1)
        first, last = x[..., : self.split_at], x[..., self.split_at :]
        kept, moved = (last, first) if self.swap else (first, last)
        moved, log_slope = move(moved, self.network(kept))
        x = ops.concatenate([moved, kept] if self.swap else [kept, moved], axis=-1)
        x = x if self.order is None else ops.take(x, np.argsort(self.order), axis=-1)
        return x, ops.sum(log_slope, axis=tuple(range(-self.event_ndims, 0)))


class Coupling(NetworkFlow):
    """Base of coupling flows: which channels are kept, and the network that sees them.

    A subclass has `make_network`, and `make_bijector`, which maps the moved channels.
    """

    min_channels: ClassVar[int] = 2

    def __init__(
        self,
        hidden: int = 32,
        swap: bool = False,
        limit: float = 2.0,
        mask: str | Sequence[bool] = "halves",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.hidden = checks.positive_integer("hidden", hidden, checks.LARGEST_SIZE)
        self.swap = bool(swap)
        self.limit = checks.positive("limit", limit)
        self.mask = mask
        if isinstance(mask, str):
            checks.one_of("mask", mask, ("halves", "alternating"))
            return
        given = np.asarray(mask)
        if given.ndim != 1 or set(given.tolist()) != {False, True}:
            wanted = "'halves', 'alternating', or a boolean for each channel, some true, some false"
            raise ValueError(f"`mask` must be {wanted}; got {mask!r}.")
        self.mask = given.astype("bool").tolist()

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        if len(self._kept()) != self.channels:
            got = f"{len(self.mask)} for {self.channels} channels"
            raise ValueError(f"`mask` must be a boolean per channel, or 'alternating'; got {got}.")
        kept = int(self._kept().sum())
        moved = self.channels - kept
        options = {"condition_size": self.condition_size, "dtype": self.dtype, "name": "network"}
        self.network = self.make_network(moved, given=self.own_network(), **options)
        self.network.build((*input_shape[:-1], kept))

    def make_network(self, moved: int, **options: Any) -> Conditioner:
        """Return the network, unbuilt, for so many moved channels."""
        return Conditioner(moved, self.hidden, self.limit, **options)

    def make_bijector(self, **options: Any) -> CouplingBijector:
        """Return the bijector."""
        return CouplingBijector(**options)

    def bijector(self, condition: Tensor | None = None) -> CouplingBijector:
        condition = self.checked_condition(condition)
        halves = self.mask == "halves"
        return self.make_bijector(
            network=self.network.given(condition),
            split_at=self.channels // 2 if halves else int(self._kept().sum()),
            swap=self.swap and halves,
            order=None if halves else np.argsort(~self._kept(), kind="stable"),
            condition=condition,
            event_ndims=self.event_ndims,
            dtype=self.dtype,
        )

    def _kept(self) -> np.ndarray:
        places = np.arange(self.channels)
        named = {"halves": places < self.channels // 2, "alternating": places % 2 == 0}
        mask = named[self.mask] if isinstance(self.mask, str) else np.array(self.mask)
        return ~mask if self.swap else mask


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class AffineCoupling(Coupling):
    """Affine coupling flow with a small Keras network and a bounded log-scale.

    The channels are cut into halves (an odd one out goes to the last half), or as a mask says. The
    network's last layer starts at 0, so the flow starts as the identity.

    Args:
        hidden: units of the network's hidden layer.
        swap: keep the last half and move the first, or keep what the mask would move.
        limit: bound of |log scale|.
        mask: "halves"; "alternating" to keep every second channel; or a boolean for each channel,
            true where it is kept.
        network: a Keras model or layer in place of the hidden layer, which turns the kept channels,
            followed by the condition if there is one, into any number of features. The flow has a
            copy with new weights, which runs as in inference.
        event_ndims: how many of the last axes the network sees at once: 3 for convolutions of
            images (..., height, width, channels).

    References:
        Dinh et al., Density Estimation Using Real NVP, arXiv 1605.08803.
    """


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class AdditiveCoupling(Coupling):
    """Additive coupling flow (NICE): y_moved = x_moved + shift(x_kept); log-determinant 0.

    The arguments are those of `AffineCoupling`; `limit` has no effect.

    References:
        Dinh et al., NICE: Non-linear Independent Components Estimation, arXiv 1410.8516.
    """

    def make_network(self, moved: int, **options: Any) -> Conditioner:
        return super().make_network(moved, parts=1, **options)
