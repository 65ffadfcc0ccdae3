"""Posteriors over a layer's multiplicative noise z, and the named recipes."""

from tfp_ibnn._core.protocols import Draw, PosteriorTemplate
from tfp_ibnn.posteriors.base import Posterior
from tfp_ibnn.posteriors.flow import FlowPosterior
from tfp_ibnn.posteriors.mixture import MixturePosterior
from tfp_ibnn.posteriors.recipes import (
    NormalAffine,
    NormalGlowStep,
    NormalIAF,
    NormalInvConv,
    NormalPlanar1d,
    NormalRadial,
    NormalSylvester,
)

__all__ = [
    "Draw",
    "FlowPosterior",
    "MixturePosterior",
    "NormalAffine",
    "NormalGlowStep",
    "NormalIAF",
    "NormalInvConv",
    "NormalPlanar1d",
    "NormalRadial",
    "NormalSylvester",
    "Posterior",
    "PosteriorTemplate",
]
