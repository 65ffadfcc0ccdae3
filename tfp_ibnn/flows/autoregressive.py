"""Inverse autoregressive flow."""

from typing import Any

import keras
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor, fori_loop
from tfp_ibnn.flows._conditional import Conditioner, masks_before
from tfp_ibnn.flows.coupling import MovesBijector
from tfp_ibnn.flows.flow import Flow, like_rows


class AutoregressiveBijector(MovesBijector):
    """y_i = x_i * exp(log_scale_i(x_<i)) + shift_i(x_<i).

    The Jacobian is triangular; log-determinant: sum of log_scale. Always invertible. Forward takes
    one pass of the network, the inverse `channels` passes, each of which finds one more channel.

    Args:
        network: maps (..., channels) to shifts and log-scales, both (..., channels), where entry i
            depends on the entries before i only.
        condition: (..., condition_size), if the network has one; y is broadcast to its rows.
        dtype: of the tensors it will see.
    """

    def _inverse(self, y: Tensor) -> Tensor:
        y = like_rows(y, self.condition)
        passes, start = y.shape[-1], ops.zeros_like(y)
        return fori_loop(0, passes, lambda _, x: self.move_back(y, self.network(x))[0], start)

    def forward_and_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, log_slope = self.move(x, self.network(x))
        return y, ops.sum(log_slope, axis=-1)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class InverseAutoregressive(Flow):
    """Inverse autoregressive flow (IAF) with a masked network of one hidden layer.

    The log-scale is bounded and the output weights start at 0: the identity.

    Args:
        hidden: units of the hidden layer.
        reverse: let each channel depend on those after it instead of those before it.
        limit: bound of |log scale|.
        spread: False is for files of earlier versions, in which hidden units fewer than channels
            saw the first of these only.

    References:
        Kingma et al., Improving Variational Inference with Inverse Autoregressive Flow, arXiv
        1606.04934. Germain et al., MADE, arXiv 1502.03509.
    """

    def __init__(
        self,
        hidden: int = 32,
        reverse: bool = False,
        limit: float = 2.0,
        spread: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.hidden = checks.positive_integer("hidden", hidden, checks.LARGEST_SIZE)
        self.reverse = bool(reverse)
        self.limit, self.spread = checks.positive("limit", limit), bool(spread)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "InverseAutoregressive":
        return cls(**{"spread": False, **config})

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        masks = masks_before(self.channels, self.hidden, self.reverse, spread=self.spread)
        options = {"condition_size": self.condition_size, "dtype": self.dtype, "name": "network"}
        self.network = self.make_network(self.channels, masks=masks, **options)
        self.network.build(input_shape)

    def make_network(self, channels: int, **options: Any) -> Conditioner:
        """Return the masked network, unbuilt."""
        return Conditioner(channels, self.hidden, self.limit, **options)

    def make_bijector(self, **options: Any) -> AutoregressiveBijector:
        """Return the bijector."""
        return AutoregressiveBijector(**options)

    def bijector(self, condition: Tensor | None = None) -> AutoregressiveBijector:
        condition = self.checked_condition(condition)
        network = self.network.given(condition)
        return self.make_bijector(network=network, condition=condition, dtype=self.dtype)
