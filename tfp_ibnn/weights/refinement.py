"""Train normalizing flows on top of a Gaussian posterior over weights."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from tfp_ibnn._core import checks, keras_internals
from tfp_ibnn._core.backend import Tensor, compiled, mean, tfd
from tfp_ibnn._core.protocols import WeightPosterior
from tfp_ibnn.flows import Flow
from tfp_ibnn.weights.flat import places_of
from tfp_ibnn.weights.likelihood import likelihood_of
from tfp_ibnn.weights.refined import RefinedPosterior
from tfp_ibnn.weights.target import Target
from tfp_ibnn.weights.training import ascend

MOST_WEIGHTS = 20_000
"""Weights whose covariance is still held: 1.6 GB in single precision."""


def refine(
    posterior: WeightPosterior,
    flows: Sequence[Flow],
    x: Any = None,
    y: Any = None,
    *,
    samples: np.ndarray | None = None,
    validation: tuple[Any, Any] | None = None,
    prior_scale: float | None = None,
    steps: int = 2000,
    draws: int = 16,
    learning_rate: float = 5e-3,
    rotate: bool = True,
    path_gradients: bool = True,
    noise_scale: float | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    verbose: Any = "auto",
) -> RefinedPosterior:
    """Refine a Gaussian posterior over weights by normalizing flows.

    q(w): w = loc + M NF(eps), where loc + M eps is the given posterior. The flows are trained by
    the ELBO, E_q[log p(y | x, w) + log p(w) - log q(w)], with the prior w ~ N(0, prior_scale^2),
    mirrored draws, and Adam with a cosine decay; of last layers on cached features, of any other
    weights through the whole network. Or, with `samples`, by the likelihood of given draws, which
    finds several modes, as the ELBO rarely does. What is returned is the best of 21 checks, the
    first of them of the given posterior itself. Costs `steps * draws` gradients of the log-density.

    Args:
        posterior: a fitted posterior over at most 20,000 weights, or more if its `distribution` is
            a diagonal Gaussian: GaussianVI, Laplace, SWAG.
        flows: flows, applied in order, such as [ibnn.flows.SplineCoupling(),
            ibnn.flows.SplineCoupling(swap=True)]; they are copied.
        x: training inputs; of a last layer they may be a dataset of batches (x, y).
        y: training targets.
        samples: draws of the weights, (n, size), n at least 10 times the size, such as
            `LastLayerHMC(...).samples()`: the flows are fitted to them, and x and y are not used.
            A tenth of them is held out, and decides which check is best.
        validation: (x, y) whose mean log-likelihood decides which check is best, and ends training
            after five checks without a better one; None: the ELBO of fixed draws decides.
        prior_scale: standard deviation of the prior; None takes that of the posterior.
        steps: at most so many.
        draws: per step, in mirrored pairs; with `samples`, how many of them.
        learning_rate: the first one of Adam.
        rotate: turn the axes of a full covariance towards where posterior and target differ.
        path_gradients: leave out the part of the gradient that is 0 on average, so that the noise
            vanishes at the optimum (sticking the landing). It takes the inverses of the flows.
        noise_scale: of the targets of a plain regression; None takes that of the posterior, or the
            root mean square of the residuals.
        batch_size: examples per step, and an eighth of those in a check, for the ELBO; None takes
            all of them at once.
        seed: of the draws. The networks inside of flows start from Keras's own seed: call
            `keras.utils.set_random_seed` before, to have the same result again.
        verbose: 0 shows no progress.

    Example:
        >>> import keras, numpy as np, tfp_ibnn as ibnn
        >>> x = np.linspace(-1, 1, 20, dtype="float32")[:, None]
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True))
        >>> gaussian = ibnn.GaussianVI(model).fit(x, x > 0.1, verbose=0)
        >>> options = {"steps": 20, "verbose": 0}
        >>> refined = ibnn.refine(gaussian, [ibnn.flows.Spline()], x, x > 0.1, **options)
        >>> ibnn.MonteCarlo(refined, samples=8).samples
        8

    References:
        Kristiadi et al., Posterior Refinement Improves Sample Efficiency in Bayesian Neural
        Networks, arXiv 2205.10041. Roeder et al., Sticking the Landing, arXiv 1703.09194.
    """
    if not isinstance(posterior, WeightPosterior):
        raise ValueError(f"`posterior` must be one over weights; got {posterior!r}.")
    if not flows:
        raise ValueError("`flows` must hold at least one flow; got none.")
    model, variables = posterior.network, posterior.sampled
    size = sum(math.prod(v.shape) for v in variables)
    rng, steps = np.random.default_rng(seed), checks.positive_integer("steps", steps)
    draws = checks.positive_integer("draws", draws)
    if samples is not None:
        samples = _checked_samples(samples, size)
    loc, matrix = _base(posterior, samples, size)
    if not (np.isfinite(loc).all() and np.isfinite(matrix).all()):
        raise ValueError("`posterior` holds NaN or infinity: call its `fit` first.")
    refined = RefinedPosterior(model, flows, places_of(model, variables), matrix.ndim == 1)
    refined.set_base(loc, matrix)
    options = {"steps": steps, "learning_rate": learning_rate, "verbose": verbose}
    if samples is not None:
        _fit_samples(refined, samples, rng, draws, options)
        return refined
    if x is None:
        raise ValueError("`x` and `y` must be given, or `samples`.")
    config = posterior.get_config()
    of_model = {name: config.get(name) for name in ("head", "from_logits")}
    if noise_scale is None and likelihood_of(model, **of_model).free_scale:
        noise_scale = _number(posterior, "noise_scale")
    prior_scale = _number(posterior, "prior_scale") if prior_scale is None else prior_scale
    if prior_scale is None:  # Laplace's
        precision = _number(posterior, "prior_precision")
        prior_scale = None if precision is None else precision**-0.5
    if prior_scale is None:
        kind = type(posterior).__name__
        raise ValueError(f"`prior_scale` must be given: a {kind} does not know its prior's.")
    prior_scale = checks.positive("prior_scale", prior_scale)
    target = Target(model, variables, x, y, prior_scale, noise_scale, verbose=verbose, **of_model)
    if rotate and matrix.ndim == 2:
        refined.set_base(loc, _rotated(target, loc, matrix, rng))
    checking = None if validation is None else target.prepared(*validation, verbose=0)
    objective = _Elbo(refined, target, path_gradients)
    _fit_elbo(objective, checking, rng, draws, batch_size, options)
    return refined


def _number(posterior: WeightPosterior, name: str) -> float | None:
    """Return an attribute of a posterior, a number or a variable, if there is one."""
    value = getattr(posterior, name, None)
    return None if value is None else float(ops.convert_to_numpy(value))


class _Elbo:
    """The ELBO of flows under a target; without the gradient that is 0 on average, if so asked."""

    def __init__(self, refined: RefinedPosterior, target: Target, path_gradients: bool) -> None:
        self.refined, self.target, self._path = refined, target, path_gradients
        self.variables = [v for flow in refined.flows for v in flow.trainable_variables]
        self.reads = [*refined.weights, *refined.network.weights]

    def __call__(self, eps: Tensor, scale: Tensor, *data: Tensor) -> Tensor:
        w, log_q = self.refined.transform(eps)
        if self._path:
            fixed = [(v, ops.stop_gradient(ops.convert_to_tensor(v))) for v in self.variables]
            with keras_internals.values_in_place(fixed):
                log_q = self.refined.log_prob(w)
        return mean(self.target.log_prob(w, *data, scale) - log_q)

    def value(self, eps: Tensor, scale: Tensor, *data: Tensor) -> Tensor:
        """Return the ELBO at given draws; `scale` is the number of examples over those given."""
        w, log_q = self.refined.transform(eps)
        return mean(self.target.log_prob(w, *data, scale) - log_q)

    def predictive(self, eps: Tensor, *data: Tensor) -> Tensor:
        """Return the mean log-likelihood of examples under the average network."""
        each = self.target.log_likelihoods(self.refined.transform(eps)[0], *data)
        return mean(ops.logsumexp(each, axis=0)) - math.log(eps.shape[0])


def _fit_elbo(
    objective: _Elbo,
    validation: Any,
    rng: np.random.Generator,
    draws: int,
    batch_size: int | None,
    options: dict[str, Any],
) -> None:
    target, refined = objective.target, objective.refined
    count, size = len(target.data[0]), target.size

    def pairs(number: int) -> np.ndarray:
        half = rng.standard_normal(((number + 1) // 2, size))
        return np.concatenate([half, -half]).astype(target.dtype)

    def examples(most: int | None) -> tuple[Any, ...]:
        if most is None or most >= count:
            return np.asarray(1.0, target.dtype), *target.data
        rows = rng.choice(count, most, replace=False)
        scale = np.asarray(count / most, target.dtype)
        return scale, *(ops.take(part, rows, axis=0) for part in target.data)

    fixed = pairs(8 * draws)
    if validation is None:
        total = compiled(objective.value, objective.reads)
        data = examples(batch_size and 8 * batch_size)
    else:
        total = compiled(objective.predictive, objective.reads)
        data = tuple(map(ops.convert_to_tensor, validation))
    refined.history = ascend(
        objective.variables,
        objective,
        lambda: (pairs(draws), *examples(batch_size)),
        reads=objective.reads,
        score=lambda: float(total(fixed, *data)),
        patience=0 if validation is None else 5,
        **options,
    )


def _fit_samples(
    refined: RefinedPosterior,
    samples: np.ndarray,
    rng: np.random.Generator,
    draws: int,
    options: dict[str, Any],
) -> None:
    order = rng.permutation(len(samples))
    held = len(samples) // 10
    kept, others = (
        samples[rows].astype(refined.variable_dtype) for rows in np.split(order, [held])
    )
    variables = [v for flow in refined.flows for v in flow.trainable_variables]
    total = compiled(lambda w: mean(refined.log_prob(w)), refined.weights)
    refined.history = ascend(
        variables,
        lambda w: mean(refined.log_prob(w)),
        lambda: (others[rng.integers(0, len(others), max(draws, 64))],),
        reads=refined.weights,
        score=lambda: float(total(kept)),
        patience=5,
        **options,
    )


def _base(
    posterior: WeightPosterior, samples: np.ndarray | None, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and factor, or standard deviations, of the Gaussian to begin with."""
    found = None if samples is not None else posterior.distribution()
    if isinstance(found, (tfd.Independent, tfd.MultivariateNormalDiag)):
        parts = ops.convert_to_numpy(found.mean()), ops.convert_to_numpy(found.stddev())
        return parts[0].astype("float64"), parts[1].astype("float64")
    if size > MOST_WEIGHTS:
        raise ValueError(
            f"`posterior` is over {size} weights, whose covariance takes {4e-9 * size**2:.1f} GB; "
            f"more than {MOST_WEIGHTS} are refined only from a diagonal Gaussian."
        )
    if samples is not None:
        loc, covariance = samples.mean(axis=0), np.cov(samples.T).reshape(size, size)
    else:
        loc, covariance = map(ops.convert_to_numpy, (found.mean(), found.covariance()))
    covariance = covariance.astype("float64")
    return loc.astype("float64"), np.linalg.cholesky(covariance)


def _rotated(
    target: Target, loc: np.ndarray, matrix: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Return the factor times a rotation to where the gradients of log p - log q are largest."""
    half = rng.standard_normal((int(np.clip(2 * target.size, 64, 512)), target.size))
    eps = np.concatenate([half, -half])
    gaps = target.gradients(loc + eps @ matrix.T) @ matrix + eps
    return matrix @ np.linalg.eigh(gaps.T @ gaps / len(eps))[1][:, ::-1]


def _checked_samples(samples: Any, size: int) -> np.ndarray:
    samples = np.asarray(samples, "float64")
    if samples.ndim != 2 or samples.shape[1] != size or not np.isfinite(samples).all():
        shape = f"got the shape {samples.shape}"
        raise ValueError(f"`samples` must be finite numbers (n, {size}); {shape}.")
    if len(samples) < 10 * size:
        need = f"at least {10 * size} are needed, ten for each of {size} weights"
        raise ValueError(f"`samples` must be more draws: {need}; got {len(samples)}.")
    return samples
