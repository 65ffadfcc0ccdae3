"""Uncertain class probabilities in one pass: a Dirichlet distribution."""

from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor, tfd
from tfp_ibnn._core.gamma import dirichlet_nll, information
from tfp_ibnn.likelihoods.arrays import softmax
from tfp_ibnn.likelihoods.categorical import Categorical, entropy
from tfp_ibnn.likelihoods.labels import Labels
from tfp_ibnn.likelihoods.quantiles import central_interval
from tfp_ibnn.likelihoods.second_order import SecondOrder, mean_of_examples

_PRECISIONS = (1e-2, 1e6)
"""Bounds of the precision at which a second head starts."""
_SMALLEST = 1e-6
"""The smallest parameter of a Beta distribution whose quantiles are computed."""
_RESOLUTION = 0.03
"""The disagreement of draws, in nats, below which differences no longer count to a student.

Its loss is relative: without such a limit, differences between tiny disagreements would weigh as
much as those between large ones, and the mean would suffer.
"""
_SMOOTHING = 1e-4
"""The share of the uniform distribution in the targets of a Dirichlet: no probability is 0."""


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Dirichlet(SecondOrder, Categorical):
    """One of several classes, whose probabilities p have a Dirichlet distribution.

        outputs_c = log a_c,   p ~ Dirichlet(a),   a_0 = sum_c a_c

    With g(a) = digamma(a + 1) - log(a), a prediction has a closed form, without draws of p:

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
        log_softmax = keras.layers.Activation("log_softmax", dtype=dtype)
        add = keras.layers.Add(dtype=dtype)
        # In this order: Keras mistakes a second term (K, 1) for a bias if a batch has K examples.
        return add([second, log_softmax(first)])

    def start(self, teacher: dict[str, Tensor]) -> Tensor:
        mean = teacher["mean"]
        of_one_hot = mean * (1 - mean)
        of_one_hot = mean_of_examples(of_one_hot)
        of_draws = mean_of_examples(teacher["variance"])
        of_one_hot = ops.sum(of_one_hot, keepdims=True)
        of_draws = ops.sum(of_draws, keepdims=True)
        return _log_precision(of_one_hot, of_draws)

    def distillation_loss(self, outputs: Tensor, teacher: dict[str, Tensor]) -> Tensor:
        log_a = self._log_concentrations(outputs)
        log_mean = ops.log_softmax(log_a, axis=-1)
        mean = ops.cast(teacher["mean"], log_a.dtype)
        mean = self._of_classes(mean)
        agreement = ops.sum(mean * log_mean, axis=-1)
        expected = ops.sum(information(log_a), axis=-1)
        observed = ops.cast(teacher["epistemic"], log_a.dtype)
        return _deviance(observed, expected) - agreement

    def sample_loss(self, outputs: Tensor, samples: Tensor, temperature: Any) -> Tensor:
        p = ops.cast(samples, outputs.dtype)
        p = self._of_classes(p)
        uniform = 1 / p.shape[-1]
        p = p + _SMOOTHING * (uniform - p)
        log_p = ops.log(p) / temperature
        log_p = ops.log_softmax(log_p, axis=-1)
        mean_log_p = ops.mean(log_p, axis=1)
        log_a = self._log_concentrations(outputs)
        log_a = log_a / temperature
        return dirichlet_nll(log_a, mean_log_p)

    # Many networks

    def draws(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean, variance and information (..., 3) of each class, and the mean entropies."""
        log_a = self._log_concentrations(outputs)
        mean = softmax(log_a)
        log_total = ops.logsumexp(log_a, axis=-1, keepdims=True)
        shrinkage = ops.sigmoid(-log_total)  # 1 / (a_0 + 1)
        variance = mean * (1 - mean) * shrinkage
        epistemic = information(log_a)
        moments = ops.stack([mean, variance, epistemic], axis=-1)
        epistemic = ops.sum(epistemic, axis=-1)
        return moments, entropy(mean) - epistemic

    def divergence(self, draw: Tensor, mean: Tensor) -> Tensor:
        draw = draw[..., 0]
        mean = mean[..., 0]
        return super().divergence(draw, mean)

    def public(self, draws: Tensor) -> Tensor:
        mean = draws[..., 0]
        return self._visible(mean)

    def statistics(self, summary: Any) -> dict[str, Tensor]:
        """Return mean, variance, and the entropies."""
        mean, within, of_classes = ops.unstack(summary.mean, 3, axis=-1)
        between = summary.squares[..., 0] / summary.count
        variance = within + between
        epistemic = ops.sum(of_classes, axis=-1)
        epistemic = epistemic + summary.between / summary.count
        aleatoric = summary.within / summary.count
        return {
            "mean": self._visible(mean),
            "variance": self._visible(variance),
            "entropy": entropy(mean),
            "aleatoric": aleatoric,
            "epistemic": epistemic,
            "total_variance": self._total(variance),
        }

    def interval(self, draws: Tensor, within: Tensor, level: float) -> tuple[Tensor, Tensor]:
        mean, variance, _ = ops.unstack(draws, 3, axis=-1)
        of_one_hot = mean * (1 - mean)
        of_one_hot = ops.sum(of_one_hot, axis=-1, keepdims=True)
        of_draws = ops.sum(variance, axis=-1, keepdims=True)
        precision = ops.exp(_log_precision(of_one_hot, of_draws))
        first = ops.maximum(mean * precision, _SMALLEST)
        second = ops.maximum((1 - mean) * precision, _SMALLEST)
        first = self._visible(first)
        second = self._visible(second)
        marginals = tfd.Beta(first, second)

        def cdf(x: Tensor) -> Tensor:
            of_draws = marginals.cdf(x)
            return ops.mean(of_draws, axis=0)

        zero = ops.zeros_like(first[0])
        one = ops.ones_like(zero)
        return central_interval(cdf, zero, one, level)

    # What `Beta` overrides

    def _log_concentrations(self, outputs: Tensor) -> Tensor:
        """Return the logarithms of concentrations, (..., classes)."""
        return outputs

    def _of_classes(self, probabilities: Tensor) -> Tensor:
        """Return the probabilities of all classes, given those that the user sees."""
        return probabilities

    def _visible(self, values: Tensor) -> Tensor:
        """Return what the user sees of values (..., classes)."""
        return values

    def _total(self, variance: Tensor) -> Tensor:
        """Return the `total_variance` from the variances (..., classes)."""
        return ops.sum(variance, axis=-1)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Beta(Dirichlet, Labels):
    """Binary labels whose probabilities have Beta distributions: a `Dirichlet` for each label.

    The outputs are the logarithms of the concentrations of "no", (..., L), then those of "yes",
    (..., L). A prediction has the entries of `Labels`, each (..., L).

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
        negate = keras.layers.Rescaling(-1.0, dtype=dtype)
        concatenate = keras.layers.Concatenate(dtype=dtype)
        log_sigmoid = keras.layers.Activation("log_sigmoid", dtype=dtype)
        add = keras.layers.Add(dtype=dtype)
        of_no = log_sigmoid(negate(first))
        of_yes = log_sigmoid(first)
        log_mean = concatenate([of_no, of_yes])
        log_precision = concatenate([second, second])
        return add([log_mean, log_precision])

    def start(self, teacher: dict[str, Tensor]) -> Tensor:
        yes = teacher["mean"]
        of_one_hot = yes * (1 - yes)
        of_one_hot = mean_of_examples(of_one_hot)
        of_draws = mean_of_examples(teacher["variance"])
        return _log_precision(of_one_hot, of_draws)

    def targets(self, y: Any, *, what: str = "`y`") -> np.ndarray:
        labels = Labels(True, self.size)
        return labels.targets(y, what=what)

    def log_prob(self, logits: Tensor, y: Tensor) -> Tensor:
        no, yes = ops.split(logits, 2, axis=-1)
        return super().log_prob(yes - no, y)

    def hessian_factors(self, logits: Tensor) -> Tensor:
        raise self._missing("hessian_factors")

    def _log_concentrations(self, outputs: Tensor) -> Tensor:
        no, yes = ops.split(outputs, 2, axis=-1)
        return ops.stack([no, yes], axis=-1)

    def _of_classes(self, probabilities: Tensor) -> Tensor:
        no = 1 - probabilities
        return ops.stack([no, probabilities], axis=-1)

    def _visible(self, values: Tensor) -> Tensor:
        return values[..., 1]

    def _total(self, variance: Tensor) -> Tensor:
        return self._visible(variance)


def _log_precision(of_one_hot: Tensor, of_draws: Tensor) -> Tensor:
    """Return log a_0, within bounds, from m (1 - m) and the variance m (1 - m) / (a_0 + 1)."""
    least, most = _PRECISIONS
    of_draws = ops.maximum(of_draws, of_one_hot / most)
    precision = of_one_hot / of_draws - 1
    precision = ops.clip(precision, least, most)
    return ops.log(precision)


def _deviance(observed: Tensor, expected: Tensor) -> Tensor:
    """Return observed / expected + log(expected), halved: lowest where both are equal.

    For squared distances it is the negative log-density of a Gaussian with that variance.
    """
    observed = observed + _RESOLUTION
    expected = expected + _RESOLUTION
    ratio = observed / expected
    return (ratio + ops.log(expected)) / 2
