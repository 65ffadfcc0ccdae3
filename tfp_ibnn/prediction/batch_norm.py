"""Monte Carlo batch normalization: networks that differ in the statistics of a mini-batch."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import keras_internals, protocols
from tfp_ibnn._core.backend import Tensor, compiled
from tfp_ibnn._core.serialization import naming_unknown_classes, states_of
from tfp_ibnn._core.text import with_strings
from tfp_ibnn.conversion.copying import copy_of
from tfp_ibnn.data.datasets import is_dataset
from tfp_ibnn.data.examples import Examples, as_array, unpacked
from tfp_ibnn.prediction.samplers import WeightSampler, check_options

BATCH_SIZE = 32
"""The size of mini-batches of arrays, the default of Keras's `fit`."""


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class BatchStatistics(protocols.WeightPosterior, keras.layers.Layer):
    """Networks whose batch normalization uses the mean and variance of one mini-batch each.

    All other weights are the same. In training, every step normalizes by the statistics of another
    mini-batch; these networks are draws of that noise. Reference: Teye et al., Bayesian uncertainty
    estimation for batch normalized deep networks, arXiv 1802.06455.

    Args:
        network: a built model with batch normalization.
        count: number of networks.
        **kwargs: those of `keras.layers.Layer`.
    """

    def __init__(self, network: keras.Model, count: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.network = network
        self.count = count
        self._sets = []
        for number, variable in enumerate(self.sampled):
            stacked = self.add_weight(
                (count, *variable.shape),
                initializer="zeros",
                dtype=variable.dtype,
                trainable=False,
                autocast=False,
                name=f"set_{number}",
            )
            self._sets.append(stacked)
        self.built = True

    @classmethod
    def of(
        cls,
        network: keras.Model,
        data: Any,
        count: int,
        *,
        batch_size: int = BATCH_SIZE,
        seed: int | None = None,
    ) -> Self:
        """Return networks with the statistics of random mini-batches of training data.

        Args:
            network: a built model, which is not changed.
            data: inputs, (inputs, labels), or a dataset of such batches. The
                mini-batches of a dataset are used as they come; those smaller than the first are
                left out.
            count: number of networks; a dataset with fewer batches gives one for each.
            batch_size: number of examples in a mini-batch of arrays.
            seed: chooses the examples of arrays; None takes different ones each time.

        Raises:
            ValueError: if there is no trainable batch normalization, no mini-batch, or one whose
                statistics are not finite.
        """
        norms = batch_norms(network)
        if not norms:
            raise ValueError(
                f"`batch_norm` is for models with keras.layers.BatchNormalization whose "
                f"`trainable` is True; {network.name!r} has none. Leave it out."
            )
        batches = _mini_batches(data, count, batch_size, seed)
        sets = _statistics_by_batch(network, norms, batches)
        _check_finite(sets, network.name)
        posterior = cls(network, len(sets))
        for stacked, values in zip(posterior._sets, zip(*sets, strict=True), strict=True):
            stacked.assign(np.stack(values))
        return posterior

    @property
    def sampled(self) -> list[keras.Variable]:
        return _statistics(batch_norms(self.network))

    def sample(self, key: Tensor, number: int | Tensor) -> list[Tensor]:
        """Return the statistics of one mini-batch.

        Args:
            key: not used.
            number: index of the mini-batch, from 0.

        Returns:
            Mean and variance for each layer of batch normalization.
        """
        return [ops.take(stacked, number % self.count, axis=0) for stacked in self._sets]

    def mean(self) -> list[Tensor]:
        """Return the running averages of the network itself."""
        return [variable.value for variable in self.sampled]

    def mean_network(self) -> keras.Model:
        return copy_of(self.network)

    def materialize(self, number: int | None = None, data: Any = None, **_: Any) -> Self:
        """Return itself: the number of networks is finite already, and no argument matters.

        Args:
            number: not used.
            data: not used.
        """
        return self

    def sampler(self, samples: int, **options: Any) -> WeightSampler:
        check_options(options, "`batch_norm`")
        return WeightSampler(self, samples, options.get("chunk_size"))

    def get_config(self) -> dict[str, Any]:
        network = keras.saving.serialize_keras_object(self.network)
        return {**super().get_config(), "network": network, "count": self.count}

    @classmethod
    @naming_unknown_classes()
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Self:
        config = keras_internals.readable(config)
        options = keras.saving.deserialize_keras_object(config, custom_objects=custom_objects)
        return cls(**options)


def batch_norms(network: keras.Model) -> list[keras.layers.BatchNormalization]:
    """Return the layers whose statistics training changes."""
    layers = keras_internals.nested_layers(network)
    return [x for x in layers if isinstance(x, keras.layers.BatchNormalization) and x.trainable]


@contextlib.contextmanager
def statistics_of_last_batch(norms: Sequence[keras.layers.BatchNormalization]) -> Iterator[None]:
    """Within this context, a pass sets the running averages to the statistics of its batch."""
    momentums = [layer.momentum for layer in norms]
    try:
        for layer in norms:
            layer.momentum = 0.0
        yield
    finally:
        for layer, momentum in zip(norms, momentums, strict=True):
            layer.momentum = momentum


def _statistics(norms: Sequence[keras.layers.BatchNormalization]) -> list[keras.Variable]:
    """Return the running averages of batch-norm layers: mean and variance of each."""
    return [x for layer in norms for x in (layer.moving_mean, layer.moving_variance)]


def _statistics_by_batch(
    network: keras.Model,
    norms: Sequence[keras.layers.BatchNormalization],
    batches: Iterable[Any],
) -> list[list[np.ndarray]]:
    """Return mean and variance of each layer's inputs for each batch, passed as in training.

    Args:
        network: a model, whose own variables stay as they are.
        norms: its batch-norm layers.
        batches: inputs.
    """
    seeds = states_of(keras_internals.nested_layers(network))

    def one_pass(inputs: Any, states: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        # Inside, layers read what they assign, and the network's own variables stay as they are.
        with keras_internals.values_in_place(zip(seeds, states, strict=True)):
            network(inputs, training=True)
            statistics = [variable.value for variable in _statistics(norms)]
            return statistics, [seed.value for seed in seeds]

    compiled_pass = compiled(one_pass, network.variables)
    # The states of other noise, such as dropout, carry over from batch to batch.
    states = [seed.value for seed in seeds]
    sets = []
    with statistics_of_last_batch(norms):
        for inputs in batches:
            statistics, states = compiled_pass(with_strings(inputs), states)
            sets.append([ops.convert_to_numpy(values) for values in statistics])
    return sets


def _check_finite(sets: list[list[np.ndarray]], name: str) -> None:
    """Raise for statistics that are NaN or infinite; `name` is that of the network."""
    are_finite = [all(np.isfinite(part).all() for part in parts) for parts in sets]
    bad = len(sets) - sum(are_finite)
    if bad:
        raise ValueError(
            f"The statistics of {bad} of {len(sets)} mini-batches are not finite: `batch_norm`, or "
            f"the weights of {name!r}, hold NaN or infinity."
        )


def _mini_batches(data: Any, count: int, batch_size: int, seed: int | None) -> Iterator[Any]:
    """Yield the inputs of mini-batches of one size.

    Args:
        data: inputs, (inputs, labels), or a dataset of such batches.
        count: the largest number of mini-batches.
        batch_size: number of examples in a mini-batch of arrays.
        seed: chooses the examples of arrays.
    """
    if is_dataset(data):
        size = 0  # of the first
        for batch in itertools.islice(unpacked(data, "batch_norm"), count):
            size = size or batch.size
            if batch.size >= size:
                yield batch.x
        return
    inputs = data[0] if isinstance(data, tuple) else data
    examples = Examples(keras.tree.map_structure(as_array, inputs))
    if not all(part.ndim for part in keras.tree.flatten(examples.x)):
        raise ValueError(
            "`batch_norm` must be training inputs, such as batch_norm=x_train, or a dataset of "
            f"batches; got {data!r}."
        )
    if examples.size <= batch_size:
        raise ValueError(
            f"`batch_norm` must hold more examples than the {batch_size} of a mini-batch; got "
            f"{examples.size}. For smaller mini-batches, give a dataset of them."
        )
    random = np.random.default_rng(seed)
    for _ in range(count):
        index = random.choice(examples.size, batch_size, replace=False)
        yield examples.take(index).x
