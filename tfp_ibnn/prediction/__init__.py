"""Prediction by many sampled networks, calibration by a temperature, and export."""

from tfp_ibnn.prediction.exporting import export
from tfp_ibnn.prediction.monte_carlo import MonteCarlo
from tfp_ibnn.prediction.temperature import TemperatureScaling

__all__ = ["MonteCarlo", "TemperatureScaling", "export"]
