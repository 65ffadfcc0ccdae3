"""Training runs from the data to the report, and the original report's experiments."""

from tfp_ibnn.experiments.folder import RunError, RunFolder
from tfp_ibnn.experiments.posterior_files import read_posteriors
from tfp_ibnn.experiments.provenance import provenance
from tfp_ibnn.experiments.run import run
from tfp_ibnn.experiments.scoring import Scorer, Scores
from tfp_ibnn.experiments.settings import Settings

__all__ = [
    "RunError",
    "RunFolder",
    "Scorer",
    "Scores",
    "Settings",
    "provenance",
    "read_posteriors",
    "run",
]
