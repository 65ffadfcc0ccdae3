"""Posteriors over whole sets of weights, and what collects them while a model trains."""

from tfp_ibnn.prediction.samplers import WeightSampler as WeightSampler
from tfp_ibnn.weights.base import WeightPosterior as WeightPosterior
from tfp_ibnn.weights.base import WeightSets as WeightSets
from tfp_ibnn.weights.ensemble import DeepEnsemble as DeepEnsemble
from tfp_ibnn.weights.flat import GaussianWeights as GaussianWeights
from tfp_ibnn.weights.gaussian_vi import GaussianVI as GaussianVI
from tfp_ibnn.weights.hmc import LastLayerHMC as LastLayerHMC
from tfp_ibnn.weights.ivon import IVON as IVON
from tfp_ibnn.weights.ivon import IVONMean as IVONMean
from tfp_ibnn.weights.laplace import Laplace as Laplace
from tfp_ibnn.weights.mixture import WeightMixture as WeightMixture
from tfp_ibnn.weights.refinement import RefinedPosterior as RefinedPosterior
from tfp_ibnn.weights.refining import refine as refine
from tfp_ibnn.weights.scaled import ScaledPosterior as ScaledPosterior
from tfp_ibnn.weights.sgmcmc import SGHMC as SGHMC
from tfp_ibnn.weights.sgmcmc import SGLD as SGLD
from tfp_ibnn.weights.sgmcmc import CosineCycles as CosineCycles
from tfp_ibnn.weights.snapshots import SWAG as SWAG
from tfp_ibnn.weights.snapshots import Snapshots as Snapshots
