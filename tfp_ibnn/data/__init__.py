"""Datasets: loading, splitting, preprocessing, batches, and what shifts them."""

from tfp_ibnn.data import ood as ood
from tfp_ibnn.data import toy as toy
from tfp_ibnn.data.adversarial import fgsm as fgsm
from tfp_ibnn.data.adversarial import fgsm_direction as fgsm_direction
from tfp_ibnn.data.augmentation import RandomMirror as RandomMirror
from tfp_ibnn.data.augmentation import RandomShift as RandomShift
from tfp_ibnn.data.augmentation import preprocessing as preprocessing
from tfp_ibnn.data.batches import ShuffledBatches as ShuffledBatches
from tfp_ibnn.data.batches import validation_split as validation_split
from tfp_ibnn.data.corruptions import CORRUPTIONS as CORRUPTIONS
from tfp_ibnn.data.corruptions import corrupt as corrupt
from tfp_ibnn.data.corruptions import rotate as rotate
from tfp_ibnn.data.datasets import DATASETS as DATASETS
from tfp_ibnn.data.datasets import DataError as DataError
from tfp_ibnn.data.datasets import Dataset as Dataset
from tfp_ibnn.data.loading import load as load
