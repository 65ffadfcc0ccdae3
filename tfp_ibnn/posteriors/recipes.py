"""The named recipes: posteriors that one line makes."""

import functools
from collections.abc import Callable
from typing import Any

from tfp_ibnn import flows
from tfp_ibnn._core import checks
from tfp_ibnn.layers.multiplicative import Stochastic
from tfp_ibnn.posteriors.flow import FlowPosterior

MOST_FLOWS = 1000  # more would take minutes to make, and nobody has asked for as many

Recipe = Callable[..., FlowPosterior]


def recipe(make: Recipe) -> Recipe:
    """Let a recipe answer for keywords that nobody takes, which Keras would blame on a class."""

    @functools.wraps(make)
    def checked(*args: Any, **kwargs: Any) -> FlowPosterior:
        with checks.known_keywords(make.__name__, kwargs, (make,)):
            return make(*args, **kwargs)

    return checked


def steps_of(depth: int) -> range:
    """Return the numbers of the flows, or raise if `depth` is not a number of flows."""
    try:
        return range(checks.positive_integer("depth", depth, MOST_FLOWS))
    except ValueError as error:
        raise ValueError(f"{error} For a posterior without a flow use NormalAffine().") from None


@recipe
def NormalAffine(  # noqa: N802
    *,
    initial_scale: float | None = 0.1,
    affine: str = "last",
    components: int = 1,
    shared_components: bool = False,
    prior: Any = None,
    prior_scale: float | None = None,
    prior_loc: float = 1.0,
    learn_prior_scale: bool = False,
    sides: str = "input",
    beta: float | None = None,
    gamma: float = 0.0,
    seed: int | None = None,
    **kwargs: Any,
) -> FlowPosterior:
    """Return a Gaussian posterior over z, with closed-form KL.

    Args:
        initial_scale: scale of z at the start; None takes `prior_scale`.
        affine: "last" for z = loc + scale * NF(eps), "first" for z = NF(loc + scale * eps).
        components: number of Gaussians in the distribution of eps.
        shared_components: draw one component index for all layers of a pass.
        prior: another prior of each channel than the Gaussian, such as `ibnn.priors.Laplace(0.3)`.
        prior_scale: standard deviation of the prior; None is 0.3 in up to 10 layers, less in more.
        prior_loc: mean of the prior, and of z at the start.
        learn_prior_scale: train the prior's scale, one per layer.
        sides: "input", or "both" for z on a layer's output channels, too.
        beta: weight of the KL; None is train_size / 500, at least 1.
        gamma: weight of the entropy that is subtracted from the loss.
        seed: of the noise; None draws fresh noise in each process.
        **kwargs: those of `keras.layers.Layer`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> det = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        >>> sto = ibnn.to_stochastic(det, ibnn.NormalAffine(prior_scale=0.2), train_size=100)
        >>> [weight.name for weight in ibnn.stochastic_layers(sto)[0].posterior.trainable_weights]
        ['shift', 'raw_scale']
    """
    return FlowPosterior(
        (),
        initial_scale=initial_scale,
        affine=affine,
        components=components,
        shared_components=shared_components,
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


@recipe
def NormalPlanar1d(  # noqa: N802
    depth: int = 2,
    *,
    initial_scale: float | None = 0.1,
    affine: str = "last",
    components: int = 1,
    shared_components: bool = False,
    prior: Any = None,
    prior_scale: float | None = None,
    prior_loc: float = 1.0,
    learn_prior_scale: bool = False,
    sides: str = "input",
    beta: float | None = None,
    gamma: float = 0.0,
    seed: int | None = None,
    **kwargs: Any,
) -> FlowPosterior:
    """Return a Gaussian under `depth` planar flows.

    Args:
        depth: number of flows.
        initial_scale: scale of z at the start; None takes `prior_scale`.
        affine: "last" for z = loc + scale * NF(eps), "first" for z = NF(loc + scale * eps).
        components: number of Gaussians in the distribution of eps.
        shared_components: draw one component index for all layers of a pass.
        prior: another prior of each channel than the Gaussian, such as `ibnn.priors.Laplace(0.3)`.
        prior_scale: standard deviation of the prior; None is 0.3 in up to 10 layers, less in more.
        prior_loc: mean of the prior, and of z at the start.
        learn_prior_scale: train the prior's scale, one per layer.
        sides: "input", or "both" for z on a layer's output channels, too.
        beta: weight of the KL; None is train_size / 500, at least 1.
        gamma: weight of the entropy that is subtracted from the loss.
        seed: of the noise; None draws fresh noise in each process.
        **kwargs: those of `keras.layers.Layer`.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> [type(flow).__name__ for flow in ibnn.NormalPlanar1d(depth=2).flows]
        ['Planar', 'Planar']
    """
    planar = [flows.Planar() for _ in steps_of(depth)]
    return FlowPosterior(
        planar,
        initial_scale=initial_scale,
        affine=affine,
        components=components,
        shared_components=shared_components,
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


@recipe
def NormalRadial(  # noqa: N802
    depth: int = 2,
    *,
    initial_scale: float | None = 0.1,
    affine: str = "last",
    components: int = 1,
    shared_components: bool = False,
    prior: Any = None,
    prior_scale: float | None = None,
    prior_loc: float = 1.0,
    learn_prior_scale: bool = False,
    sides: str = "input",
    beta: float | None = None,
    gamma: float = 0.0,
    seed: int | None = None,
    **kwargs: Any,
) -> FlowPosterior:
    """Return a Gaussian under `depth` radial flows.

    Args:
        depth: number of flows.
        initial_scale: scale of z at the start; None takes `prior_scale`.
        affine: "last" for z = loc + scale * NF(eps), "first" for z = NF(loc + scale * eps).
        components: number of Gaussians in the distribution of eps.
        shared_components: draw one component index for all layers of a pass.
        prior: another prior of each channel than the Gaussian, such as `ibnn.priors.Laplace(0.3)`.
        prior_scale: standard deviation of the prior; None is 0.3 in up to 10 layers, less in more.
        prior_loc: mean of the prior, and of z at the start.
        learn_prior_scale: train the prior's scale, one per layer.
        sides: "input", or "both" for z on a layer's output channels, too.
        beta: weight of the KL; None is train_size / 500, at least 1.
        gamma: weight of the entropy that is subtracted from the loss.
        seed: of the noise; None draws fresh noise in each process.
        **kwargs: those of `keras.layers.Layer`.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> [type(flow).__name__ for flow in ibnn.NormalRadial(depth=1).flows]
        ['Radial']
    """
    radial = [flows.Radial() for _ in steps_of(depth)]
    return FlowPosterior(
        radial,
        initial_scale=initial_scale,
        affine=affine,
        components=components,
        shared_components=shared_components,
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


@recipe
def NormalSylvester(  # noqa: N802
    depth: int = 2,
    units: int = 8,
    *,
    initial_scale: float | None = 0.1,
    affine: str = "last",
    components: int = 1,
    shared_components: bool = False,
    prior: Any = None,
    prior_scale: float | None = None,
    prior_loc: float = 1.0,
    learn_prior_scale: bool = False,
    sides: str = "input",
    beta: float | None = None,
    gamma: float = 0.0,
    seed: int | None = None,
    **kwargs: Any,
) -> FlowPosterior:
    """Return a Gaussian under `depth` Sylvester flows.

    Args:
        depth: number of flows.
        units: hidden units of each flow.
        initial_scale: scale of z at the start; None takes `prior_scale`.
        affine: "last" for z = loc + scale * NF(eps), "first" for z = NF(loc + scale * eps).
        components: number of Gaussians in the distribution of eps.
        shared_components: draw one component index for all layers of a pass.
        prior: another prior of each channel than the Gaussian, such as `ibnn.priors.Laplace(0.3)`.
        prior_scale: standard deviation of the prior; None is 0.3 in up to 10 layers, less in more.
        prior_loc: mean of the prior, and of z at the start.
        learn_prior_scale: train the prior's scale, one per layer.
        sides: "input", or "both" for z on a layer's output channels, too.
        beta: weight of the KL; None is train_size / 500, at least 1.
        gamma: weight of the entropy that is subtracted from the loss.
        seed: of the noise; None draws fresh noise in each process.
        **kwargs: those of `keras.layers.Layer`.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> [type(flow).__name__ for flow in ibnn.NormalSylvester(depth=1, units=4).flows]
        ['Sylvester']
    """
    sylvester = [flows.Sylvester(units) for _ in steps_of(depth)]
    return FlowPosterior(
        sylvester,
        initial_scale=initial_scale,
        affine=affine,
        components=components,
        shared_components=shared_components,
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


# What a layer has if it is given no posterior. Layers do not know posteriors.
Stochastic.default_posterior = staticmethod(NormalAffine)
