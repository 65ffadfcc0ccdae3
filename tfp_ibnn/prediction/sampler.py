"""Find what runs the sampled networks of a model."""

import warnings
from typing import Any

import keras

from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.protocols import Sampler, WeightPosterior
from tfp_ibnn.prediction.noise_sampler import NoiseSampler
from tfp_ibnn.prediction.wrapping import PredictionWrapper, ScaledModel

__all__ = ["sampler_of"]


def sampler_of(
    model: keras.Model | WeightPosterior,
    samples: int,
    *,
    portable: bool,
    **options: Any,
) -> Sampler:
    """Return what runs `samples` networks, or one if all would be alike.

    Args:
        model: a Keras model, or a posterior over its weights.
        samples: number of networks.
        portable: see `noise.Source`.
        **options: `sampling`, `independent`, `chunk_size` and `dropout`, those of `MonteCarlo`.
    """
    if isinstance(model, WeightPosterior):
        return model.sampler(samples, **options)
    nested = keras_internals.nested_layers
    # The noise of a MonteCarlo inside is its own.
    inside = [x for x in nested(model) if isinstance(x, PredictionWrapper)]
    averaged = [x for x in inside if not isinstance(x, ScaledModel)]
    quiet = [layer for x in averaged for layer in nested(x)]
    sampler = NoiseSampler(model, samples, portable=portable, quiet=quiet, **options)
    dropout = options["dropout"]
    if dropout and sampler.hidden_dropout:
        warnings.warn(
            f"The dropout inside of {', '.join(sampler.hidden_dropout)} stays off: only dropout "
            "layers of the graph can be left on.",
            stacklevel=3,
        )
    if samples > 1 and not sampler.is_random:
        # What is scaled needs no noise, unless it was asked for.
        if dropout or not isinstance(model, ScaledModel):
            warnings.warn(
                f"Model {model.name!r} has no stochastic layer"
                + (" and no dropout" if dropout else "")
                + ": all samples are alike, so one is enough, and one is drawn.",
                stacklevel=3,
            )
        sampler.samples = 1
    return sampler
