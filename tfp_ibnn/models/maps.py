"""Which posterior goes where: the original report's choices, by network."""

from collections.abc import Callable
from typing import Any

from tfp_ibnn import _checks
from tfp_ibnn.posteriors import (
    MixturePosterior,
    NormalAffine,
    NormalInvConv,
    NormalPlanar1d,
    Posterior,
)

__all__ = ["POSTERIORS", "posterior_map"]

POSTERIORS = ("gaussian", "flow", "mixture")
"""Kinds of posterior that `posterior_map` knows."""

_EVERYWHERE = ".*"

# What the flow map has beside a Gaussian in all other layers. The report has no wide residual
# network; there the first convolution of each group stands for its convolutions 4, 8 and 11.
_FLOWS: dict[str, dict[str, Callable[..., Posterior]]] = {
    "mlp": {_EVERYWHERE: NormalPlanar1d},
    "lenet": {"conv2": NormalInvConv, "fc1": NormalPlanar1d},
    "vgg16": {"conv(4|8|11)": NormalInvConv, "fc2": NormalPlanar1d},
    "wide_resnet": {r"group\d_block1_conv1": NormalInvConv, "fc": NormalPlanar1d},
}


def posterior_map(model: str, kind: str, **kwargs: Any) -> dict[str, Posterior]:
    """Return the posteriors of a network's layers, as `to_stochastic` takes them.

    Args:
        model: "mlp", "lenet", "vgg16" or "wide_resnet", the network of that name in this module.
        kind: "gaussian", a Gaussian in every layer; "flow", flows in the layers where the original
            report had them and Gaussians elsewhere; "mixture", Gaussian mixtures that share their
            component index over all layers.
        **kwargs: for every posterior, such as `prior_scale`, `gamma` or, for mixtures,
            `components`.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> list(ibnn.models.posterior_map("vgg16", "flow", prior_scale=0.3))
        ['conv(4|8|11)', 'fc2', '.*']
        >>> det = ibnn.models.lenet()
        >>> sto = ibnn.to_stochastic(
        ...     det, ibnn.models.posterior_map("lenet", "gaussian"), train_size=50_000
        ... )
    """
    _checks.one_of("model", model, tuple(_FLOWS))
    _checks.one_of("kind", kind, POSTERIORS)
    if kind == "mixture":
        return {_EVERYWHERE: MixturePosterior(**kwargs)}
    flows = _FLOWS[model] if kind == "flow" else {}
    recipes = {**flows, _EVERYWHERE: flows.get(_EVERYWHERE, NormalAffine)}
    return {pattern: recipe(**kwargs) for pattern, recipe in recipes.items()}
