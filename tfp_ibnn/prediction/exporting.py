"""Export of predictions to a TensorFlow SavedModel."""

import os
from pathlib import Path
from typing import Any

import keras

from tfp_ibnn.conversion.wrappers import PredictionWrapper
from tfp_ibnn.prediction.monte_carlo import MonteCarlo, fixed_seed
from tfp_ibnn.prediction.saved_model import write_saved_model


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

    TensorFlow Serving serves it, and TensorFlow alone loads it, for an input "features" by
    `tf.saved_model.load(path).signatures["serve"](features=x)["epistemic"]`. Its signatures take
    the model's inputs by name, in batches of any size:

    - `serve`, also the default: all that `MonteCarlo.predict` returns;
    - `sample`: `mean` and `aleatoric` of one sampled network, which the further input `seed`, a
      whole number, chooses. The seeds 0 to `samples` - 1 are the networks that `serve` averages;
    - `deterministic`: `mean` and `aleatoric` of the network at the posterior mean, without noise.

    The sampled networks are fixed in the file: equal inputs have equal outputs, unless the draws
    are `independent`. `serve` of a `Conformal` adds its `set` or `interval`, of an `OODDetector`
    its `score`. `assets.extra/tfp_ibnn.json` has versions, seed, signatures and SHA-256 of the
    files. The backend must be TensorFlow; `scripts/export.py` exports `.keras` files made on JAX.

    Args:
        model: a `MonteCarlo`, `Conformal` or `OODDetector`, or a model to average.
        path: of a folder. It is written whole or not at all.
        samples: number of draws; None takes the `MonteCarlo`'s.
        seed: of the draws; None takes the `MonteCarlo`'s, or a random one.
        input_signature: `keras.InputSpec` or arrays, by name or in a list as Keras has it, for a
            model whose inputs are unknown because its `call` is its own.
        overwrite: replace a folder that is not empty.

    Returns:
        The path of the folder.

    Raises:
        ValueError: If something else is at the path, the inputs are unknown, or a decision is given
            `samples` or `seed`, which its `fit` has seen.

    Example:
        >>> import keras, tempfile, tfp_ibnn as ibnn
        >>> inputs = keras.Input((3,), name="features")
        >>> outputs = ibnn.StochasticDense(2, activation="softmax", train_size=100)(inputs)
        >>> mc = ibnn.MonteCarlo(keras.Model(inputs, outputs), samples=16)
        >>> if keras.backend.backend() == "tensorflow":
        ...     path = ibnn.export(mc, tempfile.mkdtemp() + "/1", seed=0)
    """
    if isinstance(model, MonteCarlo):
        served = model.with_fixed_draws(samples, seed)
    elif isinstance(model, PredictionWrapper) and hasattr(model, "serve"):  # a decision
        if samples is not None or seed is not None:
            raise ValueError("`samples` and `seed` are those that `fit` has seen: leave them out.")
        served = model
    else:
        options = {} if samples is None else {"samples": samples}
        served = MonteCarlo(model, seed=fixed_seed(seed), **options)
    return write_saved_model(served, path, input_signature, overwrite)
