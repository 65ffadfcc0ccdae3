"""Prediction by many sampled networks, calibration by a few parameters, and export."""

from tfp_ibnn.prediction.class_scaling import IsotonicScaling, VectorScaling
from tfp_ibnn.prediction.exporting import export
from tfp_ibnn.prediction.monte_carlo import MonteCarlo
from tfp_ibnn.prediction.temperature import TemperatureScaling

__all__ = ["IsotonicScaling", "MonteCarlo", "TemperatureScaling", "VectorScaling", "export"]
