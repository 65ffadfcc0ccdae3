"""Flows of images at several scales."""

import functools
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.flows.chain import copied, through
from tfp_ibnn.flows.coupling import AffineCoupling
from tfp_ibnn.flows.flow import Flow, FlowBijector
from tfp_ibnn.flows.glow import GlowStep


class SqueezeBijector(FlowBijector):
    """The map of `Squeeze`, of built flows; a condition is (..., 1, 1, condition_size)."""

    event_ndims = 3

    def forward_and_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, log_det = self._half(_blocks(x), "forward")
        x, change = through(self.flows, x, self.condition, "forward", 3)
        return _blocks(x, back=True), log_det + change

    def inverse_and_log_det(self, y: Tensor) -> tuple[Tensor, Tensor]:
        y, log_det = through(self.flows, _blocks(y), self.condition, "inverse", 3)
        y, change = self._half(y, "inverse")
        return _blocks(y, back=True), log_det + change

    def _half(self, x: Tensor, way: str) -> tuple[Tensor, Tensor]:
        first, last = ops.split(x, 2, axis=-1)
        last, log_det = through(self.coarser, last, self.condition, way, 3)
        return ops.concatenate([first, last], axis=-1), log_det


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Squeeze(Flow):
    """Flows of 2 x 2 blocks: images (..., height, width, channels) become half as wide and high.

    Their 4 * channels pass `flows`, and the blocks go back to their places. The last half of the
    channels passes `coarser` first, and the other half is noise till then: with another `Squeeze`
    there, this is the multi-scale architecture. Log-determinants are those of whole images.

    References:
        Dinh et al., Density Estimation Using Real NVP, arXiv 1605.08803.
    """

    event_ndims = 3

    def __init__(self, flows: Sequence[Flow], coarser: Sequence[Flow] = (), **kw: Any) -> None:
        super().__init__(**kw)
        self.flows = copied(flows, self.dtype, "flows", self.condition_size, 3)
        self.coarser = copied(coarser, self.dtype, "coarser", self.condition_size, 3)
        self.exact_log_det = all(flow.exact_log_det for flow in (*self.flows, *self.coarser))

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        *lead, height, width, channels = input_shape
        if (height or 1) % 2 or (width or 1) % 2:
            raise ValueError(f"`x` must have even height and width; got {tuple(input_shape)}.")
        for flows, size in ((self.flows, 4 * channels), (self.coarser, 2 * channels)):
            for flow in flows:
                flow.build((*lead, height // 2, width // 2, size))

    def bijector(self, condition: Tensor | None = None) -> SqueezeBijector:
        parts = {"flows": self.flows, "coarser": self.coarser, "condition": condition}
        return SqueezeBijector(**parts, dtype=self.dtype)

    def get_config(self) -> dict[str, Any]:
        lists = {"flows": self.flows, "coarser": self.coarser}
        return {**super().get_config(), **keras.saving.serialize_keras_object(lists)}


def _blocks(x: Tensor, back: bool = False) -> Tensor:
    """Return images with blocks of 2 x 2 pixels as channels, or undo it."""
    *lead, height, width, size = ops.shape(x)
    split = (height, width, 2, 2, size // 4) if back else (height // 2, 2, width // 2, 2, size)
    x = ops.transpose(ops.reshape(x, (-1, *split)), (0, 1, 3, 2, 4, 5))
    if back:
        return ops.reshape(x, (*lead, 2 * height, 2 * width, size // 4))
    return ops.reshape(x, (*lead, height // 2, width // 2, 4 * size))


def RealNVP(  # noqa: N802
    steps: int = 8, hidden: int = 64, scales: int = 0, network: keras.layers.Layer | None = None
) -> list[Flow]:
    """Return affine couplings that move either half in turn; of images at `scales` scales.

    For images the `network` of `AffineCoupling` is by default two convolutions of `hidden` filters.
    """
    return _levels(AffineCoupling, steps, hidden, scales, network)


def Glow(  # noqa: N802
    steps: int = 8, hidden: int = 64, scales: int = 0, network: keras.layers.Layer | None = None
) -> list[Flow]:
    """Return steps of Glow that move either half in turn; the arguments are those of `RealNVP`."""
    return _levels(GlowStep, steps, hidden, scales, network)


def _levels(kind: type, steps: int, hidden: int, scales: int, network: Any) -> list[Flow]:
    if checks.positive_integer("scales", scales, least=0) and network is None:
        convolve = functools.partial(keras.layers.Conv2D, hidden, padding="same", activation="relu")
        network = keras.Sequential([convolve(kernel_size=3), convolve(kernel_size=3)])
    options = {"hidden": hidden, "network": network, "event_ndims": 3 if scales else 1}
    steps = checks.positive_integer("steps", steps, checks.LARGEST_SIZE)
    flows = [kind(swap=step % 2 == 1, **options) for step in range(steps)]
    coarser = _levels(kind, steps, hidden, scales - 1, network) if scales > 1 else ()
    return [Squeeze(flows, coarser)] if scales else flows
