"""Prediction by many sampled networks, and calibration by a few parameters."""

from tfp_ibnn.prediction.class_scaling import IsotonicScaling, VectorScaling
from tfp_ibnn.prediction.monte_carlo import MonteCarlo
from tfp_ibnn.prediction.temperature import TemperatureScaling

__all__ = ["IsotonicScaling", "MonteCarlo", "TemperatureScaling", "VectorScaling"]
