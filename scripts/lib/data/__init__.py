"""The image data sets of the experiments, fetched once, verified and cached."""

from lib.data.datasets import DATASETS, DataError, Dataset
from lib.data.loading import load
from lib.data.splits import validation_split

__all__ = ["DATASETS", "DataError", "Dataset", "load", "validation_split"]
