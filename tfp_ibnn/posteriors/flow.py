"""A normalizing flow on standard normal noise."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks, constraints
from tfp_ibnn._core.backend import Tensor, mean, tfb, tfd
from tfp_ibnn._core.protocols import Draw
from tfp_ibnn.flows import Affine, Flow
from tfp_ibnn.flows._rows import log_normal
from tfp_ibnn.flows.chain import copied as copied
from tfp_ibnn.posteriors import densities
from tfp_ibnn.posteriors.base import Posterior
from tfp_ibnn.posteriors.densities import Component

_SPREAD = 0.5
"""Standard deviation of the means of the base's components at the start."""


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class FlowPosterior(Posterior):
    """A normalizing flow on standard normal noise: z = loc + scale * NF(eps).

    log q(z) = log N(eps; 0, 1) - sum_i log|det J_i| - sum_c log scale_c. Without flows this is a
    learnable Gaussian, whose KL and entropy are closed forms; with flows both are estimated from
    the draws of the pass, forward only.

    With the affine map last, a rotation leaves the noise as it is, and every flow of this library
    starts with q = N(prior_loc, initial_scale^2): at KL 0 if `initial_scale` equals `prior_scale`.

    Args:
        flows: flows, applied in order; an empty sequence gives a Gaussian. They are copied.
        initial_scale: scale of z at the start; None takes `prior_scale`. At a small one deep
            networks learn, and trained ones keep their accuracy when they are converted.
        affine: "last", or "first" for z = NF(loc + scale * eps), the order of the original report.
        components: number of Gaussians in the base distribution. Above 1, eps is drawn from an
            equally weighted mixture with learned means and scales, so that z can have many modes.
        shared_components: draw one component index for all layers of a pass, not one per layer. The
            layers are then dependent, and the sum of their KLs, each given the index, is an upper
            bound of the joint KL, loose by at most log(components) in all.
        **kwargs: those of `Posterior`.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> planar = [ibnn.flows.Planar(), ibnn.flows.Planar()]
        >>> posterior = ibnn.FlowPosterior(planar, initial_scale=None)
        >>> posterior.build((3,))
        >>> z, kl = posterior.sample_and_kl((1000,))
        >>> bool(abs(keras.ops.mean(kl)) < 1e-4)
        True
    """

    has_own_draws = False
    """Whether the subclass defines `transform` or `mean`, so that nothing is known of its z."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own_transform = cls.transform is not FlowPosterior.transform  # of a mixin, perhaps
        if own_transform or cls.mean is not FlowPosterior.mean:
            cls.has_own_draws = True

    def __init__(
        self,
        flows: Sequence[Flow] = (),
        *,
        initial_scale: float | None = 0.1,
        affine: str = "last",
        components: int = 1,
        shared_components: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.flows = copied(flows, self.dtype)
        self.initial_scale = initial_scale
        self.order = checks.one_of("affine", affine, ("last", "first"))
        self.components = checks.positive_integer("components", components, checks.LARGEST_SIZE)
        self.shared_components = bool(shared_components)
        scale = self.prior_scale if initial_scale is None else initial_scale
        scale = checks.scale("initial_scale", scale)
        self.affine = Affine(self.prior_loc, scale, dtype=self.dtype, name="affine")

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        for flow in self._chain():
            flow.build(input_shape)
        if self.components > 1:
            # Components of variance 1 - spread^2 around means of variance spread^2: 1 in all.
            shape = (self.components, self.channels)
            around_0 = keras.initializers.RandomNormal(stddev=_SPREAD)
            raw = constraints.inverse_scale((1 - _SPREAD**2) ** 0.5)
            raw_scale = keras.initializers.Constant(raw)
            self.base_loc = self._add_parameter("base_loc", shape, around_0)
            self.base_raw_scale = self._add_parameter("base_raw_scale", shape, raw_scale)

    @property
    def has_joint_density(self) -> bool:
        """Whether z has the density of `distribution`, whatever the z of other layers."""
        return not (self.has_own_draws or self.shared_components)

    def distribution(self) -> tfd.TransformedDistribution:
        """Return q(z), with event shape (channels,), and the posterior's mean."""
        # A chain applies its last element first.
        chain = tfb.Chain([flow.bijector() for flow in reversed(self._chain())])
        return Pushforward(self._base(), chain)

    def transform(self, noise: Tensor, component: Component = None, training: bool = False) -> Draw:
        noise = ops.convert_to_tensor(noise, dtype=self.dtype)
        if self._is_gaussian:
            loc, scale = self.loc_and_scale()
            z = loc + scale * noise
            kl, entropy = self._gaussian_kl_and_entropy(loc, scale, z)
            return Draw(z, kl, entropy)
        z, log_q = self._base_draw(noise, component)
        for flow in self._chain():
            z, log_det = flow.forward_and_log_det(z, training=training)
            log_q = log_q - log_det
        return Draw(z, log_q - self._log_prior(z), -log_q)

    def _base_draw(self, noise: Tensor, component: Component) -> tuple[Tensor, Tensor]:
        """Return draws of the base distribution, (..., channels), and their log-density (...,)."""
        if self.components == 1:
            return noise, log_normal(noise)
        scales = constraints.scale(self.base_raw_scale)
        loc, scale = densities.of_component(component, self.base_loc, scales)
        draws = loc + scale * noise
        if self.shared_components:  # given the component
            log_prob = densities.diagonal_normal(loc, scale).log_prob(draws)
        else:
            log_prob = self._base().log_prob(draws)
        return draws, log_prob

    def mean(self) -> Tensor:
        """Return the mean of z, (channels,), over antithetic draws.

        The draws are always the same, so the mean is a function of the weights; it is exact for
        linear flows, and for flows that are odd, as all are at the start.
        """
        if self._is_gaussian:
            return ops.convert_to_tensor(self.affine.shift)
        noise = ops.convert_to_tensor(self._fixed_noise())
        if self.components == 1:
            return mean(self.transform(noise).z, axis=0)
        every = np.arange(self.components, dtype="int32")
        draws = self.transform(noise[:, None, :], every)  # (draws, components, channels)
        return mean(draws.z, axis=(0, 1))

    def fixed_noise(self, training: bool = False) -> np.ndarray | None:
        """Return the noise whose draws `mean` averages, if it does so, over one component."""
        if not self.flows or self.components > 1 or self.has_own_draws:
            return None
        # Flows that look at all draws of a training step must see no others among them.
        if training and any(flow.mixes_draws for flow in self.flows):
            return None
        return self._fixed_noise()

    @property
    def is_centered(self) -> bool:
        return self._is_gaussian and not self.has_own_draws

    def loc_and_scale(self) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation (channels,) of a Gaussian posterior."""
        affine = self.affine.bijector()
        return affine.shift, affine.scale

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "affine": self.order}

    @property
    def _is_gaussian(self) -> bool:
        return not self.flows and self.components == 1

    def _chain(self) -> list[Flow]:
        """Return all maps in the order in which they are applied."""
        if self.order == "first":
            return [self.affine, *self.flows]
        return [*self.flows, self.affine]

    def _base(self) -> tfd.Distribution:
        """Return the distribution of the noise before all maps."""
        if self.components == 1:
            zeros = ops.zeros((self.channels,), dtype=self.dtype)
            return densities.diagonal_normal(zeros, ops.ones_like(zeros))
        loc = ops.convert_to_tensor(self.base_loc)
        return densities.equal_mixture(loc, constraints.scale(self.base_raw_scale))


class Pushforward(tfd.TransformedDistribution):
    """The distribution of what flows make of Gaussian noise, or of a mixture of Gaussians.

    Its `mean` and `stddev` are exact for linear flows (`stddev` of Gaussian noise only), and
    otherwise those of antithetic draws which are always the same. TFP makes its own class a
    `tfd.TransformedDistribution` for its own bijectors alone.
    """

    def _mean(self, **kwargs: Any) -> Tensor:
        if self.bijector.is_constant_jacobian:
            return super()._mean(**kwargs)
        draws = self._draws()
        all_but_channels = tuple(range(len(draws.shape) - 1))
        return mean(draws, axis=all_but_channels)

    def _stddev(self, **kwargs: Any) -> Tensor:
        base = self.distribution
        if self.bijector.is_constant_jacobian and isinstance(base, tfd.Independent):
            loc = base.mean()
            moved = self.bijector.forward(loc + ops.diag(base.stddev()))
            columns = moved - self.bijector.forward(loc)
            return ops.sqrt(ops.sum(columns * columns, axis=0))
        draws = self._draws()
        rows = ops.reshape(draws, (-1, draws.shape[-1]))
        deviations = rows - mean(rows, axis=0)
        return ops.sqrt(mean(deviations * deviations, axis=0))

    def _draws(self) -> Tensor:
        """Return draws (128, [components,] channels), in pairs of opposite noise."""
        dtype = keras.backend.standardize_dtype(self.dtype)
        noise = densities.fixed_noise(int(self.event_shape[0]), dtype)
        gaussian = self.distribution
        if isinstance(gaussian, tfd.MixtureSameFamily):
            gaussian = gaussian.components_distribution
            noise = noise[:, None, :]  # for each component
        normal = gaussian.distribution
        return self.bijector.forward(normal.loc + normal.scale * noise)
