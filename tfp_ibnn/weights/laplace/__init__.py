"""The Laplace approximation."""

from tfp_ibnn.weights.laplace.laplace import Laplace

__all__ = ["Laplace"]
