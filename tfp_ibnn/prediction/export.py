"""Export as a SavedModel, which TensorFlow runs without this library."""

import os
from pathlib import Path
from typing import Any

import keras

from tfp_ibnn._core import checks
from tfp_ibnn.noise import counter
from tfp_ibnn.prediction.monte_carlo import MonteCarlo
from tfp_ibnn.prediction.saved_model import write_saved_model

__all__ = ["export"]


def export(
    model: keras.Model,
    path: str | os.PathLike,
    *,
    samples: int | None = None,
    seed: int | None = None,
    input_signature: Any = None,
    overwrite: bool = False,
) -> Path:
    """Write a TensorFlow SavedModel that gives the averaged prediction and its uncertainty.

    It takes TensorFlow alone to load it, and TensorFlow Serving serves it as it is. Its signatures
    take the model's inputs by name, in batches of any size:

    - `serve`, also the default: all that `MonteCarlo.predict` returns;
    - `sample`: `mean` and `aleatoric` of one sampled network, which the further input `seed`, a
      whole number, chooses. The seeds 0 to `samples` - 1 are the networks that `serve` averages;
    - `deterministic`: `mean` and `aleatoric` of the network at the posterior mean, without noise.

    The sampled networks are those of the seed, fixed in the file: one question has always one
    answer. (Of a `MonteCarlo` with `independent` draws it depends on the place in the batch. An
    input that was made for one batch size keeps it. Of a `TemperatureScaling` of a `MonteCarlo` all
    signatures give the scaled average.) `assets.extra/tfp_ibnn.json` in the folder
    names versions, seed and signatures, and the SHA-256 of each file.

    The backend must be TensorFlow. A model that was trained on JAX is saved there as `.keras`, and
    exported where TensorFlow is, by `scripts/export.py` for example.

    Args:
        model: a `MonteCarlo`, or a model that `MonteCarlo` can average.
        path: of a folder. It is written whole or not at all.
        samples: number of draws; None takes the `MonteCarlo`'s.
        seed: of the draws; None takes the `MonteCarlo`'s, or a random one.
        input_signature: `keras.InputSpec` or arrays, for a model whose `call` is its own, so that
            its inputs are unknown: by name, or in a list as Keras has it.
        overwrite: replace a folder that is not empty.

    Returns:
        The path.

    Example:
        >>> import keras, tempfile, tfp_ibnn as ibnn
        >>> inputs = keras.Input((3,), name="features")
        >>> outputs = ibnn.StochasticDense(2, activation="softmax", train_size=100)(inputs)
        >>> mc = ibnn.MonteCarlo(keras.Model(inputs, outputs), samples=16)
        >>> if keras.backend.backend() == "tensorflow":
        ...     path = ibnn.export(mc, tempfile.mkdtemp() + "/1", seed=0)

        And where only TensorFlow is:

            served = tf.saved_model.load("saved_model/1")
            served.signatures["serve"](features=tf.ones((5, 3)))["epistemic"]
    """
    options = {}
    if samples is not None:
        options["samples"] = checks.positive_integer("samples", samples)
    if seed is not None:
        options["seed"] = checks.whole("seed", seed)
    if isinstance(model, MonteCarlo):
        served = model.frozen(**options)
    else:
        served = MonteCarlo(model, **{"seed": counter.random_seed(), **options})
    return write_saved_model(served, path, input_signature, overwrite)
