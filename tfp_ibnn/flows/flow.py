"""The base class of all flows: the Keras layer that owns the weights of a bijector."""

from typing import Any, ClassVar

from keras import ops

from tfp_ibnn._core.backend import KEY_DTYPE, Tensor, tfb
from tfp_ibnn._core.checks import channels_of, full_precision, missing_attribute
from tfp_ibnn._core.serialization import SavesRandomState
from tfp_ibnn.flows._conditional import Conditional
from tfp_ibnn.flows.bijector import FlowBijector, map_with_log_det


class Flow(SavesRandomState, Conditional):
    """An invertible map of the last axis whose weights Keras owns.

    A new flow is a subclass with `build`, which adds weights by `add_parameter`, and `bijector_of`,
    a function of their values by name, or `bijector`, which reads them by `parameter`. With a
    `condition_size`, each row of a condition has its own parameters, weight + linear(condition),
    which start as those of the flow without one. Flows compute in float32, or in float64 under a
    float64 policy, whatever network is around them.

    Args:
        condition_size: int or None, the size of the last axis of conditions; None, the default,
            for a flow without a condition.
        **kwargs: arguments of `keras.layers.Layer`, such as `name` and `dtype`.

    Example:
        >>> import keras
        >>> from tfp_ibnn.flows import Flow, AffineBijector
        >>> class Shift(Flow):
        ...     def build(self, input_shape):
        ...         super().build(input_shape)
        ...         self.shift = self.add_parameter("shift", (self.channels,), "zeros")
        ...
        ...     def bijector_of(self, shift):
        ...         return AffineBijector(shift=shift, scale=keras.ops.ones_like(shift))
        >>> Shift()(keras.ops.ones((2, 3))).shape[-1]
        3
    """

    event_ndims: ClassVar[int] = 1
    """How many of the last axes are one event, which has one log-determinant."""

    min_channels: ClassVar[int] = 1
    exact_log_det: ClassVar[bool] = True
    """Whether the log-determinant is exact, or else random and unbiased, by `seed_generator`."""

    mixes_draws: ClassVar[bool] = False
    """Whether what becomes of a draw in training depends on the others, as by batch statistics.

    It is assumed of each class that defines a `forward_and_log_det`, or inherits one that is not
    `Flow`'s, unless that class itself declares it.
    """

    stackable: ClassVar[bool] = False
    """Whether `bijector_of` is all that the flow does with its weights, so that `Stack` takes it.

    Each class declares it for itself: a subclass, which may do more, does not inherit it.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "stackable" not in vars(cls):
            cls.stackable = False
        is_its_own = cls.forward_and_log_det is not Flow.forward_and_log_det
        if is_its_own and "mixes_draws" not in vars(cls):
            cls.mixes_draws = True

    def __init__(self, **kwargs: Any) -> None:
        kwargs["dtype"] = full_precision(kwargs.get("dtype"))
        super().__init__(**kwargs)
        self.channels: int | None = None

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Check the channel count and remember it as `self.channels`; call this first."""
        name = type(self).__name__
        channels = channels_of(name, input_shape)
        if len(input_shape) < self.event_ndims:
            raise ValueError(
                f"{name} works on the last {self.event_ndims} axes of a tensor; got the input "
                f"shape {tuple(input_shape)!r}."
            )
        if channels < self.min_channels:
            raise ValueError(
                f"{name} needs at least {self.min_channels} channels; got {channels}. For one, use "
                "flows.Planar() among the flows, or NormalPlanar1d() as the posterior."
            )
        self.channels = channels

    def bijector(self, condition: Tensor | None = None) -> tfb.Bijector:
        """Return the bijector, built afresh from the weights as they are now.

        A condition (..., condition_size) broadcasts against all axes of x but the last.
        """
        if not self.built:
            missing_attribute(self, "bijector")
        return self.bijector_of(**self.parameters(condition))

    def bijector_of(self, **parameters: Tensor) -> FlowBijector:
        """Return the bijector, of tensors alone, for values (..., *weight.shape) of all weights."""
        raise NotImplementedError(f"{type(self).__name__} must define `bijector_of`.")

    def forward_and_log_det(
        self, x: Tensor, condition: Tensor | None = None, training: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Map draws forward.

        Args:
            x: tensor (..., channels).
            condition: tensor (..., condition_size); None, the default, without `condition_size`.
            training: bool, whether this is a training step, in which `BatchNorm` takes the
                statistics of x. Defaults to False.

        Returns:
            The mapped draws (..., channels), and the log-determinants (...,).
        """
        del training
        return self._map(x, condition, "forward")

    def inverse_and_log_det(self, y: Tensor, condition: Any = None) -> tuple[Tensor, Tensor]:
        """Map draws back.

        Args:
            y: tensor (..., channels).
            condition: tensor (..., condition_size); None, the default, without `condition_size`.

        Returns:
            What is mapped forward to y, (..., channels), and the log-determinants (...,) of the
            inverse map.
        """
        return self._map(y, condition, "inverse")

    def _map(self, x: Tensor, condition: Tensor | None, direction: str) -> tuple[Tensor, Tensor]:
        x = ops.convert_to_tensor(x, dtype=self.dtype)
        bijector = self._bijector_for(condition)
        return map_with_log_det(bijector, x, self.event_ndims, direction)

    def call(self, inputs: Tensor, condition: Tensor | None = None) -> Tensor:
        """Map draws forward.

        Args:
            inputs: tensor (..., channels).
            condition: tensor (..., condition_size); None, the default, without `condition_size`.

        Returns:
            The mapped draws (..., channels).
        """
        return self._bijector_for(condition).forward(inputs)

    def key(self) -> Tensor | None:
        """Return a new key for a bijector's noise, or None if the log-determinant is exact."""
        if self.exact_log_det:
            return None
        # On TensorFlow a key is of int32.
        seed = ops.mod(self.seed_generator.next(), 2**31 - 2)
        return ops.cast(seed, KEY_DTYPE)

    def _bijector_for(self, condition: Tensor | None) -> tfb.Bijector:
        condition = self.checked_condition(condition)
        if condition is None:  # a flow that never has a condition need not take one
            return self.bijector()
        return self.bijector(condition)

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        return input_shape
