"""The bases of all posteriors: Keras layers of which each stochastic layer takes a copy."""

from typing import Any, Self

import keras
import numpy as np

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import SeedGenerator, Tensor
from tfp_ibnn._core.protocols import Draw, PosteriorTemplate, ZPosterior
from tfp_ibnn._core.serialization import ConfiguredLayer, SavesRandomState
from tfp_ibnn.layers.adapter import StochasticAdapter, has_adapter
from tfp_ibnn.layers.base import CELLS
from tfp_ibnn.layers.multiplicative import Stochastic
from tfp_ibnn.layers.recurrent import StochasticCell


class KerasTemplate(ConfiguredLayer, PosteriorTemplate, keras.layers.Layer):
    """A posterior that is a Keras layer, in full precision, and is saved with its arguments."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs["dtype"] = checks.full_precision(kwargs.get("dtype"))
        super().__init__(**kwargs)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls(**{name: _deserialized(value) for name, value in config.items()})

    def get_build_config(self) -> None:
        """Leave building to the layer, so that weight paths are the same after loading."""


def _deserialized(value: Any) -> Any:
    """Return an argument of a config: what was saved, or an object that `copy` passes on."""
    if isinstance(value, list):
        return [_deserialized(part) for part in value]
    if isinstance(value, dict) and "class_name" in value:
        return keras.saving.deserialize_keras_object(value)
    return value


class Template(SavesRandomState, KerasTemplate):
    """A posterior with weights and noise of its own, and the weight of its KL.

    The one given to a stochastic layer is a template: each layer takes a copy and builds it.

    Args:
        beta: weight of the KL in the loss, kept in a variable of that name; 1 is the ELBO. None is
            `default_beta` in a layer, and 1 outside of one.
        gamma: weight of the entropy that is subtracted from the loss; 0 is the ELBO.
        seed: of the posterior's noise. The first layer that takes a copy has this seed, each later
            one a seed derived from it, so that layers of one template draw different noise.
        **kwargs: those of `keras.layers.Layer`.
    """

    def __init__(
        self,
        *,
        beta: float | None = None,
        gamma: float = 0.0,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
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
        if self.gamma:
            loss = loss - self.gamma * draw.entropy
        return loss

    def copy(self, **changes: Any) -> Self:
        """Return an unbuilt posterior of the same configuration, but for the changes."""
        # Flows and priors go by as objects: their classes need not be registered for a copy.
        return type(self).from_config({**self.get_config(), **changes})

    def copy_for_layer(self, dtype: str, seed: int | None = None, train_size: int = 1) -> Self:
        """Return the unbuilt copy that a layer takes, by default with this template's next seed.

        Args:
            dtype: "float32" or "float64".
            seed: of the layer's noise; None derives it from the template's, if that has one.
            train_size: number of training examples, on which the default beta depends.

        Returns:
            A posterior of the same class, named "posterior".
        """
        if seed is None and self.seed is not None:
            seed = self._next_seed()
        beta = self.initial_beta
        if beta is None:
            beta = self.default_beta(train_size)
        changes = {"name": "posterior", "dtype": dtype, "seed": seed, "beta": beta}
        copy = self.copy(**changes, **self._settled())
        copy._layers_served = 1  # by its own layer, should it become a template in turn
        return copy

    def _next_seed(self) -> int:
        """Return the template's seed for its first layer, and one derived from it for others."""
        layer = self._layers_served
        self._layers_served += 1
        if layer == 0:
            return self.seed
        # Far from the seeds that users choose, which lie close to each other.
        words = np.random.SeedSequence((self.seed % 2**64, layer)).generate_state(1)
        return int(words[0] >> 1)

    def _settled(self) -> dict[str, Any]:
        """Return arguments that were left open, as a layer's copy has them, and its file."""
        return {}

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "beta": self.initial_beta}

    def _add_parameter(
        self, name: str, shape: Any, initializer: Any, **kwargs: Any
    ) -> keras.Variable:
        return self.add_weight(shape, initializer, autocast=False, name=name, **kwargs)


class ZTemplate(ZPosterior, KerasTemplate):
    """A posterior over z, which knows the layers that multiply by z."""

    def wrap(self, layer: keras.layers.Layer, train_size: int, **options: Any) -> Stochastic:
        if isinstance(layer, CELLS):
            return StochasticCell(layer, self, train_size, **options)
        if has_adapter(layer):
            return StochasticAdapter(layer, self, train_size, **options)
        return Stochastic(layer, self, train_size, **options)
