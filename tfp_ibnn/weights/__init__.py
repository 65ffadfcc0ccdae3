"""Posteriors over whole sets of weights."""

from tfp_ibnn._core.protocols import WeightPosterior
from tfp_ibnn.prediction.samplers import WeightSampler
from tfp_ibnn.weights.ensemble import DeepEnsemble, WeightSets
from tfp_ibnn.weights.gaussian_vi import GaussianVI
from tfp_ibnn.weights.hmc import LastLayerHMC
from tfp_ibnn.weights.laplace import Laplace
from tfp_ibnn.weights.refined import RefinedPosterior
from tfp_ibnn.weights.refinement import refine

__all__ = [
    "DeepEnsemble",
    "GaussianVI",
    "Laplace",
    "LastLayerHMC",
    "RefinedPosterior",
    "WeightPosterior",
    "WeightSampler",
    "WeightSets",
    "refine",
]
