"""Print how much memory a training takes: python -m ...benchmark.memory KIND NOISE SEED.

Linux keeps the largest resident size of a process. It is read before the training, when the
network, its optimizer and the images are there, and after it; in between everything is traced and
three steps are taken.
"""

import json
import sys
from pathlib import Path

import keras

from experiments.benchmark.networks import a_few_images, images, stochastic
from tfp_ibnn import models

__all__ = ["main"]

BATCH, STEPS = 32, 3


def main(kind: str, noise: str, seed: int) -> dict[str, int]:
    """Train VGG16 and return bytes: `before` the training, and at the `peak`."""
    keras.utils.set_random_seed(seed)
    model = models.vgg16() if kind == "none" else stochastic("vgg16", kind, noise=noise)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    model.optimizer.build(model.trainable_variables)
    x, y = images(BATCH * STEPS, seed)
    _forget_peak()
    before = _status("VmRSS")
    with a_few_images():
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return {"before": before, "peak": _status("VmHWM")}


def _forget_peak() -> None:
    """Begin again with the largest size; imports may have been larger for a moment."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(key: str) -> int:
    """Return a size from what Linux says of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kibibytes,) = (line.split()[1] for line in lines if line.startswith(f"{key}:"))
    return 1024 * int(kibibytes)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
