"""Posteriors over whole sets of weights."""

from tfp_ibnn.weights.ensemble import DeepEnsemble, WeightSets

__all__ = ["DeepEnsemble", "WeightSets"]
