"""Posteriors over the weights of a network's last layer, on cached features."""

from typing import Any

import keras
import numpy as np

from tfp_ibnn._core import checks
from tfp_ibnn.weights.features import last_weighted_layer
from tfp_ibnn.weights.flat import FlatPosterior
from tfp_ibnn.weights.target import Target
from tfp_ibnn.weights.vectors import places_of


class LastLayerPosterior(FlatPosterior):
    """Base of posteriors over the weights of a network's last layer, under a Gaussian prior.

    A subclass defines `fit_to(target, rng, verbose, **options)` besides `draw` and `center`.

    Args:
        model: a built Functional or Sequential model that ends in a Dense layer; it is not changed.
        prior_scale: standard deviation of each weight's prior, 1 by default.
        noise_scale: standard deviation of the targets of a plain regression; None takes the root
            mean square of the residuals of `model`.
        head: what the output means, as for `MonteCarlo`.
        from_logits: whether it is logits, as for `MonteCarlo`.
        **kwargs: those of `keras.layers.Layer`.
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        prior_scale: float = 1.0,
        noise_scale: float | None = None,
        head: str | None = None,
        from_logits: bool | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs["places"] = places_of(model, last_weighted_layer(model).weights)
        super().__init__(model, **kwargs)
        self.prior_scale = checks.scale("prior_scale", prior_scale)
        self.noise_scale = noise_scale
        self.head = head
        self.from_logits = from_logits

    def fit(
        self,
        x: Any,
        y: Any = None,
        *,
        batch_size: int = 256,
        seed: int = 0,
        verbose: Any = "auto",
        **options: Any,
    ) -> "LastLayerPosterior":
        """Fit to all of the training data.

        Args:
            x: training inputs, or a dataset of batches (x, y).
            y: training targets; None with a dataset.
            batch_size: examples whose features are computed at a time, 256 by default.
            seed: of the draws; equal seeds give equal fits.
            verbose: 0 shows no progress.
            **options: of `GaussianVI`, `steps` (100); for "lowrank" ten times as many of Adam
                follow.

        Returns:
            Itself.
        """
        target = self.target(x, y, batch_size=batch_size, verbose=verbose)
        rng = np.random.default_rng(seed)
        self.fit_to(target, rng, verbose, **options)
        return self

    def target(
        self, x: Any, y: Any = None, *, batch_size: int = 256, verbose: Any = "auto"
    ) -> Target:
        """Return the log-density that is approximated.

        Args:
            x: training inputs, or a dataset of batches (x, y).
            y: training targets; None with a dataset.
            batch_size: examples whose features are computed at a time, 256 by default.
            verbose: 0 shows no progress.

        Returns:
            log p(y | x, w) + log p(w) over the weights of the last layer.
        """
        return Target(
            self.network,
            None,
            x,
            y,
            self.prior_scale,
            self.noise_scale,
            self.head,
            self.from_logits,
            batch_size=batch_size,
            verbose=verbose,
        )
