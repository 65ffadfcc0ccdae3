"""The named recipes: posteriors that one line makes."""

import functools
from collections.abc import Callable
from typing import Any

from tfp_ibnn import flows
from tfp_ibnn._core import checks
from tfp_ibnn.posteriors.base import Posterior, Template
from tfp_ibnn.posteriors.flow import FlowPosterior

_MOST_FLOWS = 1000  # more would take minutes to make, and nobody has asked for as many

Recipe = Callable[..., FlowPosterior]


def _recipe(make: Recipe) -> Recipe:
    """Let a recipe answer for keywords that nobody takes, which Keras would blame on a class."""

    @functools.wraps(make)
    def recipe(*args: Any, **kwargs: Any) -> FlowPosterior:
        takers = (make, FlowPosterior.__init__, Posterior.__init__, Template.__init__)
        with checks.known_keywords(make.__name__, kwargs, takers, but=("self", "flows")):
            return make(*args, **kwargs)

    return recipe


@_recipe
def NormalAffine(**kwargs: Any) -> FlowPosterior:  # noqa: N802
    """Return a Gaussian, with closed-form KL. `kwargs`, here and below, are `FlowPosterior`'s."""
    return FlowPosterior((), **kwargs)


@_recipe
def NormalPlanar1d(depth: int = 2, **kwargs: Any) -> FlowPosterior:  # noqa: N802
    """Return a Gaussian under `depth` planar flows."""
    return FlowPosterior([flows.Planar() for _ in _steps(depth)], **kwargs)


@_recipe
def NormalInvConv(depth: int = 3, planar: int = 2, **kwargs: Any) -> FlowPosterior:  # noqa: N802
    """Return a Gaussian under `planar` planar flows, `depth` 1x1 convolutions, `planar` planar."""
    around = [flows.Planar] * checks.positive_integer("planar", planar, _MOST_FLOWS)
    kinds = [*around, *(flows.InvertibleConv1x1 for _ in _steps(depth)), *around]
    return FlowPosterior([kind() for kind in kinds], **kwargs)


@_recipe
def NormalGlowStep(depth: int = 3, hidden: int = 32, **kwargs: Any) -> FlowPosterior:  # noqa: N802
    """Return a Gaussian under `depth` Glow steps, which move either half in turn."""
    steps = [flows.GlowStep(hidden, swap=step % 2 == 1) for step in _steps(depth)]
    return FlowPosterior(steps, **kwargs)


@_recipe
def NormalRadial(depth: int = 2, **kwargs: Any) -> FlowPosterior:  # noqa: N802
    """Return a Gaussian under `depth` radial flows."""
    return FlowPosterior([flows.Radial() for _ in _steps(depth)], **kwargs)


@_recipe
def NormalSylvester(depth: int = 2, units: int = 8, **kwargs: Any) -> FlowPosterior:  # noqa: N802
    """Return a Gaussian under `depth` Sylvester flows of `units` hidden units."""
    return FlowPosterior([flows.Sylvester(units) for _ in _steps(depth)], **kwargs)


@_recipe
def NormalIAF(depth: int = 2, hidden: int = 32, **kwargs: Any) -> FlowPosterior:  # noqa: N802
    """Return a Gaussian under `depth` inverse autoregressive flows, in alternating order."""
    iaf = flows.InverseAutoregressive
    steps = [iaf(hidden, reverse=step % 2 == 1) for step in _steps(depth)]
    return FlowPosterior(steps, **kwargs)


def _steps(depth: int) -> range:
    try:
        return range(checks.positive_integer("depth", depth, _MOST_FLOWS))
    except ValueError as error:
        raise ValueError(f"{error} For a posterior without a flow use NormalAffine().") from None
