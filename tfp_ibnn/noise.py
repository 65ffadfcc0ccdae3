"""The noise of one forward pass.

A `Pass` hands every stochastic layer its draws for one pass through a model and remembers them, so
that a layer which is called twice uses one z and counts its KL once.

By default each outermost call of a model or layer is a pass of its own, with independent
draws for each example: `model(x)`, `model.stateless_call(...)`, and each batch of `fit`, `evaluate`
and `predict`. The rule is the same on every backend; a `keras.StatelessScope` around two calls does
not join them. A method that is called directly, `layer.call(x)`, belongs to the pass around it, and
is refused where there is none.

A model that wants other draws opens a `scope` inside its own `call`:

    with noise.scope(groups=1):                      # one z for the whole batch
    with noise.scope(groups=8, sampling="qmc"):      # the batch is 8 blocks, one z each
    with noise.scope(off=True):                      # z is its mean

A pass lives as long as the call it serves: nothing survives a trace.
"""

import contextlib
import contextvars
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
from keras import ops

from tfp_ibnn import _checks, _counter
from tfp_ibnn._core import keras_internals
from tfp_ibnn.backend import Tensor, checked, normal

__all__ = ["SAMPLINGS", "Pass", "current", "scope"]

SAMPLINGS = ("iid", "antithetic", "qmc")

_CALL_STRIDE = 0x9E3779B1
"""Distance between the seeds of two layers: those of two batches follow each other."""

_ROWS = (
    "Layers with a common mixture component for each example need the same batch: a reshape inside "
    "the network may cut each example into several rows, as from (batch, time, channels) to "
    "(batch * time, channels), but not merge examples. To allow any reshape, choose components per "
    "layer: FlowPosterior(components=4)."
)

_open_pass: contextvars.ContextVar["Pass | None"] = contextvars.ContextVar(
    "tfp_ibnn_pass", default=None
)

_passes: "weakref.WeakKeyDictionary[Any, Pass]" = weakref.WeakKeyDictionary()


class Pass:
    """What one forward pass hands to its stochastic layers.

    Args:
        groups: how many z each layer draws. The batch is cut into that many consecutive blocks of
            equal size, and all examples of a block share one z. None draws one for each example.
        sampling: "iid"; "antithetic", where the second draw of each pair mirrors the first; or
            "qmc", scrambled Sobol points, over all layers jointly.
        seed: None takes fresh noise from the layers' own generators at each execution. With a
            number, or a key of two integers (a tensor, perhaps), every draw is a function of it and
            of `sample` and `stream` alone, on every backend and under every compiler.
        sample: with a seed, the number of each draw, (draws,); 0, 1, ... by default.
        stream: with a seed, which of many independent streams each draw is from, (draws,).
        skip: with a seed, how many random numbers of each draw are already used.
        portable: False relaxes what a seed promises: independent noise may then depend on the
            number of draws too, on backend and compiler. It is drawn several times as fast.
        off: every layer uses the mean of its posterior.
        losses: whether layers add their KL to the loss.
        draws: z by layer, of shape (groups, ...), for layers whose draws are already made.
    """

    def __init__(
        self,
        *,
        groups: int | Tensor | None = None,
        sampling: str = "iid",
        seed: int | Tensor | None = None,
        sample: Tensor | None = None,
        stream: Tensor | None = None,
        skip: int = 0,
        portable: bool = True,
        off: bool = False,
        losses: bool = True,
        draws: Mapping[keras.layers.Layer, Tensor] | None = None,
    ) -> None:
        if groups is not None and not ops.is_tensor(groups):
            groups = _checks.positive_integer("groups", groups)
        self.groups = groups
        self.sampling = _checks.one_of("sampling", sampling, SAMPLINGS)
        self.key = None if seed is None else _key(seed)
        self.sample, self.stream = sample, stream
        self.portable = portable
        self.off = off
        self.losses = losses
        self.used = skip
        self._calls = 0
        self._draws: dict[keras.layers.Layer, Tensor] = dict(draws or {})
        self._losses: dict[keras.layers.Layer, Tensor] = {}
        self._components: dict[int, Tensor] = {}
        self._kl: dict[keras.layers.Layer, Tensor] = {}

    @property
    def kl(self) -> Tensor:
        """The KL divergences of all layers so far, summed, in nats."""
        return sum(self._kl.values()) if self._kl else ops.zeros(())

    @property
    def layers(self) -> list[keras.layers.Layer]:
        """The layers that have drawn so far, in that order."""
        return list(self._draws)

    def first_fault(self) -> Tensor:
        """Return the place of the first z or KL that is not finite, from 1 on; 0 if all are.

        Layer i of `layers`, counted from 0, has its z in place 2 i + 1 and its KL in 2 i + 2.
        """
        numbers = [
            ops.cast(number, "float32")
            for layer, z in self._draws.items()
            # With noise at each position z is large; one example shows what the weights do.
            for number in (ops.sum(z if len(z.shape) == 2 else z[:1]), self._kl.get(layer, 0.0))
        ]
        if not numbers:
            return ops.zeros((), dtype="int32")
        bad = ops.logical_not(ops.isfinite(ops.stack(numbers)))
        return ops.where(ops.any(bad), ops.cast(ops.argmax(bad), "int32") + 1, 0)

    def recall(self, layer: keras.layers.Layer) -> Tensor | None:
        """Return the z that `layer` has in this pass, or None before its first call."""
        return self._draws.get(layer)

    def remember(
        self,
        layer: keras.layers.Layer,
        z: Tensor,
        loss: Tensor | None = None,
        kl: Tensor | None = None,
    ) -> None:
        """Keep what `layer` has drawn for its further calls in this pass, and add up the KL."""
        self._draws[layer] = z
        if loss is not None:
            self._losses[layer] = loss
        if kl is not None:
            self._kl[layer] = kl

    def restore_losses(self) -> None:
        """Add the losses of this pass again to layers whose losses Keras has forgotten.

        In JAX's functions Keras takes every call of a layer for an outermost one, and then drops
        what the layer added before; run eagerly, it may even drop what another layer added.
        """
        for layer, loss in self._losses.items():
            if not keras_internals.own_losses(layer):
                layer.add_loss(loss)

    def normal(
        self,
        count: int | Tensor,
        shape: tuple[int | Tensor, ...],
        dtype: str,
        generator: keras.random.SeedGenerator,
        stddev: float | Tensor = 1.0,
    ) -> Tensor:
        """Return `count` normal arrays of the given shape, drawn as this pass samples.

        Args:
            count: number of draws, which may be known at run time only.
            shape: shape of one draw; quasi-random draws need numbers.
            dtype: floating type of the draws.
            generator: source of fresh noise.
            stddev: standard deviation, a number.
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
        source = _counter.sobol if self.sampling == "qmc" else _counter.bits
        words = self._words(count, shape, generator, source)
        draws = ops.reshape(_counter.normal(words, dtype), (count, *shape))
        if self.sampling == "antithetic":
            sign = 1 - 2 * ops.cast(self._samples(count) % 2, dtype)
            draws = draws * ops.reshape(sign, (count, *(1,) * len(shape)))
        return stddev * draws

    def uniform(self, count: int | Tensor, shape: tuple[int | Tensor, ...], dtype: str) -> Tensor:
        """Return `count` arrays of numbers uniform in [0, 1), independent, of a seeded pass."""
        words = self._words(count, shape, None, _counter.bits, paired=False)
        return ops.reshape(_counter.uniform(words, dtype), (count, *shape))

    def component(
        self,
        components: int,
        count: int | Tensor,
        generator: keras.random.SeedGenerator,
        *,
        shared: bool,
    ) -> Tensor:
        """Return the mixture component of each draw, integers of shape (count,).

        Args:
            components: how many there are.
            count: number of draws.
            generator: source of fresh noise.
            shared: one index for all layers of the pass that have as many components. The draws
                then take the components in turn, from a random one on (the first, if the seed is
                fixed), so that each has its share in batches of any size. Where a batch is reshaped
                into more rows inside the network, the rows of an example have its component.
        """
        if not shared:
            if self.key is None:
                return keras.random.randint((count,), 0, components, seed=generator)
            number = ops.floor(components * self.uniform(count, (1,), "float32")[:, 0])
            return ops.cast(number, "int32")
        if components not in self._components:
            index = self._samples(count)
            if self.sampling == "antithetic":
                index = index // 2
            if self.stream is not None:
                index = index + self.stream
            if self.key is None:
                index = index + keras.random.randint((), 0, components, seed=generator)
            self._components[components] = index % components
            return self._components[components]
        return _spread(self._components[components], count)

    def _samples(self, count: int | Tensor) -> Tensor:
        return ops.arange(count, dtype="int32") if self.sample is None else self.sample

    def _words(
        self,
        count: int | Tensor,
        shape: tuple[int | Tensor, ...],
        generator: keras.random.SeedGenerator | None,
        source: Callable[..., Tensor],
        *,
        paired: bool = True,
    ) -> Tensor:
        """Return the next random words (count, size of a draw) of this pass."""
        if source is _counter.sobol and not all(isinstance(size, int) for size in shape):
            raise ValueError(
                "Quasi-random noise needs sizes that are known ahead; one draw has the shape "
                f"{shape}. Give the model's input a fixed size, or use another sampling."
            )
        key = self.key
        if key is None:
            key = _key(keras.random.randint((2,), 0, 2**31 - 1, seed=generator))
        if self.stream is not None:
            key = (key[0], key[1] + ops.cast(self.stream, "uint32")[:, None])
        samples = self._samples(count)
        if paired and self.sampling == "antithetic":
            samples = samples // 2
        size = math.prod(shape)
        words = source(key, samples, self.used, size)
        self.used += size
        return words


@contextlib.contextmanager
def scope(**options: Any) -> Iterator[Pass]:
    """Open a pass with the options of `Pass`; to be used inside a model's `call` only.

    Around `predict` or `fit` it would act on tracing, and not on functions already compiled.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> layer = ibnn.StochasticDense(2, posterior=ibnn.NormalAffine(), train_size=10)
        >>> with ibnn.noise.scope(groups=1):
        ...     y = layer(keras.ops.ones((3, 4)))
        >>> bool(keras.ops.all(y[0] == y[2]))
        True
    """
    opened = Pass(**options)
    token = _open_pass.set(opened)
    try:
        yield opened
    finally:
        _open_pass.reset(token)


def current() -> Pass:
    """Return the innermost open pass, or else the one that belongs to the present Keras call."""
    opened = _open_pass.get()
    if opened is not None:
        return opened
    call = keras_internals.find_call()
    if call is None:
        raise RuntimeError(
            "No forward pass can be found, so the KL would be lost or counted twice. Call the "
            "layer or model itself, layer(x), not layer.call(x), or open a pass around the call: "
            "`with ibnn.noise.scope():`. If you did, this package does not work with Keras "
            f"{keras.__version__}: pip install 'keras{keras_internals.TESTED_VERSIONS}'."
        )
    return _passes.setdefault(call, Pass())


def _spread(index: Tensor, count: int | Tensor) -> Tensor:
    """Return the component of each of `count` rows, given those of the examples they came from.

    A reshape, as from (batch, time, channels) to (batch * time, channels), leaves the rows of an
    example next to each other.
    """
    examples = ops.shape(index)[0]
    known = isinstance(examples, int) and isinstance(count, int)
    if count is examples or (known and count == examples):
        return index
    rows = count // (max(examples, 1) if known else ops.maximum(examples, 1))
    if not known:
        index = checked(index, rows * examples == count, _ROWS)
    elif rows * examples != count:
        raise ValueError(f"{_ROWS} Here {count} rows follow {examples} examples.")
    return ops.reshape(ops.broadcast_to(index[:, None], (examples, rows)), (count,))


def _key(seed: int | Tensor) -> tuple[Tensor, Tensor]:
    """Return the two words of a seed, or of a key of two integers."""
    if not ops.is_tensor(seed):
        seed = ops.convert_to_tensor(_counter.key_from_seed(seed), dtype="int32")
    words = ops.cast(seed, "uint32")
    return words[0], words[1]
