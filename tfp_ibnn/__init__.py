"""Calibrated probabilities and implicit Bayesian neural networks for Keras 3.

import tfp_ibnn as ibnn

report = ibnn.calibrate(model, (x_train, y_train), validation=(x_val, y_val))
sto = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=len(x_train))
"""

from tfp_ibnn._core import command_line as _command_line
from tfp_ibnn._core.extras import needs_backend as _needs_backend

if _command_line.is_command():
    # --help need not wait for the imports below, which take seconds.
    _command_line.choose_backend(_command_line.parse())

with _needs_backend():
    from tfp_ibnn._core.backend import tfd as tfd

from tfp_ibnn import data as data
from tfp_ibnn import decisions as decisions
from tfp_ibnn import diagnostics as diagnostics
from tfp_ibnn import flows as flows
from tfp_ibnn import layers as layers
from tfp_ibnn import likelihoods as likelihoods
from tfp_ibnn import metrics as metrics
from tfp_ibnn import noise as noise
from tfp_ibnn import prediction as prediction
from tfp_ibnn.calibration import calibrate as calibrate
from tfp_ibnn.conversion import named as _named
from tfp_ibnn.conversion import posterior_as_prior as posterior_as_prior
from tfp_ibnn.conversion import to_deterministic as to_deterministic
from tfp_ibnn.conversion import to_stochastic as to_stochastic
from tfp_ibnn.conversion.named import StochasticConv2D as StochasticConv2D
from tfp_ibnn.conversion.named import StochasticDense as StochasticDense
from tfp_ibnn.decisions import Conformal as Conformal
from tfp_ibnn.decisions import OODDetector as OODDetector
from tfp_ibnn.decisions import decide as decide
from tfp_ibnn.distillation import distill as distill
from tfp_ibnn.distillation import prune as prune
from tfp_ibnn.export import export as export
from tfp_ibnn.export import exported_scores as exported_scores
from tfp_ibnn.flows import Flow as Flow
from tfp_ibnn.generative import VAE as VAE
from tfp_ibnn.generative import FlowDensity as FlowDensity
from tfp_ibnn.layers import Stochastic as Stochastic
from tfp_ibnn.layers import StochasticModel as StochasticModel
from tfp_ibnn.layers import freeze as freeze
from tfp_ibnn.layers import noise_off as noise_off
from tfp_ibnn.layers import set_noise as set_noise
from tfp_ibnn.layers import stochastic_layers as stochastic_layers
from tfp_ibnn.layers import unfreeze as unfreeze
from tfp_ibnn.metrics import BrierScore as BrierScore
from tfp_ibnn.metrics import ExpectedCalibrationError as ExpectedCalibrationError
from tfp_ibnn.metrics import NegativeLogLikelihood as NegativeLogLikelihood
from tfp_ibnn.posteriors import MNF as MNF
from tfp_ibnn.posteriors import FlowPosterior as FlowPosterior
from tfp_ibnn.posteriors import JointPosterior as JointPosterior
from tfp_ibnn.posteriors import MeanField as MeanField
from tfp_ibnn.posteriors import MixturePosterior as MixturePosterior
from tfp_ibnn.posteriors import NormalAffine as NormalAffine
from tfp_ibnn.posteriors import NormalFull as NormalFull
from tfp_ibnn.posteriors import NormalGlowStep as NormalGlowStep
from tfp_ibnn.posteriors import NormalIAF as NormalIAF
from tfp_ibnn.posteriors import NormalInvConv as NormalInvConv
from tfp_ibnn.posteriors import NormalLowRank as NormalLowRank
from tfp_ibnn.posteriors import NormalPlanar1d as NormalPlanar1d
from tfp_ibnn.posteriors import NormalRadial as NormalRadial
from tfp_ibnn.posteriors import NormalSylvester as NormalSylvester
from tfp_ibnn.posteriors import Posterior as Posterior
from tfp_ibnn.posteriors import priors as priors
from tfp_ibnn.prediction import IsotonicScaling as IsotonicScaling
from tfp_ibnn.prediction import MonteCarlo as MonteCarlo
from tfp_ibnn.prediction import TemperatureScaling as TemperatureScaling
from tfp_ibnn.prediction import VectorScaling as VectorScaling
from tfp_ibnn.training import Checkpoint as Checkpoint
from tfp_ibnn.training import KLAnnealing as KLAnnealing
from tfp_ibnn.training import MonteCarloEvaluation as MonteCarloEvaluation
from tfp_ibnn.training import NonFiniteError as NonFiniteError
from tfp_ibnn.training import PosteriorLog as PosteriorLog
from tfp_ibnn.training import TerminateOnNonFinite as TerminateOnNonFinite
from tfp_ibnn.training import TwoSpeed as TwoSpeed
from tfp_ibnn.training import two_speed as two_speed
from tfp_ibnn.weights import IVON as IVON
from tfp_ibnn.weights import SGHMC as SGHMC
from tfp_ibnn.weights import SGLD as SGLD
from tfp_ibnn.weights import SWAG as SWAG
from tfp_ibnn.weights import CosineCycles as CosineCycles
from tfp_ibnn.weights import DeepEnsemble as DeepEnsemble
from tfp_ibnn.weights import GaussianVI as GaussianVI
from tfp_ibnn.weights import IVONMean as IVONMean
from tfp_ibnn.weights import Laplace as Laplace
from tfp_ibnn.weights import LastLayerHMC as LastLayerHMC
from tfp_ibnn.weights import Snapshots as Snapshots
from tfp_ibnn.weights import WeightMixture as WeightMixture
from tfp_ibnn.weights import refine as refine

# Each is a layer with its posterior, and so made below both; users find them among the layers.
vars(layers).update({name: getattr(_named, name) for name in _named.__all__})
vars(prediction)["export"] = export  # from before it had a room of its own

__version__ = "0.1.0"

__all__ = [name for name in dir() if not name.startswith("_")]
