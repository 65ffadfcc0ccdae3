"""The image data sets of the experiments, fetched once, verified and cached."""

from experiments.data.datasets import DATASETS, DataError, Dataset
from experiments.data.loading import load
from experiments.data.splits import validation_split

__all__ = ["DATASETS", "DataError", "Dataset", "load", "validation_split"]
