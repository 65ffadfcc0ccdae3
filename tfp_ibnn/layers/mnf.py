"""A layer whose Gaussian weights have means that are multiplied by a random z."""

from typing import Any, NamedTuple

import keras
from keras import layers, ops

from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.protocols import Draw, PosteriorTemplate
from tfp_ibnn.layers.base import CONVOLUTIONS
from tfp_ibnn.layers.estimators import Explicit, Flipped, Local
from tfp_ibnn.layers.mean_field import MeanFieldLayer
from tfp_ibnn.noise import Pass

_KINDS = (layers.Dense, *CONVOLUTIONS)


class Multiplied(NamedTuple):
    """Factors z (draws, channels) of the means, and the noise of the weights around them."""

    z: Tensor
    noise: Explicit | Flipped | Local


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class MNFLayer(MeanFieldLayer):
    """Wrap a layer: z multiplies its kernel, the mean of a Gaussian whose scales are in `MNF`.

    `MNF.wrap` and `to_stochastic` make it.

    Args:
        layer: a Dense layer or a convolution of Keras.
        posterior: an `MNF` template.
        train_size: number of training examples.
        seed: of the noise.
        **kwargs: those of `keras.layers.Layer`.
    """

    def __init__(
        self,
        layer: keras.layers.Layer,
        posterior: PosteriorTemplate,
        train_size: int | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(layer, posterior, train_size, seed, **kwargs)
        if type(layer) not in _KINDS:
            names = ", ".join(kind.__name__ for kind in _KINDS)
            raise ValueError(
                f"MNF needs one of {names}; got {layer!r}. Use ibnn.MeanField for this layer, by "
                "patterns of layer names: to_stochastic(model, {pattern: posterior})."
            )

    @property
    def draw_size(self) -> int:
        return super().draw_size + self.posterior.z.channels

    def _noise_in(self, latent: Multiplied) -> Explicit | Flipped | Local:
        return latent.noise

    def mean_latent(self) -> Multiplied:
        mean_of_z = self.posterior.z.mean()
        return Multiplied(mean_of_z[None], super().mean_latent())

    def draw(
        self, forward_pass: Pass, count: int | Tensor, inputs: Any = None, training: bool = False
    ) -> Draw:
        noise = self._noise(forward_pass, count, training)
        sets = count
        if isinstance(noise, Explicit):
            sets = self._sets(forward_pass, count)
        if not forward_pass.losses:
            draw = self._draw_z(forward_pass, (sets,), training)
            latent = Multiplied(draw.z, noise)
            return self._without_kl(latent)
        draw = self._draw_z(forward_pass, (1, sets), training)
        first = Draw(draw.z[:1], draw.kl[:1], draw.entropy[:1])  # for the KL
        kl, entropy = self._kl_and_entropy(forward_pass, first)
        latent = Multiplied(draw.z[1:], noise)
        return Draw(latent, kl, entropy)

    def _draw_z(self, forward_pass: Pass, counts: tuple[int | Tensor, ...], training: bool) -> Draw:
        """Return draws of z.

        Args:
            forward_pass: gives the noise, in portions.
            counts: sizes of the portions.
            training: whether the draws are for a training step.

        Returns:
            A `Draw` whose z is (sum of the counts, channels).
        """
        z = self.posterior.z
        normal = self._normal(forward_pass)
        portions = [normal(count, (z.channels,)) for count in counts]
        noise = ops.concatenate(portions)
        on = self.noise_switch > 0.5
        return z.switched(on, noise, training=training)

    def _outputs(self, inputs: Tensor, latent: Multiplied) -> Tensor:
        z, noise = latent
        if isinstance(noise, Explicit):
            kernel_mean = self._means()[0]
            kernel_deviation, *others = self._deviations(noise)
            by_z = self.posterior.times_z(kernel_mean, z - 1)
            kernel_deviation = kernel_deviation + by_z
            return self._explicit(inputs, [kernel_deviation, *others])
        self.check_blocks(inputs, z.shape[0])
        outputs = self._outputs_at_means(inputs, z)
        if isinstance(noise, Local):
            return outputs + self._local_noise(inputs, noise.noise)
        deviations = self._deviations(noise)
        kernel, *bias = [deviation[0] for deviation in deviations]
        sign_in = ops.cast(noise.sign_in, inputs.dtype)
        sign_out = ops.cast(noise.sign_out, inputs.dtype)
        flipped = self._linear(sign_in * inputs, [kernel], *bias)
        return outputs + sign_out * flipped

    def _outputs_at_means(self, inputs: Tensor, z: Tensor) -> Tensor:
        """Return the outputs for the means of the weights, with a z for each example.

        Args:
            inputs: (batch, ..., channels).
            z: (batch, channels).

        Returns:
            A tensor without the activation.
        """
        kernel = self._means()[:1]
        bias = self._bias()
        channels = z.shape[-1]
        positions = (1,) * (len(inputs.shape) - 2)
        z = ops.cast(z, inputs.dtype)
        z = ops.reshape(z, (-1, *positions, channels))
        if self.posterior.on_inputs:
            return self._linear(inputs * z, kernel, bias)
        outputs = self._linear(inputs, kernel) * z
        if bias is not None:
            outputs = outputs + ops.cast(bias, outputs.dtype)
        return outputs
