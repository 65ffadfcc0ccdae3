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

_ROWS = (
    "Layers that share a mixture component or a joint posterior need the same batch: a reshape may "
    "cut an example into rows, but not merge examples. Else give each layer its own one."
)


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
        self.sample, self.stream, self.portable = sample, stream, portable
        self.used, self._calls = skip, 0
        self._components: dict[int, Tensor] = {}

    def normal(
        self, count: Size, shape: Shape, dtype: str, generator: Generator, stddev: Any = 1.0
    ) -> Tensor:
        """Return `count` normal arrays of the given shape, drawn as this pass samples.

        Sizes may be known at run time only, but for quasi-random draws. Without a seed, fresh noise
        comes from the generator. `stddev` is a number or a tensor.
        """
        if self.key is None and self.sampling == "iid":
            return normal((count, *shape), dtype, generator, stddev)
        if self.key is None and self.sampling == "antithetic":
            half = normal(((count + 1) // 2, *shape), dtype, generator, stddev)
            return ops.reshape(ops.stack([half, -half], axis=1), (-1, *shape))[:count]
        if self.sampling == "iid" and not self.portable:
            first, second = (ops.cast(word, "int32") for word in self.key)
            apart = self._calls * _CALL_STRIDE % 2**31
            seed = ops.stack([first + apart, second + ops.sum(self._samples(count)[:1])])
            self._calls += 1
            self.used += math.prod(shape)
            return normal((count, *shape), dtype, seed, stddev)
        is_paired, samples = self.sampling == "antithetic", self._samples(count)
        source = counter.sobol if self.sampling == "qmc" else counter.bits
        if source is counter.sobol and not all(isinstance(size, int) for size in shape):
            wanted = "needs sizes that are known ahead: give the model's input a fixed one"
            raise ValueError(f"Quasi-random noise {wanted}; one draw has the shape {shape}.")
        words = self._words(source, samples // 2 if is_paired else samples, shape, generator)
        draws = ops.reshape(counter.normal(words, dtype), (count, *shape))
        if is_paired:
            sign = 1 - 2 * ops.cast(samples % 2, dtype)
            draws = draws * ops.reshape(sign, (count, *(1,) * len(shape)))
        return stddev * draws

    def uniform(self, count: Size, shape: Shape, dtype: str) -> Tensor:
        """Return `count` arrays of numbers uniform in [0, 1), independent, of a seeded pass."""
        words = self._words(counter.bits, self._samples(count), shape)
        return ops.reshape(counter.uniform(words, dtype), (count, *shape))

    def sign(self, count: Size, shape: Shape, dtype: str, generator: Generator) -> Tensor:
        """Return `count` arrays of independent signs, 1 or -1."""
        if self.key is None:
            bits = keras.random.randint((count, *shape), 0, 2, seed=generator)
        else:
            bits = self.uniform(count, shape, dtype) < 0.5
        return 1 - 2 * ops.cast(bits, dtype)

    def component(
        self, components: int, count: Size, generator: Generator, *, shared: bool
    ) -> Tensor:
        """Return the mixture component of each draw, integers of shape (count,).

        If shared, all layers of the pass with as many components have one index. The draws then
        take the components in turn, from a random one on (the first, if the seed is fixed). Where a
        batch is reshaped into more rows inside the network, those of an example have its component.
        """
        if not shared:
            if self.key is None:
                return keras.random.randint((count,), 0, components, seed=generator)
            number = ops.floor(components * self.uniform(count, (1,), "float32")[:, 0])
            return ops.cast(number, "int32")
        if components in self._components:
            return spread(self._components[components], count)
        index = self._samples(count)
        if self.sampling == "antithetic":
            index = index // 2
        if self.stream is not None:
            index = index + self.stream
        if self.key is None:
            index = index + keras.random.randint((), 0, components, seed=generator)
        self._components[components] = index % components
        return self._components[components]

    def _samples(self, count: Size) -> Tensor:
        return ops.arange(count, dtype="int32") if self.sample is None else self.sample

    def _words(
        self, source: Callable[..., Tensor], samples: Tensor, shape: Shape, generator: Any = None
    ) -> Tensor:
        """Return the next random words (samples, size of a draw) of this pass."""
        key = self.key
        if key is None:
            key = _key(keras.random.randint((2,), 0, 2**31 - 1, seed=generator))
        if self.stream is not None:
            key = (key[0], key[1] + ops.cast(self.stream, "uint32")[:, None])
        size = math.prod(shape)
        words = source(key, samples, self.used, size)
        self.used += size
        return words


def spread(values: Tensor, count: Size) -> Tensor:
    """Return the values (examples, ...) of each of `count` rows, in the order of their examples."""
    examples, rest = ops.shape(values)[0], values.shape[1:]
    known = isinstance(examples, int) and isinstance(count, int)
    if count is examples or (known and count == examples):
        return values
    rows = count // (max(examples, 1) if known else ops.maximum(examples, 1))
    if known and rows * examples != count:  # else the reshape below fails
        raise ValueError(f"{_ROWS} Here {count} rows follow {examples} examples.")
    return ops.reshape(ops.broadcast_to(values[:, None], (examples, rows, *rest)), (count, *rest))


def _key(seed: int | Tensor) -> tuple[Tensor, Tensor]:
    """Return the two words of a seed, or of a key of two integers."""
    if not ops.is_tensor(seed):
        seed = ops.convert_to_tensor(counter.key_from_seed(seed), dtype="int32")
    words = ops.cast(seed, "uint32")
    return words[0], words[1]
