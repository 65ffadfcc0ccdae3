"""Posteriors over whole sets of weights, and what collects them while a model trains."""

from tfp_ibnn.prediction.samplers import WeightSampler
from tfp_ibnn.weights.base import WeightPosterior, WeightSets
from tfp_ibnn.weights.ensemble import DeepEnsemble, WeightMixture
from tfp_ibnn.weights.flat import GaussianWeights
from tfp_ibnn.weights.gaussian_vi import GaussianVI
from tfp_ibnn.weights.hmc import LastLayerHMC
from tfp_ibnn.weights.laplace import Laplace
from tfp_ibnn.weights.refinement import RefinedPosterior, refine
from tfp_ibnn.weights.scaled import ScaledPosterior
from tfp_ibnn.weights.sgmcmc import SGHMC, SGLD, CosineCycles
from tfp_ibnn.weights.snapshots import SWAG, Snapshots

__all__ = [
    "SGHMC",
    "SGLD",
    "SWAG",
    "CosineCycles",
    "DeepEnsemble",
    "GaussianVI",
    "GaussianWeights",
    "Laplace",
    "LastLayerHMC",
    "RefinedPosterior",
    "ScaledPosterior",
    "Snapshots",
    "WeightMixture",
    "WeightPosterior",
    "WeightSampler",
    "WeightSets",
    "refine",
]
