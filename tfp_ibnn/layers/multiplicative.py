"""Layers whose input is multiplied by a latent z drawn from a posterior."""

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tfp_ibnn._core import checks, keras_internals
from tfp_ibnn._core.backend import Tensor, times
from tfp_ibnn._core.protocols import Draw, PosteriorTemplate
from tfp_ibnn._core.serialization import ConfiguredLayer
from tfp_ibnn.layers import base, folding
from tfp_ibnn.layers.convolution import convolves, finish, noisy_convolution, separate_channels
from tfp_ibnn.noise import Pass

NOISES = ("channel", "position")
REDUCTIONS = ("sum", "mean")

_FEW_CHANNELS = 4  # an image's
_SMALL_OUTPUT = 2**13  # numbers in a convolution's output for one example


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Stochastic(ConfiguredLayer, base.StochasticLayer):
    """Wrap a layer: y = layer(z * x), with z from a posterior, whose KL is added to the loss.

    The term added by `add_loss` is (beta * KL - gamma * entropy) / train_size: Keras averages the
    likelihood over the batch, so with beta = 1 and gamma = 0 the sum of both is the negative ELBO
    per example. Where Keras averages over pixels or time steps too, `StochasticModel.compile`
    divides the term by their number; in a plain `keras.Model`, divide beta. The noise is on in
    inference too, unless it is switched off by `set_noise`.

    Args:
        layer: a Keras layer with one floating-point input tensor, (batch, ..., channels). Dense
            layers and convolutions also take integers and booleans, and cast them.
        posterior: template; the layer builds its own copy for its channels. None is a Gaussian.
        train_size: number of training examples, over which the KL is spread.
        noise: "channel", one z for each example and channel; or "position", one for each position
            (pixel, time step) too, from the same posterior, and the same in each call of a pass.
        kl_reduction: with position noise, "sum" the KL over positions (the ELBO) or take the "mean"
            (as the original report did).
        seed: of the noise; None takes the posterior's, or one derived from it if an earlier layer
            has taken that.
        **kwargs: those of `keras.layers.Layer`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> layer = ibnn.Stochastic(keras.layers.Dense(2), ibnn.NormalPlanar1d(), train_size=100)
        >>> layer(keras.ops.ones((5, 3))).shape[-1]
        2
    """

    def __init__(
        self,
        layer: keras.layers.Layer,
        posterior: PosteriorTemplate | None = None,
        train_size: int | None = None,
        noise: str = "channel",
        kl_reduction: str = "sum",
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        if posterior is None:
            # By its name: posteriors know their layers, and not the other way round.
            posterior = keras.saving.get_registered_object("tfp_ibnn>FlowPosterior")()
        if isinstance(posterior, PosteriorTemplate) and not hasattr(posterior, "draw"):
            kind = type(posterior).__name__
            remedy = f"write `{kind}(...).wrap(layer, train_size)` instead of this layer"
            raise ValueError(f"`posterior` must be one over z; {kind} is over weights: {remedy}.")
        super().__init__(layer, posterior, train_size, seed, **kwargs)
        self.noise = checks.one_of("noise", noise, NOISES)
        self.kl_reduction = checks.one_of("kl_reduction", kl_reduction, REDUCTIONS)
        if noise == "position" and type(self).draws_ahead is True:
            got = f"{type(layer).__name__}, named {layer.name!r}"
            raise ValueError(f"`noise` must be 'channel' for {got}.")
        if self._both:
            self._check_both()
            self.forbid("quantize")
            self.activity_regularizer = layer.activity_regularizer  # the layer's call is not used

    def _check_both(self) -> None:
        """Raise if it is not known where the kernel of the layer is, between two factors."""
        layer = self.layer
        is_kernel = base.is_known(layer) and not base.is_quantized(layer)
        if not is_kernel or self.noise != "channel":
            raise ValueError(
                "`sides='both'` is for Keras's own Dense layers and convolutions, not quantized, "
                f"with noise='channel'; got {layer!r} with noise={self.noise!r}. Use sides='input'."
            )

    @property
    def draws_ahead(self) -> bool:
        """Whether `draw` works without `inputs`: with noise at each position it needs the shape."""
        return self.noise == "channel"

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self._channels = checks.channels_of(self._owner, input_shape)
        if len(input_shape) < 2:
            raise self._wrong_shape(input_shape)
        self._input_shape = tuple(input_shape)
        self.posterior.build((None, self._latent_channels(input_shape)))
        super().build(input_shape)

    def _latent_channels(self, input_shape: tuple[int | None, ...]) -> int:
        if not self._both:
            return self._channels
        outputs = self.layer.compute_output_shape(input_shape)[-1]
        self._output_factors(np.ones(outputs))
        return self._channels + outputs

    def draw(
        self, forward_pass: Pass, count: int | Tensor, inputs: Any = None, training: bool = False
    ) -> Draw:
        """Return `count` z of a pass, (count, [positions,] channels), with KL and entropy."""
        positions = () if self.draws_ahead else self._positions(inputs)
        on = self.noise_switch > 0.5
        return self.posterior.draw(forward_pass, count, positions, on, training)

    def apply(
        self,
        inputs: Tensor,
        latent: Tensor,
        groups: int | Tensor | None = None,
        mask: Tensor | None = None,
        training: bool = False,
    ) -> Tensor:
        if training and groups is None and self.posterior.is_centered and self._convolves_image:
            loc, scale = self.posterior.loc_and_scale()
            normal = ops.cast(ops.stop_gradient((latent - loc) / scale), inputs.dtype)
            normal = self.broadcast(normal, len(inputs.shape))
            return noisy_convolution(self.layer, inputs, normal, loc, scale)
        shared, size = groups is not None, self._channels
        if self._both:
            inputs = ops.cast(inputs, self.layer.compute_dtype)  # as its own call does
        modulated = self._multiply(inputs, latent[..., :size], shared)
        if self._both:
            linear = {"bias": None, "use_bias": False, "activation": None}
            outputs = keras_internals.call_with(self.layer, modulated, **linear)
            return finish(self.layer, self._multiply(outputs, latent[..., size:], shared))
        return self.layer(modulated, mask=mask) if self._layer_takes_mask else self.layer(modulated)

    def mean_latent(self) -> Tensor:
        return self.posterior.mean()[None]

    def fold(self) -> keras.layers.Layer:
        """Return the wrapped layer with the mean of z in its weights, or behind a `Rescaling`.

        What LoRA adds becomes part of the kernel, as in a file of Keras.
        """
        layer, place = self.layer, (self.name, self._input_shape)
        mean = ops.convert_to_numpy(self.posterior.mean())
        on_inputs, on_outputs = mean[: self._channels], mean[self._channels :]
        spread = self.broadcast(on_inputs[None], len(self._input_shape))[0]
        spread = ops.convert_to_numpy(spread)
        if not base.is_known(layer) or base.is_quantized(layer):
            return folding.behind_rescaling(layer, spread, *place)
        weights = folding.merged_weights(layer)
        if len(on_outputs):
            number, factors = self._output_factors(on_outputs)
            weights[number] = (weights[number] * factors).astype(weights[number].dtype)
        factors = folding.kernel_factors(layer, on_inputs)
        if factors is None:
            return folding.behind_rescaling(layer, spread, *place, weights)
        weights[0] = (weights[0] * factors).astype(weights[0].dtype)
        return folding.with_weights(layer, weights, *place)

    def kl_weight(self, inputs: Tensor) -> float | Tensor:
        """Return the number of positions that have a z of their own, if their KLs are summed."""
        if self.kl_reduction == "mean" or self.draws_ahead:
            return 1.0
        return math.prod(ops.cast(size, self.posterior.dtype) for size in self._positions(inputs))

    def shares_work(self, inputs: Any) -> bool:
        # `separate_channels` takes memory as for one draw more for each channel of the input, so it
        # is left to small networks, of which the first convolution is a large part.
        methods = (type(self).call, type(self).apply)
        is_plain = self.draws_ahead and methods == (Stochastic.call, Stochastic.apply)
        if not is_plain or not self._convolves_image:
            return False
        outputs = self.compute_output_shape(inputs.shape)[1:]
        return None not in outputs and math.prod(outputs) <= _SMALL_OUTPUT

    def shared(self, inputs: Tensor) -> Callable[[Tensor], Tensor]:
        """Return what gives the outputs (draws * batch, ...) for many z (draws, channels)."""
        return separate_channels(self.layer, ops.cast(inputs, self.compute_dtype))

    @property
    def _both(self) -> bool:
        return getattr(self.posterior, "sides", "input") == "both"

    def _output_factors(self, scale: np.ndarray) -> tuple[int, np.ndarray]:
        """Return by what to multiply which weight instead of the output, or raise."""
        layer = self.layer
        if isinstance(layer, layers.EinsumDense):
            operands, target = layer.equation.replace(" ", "").split("->")
            kernel = operands.split(",")[1]
            if target[-1] == "." or kernel.count(target[-1]) != 1:
                wanted = "`sides='both'` needs an equation whose last output axis is the kernel's"
                got = f"{layer.equation!r}. Use sides='input' for layer {layer.name!r}"
                raise ValueError(f"{wanted}; got {got}.")
            return 0, folding.along(scale, kernel, target[-1])
        if isinstance(layer, base.SEPARABLE):
            return 1, scale
        if isinstance(layer, base.DEPTHWISE):
            return 0, scale.reshape(self._channels, -1)
        return 0, scale[:, None] if isinstance(layer, base.TRANSPOSED) else scale

    def _multiply(self, inputs: Tensor, z: Tensor, shared: bool) -> Tensor:
        """Return z * inputs, z (draws, [positions,] channels): by example, or block if shared."""
        if len(z.shape) > 2:
            z = self._at_positions(z, inputs)
        z = self.broadcast(ops.cast(z, inputs.dtype), len(inputs.shape))
        draws, batch = z.shape[0], inputs.shape[0]
        if draws == 1 or draws == batch is not None or (draws is None and not shared):
            return times(inputs, z)
        self.check_blocks(inputs, draws)
        # The batch is consecutive blocks, one per draw; broadcasting spares a repeated copy of z.
        size = ops.shape(inputs)
        draws = ops.shape(z)[0]
        blocks = ops.reshape(inputs, (draws, size[0] // draws, *size[1:]))
        return ops.reshape(times(blocks, z[:, None]), size)

    def _at_positions(self, z: Tensor, inputs: Tensor) -> Tensor:
        """Return z (draws, positions, channels), drawn in the first call, or raise for others."""
        drawn, needed = tuple(z.shape[1:-1]), tuple(inputs.shape[1:-1])
        known = [pair for pair in zip(drawn, needed, strict=False) if None not in pair]
        if len(drawn) != len(needed) or any(first != second for first, second in known):
            raise ValueError(
                f"{self._owner} has noise='position', a z for each position, and must be called "
                f"with the same positions each time; they were {drawn} in the first call of this "
                f"pass, and are {needed} now. Use noise='channel' for it."
            )
        if len(known) == len(drawn):
            return z
        # Or a product would repeat what turns out to be one position.
        return ops.reshape(z, (ops.shape(z)[0], *ops.shape(inputs)[1:-1], z.shape[-1]))

    def broadcast(self, z: Tensor, rank: int) -> Tensor:
        """Return z (groups, [positions,] channels) with the axes of an input of that rank."""
        if len(z.shape) == rank:
            return z
        return ops.reshape(z, (-1, *(1,) * (rank - len(z.shape)), z.shape[-1]))

    @property
    def _convolves_image(self) -> bool:
        if self._both or self.posterior.channels > _FEW_CHANNELS or not convolves(self.layer):
            return False
        return self.layer.compute_dtype == self.compute_dtype

    def _positions(self, inputs: Tensor) -> tuple[int | Tensor, ...]:
        """Return the sizes of the axes between examples and channels."""
        return tuple(ops.shape(inputs)[1:-1])

    def checked_inputs(self, inputs: Any) -> Any:
        if isinstance(inputs, (list, tuple, dict)):
            raise ValueError(f"{self._owner} takes one input; it was called with {len(inputs)}.")
        if not hasattr(inputs, "dtype"):
            raise ValueError(f"{self._owner} must be called with a tensor; got {inputs!r}.")
        dtype = keras.backend.standardize_dtype(inputs.dtype)
        if not keras.backend.is_float_dtype(dtype):
            is_number = keras.backend.is_int_dtype(dtype) or dtype == "bool"
            if not is_number or not isinstance(self.layer, base.CONVERTIBLE):
                got = f"{dtype}. Cast it, or leave {type(self.layer).__name__} deterministic"
                raise ValueError(f"{self._owner} needs a floating-point input; got {got}.")
            inputs = ops.cast(inputs, self.layer.compute_dtype)
        if len(inputs.shape) < 2 and not isinstance(inputs, keras.KerasTensor):
            raise self._wrong_shape(inputs.shape)  # a graph may add an axis yet
        if self.built and len(inputs.shape) == len(self._input_shape):
            if inputs.shape[-1] not in (None, self._channels):
                built = f"{self._owner} was built for {self._channels} channels"
                raise ValueError(f"{built}; got an input of shape {tuple(inputs.shape)}.")
        return inputs

    def _wrong_shape(self, shape: Any) -> ValueError:
        wanted = "an input of shape (batch, ..., channels)"
        return ValueError(f"{self._owner} needs {wanted}; got {tuple(shape)}.")
