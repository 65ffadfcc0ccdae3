"""Flows of images at several scales."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.flows.bijector import FlowBijector
from tfp_ibnn.flows.chain import copied, through
from tfp_ibnn.flows.coupling import AffineCoupling
from tfp_ibnn.flows.flow import Flow
from tfp_ibnn.flows.glow import GlowStep


class SqueezeBijector(FlowBijector):
    """The map of `Squeeze`, by flows that are built.

    Args:
        flows: list of flows of the blocks.
        coarser: list of flows of the last half of their channels, before those.
        condition: tensor (..., 1, 1, condition_size), or None.
        dtype: str, the type of the tensors it maps.
    """

    event_ndims = 3

    def forward_and_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        blocks = _to_blocks(x)
        blocks, log_det = self._map_last_half(blocks, "forward")
        blocks, change = through(self.flows, blocks, self.condition, "forward", self.event_ndims)
        return _to_pixels(blocks), log_det + change

    def inverse_and_log_det(self, y: Tensor) -> tuple[Tensor, Tensor]:
        blocks = _to_blocks(y)
        blocks, log_det = through(self.flows, blocks, self.condition, "inverse", self.event_ndims)
        blocks, change = self._map_last_half(blocks, "inverse")
        return _to_pixels(blocks), log_det + change

    def _map_last_half(self, blocks: Tensor, direction: str) -> tuple[Tensor, Tensor]:
        first, last = ops.split(blocks, 2, axis=-1)
        last, log_det = through(
            self.coarser,
            last,
            self.condition,
            direction,
            self.event_ndims,
        )
        blocks = ops.concatenate([first, last], axis=-1)
        return blocks, log_det


def _to_blocks(x: Tensor) -> Tensor:
    """Return images with blocks of 2 x 2 pixels as channels: half as wide and high."""
    *lead, height, width, channels = ops.shape(x)
    rows = height // 2
    columns = width // 2
    x = ops.reshape(x, (-1, rows, 2, columns, 2, channels))
    x = _swap_inner_axes(x)
    size = 4 * channels
    return ops.reshape(x, (*lead, rows, columns, size))


def _to_pixels(blocks: Tensor) -> Tensor:
    """Undo `_to_blocks`."""
    *lead, rows, columns, size = ops.shape(blocks)
    channels = size // 4
    x = ops.reshape(blocks, (-1, rows, columns, 2, 2, channels))
    x = _swap_inner_axes(x)
    height = 2 * rows
    width = 2 * columns
    return ops.reshape(x, (*lead, height, width, channels))


def _swap_inner_axes(x: Tensor) -> Tensor:
    """Swap the axes of a block's rows and of the columns of blocks."""
    return ops.transpose(x, (0, 1, 3, 2, 4, 5))


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Squeeze(Flow):
    """Flows of 2 x 2 blocks: images (..., height, width, channels) become half as wide and high.

    Their 4 * channels pass `flows`, and the blocks go back to their places. The last half of the
    channels passes `coarser` first, and the other half is noise till then: with another `Squeeze`
    there, this is the multi-scale architecture. Log-determinants are those of whole images.

    Args:
        flows: sequence of flows of the blocks (..., height / 2, width / 2, 4 * channels); they are
            copied, with new weights.
        coarser: sequence of flows of the last 2 * channels of these; copied too. Defaults to none.
        **kwargs: arguments of `Flow`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> flow = ibnn.flows.Squeeze([ibnn.flows.AffineCoupling(hidden=4)])
        >>> flow.build((None, 4, 4, 1))
        >>> y, log_det = flow.forward_and_log_det(keras.ops.ones((2, 4, 4, 1)))
        >>> tuple(y.shape), tuple(log_det.shape)
        ((2, 4, 4, 1), (2,))

    References:
        Dinh et al., Density Estimation Using Real NVP, arXiv 1605.08803.
    """

    event_ndims = 3

    def __init__(self, flows: Sequence[Flow], coarser: Sequence[Flow] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        size = self.condition_size
        ndims = self.event_ndims
        self.flows = copied(flows, self.dtype, "flows", size, ndims)
        self.coarser = copied(coarser, self.dtype, "coarser", size, ndims)
        both = (*self.flows, *self.coarser)
        self.exact_log_det = all(flow.exact_log_det for flow in both)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        *lead, height, width, channels = input_shape
        if (height or 1) % 2 or (width or 1) % 2:
            raise ValueError(f"`x` must have even height and width; got {tuple(input_shape)}.")
        places = (*lead, height // 2, width // 2)
        shape = (*places, 4 * channels)
        for flow in self.flows:
            flow.build(shape)
        shape = (*places, 2 * channels)
        for flow in self.coarser:
            flow.build(shape)

    def bijector(self, condition: Tensor | None = None) -> SqueezeBijector:
        return SqueezeBijector(
            flows=self.flows,
            coarser=self.coarser,
            condition=condition,
            dtype=self.dtype,
        )

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        config["flows"] = keras.saving.serialize_keras_object(self.flows)
        config["coarser"] = keras.saving.serialize_keras_object(self.coarser)
        return config


def RealNVP(  # noqa: N802
    steps: int = 8, hidden: int = 64, scales: int = 0, network: keras.layers.Layer | None = None
) -> list[Flow]:
    """Return affine couplings that move either half in turn, for images at several scales.

    Args:
        steps: positive int, the number of couplings, of each scale. Defaults to 8.
        hidden: positive int, units of a coupling's hidden layer, or filters of its convolutions.
            Defaults to 64.
        scales: int, the number of scales of images, each of half the width and height of the one
            before; 0, the default, for vectors.
        network: Keras model or layer, as that of `AffineCoupling`; None, the default, for a hidden
            layer, or for images two convolutions.

    Returns:
        List of flows, for `FlowDensity` or `FlowPosterior`.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> [flow.swap for flow in ibnn.flows.RealNVP(steps=3)]
        [False, True, False]
    """
    return _levels(AffineCoupling, steps, hidden, scales, network)


def Glow(  # noqa: N802
    steps: int = 8, hidden: int = 64, scales: int = 0, network: keras.layers.Layer | None = None
) -> list[Flow]:
    """Return steps of Glow that move either half in turn, for images at several scales.

    Args:
        steps: positive int, the number of steps, of each scale. Defaults to 8.
        hidden: positive int, as that of `RealNVP`. Defaults to 64.
        scales: int, as that of `RealNVP`; 0, the default, for vectors.
        network: Keras model or layer, as that of `RealNVP`, or None, the default.

    Returns:
        List of flows, for `FlowDensity` or `FlowPosterior`.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> [type(flow).__name__ for flow in ibnn.flows.Glow(steps=2, scales=1)]
        ['Squeeze']
    """
    return _levels(GlowStep, steps, hidden, scales, network)


def _levels(
    flow_class: type[Flow],
    steps: int,
    hidden: int,
    scales: int,
    network: keras.layers.Layer | None,
) -> list[Flow]:
    """Return flows of vectors, or of images at some scales, the coarser ones inside the finest."""
    scales = checks.positive_integer("scales", scales, least=0)
    if scales == 0:
        return _steps(flow_class, steps, hidden, network, event_ndims=1)
    if network is None:
        network = _convolutions(hidden)
    flows = _steps(flow_class, steps, hidden, network, event_ndims=3)
    coarser = []
    if scales > 1:
        coarser = _levels(flow_class, steps, hidden, scales - 1, network)
    return [Squeeze(flows, coarser)]


def _steps(
    flow_class: type[Flow],
    steps: int,
    hidden: int,
    network: keras.layers.Layer | None,
    event_ndims: int,
) -> list[Flow]:
    steps = checks.positive_integer("steps", steps, checks.LARGEST_SIZE)
    return [
        flow_class(
            hidden=hidden,
            swap=step % 2 == 1,
            network=network,
            event_ndims=event_ndims,
        )
        for step in range(steps)
    ]


def _convolutions(filters: int) -> keras.Sequential:
    return keras.Sequential(
        [
            keras.layers.Conv2D(filters, kernel_size=3, padding="same", activation="relu"),
            keras.layers.Conv2D(filters, kernel_size=3, padding="same", activation="relu"),
        ]
    )
