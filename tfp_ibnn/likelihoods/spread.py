"""Numbers whose epistemic uncertainty a network predicts in one pass."""

from typing import Any

import keras
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.layers.heads import gaussian_nll
from tfp_ibnn.likelihoods.arrays import or_nan
from tfp_ibnn.likelihoods.gaussian import mixture_interval
from tfp_ibnn.likelihoods.numbers import Numbers
from tfp_ibnn.likelihoods.second_order import SecondOrder, mean_of_examples

_LEAST = 1e-30
"""The least variance whose logarithm is taken."""


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class SpreadPoint(SecondOrder, Numbers):
    """Numbers for which a network predicts the mean, and the spread of the means of draws.

        outputs = (mean, spread),   mean of a draw ~ N(mean, spread^2)

    `epistemic` is spread^2, and `aleatoric` is 0: the noise of observations is unknown, as with
    `Point`. Intervals are those of draws. The second head of a network predicts log spread.

    Args:
        width: twice the number of numbers; None if it is unknown.
    """

    free_scale = True
    has_density = False
    outputs_per_value = 2

    def joined(self, first: Tensor, second: Tensor) -> Tensor:
        dtype = checks.full_precision(first.dtype)
        spread = keras.layers.Activation("exponential", dtype=dtype)(second)
        return keras.layers.Concatenate(dtype=dtype)([first, spread])

    def start(self, teacher: dict[str, Tensor]) -> Tensor:
        variance = mean_of_examples(teacher["epistemic"])
        return _log(variance) / 2

    def distillation_loss(self, outputs: Tensor, teacher: dict[str, Tensor]) -> Tensor:
        mean, _, spread = self._split(outputs)
        target = ops.cast(teacher["mean"], mean.dtype)
        epistemic = ops.cast(teacher["epistemic"], mean.dtype)
        # The mean squared distance of the teacher's draws from the student's mean.
        distance = epistemic + ops.square(target - mean)
        variance = ops.square(spread)
        return _gaussian_loss(distance, variance)

    # Many networks

    def draws(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and squared spreads (..., 2), and the variances of the noise."""
        mean, noise, spread = self._split(outputs)
        spread = or_nan(spread, spread >= 0)
        noise = or_nan(noise, noise >= 0)
        moments = ops.stack([mean, ops.square(spread)], axis=-1)
        return moments, ops.square(noise)

    def _split(self, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return means, standard deviations of the noise, and spreads."""
        self._check_size(outputs)
        mean, spread = ops.split(outputs, 2, axis=-1)
        noise = ops.zeros_like(mean)
        return mean, noise, spread

    def _check_size(self, outputs: Tensor) -> None:
        if outputs.shape[-1] % self.outputs_per_value:
            raise ValueError(
                f"A network whose `head` is {type(self).__name__} has {self.outputs_per_value} "
                f"outputs for each number; it has {outputs.shape[-1]} outputs."
            )

    def divergence(self, draw: Tensor, mean: Tensor) -> Tensor:
        draw = draw[..., 0]
        mean = mean[..., 0]
        return super().divergence(draw, mean)

    def public(self, draws: Tensor) -> Tensor:
        return draws[..., 0]

    def statistics(self, summary: Any) -> dict[str, Tensor]:
        mean, within = ops.unstack(summary.mean, 2, axis=-1)
        aleatoric = summary.within / summary.count
        between = summary.between / summary.count
        epistemic = within + between
        return {
            "mean": mean,
            "aleatoric": aleatoric,
            "epistemic": epistemic,
            "total_variance": aleatoric + epistemic,
        }

    def interval(self, draws: Tensor, within: Tensor, level: float) -> tuple[Tensor, Tensor]:
        mean, variance = ops.unstack(draws, 2, axis=-1)
        scale = ops.sqrt(variance + within)
        return mixture_interval(mean, scale, level)

    def loss(self, y_true: Any, prediction: dict[str, Tensor]) -> Tensor:
        target, predicted = self.pair(y_true, prediction)
        error = ops.square(target - predicted)
        return ops.mean(error, axis=-1)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class SpreadGaussian(SpreadPoint):
    """Numbers with the standard deviation of their noise, and the spread of the means of draws.

        outputs = (mean, noise, spread),   y ~ N(mean, noise^2 + spread^2)

    `aleatoric` is noise^2, `epistemic` is spread^2, and `total_variance` their sum, by the law of
    total variance. Intervals are those of new observations.

    Args:
        width: three times the number of numbers; None if it is unknown.
    """

    free_scale = False
    has_density = True
    predicts_scale = True
    outputs_per_value = 3

    @property
    def first_size(self) -> int:
        return 2 * self.size

    def log_prob(self, logits: Tensor, y: Tensor) -> Tensor:
        mean, noise, spread = self._split(logits)
        aleatoric = ops.square(noise)
        epistemic = ops.square(spread)
        nll = gaussian_nll(y, mean, aleatoric + epistemic)
        return -nll

    def distillation_loss(self, outputs: Tensor, teacher: dict[str, Tensor]) -> Tensor:
        of_means = super().distillation_loss(outputs, teacher)
        _, noise, _ = self._split(outputs)
        aleatoric = ops.cast(teacher["aleatoric"], noise.dtype)
        variance = ops.square(noise)
        of_noise = _gaussian_loss(aleatoric, variance)
        return of_means + of_noise

    def _split(self, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self._check_size(outputs)
        mean, noise, spread = ops.split(outputs, 3, axis=-1)
        return mean, noise, spread

    def loss(self, y_true: Any, prediction: dict[str, Tensor]) -> Tensor:
        target, predicted = self.pair(y_true, prediction)
        variance = prediction["total_variance"]
        return gaussian_nll(target, predicted, variance)


def _gaussian_loss(distance: Tensor, variance: Tensor) -> Tensor:
    """Return the negative log-density of Gaussians up to a constant, summed over all numbers.

    Args:
        distance: mean squared distances from the mean, (..., size).
        variance: of the Gaussians, (..., size).
    """
    log_variance = _log(variance)
    precision = ops.exp(-log_variance)
    terms = precision * distance + log_variance
    return ops.sum(terms, axis=-1) / 2


def _log(variance: Tensor) -> Tensor:
    """Return the logarithms of variances, some of which may be 0."""
    variance = ops.maximum(variance, _LEAST)
    return ops.log(variance)
