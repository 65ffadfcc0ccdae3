"""Posteriors over whole sets of weights."""

from tfp_ibnn._core.protocols import WeightPosterior
from tfp_ibnn.prediction.samplers import WeightSampler
from tfp_ibnn.weights.ensemble import DeepEnsemble, WeightSets

__all__ = ["DeepEnsemble", "WeightPosterior", "WeightSampler", "WeightSets"]
