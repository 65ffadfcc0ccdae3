"""Training runs from the data to the report, and the original report's experiments."""

from experiments.devices import Devices, devices_for
from experiments.folder import RunError, RunFolder
from experiments.posterior_files import read_posteriors
from experiments.provenance import provenance
from experiments.results import write_results
from experiments.run import run
from experiments.scoring import Scorer, Scores
from experiments.settings import Settings
from experiments.summary import markdown, summarise

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
