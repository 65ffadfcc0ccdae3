"""What `model.fit` takes: optimizers and callbacks; files that are written whole or not at all."""

from tfp_ibnn._core.files import replacing
from tfp_ibnn.training.callbacks import (
    Interrupts,
    KLAnnealing,
    MonteCarloEvaluation,
    NonFiniteError,
    PosteriorLog,
    TerminateOnNonFinite,
)
from tfp_ibnn.training.checkpoint import Checkpoint, CheckpointError
from tfp_ibnn.training.optimizers import TwoSpeed, two_speed
from tfp_ibnn.training.scan import can_scan, scan

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Interrupts",
    "KLAnnealing",
    "MonteCarloEvaluation",
    "NonFiniteError",
    "PosteriorLog",
    "TerminateOnNonFinite",
    "TwoSpeed",
    "can_scan",
    "replacing",
    "scan",
    "two_speed",
]
