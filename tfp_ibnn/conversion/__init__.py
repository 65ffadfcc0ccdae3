"""Deterministic Keras models to stochastic ones, and back."""

from tfp_ibnn.conversion.convert import to_deterministic, to_stochastic

__all__ = ["to_deterministic", "to_stochastic"]
