"""Which posterior goes where: the original report's choices, by network."""

from collections.abc import Callable
from typing import Any

from tfp_ibnn._core import checks
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


def posterior_map(
    model: str,
    kind: str,
    *,
    deterministic: str | None = None,
    layers: str | None = None,
    depth: int | None = None,
    **kwargs: Any,
) -> dict[str, Posterior]:
    """Return the posteriors of a network's layers, as `to_stochastic` takes them.

    Args:
        model: "mlp", "lenet", "vgg16" or "wide_resnet", the network of that name in this module.
        kind: "gaussian", a Gaussian in every layer; "flow", flows in the layers where the original
            report had them and Gaussians elsewhere; "mixture", Gaussian mixtures that share their
            component index over all layers.
        deterministic: a pattern of layers that have no posterior, unless they have a flow.
        layers: of "flow", a pattern of the layers that have one, `NormalInvConv`, in place of the
            report's choice.
        depth: of "flow", the `depth` of each; None takes their own.
        **kwargs: for every posterior, such as `prior_scale`, `gamma` or, for mixtures,
            `components`.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> list(ibnn.models.posterior_map("vgg16", "flow", prior_scale=0.3))
        ['conv(4|8|11)', 'fc2', '.*']
        >>> list(ibnn.models.posterior_map("vgg16", "flow", layers="conv[2-7]"))
        ['conv[2-7]', '.*']
        >>> det = ibnn.models.lenet()
        >>> sto = ibnn.to_stochastic(
        ...     det, ibnn.models.posterior_map("lenet", "gaussian"), train_size=50_000
        ... )
    """
    checks.one_of("model", model, tuple(_FLOWS))
    checks.one_of("kind", kind, POSTERIORS)
    if kind != "flow" and (layers is not None or depth is not None):
        raise ValueError(f"`layers` and `depth` are of flows, and {kind!r} has none.")
    rest = _EVERYWHERE if deterministic is None else f"(?!(?:{deterministic})$).*"
    if kind == "mixture":
        return {rest: MixturePosterior(**kwargs)}
    if kind == "gaussian":
        return {rest: NormalAffine(**kwargs)}
    flows = _FLOWS[model] if layers is None else {layers: NormalInvConv}
    options = kwargs if depth is None else {"depth": depth, **kwargs}
    found = {pattern: recipe(**options) for pattern, recipe in flows.items()}
    elsewhere = found.pop(_EVERYWHERE, None) or NormalAffine(**kwargs)
    return {**found, rest: elsewhere}
