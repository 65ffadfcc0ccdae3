"""Images unlike those of training: corrupted, turned, attacked, or out of distribution (OOD)."""

from lib.shifts.adversarial import fgsm, fgsm_direction
from lib.shifts.corruptions import CORRUPTIONS, corrupt, rotate
from lib.shifts.ood import USUAL, convert_images, from_bytes, split_classes, to_bytes

__all__ = ["CORRUPTIONS", "USUAL", "convert_images", "corrupt", "fgsm", "fgsm_direction"]
__all__ += ["from_bytes", "rotate", "split_classes", "to_bytes"]
