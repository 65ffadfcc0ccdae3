"""Samplers of networks that differ in their weights."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from tfp_ibnn import noise
from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.protocols import Chunks, Sampler, WeightPosterior
from tfp_ibnn.layers import stochastic_layers
from tfp_ibnn.likelihoods.several import named_outputs
from tfp_ibnn.prediction.noise_sampler import NoiseSampler

_ONLY_OPTIONS = {"sampling": "iid", "independent": False, "dropout": False}
"""Options of `MonteCarlo` that have one value where networks differ in their weights."""


def check_options(options: dict[str, Any], what: str) -> None:
    """Raise for options of `MonteCarlo` that posteriors over weights do not take.

    Args:
        options: those that the user gave.
        what: what does not take them, for the error.
    """
    for name, default in _ONLY_OPTIONS.items():
        value = options.get(name, default)
        if value != default:
            raise ValueError(
                f"`{name}` must be {default!r} for {what}; got {value!r}. Leave it out."
            )


class WeightSampler(Sampler):
    """The networks that a posterior over weights gives; they run one after the other.

    A network with stochastic layers draws its noise too, anew for each number.

    Args:
        posterior: gives the sets of weights.
        samples: number of networks.
        chunk_size: of how many networks to keep the outputs at once; None keeps all.

    Attributes:
        samples: number of networks; of a posterior with fewer weight sets, all of them. If the
            network has stochastic layers, it is the next multiple of the number of sets, so that
            each is drawn as often.
    """

    def __init__(
        self, posterior: WeightPosterior, samples: int, chunk_size: int | None = None
    ) -> None:
        self._posterior = posterior
        self._chunk_size = chunk_size
        self._noise: NoiseSampler | None = None
        self.samples = samples
        if stochastic_layers(posterior.network):
            self._noise = NoiseSampler(posterior.network, samples)
            if posterior.count is not None:
                self.samples = _next_multiple(samples, posterior.count)
        elif posterior.count is not None:
            self.samples = min(samples, posterior.count)

    def chunks(self, inputs: Any, key: Tensor) -> Chunks:
        size = min(self._chunk_size or self.samples, self.samples)
        count = -(-self.samples // size)
        outputs_of = self._runner(inputs, key)
        offsets = ops.arange(size, dtype="int32")

        def run(first: int | Tensor) -> Tensor:
            numbers = ops.cast(first, "int32") + offsets
            return outputs_of(numbers)

        return Chunks(run, size, count)

    def _runner(self, inputs: Any, key: Tensor) -> Callable[[Tensor], Any]:
        """Return a function of numbers (S,) that gives the outputs (S, ...) of these networks."""

        def outputs_of_one(number: Tensor) -> Any:
            outputs = self.draw(inputs, key, number)
            return keras.tree.map_structure(lambda x: x[0], outputs)

        return lambda numbers: ops.map(outputs_of_one, numbers)

    def draw(self, inputs: Any, key: Tensor, number: Tensor) -> Tensor:
        number = ops.cast(number, "int32")
        weights = self._posterior.sample(key, number)
        with self._in_place(weights):
            if self._noise is None:
                return self._outputs_without_noise(inputs)
            return self._noise.draw(inputs, key, number)

    def at_mean(self, inputs: Any) -> Tensor:
        weights = self._posterior.mean()
        with self._in_place(weights):
            if self._noise is None:
                return self._outputs_without_noise(inputs)
            return self._noise.at_mean(inputs)

    def _in_place(self, weights: list[Tensor]) -> Any:
        """Return a context in which the network has these weights."""
        pairs = zip(self._posterior.sampled, weights, strict=True)
        return keras_internals.values_in_place(pairs)

    def _outputs_without_noise(self, inputs: Any) -> Tensor:
        """Return the outputs (1, batch, ...) of the network with its present weights."""
        network = self._posterior.network
        outputs = named_outputs(network, network(inputs, training=False))
        return keras.tree.map_structure(lambda x: x[None], outputs)


class MixtureSampler(WeightSampler):
    """The networks of several samplers, one per member of a mixture, in turn, each as often.

    Args:
        samplers: one for each member.
        samples: number of networks.
        chunk_size: of how many networks to keep the outputs at once; None keeps all.

    Attributes:
        samples: number of networks, a multiple of the number of members. It is the fewest that
            hold every network of every member equally often, where that is less than asked for.
    """

    def __init__(
        self, samplers: Sequence[Sampler], samples: int, chunk_size: int | None = None
    ) -> None:
        self._samplers = samplers
        self._chunk_size = chunk_size
        # Sets that are fewer than those of another member repeat, until all are even.
        networks_per_member = math.lcm(*(sampler.samples for sampler in samplers))
        even = len(samplers) * networks_per_member
        self.samples = min(_next_multiple(samples, len(samplers)), even)

    def draw(self, inputs: Any, key: Tensor, number: int | Tensor) -> Tensor:
        if not isinstance(number, int):
            number = ops.cast(number, "int32")
        count = len(self._samplers)

        def branch(place: int, sampler: Sampler) -> Callable[[], Tensor]:
            # Each has its own key: members of one size would have the same noise otherwise.
            member_key = noise.key_of_part(key, place)
            return lambda: sampler.draw(inputs, member_key, number // count)

        branches = [branch(place, sampler) for place, sampler in enumerate(self._samplers)]
        if isinstance(number, int):
            return branches[number % count]()
        return ops.switch(number % count, branches)

    def at_mean(self, inputs: Any) -> Tensor:
        """Return the outputs (1, batch, ...) of the first member's network that stands for all."""
        return self._samplers[0].at_mean(inputs)


def _next_multiple(number: int, of: int) -> int:
    """Return the smallest multiple of `of` that is not below a number."""
    return -(-number // of) * of
