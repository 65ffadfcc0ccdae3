"""The channels in another order."""

import random
from collections.abc import Sequence
from typing import Any, ClassVar

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.flows.bijector import FlowBijector
from tfp_ibnn.flows.flow import Flow

_KINDS = ("reverse", "shuffle")


class PermuteBijector(FlowBijector):
    """y_i = x_permutation[i].

    Log-determinant: 0. The inverse takes the channels back. Cost: O(channels) per draw, both ways.

    Args:
        permutation: tensor (channels,), integers.
        dtype: str, the type of the tensors it maps.
    """

    parameter_ndims: ClassVar = {"permutation": 1}
    constant_jacobian = True

    def _forward(self, x: Tensor) -> Tensor:
        return ops.take(x, self.permutation, axis=-1)

    def _inverse(self, y: Tensor) -> Tensor:
        inverse_permutation = ops.argsort(self.permutation)
        return ops.take(y, inverse_permutation, axis=-1)

    def _forward_log_det_jacobian(self, x: Tensor) -> Tensor:
        return ops.zeros((), dtype=x.dtype)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Permute(Flow):
    """Put the channels in another order, y_i = x_p(i); no weight is trained.

    Between couplings or autoregressive flows, other channels become those that are kept, or come
    first. Log-determinant: 0. Always invertible, without rounding. Cost: O(channels) per draw, both
    ways. A condition makes no difference.

    Args:
        kind: "reverse", the default; "shuffle" for a random order, which is drawn once, when the
            flow is built, and saved; or the order itself, a sequence of ints (channels,): of each
            channel of y, the channel of x that it takes.
        seed: int of 0 or above, which chooses the random order; None, the default, takes one that
            `keras.utils.set_random_seed` repeats.
        **kwargs: arguments of `Flow`.

    Raises:
        ValueError: `kind` is not one of these, or orders another number of channels, or there is a
            `seed` for an order that is not random.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> flow = ibnn.flows.Permute([2, 0, 1])
        >>> flow(keras.ops.convert_to_tensor([[10.0, 20.0, 30.0]])).__array__().tolist()
        [[30.0, 10.0, 20.0]]
    """

    def __init__(
        self, kind: str | Sequence[int] = "reverse", seed: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.kind = _checked_kind(kind)
        self.seed = None if seed is None else checks.whole("seed", seed)
        if seed is not None and self.kind != "shuffle":
            raise ValueError(f"`seed` is for kind='shuffle'; got kind={kind!r} and seed={seed!r}.")

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        order = self._order()
        if len(order) != self.channels:
            raise ValueError(
                f"`kind` must order {self.channels} channels, as the input of shape "
                f"{tuple(input_shape)} has; got {self.kind!r}."
            )
        self.permutation = self.add_parameter(
            "permutation",
            (self.channels,),
            keras.initializers.Constant(order),
            dtype="int",
            trainable=False,
        )

    def _order(self) -> np.ndarray:
        """Return the permutation that a new flow has."""
        if self.kind == "reverse":
            return np.arange(self.channels)[::-1].copy()
        if self.kind == "shuffle":
            seed = random.getrandbits(63) if self.seed is None else self.seed
            return np.random.default_rng(seed).permutation(self.channels)
        return np.asarray(self.kind)

    def bijector_of(self, permutation: Tensor) -> PermuteBijector:
        return PermuteBijector(permutation=permutation, dtype=self.dtype)


def _checked_kind(kind: Any) -> str | list[int]:
    if isinstance(kind, str):
        return checks.one_of("kind", kind, _KINDS)
    order = np.asarray(kind)
    are_numbers = order.ndim == 1 and order.size > 0 and order.dtype.kind in "iu"
    if not are_numbers or not np.array_equal(np.sort(order), np.arange(order.size)):
        raise ValueError(
            "`kind` must be 'reverse', 'shuffle', or the numbers from 0 to channels - 1, each "
            f"once, such as [2, 0, 1]; got {kind!r}."
        )
    return order.tolist()
