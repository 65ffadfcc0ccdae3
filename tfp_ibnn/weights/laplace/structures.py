"""The forms of the Hessian by the names that `hessian_structure` takes."""

from tfp_ibnn.weights.laplace.full import Full, LowRank
from tfp_ibnn.weights.laplace.kronecker import Kronecker
from tfp_ibnn.weights.laplace.structure import Structure

STRUCTURES = {"diag": Structure, "kron": Kronecker, "full": Full, "lowrank": LowRank}
