"""The base class of bijectors: maps of tensors by tensors, without weights."""

import itertools
from typing import Any, ClassVar

import keras
import numpy as np

from tfp_ibnn._core.backend import Tensor, tfb, tfp

_serial_numbers = itertools.count()


class FlowBijector(tfb.Bijector):
    """A bijector on the last `event_ndims` axes: a function of tensors, without state of its own.

    A subclass names its tensors and their ranks in `parameter_ndims`, takes them by keyword, and
    defines `_inverse`, and `_forward` with `_forward_log_det_jacobian`, or `inverse_and_log_det`
    and `forward_and_log_det` where these share work. A tensor with further leading axes, which
    broadcast against those of x, differs by row.

    Args:
        dtype: str or None, the type of the tensors it maps; None, the default, takes that of the
            first floating-point tensor among the parameters.
        **parameters: the tensors in `parameter_ndims`, and anything else that is to become an
            attribute, such as a network.

    Raises:
        ValueError: a tensor in `parameter_ndims` is missing.
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
        _, log_det = self.forward_and_log_det(x)
        return x, -log_det

    def _forward(self, x: Tensor) -> Tensor:
        y, _ = self.forward_and_log_det(x)
        return y

    def _inverse(self, y: Tensor) -> Tensor:
        x, _ = self.inverse_and_log_det(y)
        return x

    def _forward_log_det_jacobian(self, x: Tensor) -> Tensor:
        _, log_det = self.forward_and_log_det(x)
        return log_det

    @classmethod
    def _parameter_properties(cls, dtype: Any, num_classes: Any = None) -> dict[str, Any]:
        properties = tfp.util.ParameterProperties
        return {name: properties(event_ndims=n) for name, n in cls.parameter_ndims.items()}


def map_with_log_det(
    bijector: tfb.Bijector, x: Tensor, event_ndims: int, direction: str
) -> tuple[Tensor, Tensor]:
    """Map x by a bijector, in one pass where it shares work with the log-determinant.

    Args:
        bijector: the bijector, of this library or of TensorFlow Probability.
        x: tensor (..., *event).
        event_ndims: int, how many of the last axes are one event.
        direction: "forward" or "inverse".

    Returns:
        The mapped tensor, and the log-determinants (...,) of that map.
    """
    if isinstance(bijector, tfb.Invert):
        opposite = "forward" if direction == "inverse" else "inverse"
        return map_with_log_det(bijector.bijector, x, event_ndims, opposite)
    if isinstance(bijector, FlowBijector) and bijector.event_ndims == event_ndims:
        if direction == "forward":
            return bijector.forward_and_log_det(x)
        return bijector.inverse_and_log_det(x)
    if direction == "forward":
        return bijector.forward(x), bijector.forward_log_det_jacobian(x, event_ndims)
    return bijector.inverse(x), bijector.inverse_log_det_jacobian(x, event_ndims)
