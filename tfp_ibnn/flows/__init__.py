"""Normalizing flows: one file each, a pure bijector and the Keras layer that owns its weights."""

from tfp_ibnn.flows.actnorm import ActNorm
from tfp_ibnn.flows.affine import Affine, AffineBijector
from tfp_ibnn.flows.autoregressive import AutoregressiveBijector, InverseAutoregressive
from tfp_ibnn.flows.batchnorm import BatchNorm
from tfp_ibnn.flows.conv1x1 import Conv1x1Bijector, InvertibleConv1x1
from tfp_ibnn.flows.coupling import AffineCoupling, CouplingBijector
from tfp_ibnn.flows.flow import Flow, FlowBijector
from tfp_ibnn.flows.glow import GlowStep
from tfp_ibnn.flows.planar import Planar, PlanarBijector
from tfp_ibnn.flows.radial import Radial, RadialBijector
from tfp_ibnn.flows.spline import (
    Spline,
    SplineBijector,
    SplineCoupling,
    SplineCouplingBijector,
)
from tfp_ibnn.flows.sylvester import Sylvester, SylvesterBijector

__all__ = [
    "ActNorm",
    "Affine",
    "AffineBijector",
    "AffineCoupling",
    "AutoregressiveBijector",
    "BatchNorm",
    "Conv1x1Bijector",
    "CouplingBijector",
    "Flow",
    "FlowBijector",
    "GlowStep",
    "InverseAutoregressive",
    "InvertibleConv1x1",
    "Planar",
    "PlanarBijector",
    "Radial",
    "RadialBijector",
    "Spline",
    "SplineBijector",
    "SplineCoupling",
    "SplineCouplingBijector",
    "Sylvester",
    "SylvesterBijector",
]
