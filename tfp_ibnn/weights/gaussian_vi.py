"""The best Gaussian over the last layer's weights, by natural gradients."""

from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor, mean
from tfp_ibnn.posteriors.gaussian import NormalLowRank
from tfp_ibnn.weights.flat import Gaussian, double, triangular
from tfp_ibnn.weights.target import Density, LastLayerPosterior, Target, ascend, mirrored

MOST_FULL = 10_000
"""Weights of which a full covariance is still held: 800 MB in double precision."""

_REMEDY = "give a smaller `prior_scale`, or scale `x`"


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class GaussianVI(Gaussian, LastLayerPosterior):
    """The Gaussian over the last layer's weights that maximises the ELBO.

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
        if covariance == "full" and self.size > MOST_FULL:
            need = f"{self.size} weights need {8e-9 * self.size**2:.1f} GB"
            raise ValueError(f"`covariance` must be 'lowrank' or 'diag' here: {need}.")
        self._add_moments(self.rank if covariance == "lowrank" else 0, covariance == "full")
        self._elbo = self._add("elbo", ())

    @property
    def elbo(self) -> float:
        """The ELBO that was reached, in nats: a lower bound of the log-evidence."""
        return float(ops.convert_to_numpy(self._elbo.value))

    def fit_to(
        self, target: Target, rng: np.random.Generator, verbose: Any = 0, steps: int = 100
    ) -> None:
        """Fit to a target."""
        steps = checks.positive_integer("steps", steps)
        loc, scale = natural_gradients(target, self.covariance == "full", steps, rng, verbose)
        factor = np.zeros((0, self.size))
        if self.covariance == "lowrank":
            loc, scale, factor = self._low_rank(target, loc, scale, 10 * steps, rng, verbose)
        self.assign(loc, scale, factor)
        eps = _pairs(rng, 512, self.size + len(factor))
        w = ops.convert_to_numpy(self.transform(ops.cast(eps, self.variable_dtype)))
        # log p + |eps|^2 / 2 is nearly constant where q is good: its mean needs few draws.
        values = target.values(w) + np.sum(eps**2 - 1, axis=1) / 2
        elbo = values.mean() + float(ops.convert_to_numpy(self.distribution().entropy()))
        if not np.isfinite(elbo):
            raise ValueError(f"The ELBO is {elbo}: {_REMEDY}.")
        self._elbo.assign(elbo)

    def _low_rank(
        self, target: Target, loc: Any, scale: Any, steps: int, rng: Any, verbose: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return mean, scales and factor of the best Gaussian with a low-rank covariance."""
        # Standard normal at the start, in coordinates where the diagonal Gaussian is.
        start = {"initial_scale": 1.0, "prior_loc": 0.0, "prior_scale": 1.0}
        q = NormalLowRank(self.rank, dtype=keras.backend.standardize_dtype(target.dtype), **start)
        q.build((target.size,))
        q.columns.assign(rng.normal(scale=0.05 / target.size**0.5, size=q.columns.shape))
        first, unit = loc.astype(target.dtype), scale.astype(target.dtype)

        def objective(eps: Tensor, *data: Tensor) -> Tensor:
            draw = q.transform(eps)
            return mean(target.log_prob(first + unit * draw.z, *data)) + draw.entropy

        def batch() -> tuple[Any, ...]:
            return (_pairs(rng, 32, target.size).astype(target.dtype), *target.data)

        ascend(q.trainable_variables, objective, batch, steps, 0.02, verbose=verbose)
        center, own, columns = map(double, (q.mean(), q.scales(), q.columns))
        # (1 + U U')^2 = 1 + U (2 + U' U) U'
        root = np.linalg.cholesky(2 * np.eye(self.rank) + columns.T @ columns)
        return loc + scale * center, scale * own, (columns @ root).T * (scale * own)


def natural_gradients(
    target: Density, full: bool, steps: int, rng: np.random.Generator, verbose: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean, and the lower triangular factor or the standard deviations, of q."""
    size = target.size
    pairs = int(np.clip(1.25 * size, 32, 512)) if full else 32
    # With fewer pairs than weights the noise of a step has eigenvalues up to this.
    most = 0.5 / max(1.0, (size / pairs) ** 0.5) ** 2
    loc = target.mode()
    factor = 0.1 * target.prior_scale * (np.eye(size) if full else np.ones(size))
    bar = keras.utils.Progbar(steps, verbose=1 if verbose == "auto" else verbose)
    for step in range(steps):
        # Constant at first; then such that all later steps count alike in the result.
        rate = most / (1 + most * max(0.0, step - 0.4 * steps))
        eps = _pairs(rng, pairs, size)
        w = loc + (eps @ factor.T if full else eps * factor)
        slopes = target.gradients(w)
        if not np.isfinite(slopes).all():
            raise ValueError(f"The gradient became NaN or infinite at step {step + 1}: {_REMEDY}.")
        slopes = slopes @ factor if full else slopes * factor
        shift = slopes.mean(axis=0)
        if full:
            excess = (slopes + eps).T @ eps / len(eps)
            excess = rate * (excess + excess.T) / 2
            root = _root(np.eye(size) - excess, excess)
            factor = np.linalg.solve(root, factor.T).T
            shift = np.linalg.solve(root, shift)
        else:
            excess = rate * np.mean((slopes + eps) * eps, axis=0)
            root = np.sqrt(1 - excess + excess**2 / 2)
            factor, shift = factor / root, shift / root
        # No step is longer than q is wide.
        shift *= rate * min(1.0, size**0.5 / max(np.linalg.norm(shift), 1e-30))
        loc = loc + (factor @ shift if full else factor * shift)
        bar.update(step + 1, [("step", float(np.linalg.norm(shift)))])
    return loc, triangular(factor) if full else factor


def _root(precision: np.ndarray, excess: np.ndarray) -> np.ndarray:
    """Return a root of the new precision, made definite where noise has made it indefinite."""
    try:
        return np.linalg.cholesky(precision)
    except np.linalg.LinAlgError:
        values, vectors = np.linalg.eigh(excess)  # of any size: a root of 1 - e + e^2 / 2
        return vectors * np.sqrt(1 - values + values**2 / 2)


def _pairs(rng: np.random.Generator, pairs: int, size: int) -> np.ndarray:
    """Return mirrored normal draws (2 * pairs, size), of covariance 1 if there are enough."""
    eps = mirrored(rng, pairs, size)
    if pairs <= size:
        return eps
    return eps @ np.linalg.inv(np.linalg.cholesky(eps.T @ eps / len(eps))).T
