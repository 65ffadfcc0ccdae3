"""Calibrated probabilities and implicit Bayesian neural networks for Keras 3.

import tfp_ibnn as ibnn

report = ibnn.calibrate(model, (x_train, y_train), validation=(x_val, y_val))
sto = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=len(x_train))
"""

from tfp_ibnn import data, flows, layers, metrics, models, noise
from tfp_ibnn.calibration import calibrate
from tfp_ibnn.conversion import to_deterministic, to_stochastic
from tfp_ibnn.flows import Flow
from tfp_ibnn.layers import (
    Stochastic,
    StochasticConv2D,
    StochasticDense,
    StochasticModel,
    freeze,
    noise_off,
    set_noise,
    stochastic_layers,
    unfreeze,
)
from tfp_ibnn.metrics import (
    AdaptiveCalibrationError,
    BrierScore,
    ClasswiseCalibrationError,
    ExpectedCalibrationError,
    MaximumCalibrationError,
    NegativeLogLikelihood,
)
from tfp_ibnn.posteriors import (
    MNF,
    FlowPosterior,
    MeanField,
    MixturePosterior,
    NormalAffine,
    NormalFull,
    NormalGlowStep,
    NormalIAF,
    NormalInvConv,
    NormalLowRank,
    NormalPlanar1d,
    NormalRadial,
    NormalSylvester,
    Posterior,
    priors,
)
from tfp_ibnn.prediction import MonteCarlo, TemperatureScaling, export
from tfp_ibnn.training import (
    Checkpoint,
    KLAnnealing,
    MonteCarloEvaluation,
    NonFiniteError,
    PosteriorLog,
    TerminateOnNonFinite,
    TwoSpeed,
    two_speed,
)
from tfp_ibnn.weights import (
    SGHMC,
    SGLD,
    SWAG,
    CosineCycles,
    DeepEnsemble,
    GaussianVI,
    Laplace,
    LastLayerHMC,
    Snapshots,
    WeightMixture,
    refine,
)

__version__ = "0.1.0"

__all__ = [
    "AdaptiveCalibrationError",
    "BrierScore",
    "Checkpoint",
    "ClasswiseCalibrationError",
    "CosineCycles",
    "DeepEnsemble",
    "ExpectedCalibrationError",
    "Flow",
    "FlowPosterior",
    "GaussianVI",
    "KLAnnealing",
    "Laplace",
    "LastLayerHMC",
    "MaximumCalibrationError",
    "MNF",
    "MeanField",
    "MixturePosterior",
    "MonteCarlo",
    "MonteCarloEvaluation",
    "NegativeLogLikelihood",
    "NonFiniteError",
    "NormalAffine",
    "NormalFull",
    "NormalGlowStep",
    "NormalIAF",
    "NormalInvConv",
    "NormalLowRank",
    "NormalPlanar1d",
    "NormalRadial",
    "NormalSylvester",
    "Posterior",
    "PosteriorLog",
    "SGHMC",
    "SGLD",
    "SWAG",
    "Snapshots",
    "Stochastic",
    "StochasticConv2D",
    "StochasticDense",
    "StochasticModel",
    "TemperatureScaling",
    "TerminateOnNonFinite",
    "TwoSpeed",
    "WeightMixture",
    "calibrate",
    "data",
    "export",
    "flows",
    "freeze",
    "layers",
    "metrics",
    "models",
    "noise",
    "noise_off",
    "priors",
    "refine",
    "set_noise",
    "stochastic_layers",
    "to_deterministic",
    "to_stochastic",
    "two_speed",
    "unfreeze",
]
