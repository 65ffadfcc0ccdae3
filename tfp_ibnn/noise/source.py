"""Where the random numbers of a forward pass come from: independent, mirrored, quasi-random."""

import math
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor, normal
from tfp_ibnn.noise import counter

SAMPLINGS = ("iid", "antithetic", "qmc")

Size = int | Tensor  # an axis's length; a tensor if it is known at run time only
Shape = tuple[Size, ...]
Generator = keras.random.SeedGenerator

_CALL_STRIDE = 0x9E3779B1
"""Distance between the seeds of two layers: those of two batches follow each other."""


class Source:
    """Gives the random numbers of one pass, layer after layer.

    Args:
        sampling: "iid"; "antithetic", where the second draw of each pair mirrors the first; or
            "qmc", scrambled Sobol points, over all layers jointly.
        seed: None takes fresh noise from the layers' own generators at each execution. With a
            number, or a key of two integers (a tensor, perhaps), every draw is a function of it and
            of `sample` and `stream` alone, on every backend and under every compiler.
        sample: with a seed, the number of each draw, (draws,); 0, 1, ... by default.
        stream: with a seed, which of many independent streams each draw is from, (draws,).
        skip: with a seed, how many random numbers of each draw are already used.
        portable: False relaxes what a seed promises: independent noise may then depend on the
            number of draws too, on backend and compiler. An own draw for each example, 128 times,
            then costs LeNet 1.3 times the passes without noise, and 1.8 times otherwise.
    """

    def __init__(
        self,
        sampling: str = "iid",
        seed: int | Tensor | None = None,
        sample: Tensor | None = None,
        stream: Tensor | None = None,
        skip: int = 0,
        portable: bool = True,
    ) -> None:
        self.sampling = checks.one_of("sampling", sampling, SAMPLINGS)
        self.key = None if seed is None else _key(seed)
        self.sample = sample
        self.stream = stream
        self.portable = portable
        self.used = skip
        self._calls = 0
        self._components: dict[int, Tensor] = {}

    def normal(
        self, count: Size, shape: Shape, dtype: str, generator: Generator, stddev: Any = 1.0
    ) -> Tensor:
        """Return normal arrays, drawn as this pass samples.

        Sizes may be known at run time only, but for quasi-random draws.

        Args:
            count: how many arrays.
            shape: of each.
            dtype: of the numbers, "float32" or "float64".
            generator: gives fresh noise, where there is no seed.
            stddev: standard deviation, a number or a tensor.

        Returns:
            A tensor (count, *shape).
        """
        full_shape = (count, *shape)
        is_fresh = self.key is None
        if is_fresh and self.sampling == "iid":
            return normal(full_shape, dtype, generator, stddev)
        if is_fresh and self.sampling == "antithetic":
            pair_count = (count + 1) // 2
            half_shape = (pair_count, *shape)
            half = normal(half_shape, dtype, generator, stddev)
            pairs = ops.stack([half, -half], axis=1)
            draws = ops.reshape(pairs, (-1, *shape))
            return draws[:count]
        if self.sampling == "iid" and not self.portable:
            seed = self._seed_of_call(count, shape)
            return normal(full_shape, dtype, seed, stddev)
        draws = self._portable_normal(count, shape, dtype, generator)
        return stddev * draws

    def _seed_of_call(self, count: Size, shape: Shape) -> Tensor:
        """Return the seed (2,) of the next draws of a pass that is not portable."""
        first, second = (ops.cast(word, "int32") for word in self.key)
        samples = self._samples(count)
        first_sample = ops.sum(samples[:1])
        distance = self._calls * _CALL_STRIDE % 2**31
        self._calls += 1
        self.used += math.prod(shape)
        first = first + distance
        second = second + first_sample
        return ops.stack([first, second])

    def _portable_normal(
        self, count: Size, shape: Shape, dtype: str, generator: Generator
    ) -> Tensor:
        """Return standard normal arrays (count, *shape) that each depend on their own number."""
        samples = self._samples(count)
        if self.sampling == "antithetic":
            words = self._words(counter.bits, samples // 2, shape, generator)
        elif self.sampling == "qmc":
            words = self._quasi_random_words(samples, shape, generator)
        else:
            words = self._words(counter.bits, samples, shape, generator)
        numbers = counter.normal(words, dtype)
        draws = ops.reshape(numbers, (count, *shape))
        if self.sampling == "antithetic":
            is_odd = ops.cast(samples % 2, dtype)
            sign = 1 - 2 * is_odd
            ones = (1,) * len(shape)
            sign = ops.reshape(sign, (count, *ones))
            draws = draws * sign
        return draws

    def _quasi_random_words(self, samples: Tensor, shape: Shape, generator: Generator) -> Tensor:
        are_known = all(isinstance(size, int) for size in shape)
        if not are_known:
            raise ValueError(
                "Quasi-random noise needs sizes that are known ahead: give the model's input a "
                f"fixed one; one draw has the shape {shape}."
            )
        return self._words(counter.sobol, samples, shape, generator)

    def uniform(self, count: Size, shape: Shape, dtype: str) -> Tensor:
        """Return arrays of numbers uniform in [0, 1), independent, of a seeded pass.

        Args:
            count: how many arrays.
            shape: of each.
            dtype: of the numbers.

        Returns:
            A tensor (count, *shape).
        """
        samples = self._samples(count)
        words = self._words(counter.bits, samples, shape)
        numbers = counter.uniform(words, dtype)
        return ops.reshape(numbers, (count, *shape))

    def sign(self, count: Size, shape: Shape, dtype: str, generator: Generator) -> Tensor:
        """Return arrays of independent signs, 1 or -1.

        Args:
            count: how many arrays.
            shape: of each.
            dtype: of the numbers.
            generator: gives fresh signs, where there is no seed.

        Returns:
            A tensor (count, *shape).
        """
        if self.key is None:
            is_negative = keras.random.randint((count, *shape), 0, 2, seed=generator)
        else:
            is_negative = self.uniform(count, shape, dtype) < 0.5
        is_negative = ops.cast(is_negative, dtype)
        return 1 - 2 * is_negative

    def component(
        self, components: int, count: Size, generator: Generator, *, shared: bool
    ) -> Tensor:
        """Return the mixture component of each draw.

        If shared, all layers of the pass with as many components have one index. The draws then
        take the components in turn, from a random one on (the first, if the seed is fixed). Where a
        batch is reshaped into more rows inside the network, those of an example have its component.

        Args:
            components: how many there are.
            count: how many draws.
            generator: gives fresh numbers, where there is no seed.
            shared: whether all layers have one index.

        Returns:
            Integers (count,).
        """
        if not shared:
            return self._own_component(components, count, generator)
        if components not in self._components:
            self._components[components] = self._component_in_turn(components, count, generator)
            return self._components[components]
        return spread(self._components[components], count)

    def _own_component(self, components: int, count: Size, generator: Generator) -> Tensor:
        if self.key is None:
            return keras.random.randint((count,), 0, components, seed=generator)
        numbers = self.uniform(count, (1,), "float32")
        index = ops.floor(components * numbers[:, 0])
        return ops.cast(index, "int32")

    def _component_in_turn(self, components: int, count: Size, generator: Generator) -> Tensor:
        index = self._samples(count)
        if self.sampling == "antithetic":
            index = index // 2
        if self.stream is not None:
            index = index + self.stream
        if self.key is None:
            first = keras.random.randint((), 0, components, seed=generator)
            index = index + first
        return index % components

    def _samples(self, count: Size) -> Tensor:
        """Return the number of each draw, (count,)."""
        if self.sample is not None:
            return self.sample
        return ops.arange(count, dtype="int32")

    def _words(
        self, source: Callable[..., Tensor], samples: Tensor, shape: Shape, generator: Any = None
    ) -> Tensor:
        """Return the next random words (samples, size of a draw) of this pass."""
        key = self.key
        if key is None:
            fresh_key = keras.random.randint((2,), 0, 2**31 - 1, seed=generator)
            key = _key(fresh_key)
        if self.stream is not None:
            first, second = key
            stream = ops.cast(self.stream, "uint32")
            second = second + stream[:, None]
            key = (first, second)
        size = math.prod(shape)
        offset = self.used
        words = source(key, samples, offset, size)
        self.used += size
        return words


def spread(values: Tensor, count: Size) -> Tensor:
    """Return the values of the examples for the rows that these are cut into.

    Args:
        values: (examples, ...).
        count: number of rows, in the order of their examples.

    Returns:
        A tensor (count, ...).

    Raises:
        ValueError: If it is known ahead that the rows are not a multiple of the examples.
    """
    examples = ops.shape(values)[0]
    sizes_are_known = isinstance(examples, int) and isinstance(count, int)
    if count is examples or (sizes_are_known and count == examples):
        return values
    if not sizes_are_known:
        rows = count // ops.maximum(examples, 1)
    else:
        rows = count // max(examples, 1)
        if rows * examples != count:  # else the reshape below fails
            raise ValueError(
                "Layers that share a mixture component or a joint posterior need the same batch: a "
                "reshape may cut an example into rows, but not merge examples. Else give each "
                f"layer its own one. Here {count} rows follow {examples} examples."
            )
    shape = values.shape[1:]
    each = values[:, None]
    repeated = ops.broadcast_to(each, (examples, rows, *shape))
    return ops.reshape(repeated, (count, *shape))


def _key(seed: int | Tensor) -> tuple[Tensor, Tensor]:
    """Return the two words of a seed, or of a key of two integers."""
    if not ops.is_tensor(seed):
        key = counter.key_from_seed(seed)
        seed = ops.convert_to_tensor(key, dtype="int32")
    words = ops.cast(seed, "uint32")
    first = words[0]
    second = words[1]
    return first, second
