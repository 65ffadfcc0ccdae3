"""Datasets: loading, splitting, preprocessing, batches, and what shifts them."""

from tfp_ibnn.data import ood, toy
from tfp_ibnn.data.adversarial import fgsm, fgsm_direction
from tfp_ibnn.data.augmentation import RandomMirror, RandomShift, preprocessing
from tfp_ibnn.data.batches import ShuffledBatches
from tfp_ibnn.data.corruptions import CORRUPTIONS, corrupt
from tfp_ibnn.data.datasets import DATASETS, DataError, Dataset
from tfp_ibnn.data.loading import load
from tfp_ibnn.data.rotation import rotate
from tfp_ibnn.data.splits import validation_split

__all__ = [
    "CORRUPTIONS",
    "DATASETS",
    "DataError",
    "Dataset",
    "RandomMirror",
    "RandomShift",
    "ShuffledBatches",
    "corrupt",
    "fgsm",
    "fgsm_direction",
    "load",
    "ood",
    "preprocessing",
    "rotate",
    "toy",
    "validation_split",
]
