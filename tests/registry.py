"""Everything that tests run over. A new flow is added to FLOWS, and all tests of flows cover it."""

from functools import partial

import keras
import numpy as np
import pytest
from keras import ops

import tfp_ibnn as ibnn
from tfp_ibnn import flows

# Name -> a function that makes the flow; it takes the arguments of any Keras layer, like dtype.
FLOWS = {
    "actnorm": flows.ActNorm,
    "affine": flows.Affine,
    "autoregressive": partial(flows.InverseAutoregressive, hidden=8),
    "autoregressive-reverse": partial(flows.InverseAutoregressive, hidden=8, reverse=True),
    "autoregressive-spline": partial(flows.SplineAutoregressive, hidden=8, bins=4),
    "batchnorm": flows.BatchNorm,
    "continuous": partial(flows.Continuous, hidden=8, steps=4),
    "conv1x1-identity": partial(flows.InvertibleConv1x1, start="identity"),
    "conv1x1-orthogonal": partial(flows.InvertibleConv1x1, start="orthogonal"),
    "coupling": partial(flows.AffineCoupling, hidden=8),
    "coupling-swap": partial(flows.AffineCoupling, hidden=8, swap=True),
    "coupling-mask": partial(flows.AffineCoupling, hidden=8, swap=True, mask="alternating"),
    "coupling-additive": partial(flows.AdditiveCoupling, hidden=8),
    "coupling-spline": partial(flows.SplineCoupling, hidden=8, bins=4),
    "glow-identity": partial(flows.GlowStep, hidden=8, swap=True, start="identity"),
    "glow-orthogonal": partial(flows.GlowStep, hidden=8, start="orthogonal"),
    "inverse": lambda **kwargs: flows.Inverse(flows.Planar(**kwargs)),
    "masked-autoregressive": partial(flows.MaskedAutoregressive, hidden=8),
    "permute": flows.Permute,
    "permute-shuffle": partial(flows.Permute, "shuffle", seed=3),
    "planar": flows.Planar,
    "radial": flows.Radial,
    "residual": partial(flows.Residual, hidden=8, lipschitz=0.5),
    "spline": partial(flows.Spline, bins=5, interval=4.0),
    "stack": lambda **kwargs: flows.Stack(flows.Planar(), 2, **kwargs),
    "sylvester-1": partial(flows.Sylvester, units=1),
    "sylvester-3": partial(flows.Sylvester, units=3),
}

# Other settings of flows that are there already. One backend is enough to show what differs.
VARIANTS = {
    "autoregressive-reverse",
    "autoregressive-spline",
    "conv1x1-orthogonal",
    "coupling-swap",
    "coupling-mask",
    "coupling-additive",
    "glow-orthogonal",
    "permute-shuffle",
    "spline",  # the pieces are those of the coupling
    "stack",
    "sylvester-1",
}
# No weight of theirs is trained, so no condition makes a difference.
UNTRAINED = {"permute", "permute-shuffle"}

FLOW_NAMES = [
    pytest.param(name, marks=pytest.mark.once) if name in VARIANTS else name for name in FLOWS
]
TRAINED_NAMES = [
    name for name, flow in zip(FLOW_NAMES, FLOWS, strict=True) if flow not in UNTRAINED
]

# Flows start as the identity, except these, which start as a rotation.
START_AS_ROTATION = {"conv1x1-orthogonal", "glow-orthogonal", *UNTRAINED}

# They take the mean of their input to that of their output.
LINEAR = (
    flows.ActNorm,
    flows.Affine,
    flows.BatchNorm,
    flows.InvertibleConv1x1,
    flows.Permute,
)

# Their log-determinant is 0.
VOLUME_PRESERVING = {"coupling-additive", *UNTRAINED}

# Errors, other than rounding, of flows that solve equations in few steps.
_ERRORS = {"continuous": 1e-3}


def tolerance(name, rounding):
    """What to allow for: rounding, or the error of the flow's solver."""
    return _ERRORS.get(name.removeprefix("over-"), rounding)


def min_channels(name):
    """The smallest channel count that a flow works with."""
    return FLOWS[name]().min_channels


def make_flow(name, channels=3, seed=None, **kwargs):
    """A flow of the registry, built; with a seed, at parameters of order 1."""
    flow = FLOWS[name](**kwargs)
    flow.build((None, channels))
    if seed is not None:
        perturb(flow, seed)
    return flow


def perturb(layer, seed, size=1.0):
    """Draw the weights of a layer anew: of order `size` and random, its matrices well conditioned.

    A small start hides wrong log-determinants, so tests run at parameters of order 1.
    """
    rng = np.random.default_rng(seed)
    for weight in layer.weights:
        old = ops.convert_to_numpy(weight.value)
        draw = rng.normal(size=old.shape)
        # A product with a vector of order 1 is to be again of order 1; a conditioner sees to it.
        if old.ndim > 1 and weight.name not in ("kernel", "output_kernel"):
            draw /= np.sqrt(old.shape[-2])
        if not np.issubdtype(old.dtype, np.floating) or weight.name == "diagonal":
            continue  # these choose the start of a convolution and never change
        if weight.name == "variance":
            new = np.exp(size * draw)
        elif weight.name == "factors":
            # Near the start, or the triangles are ill conditioned; the weight holds them enlarged.
            new = old + 0.5 * size * draw * np.sqrt(old.shape[-1])
        else:
            new = size * draw
        weight.assign(new.astype(old.dtype))


def sees_images():
    network = keras.layers.Conv2D(3, 3, padding="same", activation="sigmoid")
    return {"network": network, "event_ndims": 3}


# Name -> a function that makes the flow of images.
IMAGE_FLOWS = {
    "squeeze": lambda **kwargs: flows.Squeeze([flows.AffineCoupling(hidden=4)], **kwargs),
    "multi-scale": lambda **kwargs: flows.Squeeze(
        [flows.Affine()], [flows.Squeeze([flows.AffineCoupling(hidden=4)])], **kwargs
    ),
    "splines": lambda **kwargs: flows.Squeeze(
        [flows.SplineCoupling(bins=2, **sees_images())], **kwargs
    ),
    "glow": lambda **kwargs: flows.Squeeze([flows.GlowStep(**sees_images())], **kwargs),
}

# Name -> a function that makes the flow of discrete data.
DISCRETE = {
    "integer": partial(flows.IntegerAdditive, 3, hidden=8),
    "modulo": partial(flows.ModuloAffine, 4, hidden=8),
    "modulo-prime-reverse": partial(flows.ModuloAffine, 5, hidden=8, reverse=True),
}

# Name -> a function that makes the surjection.
SURJECTIONS = {
    "dequantize": partial(flows.Dequantize, 4),
    "dequantize-variational": lambda **kwargs: flows.Dequantize(4, [flows.Affine()], **kwargs),
    "argmax": lambda **kwargs: flows.Argmax(3, [flows.Affine()], **kwargs),
    "slice": lambda **kwargs: flows.Slice(1, flows=[flows.Affine()], **kwargs),
    "augment": lambda **kwargs: flows.Slice(1, augment=True, flows=[flows.Affine()], **kwargs),
    "absolute": flows.AbsoluteValue,
}


def make_surjection(name, channels=2, seed=None, size=0.5, **kwargs):
    """A surjection of the registry, built; with a seed, at parameters of order `size`."""
    surjection = SURJECTIONS[name](**kwargs)
    surjection.build((None, channels))
    if seed is not None:
        perturb(surjection, seed, size)
    return surjection


# The ELBO, and a posterior that starts at its prior: KL 0.
ELBO = {"prior_scale": 0.5, "beta": 1.0}
AT_PRIOR = {**ELBO, "initial_scale": None}


def over(*names, **fixed):
    """A function that makes a FlowPosterior over flows of the registry."""
    fixed = {**AT_PRIOR, **fixed}
    return lambda **kwargs: ibnn.FlowPosterior([FLOWS[n]() for n in names], **fixed | kwargs)


# The named recipes; the same kind of function as in FLOWS, and tests of posteriors cover them all.
RECIPES = {
    "NormalAffine": partial(ibnn.NormalAffine, **AT_PRIOR),
    "NormalPlanar1d": partial(ibnn.NormalPlanar1d, **AT_PRIOR),
    "NormalInvConv": partial(ibnn.NormalInvConv, depth=1, planar=1, **AT_PRIOR),
    "NormalGlowStep": partial(ibnn.NormalGlowStep, depth=2, hidden=8, **AT_PRIOR),
    "NormalRadial": partial(ibnn.NormalRadial, **AT_PRIOR),
    "NormalSylvester": partial(ibnn.NormalSylvester, units=2, **AT_PRIOR),
    "NormalIAF": partial(ibnn.NormalIAF, hidden=8, **AT_PRIOR),
    "NormalFull": partial(ibnn.NormalFull, **AT_PRIOR),
    "NormalLowRank": partial(ibnn.NormalLowRank, 2, **AT_PRIOR),
    "MixturePosterior-bound": partial(ibnn.MixturePosterior, 3, **ELBO),
    "MixturePosterior-averaged": partial(ibnn.MixturePosterior, 3, kl="averaged", **ELBO),
}

POSTERIORS = {
    **RECIPES,
    **{f"over-{name}": over(name) for name in FLOWS},
    "mixture-base": over(components=3),
    "mixture-base-planar": over("planar", components=3),
    "mixture-base-shared": over("planar", components=3, shared_components=True),
    "affine-first": over("planar", "radial", affine="first"),
    "learned-prior-scale": over("planar", learn_prior_scale=True),
}


def min_posterior_channels(name):
    """The smallest channel count that a posterior works with."""
    inside = getattr(POSTERIORS[name](), "flows", ())
    return max((flow.min_channels for flow in inside), default=1)


def make_posterior(name, channels=3, seed=None, size=1.0, **kwargs):
    """A posterior of the registry, built; with a seed, at parameters of order `size`."""
    posterior = POSTERIORS[name](**kwargs)
    posterior.build((None, channels))
    if seed is not None:
        perturb(posterior, seed, size)
        posterior.beta.assign(posterior.initial_beta)
    return posterior
