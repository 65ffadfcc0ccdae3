"""The cell of a recurrent layer, with noise on its input and on its state."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.layers.base import CELLS, is_known
from tfp_ibnn.layers.multiplicative import Stochastic
from tfp_ibnn.noise import current


def _of_the_cell(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.layer, name)(*args)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class StochasticCell(Stochastic, keras_internals.DropoutRNNCell):
    """Wrap the cell of an LSTM, GRU or SimpleRNN layer: z multiplies what its kernels multiply.

    One posterior has the channels of the input, then those of the state; a z holds for all steps of
    a sequence. `to_stochastic` makes such cells. The arguments are those of `Stochastic`.
    """

    draws_ahead = True  # a step has one position only

    def __init__(self, layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> None:
        if not is_known(layer):
            kinds = ", ".join(kind.__name__ for kind in CELLS)
            raise ValueError(
                f"The cell must be one of {kinds}, and not of a subclass, which may use its state "
                f"in other ways; got {layer!r}."
            )
        super().__init__(layer, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return what the recurrent layer reads of its cell, the cell's options above all."""
        if name.startswith("_") or name in ("layer", "noise_switch"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")
        return getattr(self.layer, name)

    @property
    def kernel(self) -> Any:
        """Raise as Keras expects it where cuDNN, which would pass the noise by, cannot be used."""
        raise NotImplementedError("The kernel of a stochastic cell has no value of its own.")

    @property
    def state_size(self) -> Any:
        """That of the cell; Keras looks for it in `dir(cell)`."""
        return self.layer.state_size

    def _latent_channels(self, input_shape: tuple[int | None, ...]) -> int:
        return self._channels + self.layer.units

    def call(
        self, inputs: Tensor, states: Any, training: bool | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the output of one step, and the states after it."""
        cell, forward_pass, training = self.layer, current(), bool(training)
        inputs = self.checked_inputs(inputs)
        z = self._latent(forward_pass, inputs, training)
        shared = forward_pass.groups is not None
        inputs = self._multiply(inputs, z[..., : self._channels], shared)
        own, *others = keras.tree.flatten(states)
        factor = self._multiply(ops.ones_like(own), z[..., self._channels :], shared)
        if not isinstance(cell, layers.GRUCell):
            return cell(inputs, [factor * own, *others], training=training)
        # A GRU also carries its state on, past the kernel. What only the kernel sees is multiplied
        # by the masks of its dropout, if there is one for each gate.
        kept = self._masks(cell.dropout * training, cell.get_dropout_mask, inputs)
        held = self._masks(cell.recurrent_dropout * training, cell.get_recurrent_dropout_mask, own)
        options = {"implementation": 1, "dropout": 0.5, "recurrent_dropout": 0.5}
        options["get_dropout_mask"] = lambda _: kept
        options["get_recurrent_dropout_mask"] = lambda _: [factor * mask for mask in held]
        return keras_internals.call_with(cell, inputs, [own], True, **options)

    @staticmethod
    def _masks(rate: float, mask_for: Callable[[Tensor], Any], step: Tensor) -> list[Any]:
        """Return the dropout masks of the three gates of a GRU."""
        masks = mask_for(step) if rate > 0 else 1
        return masks if isinstance(masks, list) else [masks] * 3

    def _output_factors(self, scale: np.ndarray) -> tuple[int, np.ndarray]:
        return 1, scale[:, None]  # of the recurrent kernel

    get_dropout_mask = _of_the_cell("get_dropout_mask")
    get_recurrent_dropout_mask = _of_the_cell("get_recurrent_dropout_mask")
    reset_dropout_mask = _of_the_cell("reset_dropout_mask")
    reset_recurrent_dropout_mask = _of_the_cell("reset_recurrent_dropout_mask")
