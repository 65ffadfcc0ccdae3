"""Deterministic Keras models to stochastic ones, and back; from one task to the next."""

from tfp_ibnn.conversion.continual import posterior_as_prior
from tfp_ibnn.conversion.convert import to_deterministic, to_stochastic

__all__ = ["posterior_as_prior", "to_deterministic", "to_stochastic"]
