"""The Laplace approximation."""

from tfp_ibnn.weights.laplace.laplace import Laplace
from tfp_ibnn.weights.laplace.prior import GRID

__all__ = ["GRID", "Laplace"]
