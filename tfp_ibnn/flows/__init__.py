"""Normalizing flows: one file each, a pure bijector and the Keras layer that owns its weights."""

from tfp_ibnn.flows.actnorm import ActNorm as ActNorm
from tfp_ibnn.flows.affine import Affine as Affine
from tfp_ibnn.flows.affine import AffineBijector as AffineBijector
from tfp_ibnn.flows.autoregressive import AutoregressiveBijector as AutoregressiveBijector
from tfp_ibnn.flows.autoregressive import InverseAutoregressive as InverseAutoregressive
from tfp_ibnn.flows.batchnorm import BatchNorm as BatchNorm
from tfp_ibnn.flows.conv1x1 import Conv1x1Bijector as Conv1x1Bijector
from tfp_ibnn.flows.conv1x1 import InvertibleConv1x1 as InvertibleConv1x1
from tfp_ibnn.flows.coupling import AdditiveCoupling as AdditiveCoupling
from tfp_ibnn.flows.coupling import AffineCoupling as AffineCoupling
from tfp_ibnn.flows.coupling import CouplingBijector as CouplingBijector
from tfp_ibnn.flows.flow import Flow as Flow
from tfp_ibnn.flows.flow import FlowBijector as FlowBijector
from tfp_ibnn.flows.glow import GlowStep as GlowStep
from tfp_ibnn.flows.inverse import Inverse as Inverse
from tfp_ibnn.flows.inverse import MaskedAutoregressive as MaskedAutoregressive
from tfp_ibnn.flows.planar import Planar as Planar
from tfp_ibnn.flows.planar import PlanarBijector as PlanarBijector
from tfp_ibnn.flows.radial import Radial as Radial
from tfp_ibnn.flows.radial import RadialBijector as RadialBijector
from tfp_ibnn.flows.spline import Spline as Spline
from tfp_ibnn.flows.spline import SplineBijector as SplineBijector
from tfp_ibnn.flows.spline import SplineCoupling as SplineCoupling
from tfp_ibnn.flows.spline import SplineCouplingBijector as SplineCouplingBijector
from tfp_ibnn.flows.sylvester import Sylvester as Sylvester
from tfp_ibnn.flows.sylvester import SylvesterBijector as SylvesterBijector
