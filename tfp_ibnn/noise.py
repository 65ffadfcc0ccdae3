"""The noise of one forward pass.

A `Pass` hands every stochastic layer its draws for one pass through a model and remembers them, so
that a layer which is called twice uses one z and counts its KL once. Without further ado each call
of a model is a pass of its own, with independent draws for each example. A model that wants other
draws opens a `scope` inside its own `call`:

    with noise.scope(groups=1):                      # one z for the whole batch
    with noise.scope(groups=8, sampling="qmc"):      # the batch is 8 blocks, one z each
    with noise.scope(off=True):                      # z is its mean

A pass lives as long as the call it serves: nothing survives a trace.
"""

import contextlib
import contextvars
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src.backend.common import global_state, stateless_scope

from tfp_ibnn import _checks
from tfp_ibnn.backend import Tensor

__all__ = ["SAMPLINGS", "Pass", "current", "scope"]

SAMPLINGS = ("iid", "antithetic", "qmc")

_SOBOL_DIMENSIONS = 21201
_SOBOL_ROWS = 1024

_open_pass: contextvars.ContextVar["Pass | None"] = contextvars.ContextVar(
    "tfp_ibnn_pass", default=None
)

_passes: "weakref.WeakKeyDictionary[Any, Pass]" = weakref.WeakKeyDictionary()


class Pass:
    """What one forward pass hands to its stochastic layers.

    Args:
        groups: how many z each layer draws. The batch is cut into that many consecutive blocks of
            equal size, and all examples of a block share one z. None draws one for each example.
        sampling: "iid"; "antithetic", where the second half of the draws mirrors the first; or
            "qmc", scrambled Sobol points, over all layers jointly.
        seed: None takes fresh noise from the layers' own generators at each execution. A number
            fixes the noise as constants, the same on every backend and in every execution; it needs
            a fixed number of draws.
        off: every layer uses the mean of its posterior.
        draws: z by layer, of shape (groups, ...), for layers whose draws are already made.
    """

    def __init__(
        self,
        *,
        groups: int | None = None,
        sampling: str = "iid",
        seed: int | None = None,
        off: bool = False,
        draws: Mapping[keras.layers.Layer, Tensor] | None = None,
    ) -> None:
        self.groups = None if groups is None else _checks.positive_integer("groups", groups)
        self.sampling = _checks.one_of("sampling", sampling, SAMPLINGS)
        self.seed = seed
        self.off = off
        self._draws: dict[keras.layers.Layer, Tensor] = dict(draws or {})
        self._losses: dict[keras.layers.Layer, Tensor] = {}
        self._components: dict[int, Tensor] = {}
        self._kl: list[Tensor] = []
        self._requests = 0
        self._dimensions = 0

    @property
    def kl(self) -> Tensor:
        """The KL divergences of all layers so far, summed, in nats."""
        return sum(self._kl) if self._kl else ops.zeros(())

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
            self._kl.append(kl)

    def restore_losses(self) -> None:
        """Add the losses of this pass again to layers whose losses Keras has forgotten.

        In JAX's functions Keras takes every call of a layer for an outermost one, and then drops
        what the layer added before; run eagerly, it may even drop what another layer added.
        """
        for layer, loss in self._losses.items():
            if not layer._get_own_losses():
                layer.add_loss(loss)

    def normal(
        self,
        count: int | Tensor,
        shape: tuple[int | Tensor, ...],
        dtype: str,
        generator: keras.random.SeedGenerator,
    ) -> Tensor:
        """Return `count` standard normal arrays of the given shape, drawn as this pass samples.

        Args:
            count: number of draws, which may be known at run time only unless the seed is fixed.
            shape: shape of one draw.
            dtype: floating type of the draws.
            generator: source of fresh noise.
        """
        if self.sampling == "qmc" or self.seed is not None:
            if not all(isinstance(size, int) for size in shape):
                raise ValueError(
                    "Quasi-random and seeded noise needs sizes that are known ahead; one draw has "
                    f"the shape {shape}. Give the model's input a fixed size, or use "
                    "sampling='iid' without a seed."
                )
        if self.seed is not None:
            return ops.convert_to_tensor(self._seeded_normal(count, shape), dtype=dtype)
        if self.sampling == "qmc":
            return self._shifted_sobol(count, shape, dtype, generator)
        if self.sampling == "iid":
            return keras.random.normal((count, *shape), dtype=dtype, seed=generator)
        half = keras.random.normal(((count + 1) // 2, *shape), dtype=dtype, seed=generator)
        return ops.concatenate([half, -half], axis=0)[:count]

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
                fixed), so that each has its share in batches of any size.
        """
        if not shared:
            if self.seed is not None:
                draws = self._generator().integers(components, size=self._fixed(count))
                return ops.convert_to_tensor(draws, dtype="int32")
            return keras.random.randint((count,), 0, components, seed=generator)
        if components not in self._components:
            index = ops.arange(count, dtype="int32")
            if self.seed is None:
                index = index + keras.random.randint((), 0, components, seed=generator)
            self._components[components] = index % components
        return self._components[components]

    def _generator(self) -> np.random.Generator:
        """Return a NumPy generator for the next request of a seeded pass."""
        self._requests += 1
        return np.random.default_rng([self.seed, self._requests])

    def _fixed(self, count: int | Tensor) -> int:
        if not isinstance(count, int):
            raise ValueError(
                "Seeded noise needs a fixed number of draws: set `groups` along with `seed`."
            )
        return count

    def _seeded_normal(self, count: int | Tensor, shape: tuple[int, ...]) -> np.ndarray:
        rows, rng = self._fixed(count), self._generator()
        if self.sampling == "qmc":
            from scipy.special import ndtri

            return ndtri(self._sobol(rows, int(np.prod(shape)), rng)).reshape(rows, *shape)
        if self.sampling == "iid":
            return rng.standard_normal((rows, *shape))
        half = rng.standard_normal(((rows + 1) // 2, *shape))
        return np.concatenate([half, -half])[:rows]

    def _shifted_sobol(
        self,
        count: int | Tensor,
        shape: tuple[int, ...],
        dtype: str,
        generator: keras.random.SeedGenerator,
    ) -> Tensor:
        """Return Sobol points under a fresh random shift (modulo 1), as normals."""
        rows = count if isinstance(count, int) else _SOBOL_ROWS
        table = self._sobol(rows, int(np.prod(shape)), np.random.default_rng(0))
        points = ops.take(ops.cast(table, dtype), ops.arange(count) % rows, axis=0)
        shift = keras.random.uniform((table.shape[1],), dtype=dtype, seed=generator)
        inside = ops.clip((points + shift) % 1.0, 2.0**-24, 1 - 2.0**-24)
        normal = 2.0**0.5 * ops.erfinv(2 * inside - 1)
        return ops.reshape(normal, (count, *shape))

    def _sobol(self, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
        """Return the next `columns` dimensions of the pass's Sobol points, scrambled, in (0, 1).

        Scrambling acts on each dimension by itself, so layers that take their dimensions one after
        the other get the same points as if they had drawn jointly. Past the last dimension there
        is, the count starts again, with the points in another order.
        """
        from scipy.stats import qmc

        blocks = []
        while columns > 0:
            start = self._dimensions % _SOBOL_DIMENSIONS
            width = min(columns, _SOBOL_DIMENSIONS - start)
            sobol = qmc.Sobol(start + width, scramble=True, rng=rng)
            block = sobol.random_base2(max(0, (rows - 1).bit_length()))[:rows, start:]
            wrapped = self._dimensions >= _SOBOL_DIMENSIONS
            blocks.append(rng.permutation(block) if wrapped else block)
            self._dimensions += width
            columns -= width
        tiny = 2.0**-40
        return np.clip(np.concatenate(blocks, axis=1), tiny, 1 - tiny)


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
    # One object of Keras's lives exactly as long as a pass: in JAX's functions the scope that holds
    # the state of the call, and elsewhere the context of the outermost layer's call.
    if stateless_scope.in_stateless_scope():
        anchor = stateless_scope.get_stateless_scope()
    else:
        anchor = global_state.get_global_attribute("current_call_ctx")
    if anchor is None:
        return Pass()
    return _passes.setdefault(anchor, Pass())
