"""The application code of the scripts: training runs, the original report's experiments, figures.

It is not installed with the package, and uses its public names only.
"""

from lib import data
from lib.devices import Devices, devices_for
from lib.folder import RunError, RunFolder
from lib.markdown import summary_table
from lib.posterior_files import read_posteriors
from lib.run import run
from lib.scoring import Scorer, Scores
from lib.settings import Settings
from lib.store import provenance, summarise, write_results

__all__ = ["Devices", "RunError", "RunFolder", "Scorer", "Scores", "Settings", "data"]
__all__ += ["devices_for", "provenance", "read_posteriors", "run", "summarise", "summary_table"]
__all__ += ["write_results"]
