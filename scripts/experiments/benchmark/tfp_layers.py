"""Print rows of TensorFlow Probability's own layers: python -m ...tfp_layers GROUP ROUNDS SEED.

They are layers of Keras 2, which TensorFlow chooses for a whole process by TF_USE_LEGACY_KERAS=1.
The reference is a deterministic LeNet of Keras 2.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import tensorflow_probability as tfp
import tf_keras

from experiments.benchmark import prediction, timing, training
from experiments.benchmark.networks import TRAIN_SIZE, compiled, images, stepper
from experiments.benchmark.record import Row, row

__all__ = ["lenet", "main"]

METHODS = {"reparameterization": "Reparameterization", "flipout": "Flipout"}


def main(group: str, rounds: int, seed: int) -> Iterator[Row]:
    """Give the rows of a group, "training" or "prediction"."""
    tf_keras.utils.set_random_seed(seed)
    networks = {f"{group}.tfp_{name}": lenet(kind) for name, kind in METHODS.items()}
    if group == "training":
        actions = {
            name: stepper(model, training.BATCH, training.STEPS, seed, tf_keras)
            for name, model in {"deterministic": lenet(), **networks}.items()
        }
        labels = {name: _label("LeNet step, TFP {}", name) for name in networks}
        described = {name: (label, None) for name, label in labels.items()}
        yield from training.step_rows(actions, described, rounds)
        return
    x, _ = images(prediction.IMAGES, seed)
    actions = {
        name: compiled(model, x, prediction.SAMPLES) for name, model in networks.items()
    } | prediction.passes(lenet(), seed)
    times, reference, batch = prediction.time_passes(actions, max(4, rounds // 2))
    for name in networks:
        seconds = {"prediction": min(times[name]), "deterministic": min(reference)}
        measured = timing.ratio(times[name], reference)
        label = _label("LeNet, 128 samples, TFP {}", name)
        yield row(name, label, measured, seconds=seconds, best_batch=batch)


def lenet(kind: str | None = None) -> Any:
    """Return the network of `tfp_ibnn.models.lenet` in Keras 2.

    Args:
        kind: of the layers of TensorFlow Probability; None is deterministic.
    """
    keras = tf_keras.layers
    conv, dense = keras.Conv2D, keras.Dense
    options = {}
    if kind is not None:
        conv = getattr(tfp.layers, f"Convolution2D{kind}")
        dense = getattr(tfp.layers, f"Dense{kind}")
        options = {"kernel_divergence_fn": _divergence}
    return tf_keras.Sequential(
        [
            tf_keras.Input((32, 32, 3)),
            conv(6, 5, activation="relu", **options),
            keras.MaxPooling2D(2),
            conv(16, 5, activation="relu", **options),
            # What adaptive pooling from 10x10 to 4x4 costs; its windows lie a little otherwise.
            keras.AveragePooling2D(3, 2),
            keras.Flatten(),
            dense(120, activation="relu", **options),
            dense(84, activation="relu", **options),
            dense(10, **options),
        ]
    )


def _divergence(posterior: Any, prior: Any, _: Any) -> Any:
    return tfp.distributions.kl_divergence(posterior, prior) / TRAIN_SIZE


def _label(text: str, name: str) -> str:
    return text.format(METHODS[name.partition("tfp_")[2]])


if __name__ == "__main__":
    print(json.dumps(list(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))))
