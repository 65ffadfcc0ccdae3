"""A layer whose Gaussian weights have means that are multiplied by a random z."""

from typing import Any, NamedTuple

import keras
from keras import layers, ops

from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.protocols import Draw
from tfp_ibnn.layers.base import CONVOLUTIONS
from tfp_ibnn.layers.mean_field import Explicit, Flipped, Local, MeanFieldLayer
from tfp_ibnn.noise import Pass

_KINDS = (layers.Dense, *CONVOLUTIONS)


class Multiplied(NamedTuple):
    """Factors z (draws, channels) of the means, and the noise of the weights around them."""

    z: Tensor
    rest: Explicit | Flipped | Local


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class MNFLayer(MeanFieldLayer):
    """Wrap a layer: z multiplies its kernel, the mean of a Gaussian whose scales `MNF` has.

    `MNF.wrap` and `to_stochastic` make it.
    """

    def __init__(self, layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> None:
        super().__init__(layer, *args, **kwargs)
        if type(layer) not in _KINDS:
            names = ", ".join(kind.__name__ for kind in _KINDS)
            raise ValueError(
                f"MNF needs one of {names}; got {layer!r}. Use ibnn.MeanField for this layer, by "
                "patterns of layer names: to_stochastic(model, {pattern: posterior})."
            )

    @property
    def draw_size(self) -> int:
        return super().draw_size + self.posterior.z.channels

    def mean_latent(self) -> Multiplied:
        return Multiplied(self.posterior.z.mean()[None], super().mean_latent())

    def _with_kl(
        self, forward_pass: Pass, latent: Any, count: int | Tensor, training: bool, *given: Any
    ) -> Draw:
        """Return z and the noise of a pass, with a bound of the KL, and of the entropy."""
        posterior, z = self.posterior, self.posterior.z
        kind = {"dtype": posterior.dtype, "generator": posterior.seed_generator}
        number = self._sets(forward_pass, count) if isinstance(latent, Explicit) else count
        numbers = (1, number) if forward_pass.losses else (number,)  # the first for the KL
        noise = [forward_pass.source.normal(n, (z.channels,), **kind) for n in numbers]
        draw = z.switched(self.noise_switch > 0.5, ops.concatenate(noise), training=training)
        latent = Multiplied(draw.z[len(numbers) - 1 :], latent)
        own = Draw(*(part[:1] for part in draw))
        return super()._with_kl(forward_pass, latent, count, training, own)

    def _outputs(self, inputs: Tensor, latent: Multiplied) -> Tensor:
        z, rest = latent
        if isinstance(rest, Explicit):
            deviations = self._deviations(rest)
            deviations[0] = deviations[0] + self.posterior.times_z(self._means()[0], z - 1)
            return self._explicit(inputs, deviations)
        self.check_blocks(inputs, z.shape[0])
        # The outputs for the means, with a z (examples, channels) for each example.
        z, kernel, bias = ops.cast(z, inputs.dtype), self._means()[:1], self._bias()
        z = ops.reshape(z, (-1, *(1,) * (len(inputs.shape) - 2), z.shape[-1]))
        if self.posterior.on_inputs:
            outputs = self._linear(inputs * z, kernel, bias)
        else:
            outputs = self._linear(inputs, kernel) * z
            outputs = outputs if bias is None else outputs + ops.cast(bias, outputs.dtype)
        if isinstance(rest, Local):
            return outputs + self._local_noise(inputs, rest.noise)
        own = [x[0] for x in self._deviations(rest)]
        sign_in, sign_out = (ops.cast(sign, inputs.dtype) for sign in rest[1:])
        return outputs + sign_out * self._linear(sign_in * inputs, own[:1], *own[1:])
