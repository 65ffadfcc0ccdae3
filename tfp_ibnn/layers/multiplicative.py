"""Layers whose input is multiplied by a latent z drawn from a posterior."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import keras
import numpy as np
from keras import layers, ops

from tfp_ibnn._core import checks, constraints, keras_internals
from tfp_ibnn._core.backend import Tensor, times
from tfp_ibnn._core.protocols import Draw, PosteriorTemplate, ZPosterior
from tfp_ibnn._core.serialization import ConfiguredLayer
from tfp_ibnn.layers import base, folding
from tfp_ibnn.layers.convolution import convolves, finish, noisy_convolution, separate_channels
from tfp_ibnn.noise import Pass

NOISES = ("channel", "position")
REDUCTIONS = ("sum", "mean")

LINEAR = {"bias": None, "use_bias": False, "activation": None}
"""Attributes of a layer whose call then gives what its kernel alone gives."""

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
        posterior: template over z; the layer builds its own copy for its channels. None is
            `ibnn.NormalAffine()`, a Gaussian.
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

    default_posterior: ClassVar[Callable[[], ZPosterior]]
    """Makes the posterior of a layer that is given none; `tfp_ibnn.posteriors` sets it."""

    is_plain_product: ClassVar[bool] = True
    """Whether the output is layer(z * x), by the `call` and `apply` of this class.

    It is False for a class with another one that does not declare it; draws then share no work.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        is_its_own = cls.call is not Stochastic.call or cls.apply is not Stochastic.apply
        if is_its_own and "is_plain_product" not in vars(cls):
            cls.is_plain_product = False

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
            posterior = self.default_posterior()
        if isinstance(posterior, PosteriorTemplate) and posterior.latent != "z":
            raise ValueError(
                f"`posterior` must be one over z; {type(posterior).__name__} is over weights: "
                f"write `{type(posterior).__name__}(...).wrap(layer, train_size)` instead of this "
                "layer."
            )
        super().__init__(layer, posterior, train_size, seed, **kwargs)
        self.noise = checks.one_of("noise", noise, NOISES)
        self.kl_reduction = checks.one_of("kl_reduction", kl_reduction, REDUCTIONS)
        if noise == "position" and type(self).draws_ahead is True:
            raise ValueError(
                f"`noise` must be 'channel' for {type(layer).__name__}, named {layer.name!r}."
            )
        if self._multiplies_outputs:
            self._check_kernel_is_known()
            self.forbid("quantize")
            self.activity_regularizer = layer.activity_regularizer  # the layer's call is not used

    def _check_kernel_is_known(self) -> None:
        """Raise if it is unknown how to put the kernel of the layer between two factors."""
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
        """Return the size of z."""
        if not self._multiplies_outputs:
            return self._channels
        *_, outputs = keras_internals.output_shape(self.layer, input_shape)
        ones = np.ones(outputs)
        self._output_factors(ones)  # raises for a layer that cannot be folded
        return self._channels + outputs

    def draw(
        self, forward_pass: Pass, count: int | Tensor, inputs: Any = None, training: bool = False
    ) -> Draw:
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
            return self._convolved(inputs, latent)
        shared = groups is not None
        if self._multiplies_outputs:
            return self._between_factors(inputs, latent, shared)
        product = self._multiply(inputs, latent, shared)
        if self._layer_takes_mask:
            return self.layer(product, mask=mask)
        return self.layer(product)

    def _convolved(self, inputs: Tensor, z: Tensor) -> Tensor:
        """Return layer(z * inputs) with less work for its gradients, for z = loc + scale * eps."""
        loc, scale = self.posterior.loc_and_scale()
        normal = (z - loc) / scale
        normal = ops.stop_gradient(normal)
        normal = ops.cast(normal, inputs.dtype)
        rank = len(inputs.shape)
        normal = self.broadcast(normal, rank)
        return noisy_convolution(self.layer, inputs, normal, loc, scale)

    def _between_factors(self, inputs: Tensor, latent: Tensor, shared: bool) -> Tensor:
        """Return activation(bias + z_out * kernel(z_in * inputs)), for a latent of both."""
        inputs = ops.cast(inputs, self.layer.compute_dtype)  # as the layer's call does
        z_in, z_out = self._split(latent)
        product = self._multiply(inputs, z_in, shared)
        outputs = keras_internals.call_with(self.layer, product, **LINEAR)
        outputs = self._multiply(outputs, z_out, shared)
        return finish(self.layer, outputs)

    def _split(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Return the channels of a latent for the inputs, and the others."""
        return latent[..., : self._channels], latent[..., self._channels :]

    def mean_latent(self) -> Tensor:
        mean = self.posterior.mean()
        return mean[None]

    def signal_to_noise(self) -> dict[str, np.ndarray]:
        if self.posterior.is_centered:
            loc, scale = map(ops.convert_to_numpy, self.posterior.loc_and_scale())
        else:
            draw = self.posterior.summary()
            z = ops.convert_to_numpy(draw.z)
            loc = z.mean(axis=0)
            spread = z.std(axis=0)
            scale = np.maximum(spread, constraints.MIN_SCALE)
        ratios = np.abs(loc) / scale
        on_inputs, _ = self._split(ratios)
        return {"z": on_inputs}

    def fold(self) -> keras.layers.Layer:
        """Return the wrapped layer with the mean of z in its weights, or behind a `Rescaling`.

        What LoRA adds becomes part of the kernel, as in a file of Keras.
        """
        layer = self.layer
        mean = ops.convert_to_numpy(self.posterior.mean())
        on_inputs, on_outputs = self._split(mean)
        rank = len(self._input_shape)
        rescaling = self.broadcast(on_inputs[None], rank)
        rescaling = ops.convert_to_numpy(rescaling[0])
        if not base.is_known(layer) or base.is_quantized(layer):
            return folding.behind_rescaling(layer, rescaling, self.name, self._input_shape)
        weights = folding.merged_weights(layer)
        if len(on_outputs):
            position, factors = self._output_factors(on_outputs)
            _multiply_weight(weights, position, factors)
        factors = folding.kernel_factors(layer, on_inputs)
        if factors is None:
            return folding.behind_rescaling(layer, rescaling, self.name, self._input_shape, weights)
        _multiply_weight(weights, 0, factors)
        return folding.with_weights(layer, weights, self.name, self._input_shape)

    def kl_weight(self, inputs: Tensor) -> float | Tensor:
        """Return the number of positions that have a z of their own, if their KLs are summed."""
        if self.kl_reduction == "mean" or self.draws_ahead:
            return 1.0
        dtype = self.posterior.dtype
        sizes = [ops.cast(size, dtype) for size in self._positions(inputs)]
        return math.prod(sizes)

    def shares_work(self, inputs: Any) -> bool:
        # `separate_channels` takes the memory of one more draw for each channel of the input, so it
        # is left to small networks, of which the first convolution is a large part.
        if not (self.is_plain_product and self.draws_ahead and self._convolves_image):
            return False
        _, *sizes = self.compute_output_shape(inputs.shape)
        if None in sizes:
            return False
        return math.prod(sizes) <= _SMALL_OUTPUT

    def shared(self, inputs: Tensor) -> Callable[[Tensor], Tensor]:
        """Return what gives the outputs (draws * batch, ...) for many z (draws, channels)."""
        return separate_channels(self.layer, ops.cast(inputs, self.compute_dtype))

    @property
    def _multiplies_outputs(self) -> bool:
        """Whether z has channels for the outputs of the kernel, too."""
        return self.posterior.sides == "both"

    def _output_factors(self, scale: np.ndarray) -> tuple[int, np.ndarray]:
        """Return which weight to multiply instead of the output, and by what, or raise."""
        layer = self.layer
        if isinstance(layer, layers.EinsumDense):
            return 0, self._einsum_output_factors(scale)
        if isinstance(layer, base.SEPARABLE):
            return 1, scale
        if isinstance(layer, base.DEPTHWISE):
            return 0, scale.reshape(self._channels, -1)
        if isinstance(layer, base.TRANSPOSED):
            return 0, scale[:, None]
        return 0, scale

    def _einsum_output_factors(self, scale: np.ndarray) -> np.ndarray:
        equation = self.layer.equation
        operands, target = equation.replace(" ", "").split("->")
        kernel = operands.split(",")[1]
        if target[-1] == "." or kernel.count(target[-1]) != 1:
            raise ValueError(
                "`sides='both'` needs an equation whose last output axis is the kernel's; got "
                f"{equation!r}. Use sides='input' for layer {self.layer.name!r}."
            )
        return folding.along(scale, kernel, target[-1])

    def _multiply(self, inputs: Tensor, z: Tensor, shared: bool) -> Tensor:
        """Return z * inputs, for each example, or each block of the batch.

        Args:
            inputs: (batch, ..., channels).
            z: (draws, [positions,] channels).
            shared: whether z of unknown number are for blocks, and not for examples.

        Returns:
            A tensor of the shape of `inputs`.
        """
        if len(z.shape) > 2:
            z = self._at_positions(z, inputs)
        z = ops.cast(z, inputs.dtype)
        z = self.broadcast(z, len(inputs.shape))
        draws = z.shape[0]
        is_unknown = draws is None
        by_example = not is_unknown and draws == inputs.shape[0]
        if draws == 1 or by_example or (is_unknown and not shared):
            return times(inputs, z)
        self.check_blocks(inputs, draws)
        # The batch is consecutive blocks, one per draw; broadcasting spares a repeated copy of z.
        batch, *sizes = ops.shape(inputs)
        draws = ops.shape(z)[0]
        size = batch // draws
        blocks = ops.reshape(inputs, (draws, size, *sizes))
        products = times(blocks, z[:, None])
        return ops.reshape(products, (batch, *sizes))

    def _at_positions(self, z: Tensor, inputs: Tensor) -> Tensor:
        """Return z (draws, positions, channels), drawn in the first call, or raise for others."""
        drawn = tuple(z.shape[1:-1])
        needed = tuple(inputs.shape[1:-1])
        pairs = zip(drawn, needed, strict=False)
        known = [pair for pair in pairs if None not in pair]
        if len(drawn) != len(needed) or any(first != second for first, second in known):
            raise ValueError(
                f"{self._owner} has noise='position', a z for each position, and must be called "
                f"with the same positions each time; they were {drawn} in the first call of this "
                f"pass, and are {needed} now. Use noise='channel' for it."
            )
        if len(known) == len(drawn):
            return z
        # Otherwise a product would repeat what turns out to be one position.
        positions = ops.shape(inputs)[1:-1]
        return ops.reshape(z, (ops.shape(z)[0], *positions, z.shape[-1]))

    def broadcast(self, z: Tensor, rank: int) -> Tensor:
        """Return z with the axes of an input.

        Args:
            z: (draws, [positions,] channels).
            rank: number of axes of the input.

        Returns:
            z, with axes of size 1 between those of draws and channels where it has no positions.
        """
        missing = rank - len(z.shape)
        if missing == 0:
            return z
        return ops.reshape(z, (-1, *(1,) * missing, z.shape[-1]))

    @property
    def _convolves_image(self) -> bool:
        """Whether the layer is a convolution of few channels, whose work can be rearranged."""
        if self._multiplies_outputs or self.posterior.channels > _FEW_CHANNELS:
            return False
        return convolves(self.layer) and self.layer.compute_dtype == self.compute_dtype

    def _positions(self, inputs: Tensor) -> tuple[int | Tensor, ...]:
        """Return the sizes of the axes between examples and channels."""
        return tuple(ops.shape(inputs)[1:-1])

    def checked_inputs(self, inputs: Any) -> Any:
        if isinstance(inputs, (list, tuple, dict)):
            raise ValueError(f"{self._owner} takes one input; it was called with {len(inputs)}.")
        if getattr(inputs, "dtype", None) is None:
            raise ValueError(f"{self._owner} must be called with a tensor; got {inputs!r}.")
        inputs = self._as_float(inputs)
        rank = len(inputs.shape)
        if rank < 2 and not isinstance(inputs, keras.KerasTensor):
            raise self._wrong_shape(inputs.shape)  # a graph may still add an axis
        if self.built and rank == len(self._input_shape):
            if inputs.shape[-1] not in (None, self._channels):
                raise ValueError(
                    f"{self._owner} was built for {self._channels} channels; got an input of shape "
                    f"{tuple(inputs.shape)}."
                )
        return inputs

    def _as_float(self, inputs: Tensor) -> Tensor:
        """Return inputs in floating point, cast for a layer that would cast them, or raise."""
        dtype = keras.backend.standardize_dtype(inputs.dtype)
        if keras.backend.is_float_dtype(dtype):
            return inputs
        is_number = keras.backend.is_int_dtype(dtype) or dtype == "bool"
        if not is_number or not isinstance(self.layer, base.CONVERTIBLE):
            raise ValueError(
                f"{self._owner} needs a floating-point input; got {dtype}. Cast it, or leave "
                f"{type(self.layer).__name__} deterministic."
            )
        return ops.cast(inputs, self.layer.compute_dtype)

    def _wrong_shape(self, shape: Any) -> ValueError:
        return ValueError(
            f"{self._owner} needs an input of shape (batch, ..., channels); got {tuple(shape)}."
        )


def _multiply_weight(weights: list[np.ndarray], position: int, factors: np.ndarray) -> None:
    """Multiply one of a list of weights, which keeps its type."""
    weight = weights[position]
    weights[position] = (weight * factors).astype(weight.dtype)
