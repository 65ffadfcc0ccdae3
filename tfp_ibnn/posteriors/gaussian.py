"""Gaussians whose channels depend on each other: a full covariance, and a low-rank one."""

from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks, constraints
from tfp_ibnn._core.backend import Tensor, matmul, tfd
from tfp_ibnn._core.protocols import Draw
from tfp_ibnn.posteriors.base import Posterior
from tfp_ibnn.posteriors.densities import Component

_MOST_CHANNELS = 2**13
"""A full matrix of so many channels has 256 MB."""


class _CorrelatedNormal(Posterior):
    """A Gaussian z = loc + scale * M eps; a subclass has `_mixed`, M eps, and `_traces`."""

    has_joint_density = True

    def __init__(self, *, initial_scale: float | None = 0.1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.initial_scale = initial_scale
        scale = self.prior_scale if initial_scale is None else initial_scale
        self._start = checks.scale("initial_scale", scale)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        shape = (self.channels,)
        loc = keras.initializers.Constant(self.prior_loc)
        raw_scale = keras.initializers.Constant(constraints.inverse_scale(self._start))
        self.loc = self._add_parameter("loc", shape, loc)
        self.raw_scale = self._add_parameter("raw_scale", shape, raw_scale)

    def transform(self, noise: Tensor, component: Component = None, training: bool = False) -> Draw:
        """Return z with KL and entropy, which are those of independent channels but for M.

        With r = scale / prior_scale and the diagonal d of M M' - 1, the KL to a Gaussian prior has
        the further terms sum_c r_c^2 d_c / 2 - log det M, and the entropy has log det M. The KL to
        the posterior of an earlier task, of the same kind, is that of two full covariances.
        """
        noise = ops.convert_to_tensor(noise, dtype=self.dtype)
        loc = ops.convert_to_tensor(self.loc)
        scale = self.scales()
        z = loc + scale * self._mixed(noise)
        if self._follows_task:
            gaussian = self.distribution()
            return Draw(z, tfd.kl_divergence(gaussian, self.prior()), gaussian.entropy())
        excess, log_det = self._traces()
        kl, entropy = self._gaussian_kl_and_entropy(loc, scale, z)
        entropy = entropy + log_det
        if not self._has_plain_prior:
            return Draw(z, -entropy - self._log_prior(z), entropy)
        prior_scale, _ = self._prior_scale()
        ratio = scale / prior_scale
        trace = ops.sum(ratio * ratio * excess)
        return Draw(z, kl + trace / 2 - log_det, entropy)

    def _mixed(self, noise: Tensor) -> Tensor:
        """Return M eps for noise (..., channels)."""
        raise NotImplementedError

    def _traces(self) -> tuple[Tensor, Tensor]:
        """Return the diagonal of M M' - 1, (channels,), and log det M."""
        raise NotImplementedError

    def mean(self) -> Tensor:
        return ops.convert_to_tensor(self.loc)

    def scales(self) -> Tensor:
        """Return `scale`, (channels,)."""
        return constraints.scale(self.raw_scale)

    def distribution(self) -> tfd.Distribution:
        identity = ops.eye(self.channels, dtype=self.dtype)
        factor = self._mixed(identity) * self.scales()  # (scale M)'
        covariance = matmul(ops.transpose(factor), factor)
        loc = ops.convert_to_tensor(self.loc)
        return tfd.MultivariateNormalTriL(loc, ops.cholesky(covariance))


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class NormalFull(_CorrelatedNormal):
    """A Gaussian with a full covariance: z = loc + scale * L eps, L unit lower triangular.

    KL and entropy are closed forms, log det = sum_c log scale_c. It starts as `NormalAffine` does,
    with L = 1. Parameters: channels * (channels + 3) / 2; cost: O(channels^2) per draw. This is the
    control for any flow: what it reaches is not due to the flow's shape.

    Args:
        initial_scale: scale of z at the start; None takes `prior_scale`.
        prior: another prior of each channel than the Gaussian; see `Posterior`.
        prior_scale: standard deviation of the prior; None is 0.3 in up to 10 layers, less in more.
        prior_loc: mean of the prior, and of z at the start.
        learn_prior_scale: train the prior's scale, one per layer.
        sides: "input", or "both" for z on a layer's output channels, too.
        beta: weight of the KL; None is train_size / 500, at least 1.
        gamma: weight of the entropy that is subtracted from the loss.
        seed: of the noise.
        **kwargs: those of `keras.layers.Layer`.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> layer = ibnn.StochasticDense(2, posterior=ibnn.NormalFull(), train_size=100)
        >>> layer(keras.ops.ones((5, 3))).shape[-1], layer.posterior.distribution().event_shape[0]
        (2, 3)
    """

    def __init__(
        self,
        *,
        initial_scale: float | None = 0.1,
        prior: Any = None,
        prior_scale: float | None = None,
        prior_loc: float = 1.0,
        learn_prior_scale: bool = False,
        sides: str = "input",
        beta: float | None = None,
        gamma: float = 0.0,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            initial_scale=initial_scale,
            prior=prior,
            prior_scale=prior_scale,
            prior_loc=prior_loc,
            learn_prior_scale=learn_prior_scale,
            sides=sides,
            beta=beta,
            gamma=gamma,
            seed=seed,
            **kwargs,
        )

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        size = self.channels
        if size > _MOST_CHANNELS:
            raise ValueError(f"NormalFull takes <= 8192 channels; got {size}. Use NormalLowRank().")
        entries = size * (size - 1) // 2
        self.lower = self._add_parameter("lower", (entries,), "zeros")

    def _matrix(self) -> Tensor:
        """Return L, (channels, channels)."""
        size = self.channels
        # Where each entry of the matrix stands among 0, 1 and the lower ones.
        place = np.zeros((size, size), "int32")
        place[np.tril_indices(size, -1)] = np.arange(size * (size - 1) // 2) + 2
        place[np.diag_indices(size)] = 1
        zero_and_one = ops.convert_to_tensor([0.0, 1.0], dtype=self.dtype)
        values = ops.concatenate([zero_and_one, ops.convert_to_tensor(self.lower)])
        return ops.take(values, place)

    def _mixed(self, noise: Tensor) -> Tensor:
        return matmul(noise, ops.transpose(self._matrix()))

    def distribution(self) -> tfd.Distribution:
        scale = self.scales()
        factor = scale[:, None] * self._matrix()
        return tfd.MultivariateNormalTriL(ops.convert_to_tensor(self.loc), factor)

    def _traces(self) -> tuple[Tensor, Tensor]:
        below = self._matrix() - ops.eye(self.channels, dtype=self.dtype)
        log_det = ops.zeros((), dtype=self.dtype)
        return ops.sum(below * below, axis=1), log_det


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class NormalLowRank(_CorrelatedNormal):
    """A Gaussian of covariance D + F F', D diagonal and F (channels, rank).

    Drawn as z = loc + scale * (eps + U U' eps), whose covariance scale (1 + U U')^2 scale is of
    that form, any such one for some U. KL and entropy are closed forms, log det = sum_c log scale_c
    + log det(1 + U' U). It starts as `NormalAffine` does, up to a small random U. Parameters:
    channels * (rank + 2); cost: O(channels * rank) per draw.

    Args:
        rank: number of columns of F.
        initial_scale: scale of z at the start; None takes `prior_scale`.
        prior: another prior of each channel than the Gaussian; see `Posterior`.
        prior_scale: standard deviation of the prior; None is 0.3 in up to 10 layers, less in more.
        prior_loc: mean of the prior, and of z at the start.
        learn_prior_scale: train the prior's scale, one per layer.
        sides: "input", or "both" for z on a layer's output channels, too.
        beta: weight of the KL; None is train_size / 500, at least 1.
        gamma: weight of the entropy that is subtracted from the loss.
        seed: of the noise.
        **kwargs: those of `keras.layers.Layer`.

    References:
        Ong et al., Gaussian Variational Approximation, arXiv 1701.03208.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> posterior = ibnn.NormalLowRank(2, initial_scale=0.2)
        >>> posterior.build((None, 5))
        >>> [tuple(weight.shape) for weight in posterior.trainable_weights]
        [(5,), (5,), (5, 2)]
    """

    def __init__(
        self,
        rank: int = 4,
        *,
        initial_scale: float | None = 0.1,
        prior: Any = None,
        prior_scale: float | None = None,
        prior_loc: float = 1.0,
        learn_prior_scale: bool = False,
        sides: str = "input",
        beta: float | None = None,
        gamma: float = 0.0,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            initial_scale=initial_scale,
            prior=prior,
            prior_scale=prior_scale,
            prior_loc=prior_loc,
            learn_prior_scale=learn_prior_scale,
            sides=sides,
            beta=beta,
            gamma=gamma,
            seed=seed,
            **kwargs,
        )
        self.rank = checks.positive_integer("rank", rank, checks.LARGEST_SIZE)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        # At 0 the gradient vanishes.
        small = keras.initializers.RandomNormal(stddev=0.05 / self.channels**0.5)
        self.columns = self._add_parameter("columns", (self.channels, self.rank), small)

    def _mixed(self, noise: Tensor) -> Tensor:
        columns = ops.convert_to_tensor(self.columns)
        coefficients = matmul(noise, columns)
        return noise + matmul(coefficients, ops.transpose(columns))

    def _traces(self) -> tuple[Tensor, Tensor]:
        """Return the diagonal of M M' - 1 = U (2 + U' U) U', and log det M = log det(1 + U' U)."""
        columns = ops.convert_to_tensor(self.columns)
        identity = ops.eye(self.rank, dtype=self.dtype)
        inner = matmul(ops.transpose(columns), columns)
        excess = ops.sum(matmul(columns, 2 * identity + inner) * columns, axis=1)
        factor = ops.cholesky(identity + inner)
        return excess, 2 * ops.sum(ops.log(ops.diagonal(factor)))
