"""Posteriors over a layer's multiplicative noise z or its weights, and their priors."""

from tfp_ibnn._core.protocols import Draw, PosteriorTemplate
from tfp_ibnn.posteriors import priors
from tfp_ibnn.posteriors.base import Posterior, Template
from tfp_ibnn.posteriors.flow import FlowPosterior
from tfp_ibnn.posteriors.gaussian import NormalFull, NormalLowRank
from tfp_ibnn.posteriors.mean_field import MeanField
from tfp_ibnn.posteriors.mixture import MixturePosterior
from tfp_ibnn.posteriors.mnf import MNF
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
    "MNF",
    "Draw",
    "FlowPosterior",
    "MeanField",
    "MixturePosterior",
    "NormalAffine",
    "NormalFull",
    "NormalGlowStep",
    "NormalIAF",
    "NormalInvConv",
    "NormalLowRank",
    "NormalPlanar1d",
    "NormalRadial",
    "NormalSylvester",
    "Posterior",
    "PosteriorTemplate",
    "Template",
    "priors",
]
