"""A mixture of Gaussians."""

from typing import Any

import keras
from keras import ops

from tfp_ibnn._core import checks, constraints
from tfp_ibnn._core.backend import Tensor, mean, tfd
from tfp_ibnn._core.protocols import Draw
from tfp_ibnn.posteriors.base import Posterior
from tfp_ibnn.posteriors.densities import Component, equal_mixture, of_component


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class MixturePosterior(Posterior):
    """K diagonal Gaussians per layer, the component index shared by all layers: iBNN's posterior.

    The examples of a batch take the components in turn. The KL is the mean of the components'
    closed forms, an upper bound of the mixture's, loose by at most log K for all layers together;
    the entropy, too, is the mean of the components'. Their means start around `prior_loc`, and
    average to it exactly. Reference: Trinh et al., arXiv 2010.13498.

    Args:
        components: K.
        mean_spread: standard deviation of the component means at the start.
        initial_scale: mean of the components' scales at the start.
        scale_spread: standard deviation of those scales at the start.
        kl: "bound", or "averaged" for the KL of the Gaussian that the average of one draw from each
            component has. The authors' code used that; it is not a bound.
        **kwargs: those of `Posterior`.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> posterior = ibnn.MixturePosterior(4, seed=0)
        >>> posterior.build((None, 3))
        >>> posterior.distribution().event_shape[0], [round(float(x), 3) for x in posterior.mean()]
        (3, [1.0, 1.0, 1.0])
    """

    shared_components = True

    def __init__(
        self,
        components: int = 4,
        *,
        mean_spread: float = 0.75,
        initial_scale: float = 0.05,
        scale_spread: float = 0.02,
        kl: str = "bound",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.components = checks.positive_integer("components", components, checks.LARGEST_SIZE)
        self.initial_scale = checks.scale("initial_scale", initial_scale)
        self.mean_spread = _checked_spread("mean_spread", mean_spread)
        self.scale_spread = _checked_spread("scale_spread", scale_spread)
        self.kl = checks.one_of("kl", kl, ("bound", "averaged"))
        if self.kl == "averaged" and self._given_prior is not None:
            raise ValueError("`kl='averaged'` is for a Gaussian prior: leave `prior` out.")

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        shape = (self.components, self.channels)
        self.loc = self._add_parameter("loc", shape, self._initial_loc)
        self.raw_scale = self._add_parameter("raw_scale", shape, self._initial_raw_scale)

    def _initial_loc(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        around_0 = keras.initializers.RandomNormal(stddev=self.mean_spread)
        loc = around_0(shape, dtype)
        return self.prior_loc + loc - mean(loc, axis=0)

    def _initial_raw_scale(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        around_scale = keras.initializers.RandomNormal(self.initial_scale, self.scale_spread)
        scale = ops.abs(around_scale(shape, dtype))
        scale = ops.maximum(scale, 10 * constraints.MIN_SCALE)
        return constraints.inverse_scales(scale)

    def distribution(self) -> tfd.MixtureSameFamily:
        loc, scale = self._loc_and_scale()
        return equal_mixture(loc, scale)

    def transform(self, noise: Tensor, component: Component = None, training: bool = False) -> Draw:
        locs, scales = self._loc_and_scale()
        if self.components == 1:
            loc = locs[0]
            scale = scales[0]
        else:
            loc, scale = of_component(component, locs, scales)
        z = loc + scale * noise
        if self._given_prior is not None:
            kl, entropy = self._gaussian_kl_and_entropy(loc, scale, z)
            return Draw(z, kl, entropy)
        kls, entropies = self._gaussian_kl_and_entropy(locs, scales)
        kl = mean(kls)
        if self.kl == "averaged":
            variance = ops.sum(scales * scales, axis=0)
            scale_of_average = ops.sqrt(variance) / self.components
            kl, _ = self._gaussian_kl_and_entropy(mean(locs, axis=0), scale_of_average)
        return Draw(z, kl, mean(entropies))

    def mean(self) -> Tensor:
        return mean(ops.convert_to_tensor(self.loc), axis=0)

    def _loc_and_scale(self) -> tuple[Tensor, Tensor]:
        """Return means and standard deviations of the components, (components, channels)."""
        return ops.convert_to_tensor(self.loc), constraints.scale(self.raw_scale)


def _checked_spread(name: str, value: float) -> float:
    return checks.moderate(name, checks.non_negative(name, value))
