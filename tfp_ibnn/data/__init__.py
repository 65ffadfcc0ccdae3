"""Datasets: loading, splitting, preprocessing, batches, and what shifts them."""

from tfp_ibnn.data import ood, toy
from tfp_ibnn.data.adversarial import fgsm, fgsm_direction
from tfp_ibnn.data.augmentation import RandomMirror, RandomShift, preprocessing
from tfp_ibnn.data.batches import ShuffledBatches, validation_split
from tfp_ibnn.data.corruptions import CORRUPTIONS, corrupt, rotate
from tfp_ibnn.data.datasets import DATASETS, DataError, Dataset
from tfp_ibnn.data.loading import load

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
