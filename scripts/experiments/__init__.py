"""The application code of the scripts: training runs, the original report's experiments, figures.

It is not installed with the package, and uses its public names only.
"""

from experiments import data
from experiments.devices import Devices, devices_for
from experiments.folder import RunError, RunFolder
from experiments.posterior_files import read_posteriors
from experiments.run import run
from experiments.scoring import Scorer, Scores
from experiments.settings import Settings
from experiments.store import provenance, summarise, write_results
from experiments.tables import markdown

__all__ = ["Devices", "RunError", "RunFolder", "Scorer", "Scores", "Settings", "data"]
__all__ += ["devices_for", "markdown", "provenance", "read_posteriors", "run", "summarise"]
__all__ += ["write_results"]
