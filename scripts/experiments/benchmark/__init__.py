"""What the noise costs: ratios to deterministic networks, with targets, JSON, tables and figures.

Each group of cases is a function of `Settings` that gives rows, see `record.Row`.
"""

from collections.abc import Callable, Iterator

from experiments.benchmark.gpu import gpu_steps
from experiments.benchmark.growth import exponents
from experiments.benchmark.prediction import predictions
from experiments.benchmark.processes import import_time, memory_in_training
from experiments.benchmark.record import Row
from experiments.benchmark.settings import Settings
from experiments.benchmark.sizes import conversion_time, extra_parameters
from experiments.benchmark.training import lenet_steps, vgg16_steps

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
