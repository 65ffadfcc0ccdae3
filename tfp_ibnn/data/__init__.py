"""Datasets: loading, splitting, preprocessing, and batches."""

from tfp_ibnn.data.augmentation import RandomMirror as RandomMirror
from tfp_ibnn.data.augmentation import RandomShift as RandomShift
from tfp_ibnn.data.augmentation import preprocessing as preprocessing
from tfp_ibnn.data.batches import ShuffledBatches as ShuffledBatches
from tfp_ibnn.data.batches import validation_split as validation_split
from tfp_ibnn.data.datasets import DATASETS as DATASETS
from tfp_ibnn.data.datasets import DataError as DataError
from tfp_ibnn.data.datasets import Dataset as Dataset
from tfp_ibnn.data.loading import load as load
