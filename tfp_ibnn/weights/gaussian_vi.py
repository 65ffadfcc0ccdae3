"""The best Gaussian over the last layer's weights, by natural gradients."""

from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor, mean
from tfp_ibnn.posteriors.gaussian import NormalLowRank
from tfp_ibnn.weights.adam import ascend
from tfp_ibnn.weights.flat import Gaussian
from tfp_ibnn.weights.last_layer import LastLayerPosterior
from tfp_ibnn.weights.natural_gradients import natural_gradients
from tfp_ibnn.weights.target import Target
from tfp_ibnn.weights.vectors import balanced, double

_DRAWS_OF_ELBO = 1024
MOST_FULL = 10_000
"""Weights of which a full covariance is still held: 800 MB in double precision."""


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class GaussianVI(Gaussian, LastLayerPosterior):
    """The Gaussian over the last layer's weights that maximizes the ELBO.

    ELBO = E_q[log p(y | x, w) + log p(w)] + H[q], with the prior w ~ N(0, prior_scale^2) and all
    data in every step, from cached features. Full and diagonal covariances by natural gradients: in
    coordinates where q is N(0, 1), the precision becomes 1 - rate * (1 + E[g eps']), g the gradient
    of the log-density at eps (arXiv 2002.10060, 2107.04562). "lowrank", diagonal + F F', by Adam.
    Cost of a step, for D weights: 2.5 D gradients (at most 1,024) and O(D^3) for a full covariance;
    64 gradients for the others. Nothing of the network before the last layer is uncertain.

    Args:
        model: a built Functional or Sequential model that ends in a Dense layer; it is not changed.
        covariance: "full", "lowrank" or "diag".
        rank: of F.
        **kwargs: `prior_scale` (1.0), the standard deviation of each weight's prior; `noise_scale`,
            that of a plain regression's targets (None takes the root mean square of the residuals
            of `model`); `head` and `from_logits` as for `MonteCarlo`; those of a Keras layer.

    Example:
        >>> import keras, numpy as np, tfp_ibnn as ibnn
        >>> x = np.linspace(-1, 1, 20, dtype="float32")[:, None]
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True))
        >>> posterior = ibnn.GaussianVI(model).fit(x, x > 0.1, verbose=0)
        >>> posterior.distribution().event_shape[0], posterior.elbo > -13
        (2, True)
    """

    def __init__(
        self, model: keras.Model, *, covariance: str = "full", rank: int = 4, **kwargs: Any
    ) -> None:
        super().__init__(model, **kwargs)
        self.covariance = checks.one_of("covariance", covariance, ("full", "lowrank", "diag"))
        self.rank = checks.positive_integer("rank", rank, checks.LARGEST_SIZE)
        is_full = covariance == "full"
        if is_full and self.size > MOST_FULL:
            raise ValueError(
                "`covariance` must be 'lowrank' or 'diag' here: "
                f"{self.size} weights need {8e-9 * self.size**2:.1f} GB."
            )
        rows = self.rank if covariance == "lowrank" else 0
        self._add_moments(rows, is_full)
        self._elbo = self._add("elbo", ())

    @property
    def elbo(self) -> float:
        """The ELBO that was reached, in nats: a lower bound of the log-evidence."""
        return float(ops.convert_to_numpy(self._elbo.value))

    def fit_to(
        self, target: Target, rng: np.random.Generator, verbose: Any = 0, steps: int = 100
    ) -> None:
        """Fit to a target.

        Args:
            target: the log-density of the weights.
            rng: source of the draws.
            verbose: 0 shows no progress.
            steps: of natural gradients, 100 by default; for "lowrank" ten times as many of Adam
                follow.
        """
        steps = checks.positive_integer("steps", steps)
        is_full = self.covariance == "full"
        loc, scale = natural_gradients(target, is_full, steps, rng, verbose)
        factor = np.zeros((0, self.size))  # no rows
        if self.covariance == "lowrank":
            loc, scale, factor = _low_rank(
                target,
                _Start(loc, scale),
                self.rank,
                10 * steps,
                rng,
                verbose,
            )
        self.assign(loc, scale, factor)
        self._elbo.assign(self._estimated_elbo(target, rng))

    def _estimated_elbo(self, target: Target, rng: np.random.Generator) -> float:
        """Return the ELBO, or raise if it is not finite."""
        columns = self.size + self.factor.shape[0]
        eps = balanced(rng, _DRAWS_OF_ELBO // 2, columns)
        w = self.transform(ops.cast(eps, self.variable_dtype))
        log_p = target.values(ops.convert_to_numpy(w))
        # log p + |eps|^2 / 2 is nearly constant where q is good: its mean needs few draws.
        excess = np.sum(eps**2 - 1, axis=1)
        values = log_p + excess / 2
        entropy = self.distribution().entropy()
        elbo = values.mean() + float(ops.convert_to_numpy(entropy))
        if not np.isfinite(elbo):
            raise ValueError(f"The ELBO is {elbo}: give a smaller `prior_scale`, or scale `x`.")
        return elbo


class _Start(NamedTuple):
    """A diagonal Gaussian to begin with."""

    loc: np.ndarray
    scale: np.ndarray


def _low_rank(
    target: Target,
    start: _Start,
    rank: int,
    steps: int,
    rng: np.random.Generator,
    verbose: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mean, scales and factor of the best Gaussian with a low-rank covariance.

    Adam runs in coordinates where the diagonal Gaussian is standard normal.
    """
    dtype = target.dtype
    q = NormalLowRank(
        rank,
        initial_scale=1.0,
        prior_loc=0.0,
        prior_scale=1.0,
        dtype=keras.backend.standardize_dtype(dtype),
    )
    q.build((target.size,))
    spread = 0.05 / target.size**0.5
    q.columns.assign(rng.normal(scale=spread, size=q.columns.shape))
    loc = start.loc.astype(dtype)
    scale = start.scale.astype(dtype)

    def elbo(eps: Tensor, *data: Tensor) -> Tensor:
        draw = q.transform(eps)
        log_p = target.log_prob(loc + scale * draw.z, *data)
        return mean(log_p) + draw.entropy

    def batch() -> tuple[Any, ...]:
        eps = balanced(rng, 32, target.size)
        return eps.astype(dtype), *target.data

    ascend(q.trainable_variables, elbo, batch, steps, 0.02, verbose=verbose)
    columns = double(q.columns)
    # (1 + U U')^2 = 1 + U (2 + U' U) U'
    inner = 2 * np.eye(rank) + columns.T @ columns
    rows = (columns @ np.linalg.cholesky(inner)).T
    final_scale = start.scale * double(q.scales())
    final_loc = start.loc + start.scale * double(q.mean())
    return final_loc, final_scale, rows * final_scale
