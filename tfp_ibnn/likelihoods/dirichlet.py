"""Class probabilities that are uncertain themselves: a Dirichlet distribution in one pass."""

import math
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor, tfd
from tfp_ibnn.likelihoods.categorical import Categorical, entropy
from tfp_ibnn.likelihoods.labels import Labels
from tfp_ibnn.likelihoods.quantiles import bisected
from tfp_ibnn.likelihoods.second_order import SecondOrder, mean_of_examples

_SHIFT = 6
"""By how much arguments of the gamma function are raised, where its series has eight digits."""
_LOG_BOUNDS = (-80.0, 80.0)
"""Of logarithms of concentrations, whose exponentials stay finite in float32."""
_PRECISIONS = (1e-2, 1e6)
"""Bounds of the precision at which a second head starts."""
_SMALLEST = 1e-6
"""The smallest parameter of a Beta distribution whose quantiles are computed."""
_RESOLUTION = 1e-6
"""Nats up to which the disagreement of draws is known in float32."""
_SMOOTHING = 1e-4
"""The share of the uniform distribution in what a Dirichlet is fitted to: no probability is 0."""


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Dirichlet(SecondOrder, Categorical):
    """One of several classes, whose probabilities p have a Dirichlet distribution.

        outputs_c = log a_c,   p ~ Dirichlet(a),   a_0 = sum_c a_c

    With g(a) = digamma(a + 1) - log(a), a prediction is in closed form, without draws of p:

        mean       m_c = a_c / a_0, the softmax of the outputs
        variance   m_c (1 - m_c) / (a_0 + 1)
        epistemic  sum_c m_c g(a_c) - g(a_0), the mutual information of label and p
        aleatoric  entropy[m] - epistemic, the mean entropy of p

    Intervals are those of the marginals of p, Beta(a_c, a_0 - a_c). The second head of a network
    predicts log a_0. Reference: arXiv 1905.00076.

    Args:
        width: number of classes; None if it is unknown.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> inputs = keras.Input((3,))
        >>> model = keras.Model(inputs, keras.layers.Dense(2)(inputs))
        >>> mc = ibnn.MonteCarlo(model, samples=1, head=ibnn.likelihoods.Dirichlet())
        >>> sorted(mc.predict(keras.ops.ones((5, 3)), verbose=0))
        ['aleatoric', 'entropy', 'epistemic', 'mean', 'total_variance', 'variance']
    """

    def __init__(self, width: int | None = None) -> None:
        super().__init__(True, width)

    @property
    def head_size(self) -> int:
        return 1

    def joined(self, first: Tensor, second: Tensor) -> Tensor:
        dtype = checks.full_precision(first.dtype)
        log_mean = keras.layers.Activation("log_softmax", dtype=dtype)(first)
        return keras.layers.Add(dtype=dtype)([log_mean, second])

    def start(self, teacher: dict[str, Tensor]) -> Tensor:
        mean = teacher["mean"]
        of_one_hot = mean_of_examples(mean * (1 - mean))
        of_draws = mean_of_examples(teacher["variance"])
        return _log_precision(ops.sum(of_one_hot), ops.sum(of_draws))[None]

    def distillation_loss(self, outputs: Tensor, teacher: dict[str, Tensor]) -> Tensor:
        log_a = self._log_concentrations(outputs)
        mean = self._of_classes(ops.cast(teacher["mean"], log_a.dtype))
        log_mean = ops.log_softmax(log_a, axis=-1)
        cross_entropy = -ops.sum(mean * log_mean, axis=-1)
        information = ops.sum(_information(log_a), axis=-1)
        epistemic = ops.cast(teacher["epistemic"], log_a.dtype)
        return cross_entropy + _deviance(epistemic, information)

    def sample_loss(self, outputs: Tensor, samples: Tensor, temperature: Tensor) -> Tensor:
        """Return minus the mean log-density of sampled probabilities, for each example.

        The logits of both are divided by a temperature.

        Args:
            outputs: (examples, ..., width).
            samples: of a `MonteCarlo`, (examples, draws, ..., size).
            temperature: above 0; 1 is the likelihood itself.
        """
        p = self._of_classes(ops.cast(samples, outputs.dtype))
        classes = p.shape[-1]
        p = (1 - _SMOOTHING) * p + _SMOOTHING / classes
        log_p = ops.log_softmax(ops.log(p) / temperature, axis=-1)
        mean_log_p = ops.mean(log_p, axis=1)
        log_a = self._log_concentrations(outputs) / temperature
        return dirichlet_nll(log_a, mean_log_p)

    # Many networks

    def draws(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean, variance and information (..., 3) of each class, and the mean entropies."""
        log_a = self._log_concentrations(outputs)
        mean = ops.softmax(log_a, axis=-1)
        log_total = ops.logsumexp(log_a, axis=-1, keepdims=True)
        variance = mean * (1 - mean) * ops.sigmoid(-log_total)
        information = _information(log_a)
        aleatoric = entropy(mean) - ops.sum(information, axis=-1)
        moments = ops.stack([mean, variance, information], axis=-1)
        return moments, aleatoric

    def divergence(self, draw: Tensor, mean: Tensor) -> Tensor:
        return super().divergence(draw[..., 0], mean[..., 0])

    def public(self, draws: Tensor) -> Tensor:
        return self._visible(draws[..., 0])

    def statistics(self, summary: Any) -> dict[str, Tensor]:
        """Return mean, variance, and the entropies."""
        mean, within, information = ops.unstack(summary.mean, 3, axis=-1)
        between = summary.squares[..., 0] / summary.count
        variance = within + between
        epistemic = ops.sum(information, axis=-1) + summary.between / summary.count
        return {
            "mean": self._visible(mean),
            "variance": self._visible(variance),
            "entropy": entropy(mean),
            "aleatoric": summary.within / summary.count,
            "epistemic": epistemic,
            "total_variance": self._total(variance),
        }

    def interval(self, draws: Tensor, within: Tensor, level: float) -> tuple[Tensor, Tensor]:
        mean, variance, _ = ops.unstack(draws, 3, axis=-1)
        of_one_hot = ops.sum(mean * (1 - mean), axis=-1, keepdims=True)
        of_draws = ops.sum(variance, axis=-1, keepdims=True)
        precision = ops.exp(_log_precision(of_one_hot, of_draws))
        mean = self._visible(mean)
        precision = ops.broadcast_to(precision, ops.shape(draws)[:-1])
        precision = self._visible(precision)
        first = ops.maximum(mean * precision, _SMALLEST)
        second = ops.maximum((1 - mean) * precision, _SMALLEST)

        def cdf(x: Tensor) -> Tensor:
            return ops.mean(tfd.Beta(first, second).cdf(x), axis=0)

        zero = ops.zeros_like(mean[0])
        tail = (1 - level) / 2
        lower = bisected(cdf, zero, zero + 1, tail)
        upper = bisected(cdf, zero, zero + 1, 1 - tail)
        return lower, upper

    # What a Beta distribution has otherwise

    def _log_concentrations(self, outputs: Tensor) -> Tensor:
        """Return the logarithms of concentrations, (..., classes)."""
        return outputs

    def _of_classes(self, probabilities: Tensor) -> Tensor:
        """Return the probabilities of all classes from those that the user sees."""
        return probabilities

    def _visible(self, values: Tensor) -> Tensor:
        """Return what the user sees of values (..., classes)."""
        return values

    def _total(self, variance: Tensor) -> Tensor:
        """Return the `total_variance` from the variances (..., classes)."""
        return ops.sum(variance, axis=-1)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Beta(Dirichlet, Labels):
    """Yes or no, whose probabilities have Beta distributions: a `Dirichlet` for each label.

    The outputs are the logarithms of the concentrations of no, (..., L), then those of yes, (...,
    L). The user sees what `Labels` shows, every entry (..., L).

    Args:
        width: twice the number of labels; None if it is unknown.
    """

    is_softmax = False
    outputs_per_value = 2

    @property
    def head_size(self) -> int:
        return self.size

    def joined(self, first: Tensor, second: Tensor) -> Tensor:
        dtype = checks.full_precision(first.dtype)
        negative = keras.layers.Rescaling(-1.0, dtype=dtype)(first)
        both = keras.layers.Concatenate(dtype=dtype)([negative, first])
        log_mean = keras.layers.Activation("log_sigmoid", dtype=dtype)(both)
        precision = keras.layers.Concatenate(dtype=dtype)([second, second])
        return keras.layers.Add(dtype=dtype)([log_mean, precision])

    def start(self, teacher: dict[str, Tensor]) -> Tensor:
        yes = teacher["mean"]
        of_one_hot = mean_of_examples(yes * (1 - yes))
        of_draws = mean_of_examples(teacher["variance"])
        return _log_precision(of_one_hot, of_draws)

    def targets(self, y: Any, *, what: str = "`y`") -> np.ndarray:
        return Labels(True, self.size).targets(y, what=what)

    def log_prob(self, logits: Tensor, y: Tensor) -> Tensor:
        no, yes = ops.split(logits, 2, axis=-1)
        return super().log_prob(yes - no, y)

    def hessian_factors(self, logits: Tensor) -> Tensor:
        raise self._missing("hessian_factors")

    def _log_concentrations(self, outputs: Tensor) -> Tensor:
        no, yes = ops.split(outputs, 2, axis=-1)
        return ops.stack([no, yes], axis=-1)

    def _of_classes(self, probabilities: Tensor) -> Tensor:
        return ops.stack([1 - probabilities, probabilities], axis=-1)

    def _visible(self, values: Tensor) -> Tensor:
        return values[..., 1]

    def _total(self, variance: Tensor) -> Tensor:
        return self._visible(variance)


def dirichlet_nll(log_a: Tensor, mean_log_p: Tensor) -> Tensor:
    """Return minus the mean log-density of class probabilities under a Dirichlet distribution.

    By Stirling's formula, whose remainder is r, lgamma(a) = (a - 1/2) log a - a + r(a) + const:

        a_0 KL[m || p] + (log a_0 - sum_c log a_c) / 2 + sum_c r(a_c) - r(a_0) + sum_c log p_c
            + (K - 1) / 2 log(2 pi)

    where the large terms, which cancel, are left out: float32 is enough for precisions of 1e6.

    Args:
        log_a: logarithms of the concentrations, (..., classes).
        mean_log_p: logarithms of probabilities, averaged over what is observed, (..., classes).

    Returns:
        Nats, (...,).
    """
    classes = log_a.shape[-1]
    log_mean = ops.log_softmax(log_a, axis=-1)
    log_total = ops.logsumexp(log_a, axis=-1)
    divergence = ops.sum(ops.exp(log_mean) * (log_mean - mean_log_p), axis=-1)
    weighted = ops.exp(log_total) * divergence
    half_logs = (log_total - ops.sum(log_a, axis=-1)) / 2
    remainders = ops.sum(_stirling_remainder(log_a), axis=-1) - _stirling_remainder(log_total)
    constant = (classes - 1) / 2 * math.log(2 * math.pi)
    return weighted + half_logs + remainders + ops.sum(mean_log_p, axis=-1) + constant


def _information(log_a: Tensor) -> Tensor:
    """Return the share of each class in the mutual information of label and probabilities."""
    mean = ops.softmax(log_a, axis=-1)
    log_total = ops.logsumexp(log_a, axis=-1, keepdims=True)
    return mean * (_digamma_excess(log_a) - _digamma_excess(log_total))


def _digamma_excess(log_a: Tensor) -> Tensor:
    """Return g(a) = digamma(a + 1) - log(a), about 1 / (2 a), to float32's relative precision.

    digamma(a + 1) = digamma(y) - sum_{k=1..5} 1 / (a + k) for y = a + 6, where
    digamma(y) = log y - 1 / (2 y) - 1 / (12 y^2) + 1 / (120 y^4) - 1 / (252 y^6).
    """
    a, log_ratio = _raised(log_a)
    inverse = 1 / (a + _SHIFT)
    square = inverse * inverse
    series = square * (1 / 12 - square * (1 / 120 - square / 252))
    steps = sum(1 / (a + k) for k in range(1, _SHIFT))
    return log_ratio - steps - inverse / 2 - series


def _stirling_remainder(log_a: Tensor) -> Tensor:
    """Return r(a) = lgamma(a) - (a - 1/2) log(a) + a - log(2 pi) / 2, about 1 / (12 a).

    lgamma(a) = lgamma(y) - sum_{k=0..5} log(a + k) for y = a + 6, where
    r(y) = 1 / (12 y) - 1 / (360 y^3) + 1 / (1260 y^5).
    """
    a, log_ratio = _raised(log_a)
    inverse = 1 / (a + _SHIFT)
    square = inverse * inverse
    series = inverse * (1 / 12 - square * (1 / 360 - square / 1260))
    steps = sum(ops.log1p((_SHIFT - k) / (a + k)) for k in range(1, _SHIFT))
    return (a + 0.5) * log_ratio + steps - _SHIFT + series


def _raised(log_a: Tensor) -> tuple[Tensor, Tensor]:
    """Return a, and log((a + 6) / a)."""
    log_a = ops.clip(log_a, *_LOG_BOUNDS)
    return ops.exp(log_a), ops.log1p(_SHIFT * ops.exp(-log_a))


def _log_precision(of_one_hot: Tensor, of_draws: Tensor) -> Tensor:
    """Return log a_0, within bounds, from m (1 - m) and the variance m (1 - m) / (a_0 + 1)."""
    least, most = _PRECISIONS
    ratio = of_one_hot / ops.maximum(of_draws, of_one_hot / most)
    return ops.log(ops.clip(ratio - 1, least, most))


def _deviance(observed: Tensor, expected: Tensor) -> Tensor:
    """Return observed / expected + log(expected), halved: lowest where both are equal.

    For squared distances it is minus the log-density of a Gaussian with that variance.
    """
    observed = observed + _RESOLUTION
    expected = expected + _RESOLUTION
    return (observed / expected + ops.log(expected)) / 2
