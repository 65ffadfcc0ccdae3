"""What all templates of posteriors have in common."""

from typing import Any

import keras
import numpy as np

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import SeedGenerator, Tensor
from tfp_ibnn._core.protocols import Draw, PosteriorTemplate
from tfp_ibnn._core.serialization import ConfiguredLayer, SavesRandomState


class Template(ConfiguredLayer, SavesRandomState, PosteriorTemplate, keras.layers.Layer):
    """A posterior that is a Keras layer: its weights, its noise, and the weight of its KL.

    The one given to a stochastic layer is a template: each layer takes a copy and builds it.

    Args:
        beta: weight of the KL in the loss, kept in a variable of that name; 1 is the ELBO. None is
            `default_beta` in a layer, and 1 outside of one.
        gamma: weight of the entropy that is subtracted from the loss; 0 is the ELBO.
        seed: of the posterior's noise. The first layer that takes a copy has this seed, each later
            one a seed derived from it, so that layers of one template draw different noise.
    """

    arguments = ("gamma", "seed")

    def __init__(
        self,
        *,
        beta: float | None = None,
        gamma: float = 0.0,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs["dtype"] = checks.full_precision(kwargs.get("dtype"))
        super().__init__(**kwargs)
        self.initial_beta = None if beta is None else checks.non_negative("beta", beta)
        self.gamma = checks.non_negative("gamma", gamma)
        self.seed = seed
        self.seed_generator = SeedGenerator(seed)
        self._layers_served = 0

    def build(self, input_shape: Any) -> None:
        """Add beta; call this first."""
        beta = 1.0 if self.initial_beta is None else self.initial_beta
        initial = keras.initializers.Constant(beta)
        self.beta = self._add_parameter("beta", (), initial, trainable=False)

    @staticmethod
    def default_beta(train_size: int) -> float:
        """Return the weight of the KL in a layer if none is given: 1, the ELBO."""
        return 1.0

    def loss(self, draw: Draw) -> Tensor:
        loss = self.beta * draw.kl
        return loss - self.gamma * draw.entropy if self.gamma else loss

    def copy(self, **changes: Any) -> "Template":
        """Return an unbuilt posterior of the same configuration, but for the changes."""
        return type(self).from_config({**self.get_config(), **changes})

    def copy_for_layer(
        self, dtype: str, seed: int | None = None, train_size: int = 1
    ) -> "Template":
        """Return the unbuilt copy that a layer takes, by default with this template's next seed."""
        if seed is None and self.seed is not None:
            seed = self.seed
            if self._layers_served:  # far from the seeds that users choose, which lie close
                words = np.random.SeedSequence((seed % 2**64, self._layers_served))
                seed = int(words.generate_state(1)[0] >> 1)
            self._layers_served += 1
        beta = self.default_beta(train_size) if self.initial_beta is None else self.initial_beta
        changes = {"name": "posterior", "dtype": dtype, "seed": seed, "beta": beta}
        copy = self.copy(**changes, **self._settled())
        copy._layers_served = 1  # by its own layer, should it become a template in turn
        return copy

    def _settled(self) -> dict[str, Any]:
        """Return arguments that were left open, as a layer's copy has them, and its file."""
        return {}

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "beta": self.initial_beta}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Template":
        prior = config.get("prior")
        if isinstance(prior, dict):
            config = {**config, "prior": keras.saving.deserialize_keras_object(prior)}
        return cls(**config)

    def get_build_config(self) -> None:
        """Leave building to the layer, so that weight paths are the same after loading."""

    def _add_parameter(self, name: str, shape: Any, initializer: Any, **kw: Any) -> keras.Variable:
        return self.add_weight(shape, initializer, autocast=False, name=name, **kw)
