"""The patches of an image that a convolution's kernel multiplies: a convolution is a matrix."""

import math
from typing import Any, NamedTuple

from keras import ops

from tfp_ibnn._core.backend import Tensor


class _Slide(NamedTuple):
    """How a kernel slides along one axis."""

    size: int  # of the input, without padding
    kernel: int
    stride: int
    dilation: int

    @property
    def reach(self) -> int:
        """The distance between the first and the last input that the kernel multiplies."""
        return (self.kernel - 1) * self.dilation

    def positions(self, padding: str) -> int:
        """Return the number of positions of the kernel."""
        if padding == "same":
            return -(-self.size // self.stride)
        if padding == "causal":
            return (self.size - 1) // self.stride + 1
        return (self.size - self.reach - 1) // self.stride + 1

    def pads(self, padding: str) -> tuple[int, int]:
        """Return the numbers of zeros before and after the input."""
        if padding == "causal":
            return self.reach, 0
        if padding != "same":
            return 0, 0
        last = (self.positions(padding) - 1) * self.stride + self.reach
        lacking = max(0, last + 1 - self.size)
        before = lacking // 2
        return before, lacking - before


def is_pointwise(layer: Any) -> bool:
    """Whether a convolution multiplies each position alone: no patches, and sizes may be open."""
    is_last = layer.data_format == "channels_last"
    return is_last and set(layer.kernel_size) == set(layer.strides) == {1}


def patches(layer: Any, x: Tensor) -> Tensor:
    """Return the inputs of a convolution's matrix at each position of its kernel.

    Args:
        layer: a convolution of one group, in one, two or three dimensions.
        x: what it is called on, (N, ...).

    Returns:
        A tensor (N, positions, inputs), with the inputs in the order of the kernel.
    """
    if layer.data_format == "channels_first":
        x = ops.moveaxis(x, 1, -1)
    slides = _slides(layer, x.shape[1:-1])
    # An axis at a time: fewer slices than a kernel has positions.
    for axis, slide in enumerate(slides, start=1):
        x = _along_axis(x, axis, slide, layer.padding)
    end = len(slides) + 1
    positions = math.prod(x.shape[1:end])
    inputs = math.prod(x.shape[end:])
    return ops.reshape(x, (-1, positions, inputs))


def _slides(layer: Any, sizes: tuple[int, ...]) -> list[_Slide]:
    """Return how the kernel slides along each axis of an input of these sizes."""
    numbers = zip(
        sizes,
        layer.kernel_size,
        layer.strides,
        layer.dilation_rate,
        strict=True,
    )
    return [_Slide(*each) for each in numbers]


def _along_axis(x: Tensor, axis: int, slide: _Slide, padding: str) -> Tensor:
    """Replace an axis by the positions on it; put what the kernel multiplies there in a new one."""
    pads = [(0, 0)] * len(x.shape)
    pads[axis] = slide.pads(padding)
    x = ops.pad(x, pads)
    index = [slice(None)] * len(x.shape)
    last = (slide.positions(padding) - 1) * slide.stride
    parts = []
    for first in range(0, slide.reach + 1, slide.dilation):
        end = first + last + 1
        index[axis] = slice(first, end, slide.stride)
        parts.append(x[tuple(index)])
    return ops.stack(parts, axis=-2)
