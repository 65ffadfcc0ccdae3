"""Training images: preprocessing inside the model, and batches."""

from tfp_ibnn.data.augmentation import RandomMirror as RandomMirror
from tfp_ibnn.data.augmentation import RandomShift as RandomShift
from tfp_ibnn.data.augmentation import preprocessing as preprocessing
from tfp_ibnn.data.batches import ShuffledBatches as ShuffledBatches
