"""A mixture of Gaussians."""

from typing import Any

import keras
from keras import ops

from tfp_ibnn._core import checks, constraints
from tfp_ibnn._core.backend import Tensor, mean, tfd
from tfp_ibnn._core.protocols import Draw
from tfp_ibnn.posteriors.base import Component, Posterior, equal_mixture, of_component


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
        for name, spread in (("mean_spread", mean_spread), ("scale_spread", scale_spread)):
            setattr(self, name, checks.moderate(name, checks.non_negative(name, spread)))
        self.kl = checks.one_of("kl", kl, ("bound", "averaged"))
        if self.kl == "averaged" and self._given_prior is not None:
            raise ValueError("`kl='averaged'` is for a Gaussian prior: leave `prior` out.")

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        shape = (self.components, self.channels)
        normal = keras.initializers.RandomNormal

        def centered(shape: tuple[int, ...], dtype: str) -> Tensor:
            loc = normal(stddev=self.mean_spread)(shape, dtype)
            return self.prior_loc + loc - mean(loc, axis=0)

        def raw_scales(shape: tuple[int, ...], dtype: str) -> Tensor:
            scale = ops.abs(normal(self.initial_scale, self.scale_spread)(shape, dtype))
            return constraints.inverse_scales(ops.maximum(scale, 10 * constraints.MIN_SCALE))

        self.loc = self._add_parameter("loc", shape, centered)
        self.raw_scale = self._add_parameter("raw_scale", shape, raw_scales)

    def distribution(self) -> tfd.MixtureSameFamily:
        return equal_mixture(*self._loc_and_scale())

    def transform(self, noise: Tensor, component: Component = None, training: bool = False) -> Draw:
        loc, scale = self._loc_and_scale()
        is_one = self.components == 1
        chosen = (loc[0], scale[0]) if is_one else of_component(component, loc, scale)
        z = chosen[0] + chosen[1] * noise
        if self._given_prior is not None:
            return Draw(z, *self._gaussian(*chosen, z))
        kl, entropy = map(mean, self._gaussian(loc, scale))
        if self.kl == "averaged":
            together = ops.sqrt(ops.sum(scale * scale, axis=0)) / self.components
            kl, _ = self._gaussian(mean(loc, axis=0), together)
        return Draw(z, kl, entropy)

    def mean(self) -> Tensor:
        return mean(ops.convert_to_tensor(self.loc), axis=0)

    def _loc_and_scale(self) -> tuple[Tensor, Tensor]:
        return ops.convert_to_tensor(self.loc), constraints.scale(self.raw_scale)
