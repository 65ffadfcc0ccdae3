"""Inverse autoregressive flow."""

from typing import Any

import keras
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor, fori_loop
from tfp_ibnn.flows._elementwise import shift_and_scale
from tfp_ibnn.flows._networks import Conditioner, Masks, masks_before
from tfp_ibnn.flows._rows import like_rows
from tfp_ibnn.flows.bijector import FlowBijector
from tfp_ibnn.flows.flow import Flow


class AutoregressiveBijector(FlowBijector):
    """y_i = transform(network_i(x_<i))(x_i), by default x_i * exp(log_scale_i) + shift_i.

    The Jacobian is triangular; log-determinant: the sum of the log-slopes. Always invertible.
    Forward takes one pass of the network, the inverse `channels` passes, each of which finds one
    more channel.

    Args:
        network: function of x (..., channels) that returns what `transform` takes, where entry i
            depends on the channels before i only; for the default a shift and a log-scale, both
            (..., channels).
        transform: function of the network's output that returns the map of the channels, as that of
            `CouplingBijector`. Defaults to y = x * exp(log_scale) + shift.
        condition: tensor (..., condition_size), to whose rows y is broadcast; None, the default, if
            the network has no condition.
        dtype: str, the type of the tensors it maps.
    """

    transform = staticmethod(shift_and_scale)
    condition: Tensor | None = None

    def _inverse(self, y: Tensor) -> Tensor:
        y = like_rows(y, self.condition)
        start = ops.zeros_like(y)
        passes = y.shape[-1]

        def find_next_channel(_: Tensor, x: Tensor) -> Tensor:
            transform = self.transform(self.network(x))
            x, _ = transform.inverse(y)
            return x

        return fori_loop(0, passes, find_next_channel, start)

    def forward_and_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        transform = self.transform(self.network(x))
        y, log_slopes = transform.forward(x)
        return y, ops.sum(log_slopes, axis=-1)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class InverseAutoregressive(Flow):
    """Inverse autoregressive flow (IAF): y_i = x_i * exp(log_scale_i(x_<i)) + shift_i(x_<i).

    Shifts and bounded log-scales come from a masked network of one hidden layer, whose output
    weights start at 0: the identity. Log-determinant: the sum of the log-scales. Always invertible.
    Forward takes one pass of the network, the inverse one for each channel.

    Args:
        hidden: positive int, units of the hidden layer. Defaults to 32.
        reverse: bool, let each channel depend on those after it instead of those before it.
            Defaults to False.
        limit: positive float, bound of |log scale|. Defaults to 2.
        spread: bool; False is for files of earlier versions, in which hidden units fewer than
            channels saw the first of these only. Defaults to True.
        **kwargs: arguments of `Flow`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> flow = ibnn.flows.InverseAutoregressive(hidden=8)
        >>> flow.build((None, 3))
        >>> y, log_det = flow.forward_and_log_det(keras.ops.ones((2, 3)))
        >>> float(y[0, 0]), float(log_det[0])
        (1.0, 0.0)

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
        self.limit = checks.positive("limit", limit)
        self.spread = bool(spread)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "InverseAutoregressive":
        return cls(**{"spread": False, **config})

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        masks = masks_before(self.channels, self.hidden, self.reverse, spread=self.spread)
        self.network = self.make_network(
            masks,
            condition_size=self.condition_size,
            dtype=self.dtype,
            name="network",
        )
        self.network.build(input_shape)

    def make_network(self, masks: Masks, **options: Any) -> Conditioner:
        """Return the masked network, unbuilt.

        Args:
            masks: which inputs hidden units see, and which outputs they serve.
            **options: arguments of `keras.layers.Layer`, and `condition_size`.

        Returns:
            The network, a Conditioner.
        """
        return Conditioner(self.channels, self.hidden, self.limit, masks, **options)

    def make_bijector(self, **options: Any) -> AutoregressiveBijector:
        """Return the bijector, from all arguments of its class but `transform`."""
        return AutoregressiveBijector(**options)

    def bijector(self, condition: Tensor | None = None) -> AutoregressiveBijector:
        condition = self.checked_condition(condition)
        return self.make_bijector(
            network=self.network.with_condition(condition),
            condition=condition,
            dtype=self.dtype,
        )
