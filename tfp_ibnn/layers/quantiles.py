"""A regression head whose quantiles cannot cross, and its loss."""

import math
from typing import Any

import keras
import numpy as np
from keras import ops
from scipy.special import ndtri

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.serialization import ConfiguredLayer
from tfp_ibnn.layers.heads import matched

LEVELS = (0.05, 0.5, 0.95)
"""The levels unless others are given: a median, and the ends of a 90 % interval."""

_SHIFT = math.log(math.e - 1)
"""Where softplus is 1."""


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class QuantileHead(ConfiguredLayer, keras.layers.Layer):
    """Turn numbers into quantiles that cannot cross.

    The quantile whose level is nearest to 0.5 passes as it is. From there, the others follow at
    positive distances, upwards and downwards:

        q_l = q_(l-1) + g_l softplus(x_l + c),   softplus(c) = 1

    g_l is the distance between these quantiles of a standard normal distribution, so that inputs
    of 0 give its quantiles: standardize the targets. The layer has no weights, so that the Dense
    layer before it can be converted like any other. The loss for it is `PinballLoss` with the same
    levels.

    Args:
        levels: two or more probabilities, increasing, between 0 and 1.
        outputs: how many numbers an example has, D. The layer before this one needs D units for
            each level: D for the first level, then D for the second, and so on.
        **kwargs: those of `keras.layers.Layer`.

    Raises:
        ValueError: if the levels do not increase between 0 and 1, or the input has another size.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> model = keras.Sequential(
        ...     [
        ...         keras.Input((4,)),
        ...         keras.layers.Dense(3),
        ...         ibnn.layers.QuantileHead((0.1, 0.5, 0.9)),
        ...     ]
        ... )
        >>> model.compile("adam", ibnn.layers.PinballLoss((0.1, 0.5, 0.9)))
        >>> mc = ibnn.MonteCarlo(model, samples=1, interval=0.8)
        >>> sorted(mc.predict(keras.ops.ones((5, 4)), verbose=0))
        ['epistemic', 'lower', 'mean', 'quantiles', 'upper']
    """

    def __init__(self, levels: Any = LEVELS, outputs: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.levels = checked_levels(levels)
        self.outputs = checks.positive_integer("outputs", outputs, checks.LARGEST_SIZE)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        channels = checks.channels_of("QuantileHead", input_shape)
        wanted = self.outputs * len(self.levels)
        if channels != wanted:
            raise ValueError(
                f"QuantileHead needs {wanted} inputs, one for each of {len(self.levels)} levels of "
                f"outputs={self.outputs}; got the input shape {tuple(input_shape)}. Give the layer "
                f"before it {wanted} units."
            )

    def call(self, inputs: Tensor) -> Tensor:
        """Return (..., L * D): D quantiles of the first level, then of the next."""
        raw = ops.split(inputs, len(self.levels), axis=-1)
        middle = middle_of(self.levels)
        center = raw[middle]
        below = raw[:middle]
        above = raw[middle + 1 :]
        gaps = self._gaps()
        upper = _ends(center, above, gaps[middle:])
        # Downwards is upwards with the other sign, which is exact.
        below.reverse()
        gaps_below = gaps[:middle]
        gaps_below.reverse()
        lower = _ends(-center, below, gaps_below)
        lower = [-end for end in lower]
        lower.reverse()
        return ops.concatenate([*lower, center, *upper], axis=-1)

    def _gaps(self) -> list[float]:
        """Return the distances between the quantiles of a standard normal distribution."""
        quantiles = ndtri(self.levels)
        return np.diff(quantiles).tolist()

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> Any:
        return input_shape


def _ends(start: Tensor, raw: list[Tensor], gaps: list[float]) -> list[Tensor]:
    """Return where each distance leads, one after the other.

    Sums in another order are rounded apart, so that quantiles might cross.

    Args:
        start: where the first distance begins.
        raw: what makes each distance, its softplus up to a shift.
        gaps: the distances where that is 1.
    """
    ends = []
    end = start
    for number, gap in zip(raw, gaps, strict=True):
        distance = ops.softplus(number + _SHIFT)
        end = end + gap * distance
        ends.append(end)
    return ends


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class PinballLoss(keras.losses.Loss):
    """Mean pinball loss of the quantiles of a `QuantileHead`, or of a Dense layer of that size.

        mean over levels t and numbers d of max(t (y_d - q_td), (t - 1) (y_d - q_td))

    It is lowest where each q_t is the quantile of its level. Over many evenly spaced levels it
    approaches half of the continuous ranked probability score (CRPS).

    Args:
        levels: two or more probabilities, increasing, between 0 and 1.
        name: of the loss.
        **kwargs: those of `keras.losses.Loss`.

    Raises:
        ValueError: if the levels do not increase between 0 and 1.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> loss = ibnn.layers.PinballLoss((0.1, 0.9))
        >>> round(float(loss([[3.0]], [[1.0, 2.0]])), 3)  # (0.1 * 2 + 0.9 * 1) / 2
        0.55
    """

    def __init__(self, levels: Any = LEVELS, name: str = "pinball", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.levels = checked_levels(levels)

    def call(self, y_true: Any, y_pred: Any) -> Tensor:
        """Return the loss of each example.

        Args:
            y_true: targets, (..., D), or (...,) if D is 1.
            y_pred: quantiles, (..., L * D), as a `QuantileHead` orders them.

        Returns:
            Losses, (...,).
        """
        quantiles = quantiles_of(ops.convert_to_tensor(y_pred), self.levels)
        targets = matched(y_true, quantiles[..., 0])
        losses = pinball_loss(targets, quantiles, self.levels)
        return ops.mean(losses, axis=(-2, -1))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "levels": self.levels}


def pinball_loss(y: Tensor, quantiles: Tensor, levels: tuple[float, ...]) -> Tensor:
    """Return the pinball loss of each quantile.

    Args:
        y: targets, (..., D).
        quantiles: (..., D, L).
        levels: of the quantiles.

    Returns:
        Losses, (..., D, L).
    """
    above = y[..., None] - quantiles
    level = ops.convert_to_tensor(levels, quantiles.dtype)
    of_larger = level * above
    of_smaller = (level - 1) * above
    return ops.maximum(of_larger, of_smaller)


def quantiles_of(outputs: Tensor, levels: tuple[float, ...]) -> Tensor:
    """Return the outputs of a network (..., L * D) as quantiles (..., D, L), or raise.

    Args:
        outputs: D for the first level, then D for the second, and so on.
        levels: of the quantiles.
    """
    width = outputs.shape[-1]
    if width % len(levels):
        raise ValueError(
            f"{len(levels)} levels need as many outputs for each number; the network has {width} "
            "outputs. Give the loss the levels of its QuantileHead."
        )
    size = width // len(levels)
    by_number = [outputs[..., number::size] for number in range(size)]
    return ops.stack(by_number, axis=-2)


def middle_of(levels: tuple[float, ...]) -> int:
    """Return the place of the level that is nearest to 0.5."""
    distances = np.abs(np.subtract(levels, 0.5))
    return int(np.argmin(distances))


def checked_levels(levels: Any) -> tuple[float, ...]:
    """Return levels of quantiles as floats, or raise if they do not increase between 0 and 1."""
    if isinstance(levels, (tuple, list, np.ndarray)) and len(levels) > 1:
        values = tuple(checks.probability("levels", level) for level in levels)
        if np.all(np.diff(values) > 0):
            return values
    raise ValueError(
        "`levels` must be two or more increasing numbers between 0 and 1, such as "
        f"(0.05, 0.5, 0.95); got {levels!r}."
    )
