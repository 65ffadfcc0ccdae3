"""Images unlike those of training: corrupted, turned, attacked, or out of distribution (OOD)."""

from experiments.shifts.adversarial import fgsm, fgsm_direction
from experiments.shifts.corruptions import CORRUPTIONS, corrupt, rotate
from experiments.shifts.ood import USUAL, convert_images, from_bytes, split_classes, to_bytes

__all__ = ["CORRUPTIONS", "USUAL", "convert_images", "corrupt", "fgsm", "fgsm_direction"]
__all__ += ["from_bytes", "rotate", "split_classes", "to_bytes"]
