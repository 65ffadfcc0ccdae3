"""Training images: preprocessing inside the model, validation splits, and batches."""

from tfp_ibnn.data.augmentation import RandomMirror as RandomMirror
from tfp_ibnn.data.augmentation import RandomShift as RandomShift
from tfp_ibnn.data.augmentation import preprocessing as preprocessing
from tfp_ibnn.data.batches import ShuffledBatches as ShuffledBatches
from tfp_ibnn.data.batches import validation_split as validation_split
