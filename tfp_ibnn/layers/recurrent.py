"""The cell of a recurrent layer, with noise on its input and on its state."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.protocols import PosteriorTemplate
from tfp_ibnn.layers.base import CELLS, is_known
from tfp_ibnn.layers.multiplicative import Stochastic
from tfp_ibnn.noise import current

_GRU_OPTIONS = {"implementation": 1, "dropout": 0.5, "recurrent_dropout": 0.5}
"""With these a GRU's cell multiplies by the masks that it is given, one for each gate."""


def _of_the_cell(name: str) -> Callable[..., Any]:
    """Return a method that calls the one of the cell inside."""
    return lambda self, *args: getattr(self.layer, name)(*args)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class StochasticCell(Stochastic, keras_internals.DropoutRNNCell):
    """Wrap the cell of an LSTM, GRU or SimpleRNN layer: z multiplies what its kernels multiply.

    One posterior has the channels of the input, then those of the state; a z holds for all steps of
    a sequence. `to_stochastic` makes such cells.

    Args:
        layer: one of Keras's own cells.
        posterior: template over z; None is a Gaussian.
        train_size: number of training examples.
        **kwargs: `seed`, and the arguments of `keras.layers.Layer`.
    """

    draws_ahead = True  # a step has one position only
    is_plain_product = False

    def __init__(
        self,
        layer: keras.layers.Layer,
        posterior: PosteriorTemplate | None = None,
        train_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        if not is_known(layer):
            kinds = ", ".join(kind.__name__ for kind in CELLS)
            raise ValueError(
                f"The cell must be one of {kinds}, and not of a subclass, which may use its state "
                f"in other ways; got {layer!r}."
            )
        super().__init__(layer, posterior, train_size, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return what the recurrent layer reads of its cell, the cell's options above all."""
        if name.startswith("_") or name in ("layer", "noise_switch"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")
        return getattr(self.layer, name)

    @property
    def kernel(self) -> Any:
        """Raise as Keras expects it where cuDNN, which would bypass the noise, cannot be used."""
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
        """Take one step.

        Args:
            inputs: of the step, (batch, channels).
            states: tensors (batch, units) in any structure, of which the kernel multiplies the
                first.
            training: whether this is a training step.

        Returns:
            The output, (batch, units), and the states after the step.
        """
        forward_pass = current()
        training = bool(training)
        inputs = self.checked_inputs(inputs)
        latent = self._latent(forward_pass, inputs, training)
        shared = forward_pass.groups is not None
        z_of_input, z_of_state = self._split(latent)
        product = self._multiply(inputs, z_of_input, shared)
        state, *others = keras.tree.flatten(states)
        factor = self._multiply(ops.ones_like(state), z_of_state, shared)
        if isinstance(self.layer, layers.GRUCell):
            return self._gru_step(product, state, factor, training)
        return self.layer(product, [factor * state, *others], training=training)

    def _gru_step(
        self, inputs: Tensor, state: Tensor, factor: Tensor, training: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Take a step of a GRU, which also carries its state past the kernel.

        What only the kernel sees is multiplied by the masks of its dropout, if there is one for
        each gate: there the factor of the state goes.
        """
        cell = self.layer
        input_rate = cell.dropout if training else 0
        state_rate = cell.recurrent_dropout if training else 0
        input_masks = _masks(input_rate, cell.get_dropout_mask, inputs)
        dropout_masks = _masks(state_rate, cell.get_recurrent_dropout_mask, state)
        state_masks = [factor * mask for mask in dropout_masks]
        return keras_internals.call_with(
            cell,
            inputs,
            [state],
            True,
            get_dropout_mask=lambda _: input_masks,
            get_recurrent_dropout_mask=lambda _: state_masks,
            **_GRU_OPTIONS,
        )

    def _output_factors(self, scale: np.ndarray) -> tuple[int, np.ndarray]:
        recurrent_kernel = 1
        return recurrent_kernel, scale[:, None]

    get_dropout_mask = _of_the_cell("get_dropout_mask")
    get_recurrent_dropout_mask = _of_the_cell("get_recurrent_dropout_mask")
    reset_dropout_mask = _of_the_cell("reset_dropout_mask")
    reset_recurrent_dropout_mask = _of_the_cell("reset_recurrent_dropout_mask")


def _masks(rate: float, mask_for: Callable[[Tensor], Any], step: Tensor) -> list[Any]:
    """Return the dropout masks of the three gates of a GRU."""
    masks = mask_for(step) if rate > 0 else 1
    return masks if isinstance(masks, list) else [masks] * 3
