"""Element-wise maps that networks steer: what couplings and autoregressive flows move by.

Each is made of what a network says, and maps forward and back:

    y, log_slopes = transform.forward(x)        # log dy/dx, number by number
    x, log_slopes = transform.inverse(y)        # log dx/dy
"""

from typing import NamedTuple, Protocol

from keras import ops

from tfp_ibnn._core.backend import Tensor


class Elementwise(Protocol):
    """An increasing map of each number of a tensor."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return y and log dy/dx, both of the shape of x."""

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return x and log dx/dy, both of the shape of y."""


class ShiftAndScale(NamedTuple):
    """y = x * exp(log_scale) + shift."""

    shift: Tensor
    log_scale: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return y and log dy/dx."""
        scale = ops.exp(self.log_scale)
        y = x * scale + self.shift
        return y, self.log_scale

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return x and log dx/dy."""
        log_slopes = -self.log_scale
        x = (y - self.shift) * ops.exp(log_slopes)
        return x, log_slopes


def shift_and_scale(parameters: tuple[Tensor, Tensor]) -> ShiftAndScale:
    """Return the map by a shift and a log-scale, as a `Conditioner` gives them."""
    shift, log_scale = parameters
    return ShiftAndScale(shift, log_scale)
