"""What posteriors over weights share; a finite number of weight sets."""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks, keras_internals, protocols
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.serialization import naming_unknown_classes, storable
from tfp_ibnn.conversion.copying import copy_of
from tfp_ibnn.data.examples import Examples, unpacked
from tfp_ibnn.noise import counter
from tfp_ibnn.prediction.batch_norm import batch_norms, statistics_of_last_batch
from tfp_ibnn.prediction.samplers import WeightSampler, check_options
from tfp_ibnn.weights.architecture import difference


class WeightPosterior(protocols.WeightPosterior):
    """The base of posteriors over weights; a subclass has `sample`, `mean`, `network`, `count`."""

    keeps_statistics = False
    """Whether those of batch normalization are right for all draws."""

    def check_options(self, options: dict[str, Any]) -> None:
        """Raise for options of `MonteCarlo` that posteriors over weights do not take."""
        check_options(options, f"a {type(self).__name__}")

    def sampler(self, samples: int, **options: Any) -> protocols.Sampler:
        self.check_options(options)
        if self.count is None and not self.keeps_statistics and batch_norms(self.network):
            warnings.warn(
                f"Batch-norm statistics of {self.network.name!r} are not of the weights drawn: use "
                "posterior.materialize(number, x_train).",
                stacklevel=4,
            )
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

        These are mean and variance over the data. The draws are those of
        `MonteCarlo(posterior, samples=number, seed=seed)`.

        Args:
            number: of sets.
            data: inputs, (inputs, labels), or a dataset of such batches, all held in memory; not
                needed without batch normalization.
            batch_size: examples at a time, 256 by default, of arrays.
            seed: of the draws.

        Returns:
            The sets, equally likely.

        Raises:
            ValueError: if there is batch normalization and no data.
        """
        number = checks.positive_integer("number", number)
        key = counter.key_from_seed(checks.whole("seed", seed))
        key = ops.convert_to_tensor(key)
        norms = batch_norms(self.network)
        batches = []
        if norms and data is not None:
            batches = list(input_batches(data, batch_size))
        if norms and not batches:
            raise ValueError(
                f"{self.network.name!r} has batch normalization, and `data` holds no example. Give "
                "the training inputs, or a dataset."
            )
        sets = []
        for place in range(number):
            drawn = self.sample(key, place)
            with keras_internals.values_in_place(zip(self.sampled, drawn, strict=True)):
                set_statistics(self.network, norms, batches)
                sets.append([storable(w) for w in self.network.weights])
        return WeightSets.of(self.network, sets)

    @classmethod
    @naming_unknown_classes()
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "WeightPosterior":
        """Return a posterior whose weights are yet to be loaded.

        Args:
            config: what `get_config` gave.
            custom_objects: classes by name that are not registered.

        Returns:
            A posterior with the same arguments.
        """
        config = keras_internals.readable(config)
        options = keras.saving.deserialize_keras_object(config, custom_objects=custom_objects)
        return cls(**options)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class WeightSets(WeightPosterior, keras.layers.Layer):
    """Weight sets of one network, all equally likely: copies, batch-norm statistics included.

    Args:
        models: built Keras models of one architecture. They may have stochastic layers: every draw
            then takes the next set, and noise anew.
        **kwargs: those of `keras.layers.Layer`.
    """

    def __init__(self, models: Sequence[keras.Model], **kwargs: Any) -> None:
        models = check_models(models)
        super().__init__(**kwargs)
        self.network = models[0]
        self.count = len(models)
        self._sets = []
        for number, variable in enumerate(self.sampled):
            stacked = self.add_weight(
                (self.count, *variable.shape),
                initializer="zeros",
                dtype=variable.dtype,
                trainable=False,
                autocast=False,
                name=f"set_{number}",
            )
            values = [ops.convert_to_numpy(model.weights[number]) for model in models]
            stacked.assign(np.stack(values))
            self._sets.append(stacked)
        self.built = True

    @property
    def modes(self) -> int:
        return self.count

    @classmethod
    def of(cls, network: keras.Model, sets: Sequence[Sequence[np.ndarray]]) -> "WeightSets":
        """Return sets of given values.

        Args:
            network: a built model, which gives the architecture.
            sets: for each set its values, in the order of `network.weights`.

        Returns:
            A posterior over these sets.

        Raises:
            ArithmeticError: if a value is not finite.
            ValueError: if a value has another shape than its weight.
        """
        shapes = [tuple(w.shape) for w in network.weights]
        for number, values in enumerate(sets):
            if [np.shape(value) for value in values] != shapes:
                raise ValueError(f"Set {number} has other shapes than the weights of the network.")
            if not all(np.isfinite(value).all() for value in values):
                raise ArithmeticError(f"Set {number} is not finite: the training diverged.")
        networks = [network] * len(sets)
        posterior = cls(networks)
        for number, stacked in enumerate(posterior._sets):
            values_of_sets = [values[number] for values in sets]
            stacked.assign(np.stack(values_of_sets))
        return posterior

    def sample(self, key: Tensor, number: int | Tensor) -> list[Tensor]:
        """Return the set of a number; they repeat in order.

        Args:
            key: not used.
            number: number of the set, from 0 on.

        Returns:
            A value for each weight of the network.
        """
        return [ops.take(stacked, number % self.count, axis=0) for stacked in self._sets]

    def mean(self) -> list[Tensor]:
        """Return the first set: what several trainings have in common is not their mean weight."""
        return [stacked[0] for stacked in self._sets]

    def materialize(self, number: int | None = None, data: Any = None, **_: Any) -> "WeightSets":
        """Return itself: there is a finite number of sets already, and no argument matters.

        Args:
            number: not used.
            data: not used.
        """
        return self

    def get_config(self) -> dict[str, Any]:
        network = keras.saving.serialize_keras_object(self.network)
        return {**super().get_config(), "network": network, "count": self.count}

    @classmethod
    @naming_unknown_classes()
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "WeightSets":
        config = keras_internals.readable(config)
        options = keras.saving.deserialize_keras_object(config, custom_objects=custom_objects)
        network = options.pop("network")
        count = options.pop("count")
        return cls([network] * count, **options)


def check_models(models: Any) -> Sequence[keras.Model]:
    """Return the models, or raise if they are not built, or not of one architecture."""
    if not isinstance(models, Sequence) or not models:
        raise ValueError(f"`models` must be a list of built Keras models; got {models!r}.")
    for number, model in enumerate(models):
        _check_model(model, models[0], number)
    return models


def _check_model(model: Any, first: Any, number: int) -> None:
    """Raise if a model is not built, or differs from the first."""
    if isinstance(model, protocols.WeightPosterior):
        raise ValueError(
            f"`models[{number}]` is a {type(model).__name__}: use ibnn.WeightMixture(models)."
        )
    if not isinstance(model, keras.Model):
        raise ValueError(f"`models[{number}]` must be a Keras model; got {model!r}.")
    if not model.built:
        raise ValueError(f"`models[{number}]` is not built: call it on data, or build it, first.")
    where = None if model is first else difference(first, model)
    if where:
        raise ValueError(
            f"`models[{number}]` differs from `models[0]` in more than the values of its weights: "
            f"in {where}. Use ibnn.WeightMixture(models)."
        )


def set_statistics(network: keras.Model, norms: Sequence[Any], batches: Sequence[Any]) -> None:
    """Give batch-norm layers the mean and variance of their inputs over all batches.

    Args:
        network: a model.
        norms: its batch-norm layers.
        batches: inputs, which pass as in training.
    """
    means: list[list[np.ndarray]] = []  # of each batch, for each layer
    variances: list[list[np.ndarray]] = []
    sizes = []
    with statistics_of_last_batch(norms):
        for inputs in batches:
            network(inputs, training=True)
            means.append([storable(layer.moving_mean) for layer in norms])
            variances.append([storable(layer.moving_variance) for layer in norms])
            first_input = keras.tree.flatten(inputs)[0]
            sizes.append(ops.shape(first_input)[0])
    for number, layer in enumerate(norms):
        mean, variance = _pooled(
            [each[number] for each in means],
            [each[number] for each in variances],
            sizes,
        )
        layer.moving_mean.assign(mean)
        layer.moving_variance.assign(variance)


def _pooled(
    means: list[np.ndarray], variances: list[np.ndarray], sizes: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the variance of all examples from those of batches."""
    means_of_batches = np.array(means, "float64")
    variances_of_batches = np.array(variances, "float64")
    mean = np.average(means_of_batches, axis=0, weights=sizes)
    spread = variances_of_batches + (means_of_batches - mean) ** 2
    return mean, np.average(spread, axis=0, weights=sizes)


def input_batches(data: Any, batch_size: int) -> Iterator[Any]:
    """Yield the inputs of batches.

    Args:
        data: inputs, (inputs, labels), or a dataset of such batches.
        batch_size: examples at a time, of arrays.
    """
    data = data[0] if isinstance(data, tuple) else data
    leaves = keras.tree.flatten(data)
    is_arrays = all(hasattr(leaf, "shape") for leaf in leaves)
    parts = Examples(data).batches(batch_size) if is_arrays else unpacked(data, "data")
    for part in parts:
        yield part.x
