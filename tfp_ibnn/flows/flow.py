"""The base classes of all flows: a pure bijector, and the Keras layer that owns its weights.

Below are products with parameters that are the same for all rows of x, or differ from row to row.
"""

import itertools
import json
import math
from typing import Any, ClassVar

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core.backend import KEY_DTYPE, Tensor, matmul, tfb, tfp
from tfp_ibnn._core.checks import channels_of, full_precision, missing_attribute, positive_integer
from tfp_ibnn._core.serialization import SavesRandomState
from tfp_ibnn.flows._conditional import Conditional, GivenNetwork, json_of

_serial_numbers = itertools.count()


class FlowBijector(tfb.Bijector):
    """A bijector on the last `event_ndims` axes: a function of tensors, without state of its own.

    A subclass names its tensors and their ranks in `parameter_ndims`, takes them by keyword, and
    defines `_inverse`, and `_forward` with `_forward_log_det_jacobian`, or `inverse_and_log_det`
    and `forward_and_log_det` where these share work. A tensor with further leading axes, which
    broadcast against those of x, differs by row. Other parameters, such as a network, become
    attributes too.
    """

    parameter_ndims: ClassVar[dict[str, int]] = {}
    event_ndims: ClassVar[int] = 1
    constant_jacobian: ClassVar[bool] = False

    def __init__(self, *, dtype: str | None = None, **parameters: Any) -> None:
        missing = set(self.parameter_ndims) - set(parameters)
        if missing:
            raise ValueError(f"{type(self).__name__} lacks the tensors {sorted(missing)}.")
        self._serial_number = next(_serial_numbers)
        for name, value in parameters.items():
            setattr(self, name, value)
        if dtype is None:
            dtypes = (parameters[name].dtype for name in self.parameter_ndims)
            dtype = next(filter(keras.backend.is_float_dtype, dtypes))
        super().__init__(
            forward_min_event_ndims=self.event_ndims,
            is_constant_jacobian=self.constant_jacobian,
            # A NumPy type, since tfb.Chain does not understand dtypes given by name.
            dtype=np.dtype(keras.backend.standardize_dtype(dtype)).type,
            parameters={"dtype": dtype, **parameters},
            name=type(self).__name__,
        )

    def _get_parameterization(self) -> int:
        # TFP shares cached results among bijectors of equal parameters. A network looks equal to
        # itself after its weights have changed, so every bijector must count as unique.
        return self._serial_number

    def forward_and_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return `forward(x)` and its log-determinants."""
        return self._forward(x), self._forward_log_det_jacobian(x)

    def inverse_and_log_det(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return `inverse(y)` and the log-determinants of the inverse map."""
        x = self._inverse(y)
        return x, -self.forward_and_log_det(x)[1]

    def _forward(self, x: Tensor) -> Tensor:
        return self.forward_and_log_det(x)[0]

    def _inverse(self, y: Tensor) -> Tensor:
        return self.inverse_and_log_det(y)[0]

    def _forward_log_det_jacobian(self, x: Tensor) -> Tensor:
        return self.forward_and_log_det(x)[1]

    @classmethod
    def _parameter_properties(cls, dtype: Any, num_classes: Any = None) -> dict[str, Any]:
        properties = tfp.util.ParameterProperties
        return {name: properties(event_ndims=n) for name, n in cls.parameter_ndims.items()}


class Flow(SavesRandomState, Conditional):
    """An invertible map of the last axis whose weights Keras owns.

    A new flow is a subclass with `build`, which adds weights by `add_parameter`, and `bijector_of`,
    a function of their values by name, or `bijector`, which reads them by `parameter`. With a
    `condition_size`, each row of a condition has its own parameters, weight + linear(condition),
    which start as those of the flow without one. Flows compute in float32, or in float64 under a
    float64 policy, whatever network is around them.

    Args:
        condition_size: size of the last axis of conditions; None for a flow without a condition.
        **kwargs: those of a Keras layer.

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
    """Whether what becomes of a draw in training depends on the others, as by batch statistics."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs["dtype"] = full_precision(kwargs.get("dtype"))
        super().__init__(**kwargs)
        self.channels: int | None = None

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Check the channel count and remember it as `self.channels`; call this first."""
        name = type(self).__name__
        channels = channels_of(name, input_shape)
        if len(input_shape) < self.event_ndims:
            wanted = f"works on the last {self.event_ndims} axes of a tensor"
            raise ValueError(f"{name} {wanted}; got the input shape {tuple(input_shape)!r}.")
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
        """Map draws `x` of shape (..., channels) forward; return them with the log-determinants."""
        del training
        return self._through(x, condition, "forward")

    def inverse_and_log_det(self, y: Tensor, condition: Any = None) -> tuple[Tensor, Tensor]:
        """Map `y` of shape (..., channels) back; return the log-determinants of that map too."""
        return self._through(y, condition, "inverse")

    def _through(self, x: Tensor, condition: Tensor | None, way: str) -> tuple[Tensor, Tensor]:
        x = ops.convert_to_tensor(x, dtype=self.dtype)
        return mapped(self._bijector_for(condition), x, self.event_ndims, way)

    def call(self, inputs: Tensor, condition: Tensor | None = None) -> Tensor:
        """Map `inputs` of shape (..., channels) forward."""
        return self._bijector_for(condition).forward(inputs)

    def key(self) -> Tensor | None:
        """Return a new key for a bijector's noise, or None if the log-determinant is exact."""
        if self.exact_log_det:
            return None
        return ops.cast(ops.mod(self.seed_generator.next(), 2**31 - 2), KEY_DTYPE)

    def _bijector_for(self, condition: Tensor | None) -> tfb.Bijector:
        condition = self.checked_condition(condition)
        # A flow that never has a condition need not take one.
        return self.bijector() if condition is None else self.bijector(condition)

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        return input_shape


class NetworkFlow(Flow):
    """Base of flows that take a Keras network in place of their hidden layer."""

    def __init__(
        self, *, network: keras.layers.Layer | None = None, event_ndims: int = 1, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self._network = json_of(network)
        self.event_ndims = positive_integer("event_ndims", event_ndims)

    def own_network(self) -> GivenNetwork | None:
        """Return a copy of the network, unbuilt."""
        options = {"condition_size": self.condition_size, "dtype": self.dtype, "name": "given"}
        return self._network and GivenNetwork(self._network, self.event_ndims, **options)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "network": self._network and json.loads(self._network)}


def mapped(bijector: tfb.Bijector, x: Tensor, ndims: int, way: str) -> tuple[Tensor, Tensor]:
    """Return x mapped "forward" or by the "inverse", and the log-determinants."""
    if isinstance(bijector, tfb.Invert):
        return mapped(bijector.bijector, x, ndims, {"forward": "inverse"}.get(way, "forward"))
    if isinstance(bijector, FlowBijector) and bijector.event_ndims == ndims:
        return getattr(bijector, f"{way}_and_log_det")(x)
    return getattr(bijector, way)(x), getattr(bijector, f"{way}_log_det_jacobian")(x, ndims)


def log_normal(x: Tensor) -> Tensor:
    """Return the log-density (...,) of standard normal noise (..., channels)."""
    return -0.5 * (ops.sum(x * x, axis=-1) + x.shape[-1] * math.log(2 * math.pi))


def column(numbers: Tensor) -> Tensor:
    """Return numbers, () or one per row (...,), such that they multiply vectors."""
    return ops.expand_dims(numbers, -1) if len(numbers.shape) else numbers


def total(x: Tensor) -> Tensor:
    """Return the sums (...,) of vectors x (..., n)."""
    # TensorFlow's gradient of a sum over all axes is smaller, and -1 would hide that this is one.
    return ops.sum(x, axis=(len(x.shape) - 1,))


def times_matrix(x: Tensor, matrix: Tensor, transpose: bool = False) -> Tensor:
    """Return the vectors x @ matrix, or x @ matrix', for one matrix or for one per row of x."""
    if len(matrix.shape) == 2:
        return matmul(x, ops.transpose(matrix) if transpose else matrix)
    if transpose:
        return matmul(matrix, x[..., None])[..., 0]
    return matmul(x[..., None, :], matrix)[..., 0, :]


def like_rows(x: Tensor, condition: Tensor | None) -> Tensor:
    """Return x (..., n), broadcast to the leading axes of the condition where there is one."""
    return x if condition is None else x + ops.zeros_like(condition[..., :1])
