"""What `model.fit` takes: optimizers and callbacks; files that are written whole or not at all."""

from tfp_ibnn._core.files import replacing as replacing
from tfp_ibnn.training.callbacks import KLAnnealing as KLAnnealing
from tfp_ibnn.training.callbacks import MonteCarloEvaluation as MonteCarloEvaluation
from tfp_ibnn.training.callbacks import PosteriorLog as PosteriorLog
from tfp_ibnn.training.checkpoint import Checkpoint as Checkpoint
from tfp_ibnn.training.checkpoint import CheckpointError as CheckpointError
from tfp_ibnn.training.interrupts import Interrupts as Interrupts
from tfp_ibnn.training.nonfinite import NonFiniteError as NonFiniteError
from tfp_ibnn.training.nonfinite import TerminateOnNonFinite as TerminateOnNonFinite
from tfp_ibnn.training.optimizers import TwoSpeed as TwoSpeed
from tfp_ibnn.training.optimizers import two_speed as two_speed
