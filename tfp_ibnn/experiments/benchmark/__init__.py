"""What the noise costs: ratios to deterministic networks, with targets, JSON, tables and figures.

Each group of cases is a function of `Settings` that gives rows, see `record.Row`.
"""

from collections.abc import Callable, Iterator

from tfp_ibnn.experiments.benchmark.gpu import gpu_steps
from tfp_ibnn.experiments.benchmark.growth import exponents
from tfp_ibnn.experiments.benchmark.prediction import predictions
from tfp_ibnn.experiments.benchmark.processes import import_time, memory_in_training
from tfp_ibnn.experiments.benchmark.record import Row
from tfp_ibnn.experiments.benchmark.settings import Settings
from tfp_ibnn.experiments.benchmark.sizes import conversion_time, extra_parameters
from tfp_ibnn.experiments.benchmark.training import lenet_steps, vgg16_steps

__all__ = ["GPU", "GROUPS", "Group", "Row", "Settings"]

Group = Callable[[Settings], Iterator[Row]]
"""Measures some cases, and gives a row for each."""

GROUPS: dict[str, Group] = {
    "training": lenet_steps,
    "vgg16": vgg16_steps,
    "prediction": predictions,
    "memory": memory_in_training,
    "parameters": extra_parameters,
    "imports": import_time,
    "conversions": conversion_time,
    "growth": exponents,
}
"""Those of a CPU, with TensorFlow."""

GPU: dict[str, Group] = {"gpu": gpu_steps}
"""Those of a GPU, with either backend."""
