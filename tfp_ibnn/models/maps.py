"""Which posterior goes where: the original report's choices, by network."""

from typing import Any

from tfp_ibnn import posteriors
from tfp_ibnn._core import checks

__all__ = ["POSTERIORS", "posterior_map"]

POSTERIORS = ("gaussian", "flow", "mixture")
"""Kinds of posterior that `posterior_map` knows."""

# What the flow map has beside a Gaussian in all other layers. The report has no wide residual
# network; there the first convolution of each group stands for its convolutions 4, 8 and 11.
_CONV, _DENSE = posteriors.NormalInvConv, posteriors.NormalPlanar1d
_FLOWS = {
    "mlp": {".*": _DENSE},
    "lenet": {"conv2": _CONV, "fc1": _DENSE},
    "vgg16": {"conv(4|8|11)": _CONV, "fc2": _DENSE},
    "wide_resnet": {r"group\d_block1_conv1": _CONV, "fc": _DENSE},
}


def posterior_map(
    model: str,
    kind: str,
    *,
    deterministic: str | None = None,
    layers: str | None = None,
    depth: int | None = None,
    **kwargs: Any,
) -> dict[str, posteriors.Posterior]:
    """Return the posteriors of a network's layers, as `to_stochastic` takes them.

    Args:
        model: "mlp", "lenet", "vgg16" or "wide_resnet", the network of that name in this module.
        kind: "gaussian", in every layer; "flow", where the original report had flows, Gaussians
            elsewhere; "mixture", of Gaussians, with one component index for all layers.
        deterministic: a pattern of layers that have no posterior, unless they have a flow.
        layers: of "flow", a pattern of layers to have `NormalInvConv`, not the report's choice.
        depth: of "flow", the `depth` of each; None takes their own.
        **kwargs: for every posterior, such as `prior_scale` or, for mixtures, `components`.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> list(ibnn.models.posterior_map("vgg16", "flow", prior_scale=0.3))
        ['conv(4|8|11)', 'fc2', '.*']
        >>> list(ibnn.models.posterior_map("vgg16", "flow", layers="conv[2-7]"))
        ['conv[2-7]', '.*']
    """
    checks.one_of("model", model, tuple(_FLOWS))
    checks.one_of("kind", kind, POSTERIORS)
    if kind != "flow" and (layers is not None or depth is not None):
        raise ValueError(f"`layers` and `depth` are of flows, and {kind!r} has none.")
    rest = ".*" if deterministic is None else f"(?!(?:{deterministic})$).*"
    if kind == "mixture":
        return {rest: posteriors.MixturePosterior(**kwargs)}
    flows = {} if kind == "gaussian" else _FLOWS[model]
    flows = flows if layers is None else {layers: _CONV}
    options = kwargs if depth is None else {"depth": depth, **kwargs}
    found = {pattern: recipe(**options) for pattern, recipe in flows.items()}
    elsewhere = found.pop(".*", None) or posteriors.NormalAffine(**kwargs)
    return {**found, rest: elsewhere}
