"""What posteriors over weights share; a finite number of weight sets."""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks, keras_internals, protocols
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.serialization import storable
from tfp_ibnn.conversion.copying import copy_of
from tfp_ibnn.data.examples import Examples, unpacked
from tfp_ibnn.noise import counter
from tfp_ibnn.prediction.samplers import WeightSampler
from tfp_ibnn.weights.architecture import difference


class WeightPosterior(protocols.WeightPosterior):
    """The base of posteriors over weights; a subclass has `sample`, `mean`, `network`, `count`."""

    keeps_statistics = False
    """Whether those of batch normalization are right for all draws."""

    def check_options(self, options: dict[str, Any]) -> None:
        """Raise for options of `MonteCarlo` that posteriors over weights do not take."""
        for name, value in {"sampling": "iid", "independent": False, "dropout": False}.items():
            if options.get(name, value) != value:
                got = f"{type(self).__name__}; got {options[name]!r}"
                raise ValueError(f"`{name}` must be {value!r} for a {got}. Leave it out.")

    def sampler(self, samples: int, **options: Any) -> protocols.Sampler:
        self.check_options(options)
        if self.count is None and not self.keeps_statistics and _batch_norms(self.network):
            problem = f"Batch-norm statistics of {self.network.name!r} are not of the weights drawn"
            warnings.warn(f"{problem}: use posterior.materialize(number, x_train).", stacklevel=4)
        return WeightSampler(self, samples, options.get("chunk_size"))

    def mean_network(self) -> keras.Model:
        with keras_internals.values_in_place(zip(self.sampled, self.mean(), strict=True)):
            weights = self.network.get_weights()
        network = copy_of(self.network)
        network.set_weights(weights)
        return network

    def materialize(
        self, number: int, data: Any = None, *, batch_size: int = 256, seed: int = 0
    ) -> "WeightSets":
        """Draw a finite number of weight sets, each with batch-norm statistics of its own.

        These are mean and variance over `data`: inputs, (inputs, labels), or a dataset of such
        batches, all held in memory; without batch normalization it is not needed. The draws are
        those of `MonteCarlo(posterior, samples=number, seed=seed)`.
        """
        number = checks.positive_integer("number", number)
        key = ops.convert_to_tensor(counter.key_from_seed(checks.whole("seed", seed)))
        norms, sets = _batch_norms(self.network), []
        batches = list(_batches(data, batch_size)) if norms and data is not None else []
        if norms and not batches:
            got = "`data` holds no example. Give the training inputs, or a dataset"
            raise ValueError(f"{self.network.name!r} has batch normalization, and {got}.")
        for place in range(number):
            drawn = zip(self.sampled, self.sample(key, place), strict=True)
            with keras_internals.values_in_place(drawn):
                _set_statistics(self.network, norms, batches)
                sets.append([storable(w) for w in self.network.weights])
        return WeightSets.of(self.network, sets)

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "WeightPosterior":
        """Return a posterior from what `get_config` gave; its weights are yet to be loaded."""
        return cls(**keras.saving.deserialize_keras_object(config, custom_objects=custom_objects))


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class WeightSets(WeightPosterior, keras.layers.Layer):
    """Weight sets of one network, all equally likely: copies, batch-norm statistics included.

    `models` are built, of one architecture. They may have stochastic layers: every draw then takes
    the next set, and noise anew.
    """

    def __init__(self, models: Sequence[keras.Model], **kwargs: Any) -> None:
        models = check_models(models)
        super().__init__(**kwargs)
        self.network, self.count = models[0], len(models)
        self._sets = []
        fixed = {"initializer": "zeros", "trainable": False, "autocast": False}
        for number, variable in enumerate(self.sampled):
            shape = (self.count, *variable.shape)
            stacked = self.add_weight(shape, dtype=variable.dtype, name=f"set_{number}", **fixed)
            stacked.assign(np.stack([ops.convert_to_numpy(x.weights[number]) for x in models]))
            self._sets.append(stacked)
        self.built = True

    @property
    def modes(self) -> int:
        return self.count

    @classmethod
    def of(cls, network: keras.Model, sets: Sequence[Sequence[np.ndarray]]) -> "WeightSets":
        """Return sets of given values, each in the order of `network.weights`."""
        shapes = [tuple(w.shape) for w in network.weights]
        for number, values in enumerate(sets):
            if [np.shape(value) for value in values] != shapes:
                raise ValueError(f"Set {number} has other shapes than the weights of the network.")
            if not all(np.isfinite(value).all() for value in values):
                raise ArithmeticError(f"Set {number} is not finite: the training diverged.")
        made = cls([network] * len(sets))
        for stacked, values in zip(made._sets, zip(*sets, strict=True), strict=True):
            stacked.assign(np.stack(values))
        return made

    def sample(self, key: Tensor, number: int | Tensor) -> list[Tensor]:
        """Return the set of a number; they repeat in order, whatever the key."""
        return [ops.take(stacked, number % self.count, axis=0) for stacked in self._sets]

    def mean(self) -> list[Tensor]:
        """Return the first set: what several trainings have in common is not their mean weight."""
        return [stacked[0] for stacked in self._sets]

    def materialize(self, number: int | None = None, data: Any = None, **_: Any) -> "WeightSets":
        """Return itself: there is a finite number of sets already."""
        return self

    def get_config(self) -> dict[str, Any]:
        network = keras.saving.serialize_keras_object(self.network)
        return {**super().get_config(), "network": network, "count": self.count}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "WeightSets":
        options = keras.saving.deserialize_keras_object(config, custom_objects=custom_objects)
        return cls([options.pop("network")] * options.pop("count"), **options)


def check_models(models: Any) -> Sequence[keras.Model]:
    """Return the models, or raise if they are not built, or not of one architecture."""
    if not isinstance(models, Sequence) or not models:
        raise ValueError(f"`models` must be a list of built Keras models; got {models!r}.")
    for number, model in enumerate(models):
        if isinstance(model, protocols.WeightPosterior):
            problem = f"is a {type(model).__name__}: use ibnn.WeightMixture(models)."
        elif not isinstance(model, keras.Model):
            problem = f"must be a Keras model; got {model!r}."
        elif not model.built:
            problem = "is not built: call it on data, or build it, first."
        elif model is not models[0] and (where := difference(models[0], model)):
            problem = (
                "differs from `models[0]` in more than the values of its weights: in "
                f"{where}. Use ibnn.WeightMixture(models)."
            )
        else:
            continue
        raise ValueError(f"`models[{number}]` {problem}")
    return models


def _batch_norms(network: keras.Model) -> list[keras.layers.BatchNormalization]:
    """Return the layers whose statistics a training changes."""
    layers = keras_internals.nested_layers(network)
    return [x for x in layers if isinstance(x, keras.layers.BatchNormalization) and x.trainable]


def _set_statistics(network: keras.Model, norms: Sequence[Any], batches: Sequence[Any]) -> None:
    """Give batch-norm layers the mean and variance of their inputs over all batches."""
    momentums, seen = [layer.momentum for layer in norms], []
    try:
        for layer in norms:
            layer.momentum = 0.0  # so that a pass leaves the statistics of its batch
        for inputs in batches:
            network(inputs, training=True)
            seen.append([(storable(x.moving_mean), storable(x.moving_variance)) for x in norms])
    finally:
        for layer, momentum in zip(norms, momentums, strict=True):
            layer.momentum = momentum
    sizes = [ops.shape(keras.tree.flatten(inputs)[0])[0] for inputs in batches]
    for number, layer in enumerate(norms):
        means, variances = (np.array([x[number][i] for x in seen], "float64") for i in (0, 1))
        mean = np.average(means, axis=0, weights=sizes)
        spread = variances + (means - mean) ** 2
        layer.moving_mean.assign(mean)
        layer.moving_variance.assign(np.average(spread, axis=0, weights=sizes))


def _batches(data: Any, batch_size: int) -> Iterator[Any]:
    data = data[0] if isinstance(data, tuple) else data
    leaves = keras.tree.flatten(data)
    is_arrays = all(hasattr(leaf, "shape") for leaf in leaves)
    parts = Examples(data).batches(batch_size) if is_arrays else unpacked(data, "data")
    for part in parts:
        yield part.x
