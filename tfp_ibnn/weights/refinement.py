"""Normalizing flows on top of a Gaussian posterior over weights."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks, keras_internals
from tfp_ibnn._core.backend import Tensor, compiled, matmul, mean, tfb, tfd
from tfp_ibnn._core.protocols import WeightPosterior
from tfp_ibnn.flows import AffineBijector, Flow, FlowBijector
from tfp_ibnn.flows.chain import through
from tfp_ibnn.likelihoods.numbers import finite_numbers
from tfp_ibnn.posteriors.base import diagonal_normal, log_normal
from tfp_ibnn.posteriors.flow import Pushforward, copied
from tfp_ibnn.weights.flat import FlatPosterior, double, places_of
from tfp_ibnn.weights.target import Target, ascend, mirrored

MOST_WEIGHTS = 20_000
"""Weights whose covariance is still held: 1.6 GB in single precision."""


class _MatrixBijector(FlowBijector):
    """y = loc + x M', for one invertible matrix M; its log-determinant is given."""

    parameter_ndims = {"loc": 1, "matrix": 2, "log_det": 0}  # noqa: RUF012
    constant_jacobian = True

    def _forward(self, x: Tensor) -> Tensor:
        return self.loc + matmul(x, ops.transpose(self.matrix))

    def _inverse(self, y: Tensor) -> Tensor:
        rows = ops.reshape(y - self.loc, (-1, self.loc.shape[0]))
        return ops.reshape(ops.transpose(ops.solve(self.matrix, ops.transpose(rows))), y.shape)

    def _forward_log_det_jacobian(self, x: Tensor) -> Tensor:
        return self.log_det


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class RefinedPosterior(FlatPosterior):
    """w = loc + M NF(eps), eps standard normal: a Gaussian refined by flows; made by `refine`.

    The flows are copied, and applied in order. `places` says which of `model.weights` are sampled,
    by position, and `diagonal` whether M is a diagonal matrix.
    """

    def __init__(
        self,
        model: keras.Model,
        flows: Sequence[Flow],
        places: Sequence[int],
        diagonal: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, places, **kwargs)
        self.diagonal = bool(diagonal)
        self.flows = copied(flows, self.variable_dtype)
        for flow in self.flows:
            flow.build((None, self.size))
        self.loc = self._add("loc", (self.size,))
        self.matrix = self._add("matrix", (self.size,) if diagonal else (self.size, self.size))
        self._log_det = self._add("log_det", ())
        self.history: list[float] = []

    @property
    def trained(self) -> list[keras.Variable]:
        """The variables of the flows that `refine` trains."""
        return [v for flow in self.flows for v in flow.trainable_variables]

    def draw(self, key: Tensor, number: int | Tensor) -> Tensor:
        """Return draw `number` of those a key gives, (size,)."""
        return self.transform(self._standard_normal(key, number)[None])[0][0]

    def center(self) -> Tensor:
        """Return the mean, over a fixed set of mirrored draws."""
        fixed = mirrored(np.random.default_rng(0), 64, self.size).astype(self.variable_dtype)
        return mean(self.transform(ops.convert_to_tensor(fixed))[0], axis=0)

    def distribution(self) -> tfd.Distribution:
        """Return q over the flat vector; its `log_prob` takes the inverses of the flows."""
        zeros = ops.zeros((self.size,), dtype=self.variable_dtype)
        chain = [self._affine(), *(flow.bijector() for flow in reversed(self.flows))]
        normal = diagonal_normal(zeros, ops.ones_like(zeros))
        return Pushforward(normal, tfb.Chain(chain))

    def transform(self, eps: Tensor) -> tuple[Tensor, Tensor]:
        """Turn standard normal rows (S, size) into draws and their log-densities (S,)."""
        white, log_det = through(self.flows, eps, None, "forward")
        log_q = log_normal(eps) - log_det - ops.convert_to_tensor(self._log_det)
        return self._affine().forward(white), log_q

    def log_prob(self, w: Tensor) -> Tensor:
        """Return the log-densities (S,) of vectors (S, size), by the inverses of the flows."""
        return self.distribution().log_prob(w)

    def set_base(self, loc: np.ndarray, matrix: np.ndarray) -> None:
        """Set mean and factor of the Gaussian."""
        size = np.log(np.abs(matrix)).sum() if self.diagonal else np.linalg.slogdet(matrix)[1]
        for weight, value in ((self.loc, loc), (self.matrix, matrix), (self._log_det, size)):
            weight.assign(value)

    def _affine(self) -> FlowBijector:
        loc, matrix = ops.convert_to_tensor(self.loc), ops.convert_to_tensor(self.matrix)
        if self.diagonal:
            return AffineBijector(shift=loc, scale=matrix)
        return _MatrixBijector(loc=loc, matrix=matrix, log_det=ops.convert_to_tensor(self._log_det))


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
        validation: (x, y) whose mean log-likelihood decides which check is best, and ends training
            after five checks without a better one; None: the ELBO of fixed draws decides.
        prior_scale: standard deviation of the prior; None takes that of the posterior.
        steps: at most so many.
        draws: per step, in mirrored pairs; with `samples`, how many of them.
        learning_rate: the first one of Adam.
        path_gradients: leave out the part of the gradient that is 0 on average, so that the noise
            vanishes at the optimum (sticking the landing). It takes the inverses of the flows.
        noise_scale: of the targets of a plain regression; None takes that of the posterior, or the
            root mean square of the residuals.
        batch_size: examples per step of the ELBO, and an eighth of those in a check; None: all.
        seed: of the draws. The networks inside of flows start from Keras's own seed: call
            `keras.utils.set_random_seed` before, to have the same result again.
        verbose: 0 shows no progress.
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
        samples = finite_numbers(samples, size, "`samples`").astype("float64")
        if len(samples) < 10 * size:
            need = f"at least {10 * size} are needed, ten for each of {size} weights"
            raise ValueError(f"`samples` must be more draws: {need}; got {len(samples)}.")
    loc, matrix = _base(posterior, samples, size)
    if not (np.isfinite(loc).all() and np.isfinite(matrix).all()):
        raise ValueError("`posterior` holds NaN or infinity: call its `fit` first.")
    refined = RefinedPosterior(model, flows, places_of(model, variables), matrix.ndim == 1)
    refined.set_base(loc, matrix)
    if samples is not None:
        mixed = rng.permutation(samples).astype(refined.variable_dtype)
        held, others = np.split(mixed, [len(samples) // 10])

        def objective(w: Tensor) -> Tensor:
            return mean(refined.log_prob(w))

        def batch() -> tuple[Any, ...]:
            return (others[rng.integers(0, len(others), max(draws, 64))],)

        score, fixed = objective, (held,)
    else:
        if x is None:
            raise ValueError("`x` and `y` must be given, or `samples`.")
        scales = prior_scale, noise_scale
        target = Target.of_posterior(posterior, x, y, *scales, verbose)
        if matrix.ndim == 2:  # rotated to where the gradients of log p - log q are largest
            eps = mirrored(rng, int(np.clip(2 * size, 64, 512)), size)
            gaps = target.gradients(loc + eps @ matrix.T) @ matrix + eps
            refined.set_base(loc, matrix @ np.linalg.eigh(gaps.T @ gaps / len(eps))[1][:, ::-1])
        objective = functools.partial(_elbo, refined, target, path_gradients)

        def predictive(eps: Tensor, *data: Tensor) -> Tensor:
            # The mean log-likelihood of examples under the average network.
            each = target.log_likelihoods(refined.transform(eps)[0], *data)
            return mean(ops.logsumexp(each, axis=0)) - math.log(eps.shape[0])

        def batch(factor: int = 1) -> tuple[Any, ...]:
            pairs = mirrored(rng, (factor * draws + 1) // 2, size).astype(target.dtype)
            return pairs, *target.part(batch_size and factor * batch_size, rng)

        score, fixed = objective, batch(8)
        if validation is not None:
            score, fixed = predictive, (fixed[0], *target.prepared(*validation, verbose=0))
    total = compiled(score, refined.weights)
    options = {"reads": refined.weights, "verbose": verbose}
    options["score"] = lambda: float(total(*fixed))
    options["patience"] = 0 if samples is None and validation is None else 5
    refined.history = ascend(refined.trained, objective, batch, steps, learning_rate, **options)
    return refined


def _elbo(
    refined: RefinedPosterior, target: Target, path: bool, eps: Tensor, scale: Tensor, *data: Tensor
) -> Tensor:
    """Return the ELBO at draws; `scale` is the number of examples over those given."""
    w, log_q = refined.transform(eps)
    if path:  # without the gradient that is 0 on average
        fixed = [(v, ops.stop_gradient(ops.convert_to_tensor(v))) for v in refined.trained]
        with keras_internals.values_in_place(fixed):
            log_q = refined.log_prob(w)
    return mean(target.log_prob(w, *data, scale) - log_q)


def _base(
    posterior: WeightPosterior, samples: np.ndarray | None, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and factor, or standard deviations, of the Gaussian to begin with."""
    found = None if samples is not None else posterior.distribution()
    if isinstance(found, (tfd.Independent, tfd.MultivariateNormalDiag)):
        return double(found.mean()), double(found.stddev())
    if size > MOST_WEIGHTS:
        need = f"{size} weights, whose covariance takes {4e-9 * size**2:.1f} GB"
        raise ValueError(f"`posterior` is over {need}: give one whose distribution is diagonal.")
    if samples is not None:
        return samples.mean(axis=0), np.linalg.cholesky(np.cov(samples.T).reshape(size, size))
    return double(found.mean()), np.linalg.cholesky(double(found.covariance()))
