"""What sets and detectors share: draws that stay, and what `fit` found as weights, in files too."""

import warnings
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core.serialization import ConfiguredLayer
from tfp_ibnn._core.text import TakesStrings
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.conversion.wrappers import PredictionWrapper, innermost
from tfp_ibnn.layers import stochastic_layers
from tfp_ibnn.likelihoods.infer import check_one_output
from tfp_ibnn.prediction.exporting import Exports
from tfp_ibnn.prediction.monte_carlo import MonteCarlo


class Fitted(ConfiguredLayer, TakesStrings, Exports, PredictionWrapper, keras.Model):
    """A Keras model around a `MonteCarlo` with a seed, `inner`, and `arrays` that `fit` finds.

    Args:
        model: a `MonteCarlo`, or a model or posterior that it takes.
        defaults: options of `MonteCarlo` where it has none of its own.
        **kwargs: those of `keras.Model`.
    """

    def __init__(self, model: Any, defaults: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(**{"autocast": False, **kwargs})
        self.inner = self._predictor(model, {"seed": 0, **defaults})
        self._arrays: dict[str, keras.Variable] = {}
        self.built = True

    def _predictor(self, model: Any, defaults: dict[str, Any]) -> keras.Model:
        """Return the `MonteCarlo` of a model, with defaults for the options that it lacks."""
        if not isinstance(model, MonteCarlo):
            is_plain = isinstance(model, keras.Model) and not stochastic_layers(model)
            samples = 1 if is_plain else 128
            model = MonteCarlo(model, samples=samples)
        check_one_output(model.likelihood, type(self).__name__)
        return _with_defaults(model, defaults)

    @property
    def is_fitted(self) -> bool:
        """Whether `fit` has found something."""
        return bool(self._arrays)

    @property
    def arrays(self) -> dict[str, keras.Variable]:
        """What `fit` found, by name."""
        if not self._arrays:
            raise ValueError(f"This {type(self).__name__} knows no data yet: call `fit` first.")
        return self._arrays

    def keep(self, arrays: dict[str, Any]) -> None:
        """Make arrays weights, instead of those of an earlier `fit`."""
        self._arrays.clear()  # by which Keras forgets them
        for name, value in arrays.items():
            weight = self.add_weight(
                np.shape(value),
                "zeros",
                name=name,
                dtype="float32",
                trainable=False,
                autocast=False,
            )
            weight.assign(value)
            self._arrays[name] = weight
        self.predict_function = None  # it has the earlier weights

    def save_own_variables(self, store: Any) -> None:
        for name, weight in self._arrays.items():
            store[name] = ops.convert_to_numpy(weight)

    def load_own_variables(self, store: Any) -> None:
        self.keep({name: np.asarray(store[name]) for name in store.keys()})


def has_positions(model: MonteCarlo) -> bool:
    """Whether a model, of which that is known, has outputs at positions, (N, ..., K)."""
    graph = functional_graph(innermost(model))
    return graph is not None and len(graph.outputs[0].shape) > 2


def _with_defaults(model: MonteCarlo, defaults: dict[str, Any]) -> MonteCarlo:
    """Return a model whose options have these values where they have none."""
    options = model.options()
    missing = {name: value for name, value in defaults.items() if options[name] is None}
    if not missing:
        return model
    with warnings.catch_warnings():
        # What is fitted widens an interval of draws until it holds observations.
        warnings.filterwarnings("ignore", message="`interval` holds")
        return type(model)(model.inner, **{**options, **missing})
