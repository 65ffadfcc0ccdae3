"""Posteriors over whole sets of weights."""

from tfp_ibnn._core.protocols import WeightPosterior
from tfp_ibnn.prediction.samplers import WeightSampler
from tfp_ibnn.weights.ensemble import DeepEnsemble, WeightSets
from tfp_ibnn.weights.laplace import Laplace

__all__ = ["DeepEnsemble", "Laplace", "WeightPosterior", "WeightSampler", "WeightSets"]
