"""Questions of yes or no."""

from typing import Any

import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.layers.heads import matched
from tfp_ibnn.likelihoods.arrays import check_each, or_nan
from tfp_ibnn.likelihoods.categorical import (
    Categorical,
    check_probabilities,
    classes,
    entropy,
    log_of,
)
from tfp_ibnn.likelihoods.numbers import diagonal, finite_numbers


class Labels(Categorical):
    """Yes or no, for each entry of the last axis: a sigmoid.

        log p(y) = sum_k log sigmoid(+-logit_k),   S = diag sqrt(p (1 - p))

    Targets are zeros and ones (examples, width), of (N,) or (N, 1) if the width is 1; the
    log-probability is that of all answers of an example. A draw has the probabilities [no, yes] on
    an axis of its own, so that entropies and divergences are those of two classes; the user sees
    that of yes.

    In `calibrate` each answer is a row of its own, with the class no or yes, and all questions have
    one temperature T: outputs are logits / T, or sigmoid(log(p / (1 - p)) / T) of probabilities;
    the prediction has the probabilities of both answers, (rows, 2).

    Args:
        from_logits: whether the outputs are logits, not probabilities.
        width: number of questions; None if it is unknown.
        end: the last activation; None is "linear" for logits, else "sigmoid".
    """

    is_softmax = False

    def __init__(self, from_logits: bool, width: int | None = None, end: str | None = None) -> None:
        if end is None:
            end = "linear" if from_logits else "sigmoid"
        super().__init__(from_logits, width, end)

    @property
    def variants_as_it_is(self) -> dict[str, str]:
        """Those of two classes for one question; several have a temperature in common."""
        return Categorical.variants_as_it_is if self.width == 1 else {}

    def targets(self, y: Any, *, what: str = "`y`") -> np.ndarray:
        if self.width == 1:
            is_yes = classes(y, 2, what, one_hot=False)
            return is_yes[:, None].astype("int32")
        y = finite_numbers(y, self.width, what)
        check_each(y, lambda y: np.isin(y, (0, 1)), what, "0 or 1")
        return y.astype("int32")

    def log_prob(self, logits: Tensor, y: Tensor) -> Tensor:
        sign = 2 * ops.cast(y, logits.dtype) - 1
        log_p = -ops.softplus(-sign * logits)
        return ops.sum(log_p, axis=-1)

    def hessian_factors(self, logits: Tensor) -> Tensor:
        variance = ops.sigmoid(logits) * ops.sigmoid(-logits)
        return diagonal(ops.sqrt(variance))

    def draws(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probabilities of no and yes, and their entropies."""
        if self.from_logits:
            yes = ops.sigmoid(outputs)
            no = ops.sigmoid(-outputs)
        else:
            is_probability = ops.logical_and(outputs >= 0, outputs <= 1)
            yes = or_nan(outputs, is_probability)
            no = 1 - yes
        both = ops.stack([no, yes], axis=-1)
        return both, entropy(both)

    def public(self, draws: Tensor) -> Tensor:
        """Return the probability of yes."""
        return draws[..., 1]

    def statistics(self, summary: Any) -> dict[str, Tensor]:
        statistics = super().statistics(summary)
        return {**statistics, "total_variance": statistics["variance"]}

    def pair(self, y_true: Any, prediction: dict[str, Tensor]) -> tuple[Any, Tensor]:
        yes = prediction["mean"]
        both = ops.stack([1 - yes, yes], axis=-1)
        return matched(y_true, yes), both

    @property
    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"outputs": (1,), "y": (), "prediction": (2,)}

    @property
    def head(self) -> dict[str, Any]:
        return {"head": "sigmoid", "from_logits": self.from_logits}

    def scaled(self, outputs: Tensor, parameter: Any) -> Tensor:
        if self.from_logits:
            return outputs / parameter
        log_odds = log_of(outputs) - log_of(1 - outputs)
        return ops.sigmoid(log_odds / parameter)

    def log_probabilities(self, outputs: np.ndarray) -> np.ndarray:
        """Return log-probabilities of no and yes up to a constant, (examples, draws, 2)."""
        if self.from_logits:
            of_no = np.zeros_like(outputs)
            return np.concatenate([of_no, outputs], axis=-1)
        check_probabilities(outputs)
        p = np.concatenate([1 - outputs, outputs], axis=-1)
        tiny = np.finfo(p.dtype).tiny
        return np.log(np.maximum(p, tiny))
