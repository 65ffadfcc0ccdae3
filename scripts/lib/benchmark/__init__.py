"""What the noise costs: ratios to deterministic networks, with targets, tables and figures."""

from lib.benchmark.cases import GROUPS, Settings
from lib.benchmark.exports import export_rows
from lib.benchmark.gpu import gpu_steps
from lib.benchmark.weights import weight_steps

__all__ = ["GPU", "GROUPS", "Settings"]

# Groups of cases of a GPU, with either backend; `GROUPS` are those of a CPU, with TensorFlow.
GPU = {"gpu": gpu_steps}
GROUPS["weights"] = weight_steps
GROUPS["export"] = export_rows
