"""Maps from latents to data that are not invertible, and what they add to the log-likelihood."""

import math
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.flows._conditional import Conditional
from tfp_ibnn.flows.batchnorm import refuse_batch_norm
from tfp_ibnn.flows.chain import copied, through
from tfp_ibnn.flows.flow import like_rows, log_normal


class Surjection(Conditional):
    """A map between data x (..., channels) and latents z of another size or kind.

    With z, V = inference_and_contribution(x, noise), and standard normal noise, it is a bound,
    log p(x) >= E[log p(z) + V], or if it `is_exact` log p(x) = log p(z) + V, and p(x) = E[p(z) e^V]
    in both cases. What one direction loses, flows of noise give, whose condition is the rest: such
    as `[Affine()]`, of which each surjection has copies.

    References:
        Nielsen et al., arXiv 2007.02731. Ho et al., 1902.00275. Hoogeboom et al., 2102.05379.
    """

    is_exact, levels, least = False, None, 0  # the range of x

    def __init__(self, flows: Any = (), **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "dtype": checks.full_precision(kwargs.get("dtype"))})
        refuse_batch_norm(flows := copied(flows, self.dtype))
        # As configs: only `build` knows the size of their condition.
        self.flows = keras.saving.serialize_keras_object(flows)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.channels = checks.channels_of(type(self).__name__, input_shape)
        self.latent_channels, self.noise_channels, kept = self.sizes(self.channels)
        size = kept + (self.condition_size or 0)
        self.built_flows = copied(self.flows, self.dtype, condition_size=size)
        for flow in self.built_flows:
            flow.build((*input_shape[:-1], self.noise_channels))

    def sizes(self, channels: int) -> tuple[int, int, int]:
        """Return the sizes of the last axes of z, of the noise and of what is kept."""
        return channels, channels, channels

    def inference_and_contribution(self, x: Tensor, noise: Any, condition: Any = None) -> Any:
        """Return z (..., latent_channels) and V (...,); an exact one needs no noise."""
        raise NotImplementedError(f"{type(self).__name__} must define this method.")

    def generate(self, z: Tensor, noise: Any = None, condition: Any = None) -> Tensor:
        """Return x (..., channels) as floats; an exact one needs noise (..., noise_channels)."""
        raise NotImplementedError(f"{type(self).__name__} must define `generate`.")

    def draw(self, noise: Tensor, kept: Tensor, condition: Any, way: str = "forward") -> Any:
        """Return the noise mapped by the flows, and the log-density of what comes out."""
        noise = ops.cast(noise, self.dtype)
        if (c := self.checked_condition(condition)) is not None:
            kept = ops.concatenate([like_rows(kept, c), like_rows(c, kept)], axis=-1)
        u, log_det = through(self.built_flows, noise, kept, way)
        return u, log_normal(noise) - log_det if way == "forward" else log_normal(u) + log_det

    def check(self, x: np.ndarray) -> None:
        """Raise if x cannot be data of this map."""
        most, kind = (self.levels - 1, "whole ") if self.levels else (math.inf, "")
        if x.min() < self.least or x.max() > most or (kind and (x % 1).any()):
            wanted = f"{kind}numbers from {self.least} to {most}, unscaled"
            raise ValueError(f"`x` must be {wanted}; got from {x.min()} to {x.max()}.")


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Dequantize(Surjection):
    """Whole numbers 0 to levels - 1, such as those of an image, as reals: x = floor(z).

    z = x + Phi(u), V = log N(u) - log q(u | x), a bound. Without flows Phi(u) is uniform in [0, 1)
    and V = 0. With flows, which start there too, the dequantization is variational; their condition
    is x, scaled to [-1, 1].
    """

    def __init__(self, levels: int = 256, flows: Any = (), **kwargs: Any) -> None:
        super().__init__(flows, **kwargs)
        self.levels = checks.positive_integer("levels", levels, 2**16, least=2)

    def inference_and_contribution(self, x: Tensor, noise: Any, condition: Any = None) -> Any:
        x = ops.cast(x, self.dtype)
        u, log_q = self.draw(noise, 2 * x / (self.levels - 1) - 1, condition)
        most = 1 - self.levels * 2.0**-23  # a sum that float32 does not round to x + 1
        return x + ops.minimum(0.5 * (1 + ops.erf(u / math.sqrt(2))), most), log_normal(u) - log_q

    def generate(self, z: Tensor, noise: Any = None, condition: Any = None) -> Tensor:
        return ops.clip(ops.floor(z), 0, self.levels - 1)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Argmax(Dequantize):
    """Categories as the largest of `levels` numbers each, side by side in z: x = argmax z.

    The one of category x is T = u_x; the others are moved below it, z_k = T - softplus(T - u_k).
    V = sum_(k != x) log sigmoid(T - u_k) - log q(u | x), a bound. The condition of the flows is x
    as one-hot vectors.
    """

    def sizes(self, channels: int) -> tuple[int, int, int]:
        return (channels * self.levels,) * 3

    def inference_and_contribution(self, x: Tensor, noise: Any, condition: Any = None) -> Any:
        chosen = ops.one_hot(ops.cast(x, "int32"), self.levels, dtype=self.dtype)
        flat = (*ops.shape(x)[:-1], self.latent_channels)
        u, log_q = self.draw(noise, ops.reshape(chosen, flat), condition)
        u = ops.reshape(u, ops.shape(chosen))
        gap = ops.sum(chosen * u, axis=-1, keepdims=True) - u
        z = u + (1 - chosen) * (gap - ops.softplus(gap))
        log_det = ops.sum((1 - chosen) * ops.log_sigmoid(gap), axis=(-2, -1))
        return ops.reshape(z, flat), log_det - log_q

    def generate(self, z: Tensor, noise: Any = None, condition: Any = None) -> Tensor:
        z = ops.reshape(z, (*ops.shape(z)[:-1], self.channels, self.levels))
        return ops.cast(ops.argmax(z, axis=-1), self.dtype)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Slice(Surjection):
    """Drop all but `size` channels: z = x[..., :size], V = log p(dropped | z), exact.

    With `augment`, add `size` channels: x = z[..., :channels], V = -log q(added | x), a bound.
    """

    def __init__(self, size: int, augment: bool = False, flows: Any = (), **kwargs: Any) -> None:
        super().__init__(flows, **kwargs)
        self.size = checks.positive_integer("size", size, checks.LARGEST_SIZE)
        self.augment, self.is_exact, self.least = bool(augment), not augment, -math.inf

    def sizes(self, channels: int) -> tuple[int, int, int]:
        if channels <= self.size and not self.augment:
            raise ValueError(f"`size` must be below the {channels} channels; got {self.size}.")
        sizes = self.size, channels - self.size, self.size
        return (channels + self.size, self.size, channels) if self.augment else sizes

    def inference_and_contribution(self, x: Tensor, noise: Any, condition: Any = None) -> Any:
        x = ops.cast(x, self.dtype)
        if not self.augment:
            z, dropped = x[..., : self.size], x[..., self.size :]
            return z, self.draw(dropped, z, condition, "inverse")[1]
        u, log_q = self.draw(noise, x, condition)
        return ops.concatenate([x, u], axis=-1), -log_q

    def generate(self, z: Tensor, noise: Any = None, condition: Any = None) -> Tensor:
        if self.augment:
            return z[..., : self.channels]
        return ops.concatenate([z, self.draw(noise, z, condition)[0]], axis=-1)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class AbsoluteValue(Surjection):
    """Numbers of at least 0 as absolute values, x = |z|; inference draws the signs, 1/2 each.

    V = channels * log 2, a bound, and exact where p(z) is the same for all signs.
    """

    def inference_and_contribution(self, x: Tensor, noise: Any, condition: Any = None) -> Any:
        x = ops.cast(x, self.dtype)
        return ops.where(noise < 0, -x, x), ops.full_like(x[..., 0], self.channels * math.log(2))

    def generate(self, z: Tensor, noise: Any = None, condition: Any = None) -> Tensor:
        return ops.abs(z)
