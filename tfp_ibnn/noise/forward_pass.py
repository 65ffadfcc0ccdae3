"""The noise of one forward pass.

A layer that is called twice in a pass uses one z and counts its KL once. By default each outermost
call of a model or layer is a pass, with independent draws for each example: `model(x)`,
`model.stateless_call(...)`, each batch of `fit`, `evaluate` and `predict`. A direct `layer.call(x)`
belongs to the pass around it, and is refused where there is none. A model that wants other draws
opens a `scope` in its own `call`. A pass lives no longer than its call.
"""

import contextlib
import contextvars
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import keras
from keras import layers, ops

from tfp_ibnn._core import checks, keras_internals
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.noise.source import Source

_open_pass = contextvars.ContextVar("tfp_ibnn_pass", default=None)
_passes: "weakref.WeakKeyDictionary[Any, Pass]" = weakref.WeakKeyDictionary()


class Pass:
    """What one forward pass hands to its stochastic layers, and what they have drawn in it.

    Args:
        groups: how many z each layer draws. The batch is cut into that many consecutive blocks of
            equal size, and all examples of a block share one z. None draws one for each example.
        off: every layer uses the mean of its posterior.
        losses: whether layers add their KL to the loss.
        draws: z by layer, of shape (groups, ...), for layers whose draws are already made.
        **source: `sampling`, `seed` and so on: those of `Source`.
    """

    examples: int | Tensor | None = None
    """How many examples there are, where a layer may see several rows for each."""

    seen: list[tuple[layers.Layer, Any]] | None = None
    """Layers and their inputs, in the order of their calls, if they are to be noted."""

    def __init__(
        self,
        *,
        groups: int | Tensor | None = None,
        off: bool = False,
        losses: bool = True,
        draws: Mapping[layers.Layer, Tensor] | None = None,
        **source: Any,
    ) -> None:
        if groups is not None and not ops.is_tensor(groups):
            groups = checks.positive_integer("groups", groups)
        self.groups = groups
        self.off = off
        self.losses = losses
        self.source = Source(**source)
        self.kl_by_layer: dict[layers.Layer, Tensor] = {}
        self._draws: dict[layers.Layer, Tensor] = dict(draws or {})
        self._losses: dict[layers.Layer, Tensor] = {}

    @property
    def kl(self) -> Tensor:
        """The KL divergences of all layers so far, summed, in nats."""
        kls = list(self.kl_by_layer.values())
        dtypes = [keras.backend.standardize_dtype(kl.dtype) for kl in kls]
        widest = max(dtypes, default="float32")
        total = ops.zeros((), widest)
        for kl in kls:
            kl = ops.cast(kl, widest)
            total = total + kl
        return total

    def count_of_draws(self, rows: int | Tensor) -> int | Tensor:
        """Return how many latents a layer draws whose input has so many rows."""
        if self.groups is not None:
            return self.groups
        return rows if self.examples is None else self.examples

    def recall(self, layer: layers.Layer) -> Tensor | None:
        """Return the z that `layer` has in this pass, or None before its first call."""
        return self._draws.get(layer)

    def remember(
        self,
        layer: layers.Layer,
        z: Tensor,
        loss: Tensor | None = None,
        kl: Tensor | None = None,
    ) -> Tensor:
        """Keep the z of a layer for its further calls in this pass, and add up the KL.

        Args:
            layer: which has drawn z.
            z: its latents.
            loss: what it has added to the loss; None if nothing.
            kl: its KL in nats, (), with a loss.

        Returns:
            z.
        """
        self._draws[layer] = z
        if loss is not None:
            self._losses[layer] = loss
            self.kl_by_layer[layer] = kl
        return z

    def restore_losses(self) -> None:
        """Add the losses of this pass again to layers whose losses Keras has forgotten.

        In JAX's functions Keras takes every call of a layer for an outermost one, and then drops
        what the layer added before; run eagerly, it may even drop what another layer added.
        """
        for layer, loss in self._losses.items():
            if not keras_internals.own_losses(layer):
                layer.add_loss(loss)


@contextlib.contextmanager
def scope(**options: Any) -> Iterator[Pass]:
    """Open a pass with the options of `Pass` and `Source`; to be used inside a model's `call` only.

    `with ibnn.noise.scope(groups=1):` gives the whole batch one z, `off=True` its mean. Around
    `predict` or `fit` it would act on tracing, and not on functions already compiled.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> layer = ibnn.StochasticDense(1, train_size=10)
        >>> with ibnn.noise.scope(groups=1):
        ...     y = layer(keras.ops.ones((2, 3)))
        >>> bool(y[0, 0] == y[1, 0])
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
    if _open_pass.get() is not None:
        return _open_pass.get()
    call = keras_internals.find_call()
    if call is None:
        raise RuntimeError(
            "No forward pass can be found: the KL would get lost or count twice. Use layer(x), not "
            "layer.call(x), or `with ibnn.noise.scope():` around it. If you did, do not use Keras "
            f"{keras.__version__}: pip install 'keras{keras_internals.TESTED_VERSIONS}'."
        )
    return _passes.setdefault(call, Pass())
