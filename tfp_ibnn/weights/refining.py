"""Refine a Gaussian posterior over weights by normalizing flows."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import tfd
from tfp_ibnn._core.protocols import WeightPosterior
from tfp_ibnn.flows import Flow
from tfp_ibnn.likelihoods.numbers import finite_numbers
from tfp_ibnn.weights.adam import ascend
from tfp_ibnn.weights.objectives import ElboObjective, Objective, SamplesObjective, Sizes
from tfp_ibnn.weights.refinement import RefinedPosterior
from tfp_ibnn.weights.target import Target
from tfp_ibnn.weights.vectors import double, mirrored, places_of

MOST_WEIGHTS = 20_000
"""Weights whose covariance is still held: 1.6 GB in single precision."""


def refine(
    posterior: WeightPosterior,
    flows: Sequence[Flow],
    x: Any = None,
    y: Any = None,
    *,
    samples: np.ndarray | None = None,
    validation: Any = None,
    prior_scale: float | None = None,
    steps: int = 2000,
    draws: int = 16,
    learning_rate: float = 5e-3,
    path_gradients: bool = True,
    noise_scale: float | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    verbose: Any = "auto",
) -> RefinedPosterior:
    """Refine a Gaussian posterior over weights by normalizing flows.

    q(w): w = loc + M NF(eps), where loc + M eps is the given posterior. The flows are trained by
    the ELBO, E_q[log p(y | x, w) + log p(w) - log q(w)], with the prior w ~ N(0, prior_scale^2) and
    Adam; of last layers on cached features. Or, with `samples`, by the likelihood of given draws,
    which finds several modes, as the ELBO rarely does. What is returned is the best of 21 checks,
    the first of the given posterior itself. Costs `steps * draws` gradients of the log-density.
    References: Kristiadi et al., Posterior Refinement, arXiv 2205.10041; Roeder et al., 1703.09194.

    Args:
        posterior: a fitted posterior over at most 20,000 weights, or more if its `distribution` is
            a diagonal Gaussian: GaussianVI, Laplace, SWAG.
        flows: flows, applied in order, such as [ibnn.flows.SplineCoupling(),
            ibnn.flows.SplineCoupling(swap=True)]; they are copied.
        x: training inputs; of a last layer they may be a dataset of batches (x, y).
        y: training targets.
        samples: draws of the weights, (n, size), n at least 10 times the size, such as
            `LastLayerHMC(...).samples()`, instead of x and y; a tenth decides which check is best.
        validation: (x, y), or of a last layer a dataset of batches (x, y), whose mean
            log-likelihood decides which check is best, and ends training after five checks without
            a better one; None: the ELBO of fixed draws decides.
        prior_scale: standard deviation of the prior; None takes that of the posterior.
        steps: number of steps, at most.
        draws: of the weights per step, in mirrored pairs; with `samples`, how many of them, at
            least 64.
        learning_rate: that of the first step of Adam.
        path_gradients: leave out the part of the gradient that is 0 on average, so that the noise
            vanishes at the optimum (sticking the landing). It takes the inverses of the flows.
        noise_scale: of the targets of a plain regression; None takes that of the posterior, or the
            root mean square of the residuals.
        batch_size: examples per step of the ELBO, and an eighth of those in a check; None: all.
        seed: of the draws. The networks inside of flows start from Keras's own seed: call
            `keras.utils.set_random_seed` before, to have the same result again.
        verbose: 0 shows no progress.

    Returns:
        The refined posterior, over the same weights; its `history` has the scores of the checks.

    Raises:
        ValueError: if the posterior is not fitted or too large, or if there are too few samples.

    Example:
        >>> import keras, numpy as np, tfp_ibnn as ibnn
        >>> x = np.linspace(-1, 1, 20, dtype="float32")[:, None]
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True))
        >>> gaussian = ibnn.GaussianVI(model).fit(x, x > 0.1, steps=10, verbose=0)
        >>> flows = [ibnn.flows.AffineCoupling(4)]
        >>> refined = ibnn.refine(gaussian, flows, x, x > 0.1, steps=20, verbose=0)
        >>> len(refined.history), refined.size
        (21, 2)
    """
    _check(posterior, flows, x, samples)
    steps = checks.positive_integer("steps", steps)
    draws = checks.positive_integer("draws", draws)
    rng = np.random.default_rng(seed)
    if samples is not None:
        samples = _enough(samples, posterior)
    loc, matrix = _base(posterior, samples)
    model = posterior.network
    places = places_of(model, posterior.sampled)
    refined = RefinedPosterior(model, flows, places, diagonal=matrix.ndim == 1)
    refined.set_base(loc, matrix)
    objective: Objective
    if samples is not None:
        objective = SamplesObjective(refined, samples, draws, rng)
    else:
        target = Target.of_posterior(posterior, x, y, prior_scale, noise_scale, verbose)
        if matrix.ndim == 2:
            refined.set_base(loc, _rotated(matrix, loc, target, rng))
        objective = ElboObjective(
            refined,
            target,
            Sizes(draws, batch_size),
            path_gradients=path_gradients,
            validation=validation,
            rng=rng,
        )
    refined.history = ascend(
        refined.trained,
        objective.value,
        objective.batch,
        steps,
        learning_rate,
        reads=refined.weights,
        score=objective.score,
        patience=objective.patience,
        verbose=verbose,
    )
    return refined


def _check(posterior: Any, flows: Sequence[Flow], x: Any, samples: Any) -> None:
    """Raise if there is nothing to refine, nothing to refine it by, or nothing to fit it to."""
    if not isinstance(posterior, WeightPosterior):
        raise ValueError(f"`posterior` must be one over weights; got {posterior!r}.")
    if not flows:
        raise ValueError("`flows` must hold at least one flow; got none.")
    if x is None and samples is None:
        raise ValueError("`x` and `y` must be given, or `samples`.")


def _base(posterior: WeightPosterior, samples: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and factor of the Gaussian that is refined, or raise if it is not finite."""
    if samples is None:
        loc, matrix = _moments_of_posterior(posterior)
    else:
        loc, matrix = _moments_of_samples(samples)
    if not (np.isfinite(loc).all() and np.isfinite(matrix).all()):
        raise ValueError("`posterior` holds NaN or infinity: call its `fit` first.")
    return loc, matrix


def _enough(samples: Any, posterior: WeightPosterior) -> np.ndarray:
    """Return draws of the weights (n, size) in float64, or raise if they are too few."""
    size = sum(math.prod(v.shape) for v in posterior.sampled)
    samples = finite_numbers(samples, size, "`samples`").astype("float64")
    if len(samples) < 10 * size:
        raise ValueError(
            f"`samples` must be more draws: at least {10 * size} are needed, ten for each of "
            f"{size} weights; got {len(samples)}."
        )
    return samples


def _moments_of_samples(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and lower triangular factor of the Gaussian with the moments of draws."""
    size = samples.shape[1]
    _check_size(size)
    covariance = np.cov(samples.T).reshape(size, size)
    return samples.mean(axis=0), np.linalg.cholesky(covariance)


def _moments_of_posterior(posterior: WeightPosterior) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and lower triangular factor, or standard deviations, of a Gaussian posterior."""
    q = posterior.distribution()
    loc = double(q.mean())
    if isinstance(q, (tfd.Independent, tfd.MultivariateNormalDiag)):
        return loc, double(q.stddev())
    _check_size(len(loc))
    return loc, np.linalg.cholesky(double(q.covariance()))


def _check_size(size: int) -> None:
    """Raise if the covariance of so many weights is too large."""
    if size > MOST_WEIGHTS:
        raise ValueError(
            f"`posterior` is over {size} weights, whose covariance takes {4e-9 * size**2:.1f} GB: "
            "give one whose distribution is diagonal."
        )


def _rotated(
    matrix: np.ndarray, loc: np.ndarray, target: Target, rng: np.random.Generator
) -> np.ndarray:
    """Return a factor of the same covariance with axes along which log p - log q slopes most."""
    size = len(loc)
    pairs = int(np.clip(2 * size, 64, 512))
    eps = mirrored(rng, pairs, size)
    draws = loc + eps @ matrix.T
    # The gradient of minus log q in white coordinates is eps.
    slopes = target.gradients(draws) @ matrix + eps
    products = slopes.T @ slopes / len(eps)
    _, vectors = np.linalg.eigh(products)
    steepest_first = vectors[:, ::-1]
    return matrix @ steepest_first
