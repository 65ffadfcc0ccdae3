"""The Laplace approximation."""

from tfp_ibnn.weights.laplace.laplace import GRID, Laplace

__all__ = ["GRID", "Laplace"]
