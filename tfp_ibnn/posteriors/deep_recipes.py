"""The named recipes with large flows: 1x1 convolutions, Glow steps and autoregressive networks."""

from typing import Any

from tfp_ibnn import flows
from tfp_ibnn._core import checks
from tfp_ibnn.posteriors.flow import FlowPosterior
from tfp_ibnn.posteriors.recipes import MOST_FLOWS, recipe, steps_of


@recipe
def NormalInvConv(  # noqa: N802
    depth: int = 3,
    planar: int = 2,
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
    """Return a Gaussian under planar flows, invertible 1x1 convolutions, and planar flows.

    Args:
        depth: number of convolutions.
        planar: number of planar flows before them, and behind them.
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
        >>> [type(flow).__name__ for flow in ibnn.NormalInvConv(depth=1, planar=1).flows]
        ['Planar', 'InvertibleConv1x1', 'Planar']
    """
    count = checks.positive_integer("planar", planar, MOST_FLOWS)
    before = [flows.Planar() for _ in range(count)]
    convolutions = [flows.InvertibleConv1x1() for _ in steps_of(depth)]
    behind = [flows.Planar() for _ in range(count)]
    return FlowPosterior(
        [*before, *convolutions, *behind],
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
def NormalGlowStep(  # noqa: N802
    depth: int = 3,
    hidden: int = 32,
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
    """Return a Gaussian under `depth` Glow steps, which move either half in turn.

    Args:
        depth: number of steps.
        hidden: units of the hidden layer of each coupling.
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
        >>> [type(flow).__name__ for flow in ibnn.NormalGlowStep(depth=2, hidden=8).flows]
        ['GlowStep', 'GlowStep']
    """
    steps = [flows.GlowStep(hidden, swap=step % 2 == 1) for step in steps_of(depth)]
    return FlowPosterior(
        steps,
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
def NormalIAF(  # noqa: N802
    depth: int = 2,
    hidden: int = 32,
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
    """Return a Gaussian under `depth` inverse autoregressive flows, in alternating order.

    Args:
        depth: number of flows.
        hidden: units of the hidden layer of each flow.
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
        >>> [type(flow).__name__ for flow in ibnn.NormalIAF(depth=1, hidden=8).flows]
        ['InverseAutoregressive']
    """
    steps = [flows.InverseAutoregressive(hidden, reverse=step % 2 == 1) for step in steps_of(depth)]
    return FlowPosterior(
        steps,
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
