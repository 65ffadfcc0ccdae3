"""Training runs from the data to the report, and the original report's experiments."""

from tfp_ibnn.experiments.devices import Devices, devices_for
from tfp_ibnn.experiments.folder import RunError, RunFolder
from tfp_ibnn.experiments.posterior_files import read_posteriors
from tfp_ibnn.experiments.provenance import provenance
from tfp_ibnn.experiments.results import write_results
from tfp_ibnn.experiments.run import run
from tfp_ibnn.experiments.scoring import Scorer, Scores
from tfp_ibnn.experiments.settings import Settings
from tfp_ibnn.experiments.summary import markdown, summarise

__all__ = [
    "Devices",
    "RunError",
    "RunFolder",
    "Scorer",
    "Scores",
    "Settings",
    "devices_for",
    "markdown",
    "provenance",
    "read_posteriors",
    "run",
    "summarise",
    "write_results",
]
