"""Prediction by many sampled networks, calibration by a temperature, and export."""

from tfp_ibnn.prediction.monte_carlo import MonteCarlo, export
from tfp_ibnn.prediction.temperature import TemperatureScaling, average, cross_fit, fit_temperature

__all__ = ["MonteCarlo", "TemperatureScaling", "average", "cross_fit", "export", "fit_temperature"]
