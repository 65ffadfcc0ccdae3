"""Maps from latents to data that are not invertible, and what they add to the log-likelihood."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.flows._conditional import Conditional
from tfp_ibnn.flows._rows import like_rows, log_normal
from tfp_ibnn.flows.batchnorm import refuse_batch_norm
from tfp_ibnn.flows.chain import copied, through
from tfp_ibnn.flows.flow import Flow


class Surjection(Conditional):
    """A map between data x (..., channels) and latents z of another size or type.

    With z, V = inference_and_contribution(x, noise), and standard normal noise, it is a bound,
    log p(x) >= E[log p(z) + V], or if it `is_exact` log p(x) = log p(z) + V, and p(x) = E[p(z) e^V]
    in both cases. What one direction loses, flows of noise give, whose condition is what is left.

    Args:
        flows: sequence of flows, such as `[Affine()]`, which map the noise; they are copied, with
            new weights. Defaults to none.
        **kwargs: arguments of `keras.layers.Layer`, and `condition_size` as that of `Flow`.

    References:
        Nielsen et al., arXiv 2007.02731. Ho et al., 1902.00275. Hoogeboom et al., 2102.05379.
    """

    is_exact = False
    """Whether log p(x) = log p(z) + V, and inference needs no noise."""

    levels: int | None = None
    """The number of levels of whole numbers x, or None for real x."""

    least: float = 0
    """The smallest value of x."""

    def __init__(self, flows: Sequence[Flow] = (), **kwargs: Any) -> None:
        kwargs["dtype"] = checks.full_precision(kwargs.get("dtype"))
        super().__init__(**kwargs)
        flows = copied(flows, self.dtype)
        refuse_batch_norm(flows)
        # As configs: only `build` knows the size of their condition.
        self.flows = keras.saving.serialize_keras_object(flows)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.channels = checks.channels_of(type(self).__name__, input_shape)
        self.latent_channels, self.noise_channels, kept = self.sizes(self.channels)
        self.built_flows = copied(
            self.flows,
            self.dtype,
            condition_size=kept + (self.condition_size or 0),
        )
        noise_shape = (*input_shape[:-1], self.noise_channels)
        for flow in self.built_flows:
            flow.build(noise_shape)

    def sizes(self, channels: int) -> tuple[int, int, int]:
        """Return the sizes of the last axes of z, of the noise and of what is kept."""
        return channels, channels, channels

    def inference_and_contribution(
        self, x: Tensor, noise: Tensor | None, condition: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Infer the latents of data.

        Args:
            x: tensor (..., channels), the data.
            noise: tensor (..., noise_channels), standard normal; None if `is_exact`.
            condition: tensor (..., condition_size); None, the default, without `condition_size`.

        Returns:
            The latents z (..., latent_channels), and the contribution V (...,).
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define `inference_and_contribution`."
        )

    def generate(
        self, z: Tensor, noise: Tensor | None = None, condition: Tensor | None = None
    ) -> Tensor:
        """Generate data from latents.

        Args:
            z: tensor (..., latent_channels), the latents.
            noise: tensor (..., noise_channels), standard normal, if `is_exact`; None, the default,
                otherwise.
            condition: tensor (..., condition_size); None, the default, without `condition_size`.

        Returns:
            Tensor (..., channels), floats.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `generate`.")

    def draw(
        self,
        noise: Tensor,
        kept: Tensor,
        condition: Tensor | None,
        direction: str = "forward",
    ) -> tuple[Tensor, Tensor]:
        """Map noise by the flows, and return the log-density of what they give.

        Args:
            noise: tensor (..., noise_channels), or "inverse" what the flows give.
            kept: tensor (..., kept), the flows' condition.
            condition: tensor (..., condition_size), which follows it, or None.
            direction: "forward", the default, or "inverse".

        Returns:
            The mapped tensor (..., noise_channels), and the log-density (...,) of what flows give.
        """
        noise = ops.cast(noise, self.dtype)
        condition = self.checked_condition(condition)
        if condition is not None:
            kept = like_rows(kept, condition)
            condition = like_rows(condition, kept)
            kept = ops.concatenate([kept, condition], axis=-1)
        mapped, log_det = through(self.built_flows, noise, kept, direction)
        if direction == "forward":
            return mapped, log_normal(noise) - log_det
        return mapped, log_normal(mapped) + log_det

    def check(self, x: np.ndarray) -> None:
        """Raise if x cannot be data of this map."""
        if self.levels is not None:
            largest = self.levels - 1
            is_in_range = x.min() >= self.least and x.max() <= largest
            if not is_in_range or np.any(x % 1):
                raise ValueError(
                    f"`x` must be whole numbers from {self.least} to {largest}, unscaled; got from "
                    f"{x.min()} to {x.max()}."
                )
        elif x.min() < self.least:
            raise ValueError(
                f"`x` must be numbers from {self.least} to inf, unscaled; got from {x.min()} to "
                f"{x.max()}."
            )


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Dequantize(Surjection):
    """Whole numbers 0 to levels - 1, such as those of an image, as reals: x = floor(z).

    z = x + Phi(u), V = log N(u) - log q(u | x), a bound. Without flows Phi(u) is uniform in [0, 1)
    and V = 0. With flows, which start there too, the dequantization is variational; their condition
    is x, scaled to [-1, 1].

    Args:
        levels: int, 2 or more, the number of levels. Defaults to 256.
        flows: sequence of flows of the noise, as that of `Surjection`. Defaults to none.
        **kwargs: arguments of `keras.layers.Layer`, and `condition_size` as that of `Flow`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> flows = [ibnn.flows.SplineCoupling(), ibnn.flows.Dequantize(16)]
        >>> density = ibnn.FlowDensity(flows)
    """

    def __init__(self, levels: int = 256, flows: Sequence[Flow] = (), **kwargs: Any) -> None:
        super().__init__(flows, **kwargs)
        self.levels = checks.positive_integer("levels", levels, 2**16, least=2)

    def inference_and_contribution(
        self, x: Tensor, noise: Tensor | None, condition: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        x = ops.cast(x, self.dtype)
        highest = self.levels - 1
        scaled = 2 * x / highest - 1
        u, log_q = self.draw(noise, scaled, condition)
        signed = ops.erf(u / math.sqrt(2))
        uniform = 0.5 * (1 + signed)
        most = 1 - self.levels * 2.0**-23  # a sum that float32 does not round to x + 1
        z = x + ops.minimum(uniform, most)
        contribution = log_normal(u) - log_q
        return z, contribution

    def generate(
        self, z: Tensor, noise: Tensor | None = None, condition: Tensor | None = None
    ) -> Tensor:
        return ops.clip(ops.floor(z), 0, self.levels - 1)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Argmax(Dequantize):
    """Categories as the largest of `levels` numbers each, side by side in z: x = argmax z.

    The one of category x is T = u_x; the others are moved below it, z_k = T - softplus(T - u_k).
    V = sum_(k != x) log sigmoid(T - u_k) - log q(u | x), a bound. The condition of the flows is x
    as one-hot vectors. The arguments are those of `Dequantize`; `levels` is the number of
    categories.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> argmax = ibnn.flows.Argmax(levels=3)
        >>> argmax.build((None, 1))
        >>> int(argmax.generate(keras.ops.array([[0.1, 2.0, -1.0]]))[0, 0])
        1
    """

    def sizes(self, channels: int) -> tuple[int, int, int]:
        size = channels * self.levels
        return size, size, size

    def inference_and_contribution(
        self, x: Tensor, noise: Tensor | None, condition: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        categories = ops.cast(x, "int32")
        is_largest = ops.one_hot(categories, self.levels, dtype=self.dtype)
        is_other = 1 - is_largest
        kept = self._side_by_side(is_largest)
        u, log_q = self.draw(noise, kept, condition)
        u = self._apart(u)
        largest = ops.sum(is_largest * u, axis=-1, keepdims=True)
        gap = largest - u
        change = gap - ops.softplus(gap)
        z = u + is_other * change
        log_slopes = ops.log_sigmoid(gap)
        log_det = ops.sum(is_other * log_slopes, axis=(-2, -1))
        contribution = log_det - log_q
        return self._side_by_side(z), contribution

    def generate(
        self, z: Tensor, noise: Tensor | None = None, condition: Tensor | None = None
    ) -> Tensor:
        categories = ops.argmax(self._apart(z), axis=-1)
        return ops.cast(categories, self.dtype)

    def _apart(self, z: Tensor) -> Tensor:
        """Return z (..., channels * levels) as (..., channels, levels)."""
        *rows, _ = ops.shape(z)
        shape = (*rows, self.channels, self.levels)
        return ops.reshape(z, shape)

    def _side_by_side(self, z: Tensor) -> Tensor:
        """Undo `_apart`."""
        *rows, _, _ = ops.shape(z)
        shape = (*rows, self.latent_channels)
        return ops.reshape(z, shape)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Slice(Surjection):
    """Drop all but `size` channels: z = x[..., :size], V = log p(dropped | z), exact.

    With `augment`, add `size` channels: x = z[..., :channels], V = -log q(added | x), a bound.

    Args:
        size: positive int, how many channels are left; with `augment`, how many are added.
        augment: bool, add channels instead. Defaults to False.
        flows: sequence of flows of the noise, as that of `Surjection`. Defaults to none.
        **kwargs: arguments of `keras.layers.Layer`, and `condition_size` as that of `Flow`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> surjection = ibnn.flows.Slice(size=1)
        >>> surjection.build((None, 3))
        >>> surjection.latent_channels, surjection.noise_channels
        (1, 2)
    """

    def __init__(
        self, size: int, augment: bool = False, flows: Sequence[Flow] = (), **kwargs: Any
    ) -> None:
        super().__init__(flows, **kwargs)
        self.size = checks.positive_integer("size", size, checks.LARGEST_SIZE)
        self.augment = bool(augment)
        self.is_exact = not augment
        self.least = -math.inf

    def sizes(self, channels: int) -> tuple[int, int, int]:
        if self.augment:
            return channels + self.size, self.size, channels
        if channels <= self.size:
            raise ValueError(f"`size` must be below the {channels} channels; got {self.size}.")
        return self.size, channels - self.size, self.size

    def inference_and_contribution(
        self, x: Tensor, noise: Tensor | None, condition: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        x = ops.cast(x, self.dtype)
        if self.augment:
            added, log_q = self.draw(noise, x, condition)
            z = ops.concatenate([x, added], axis=-1)
            return z, -log_q
        z = x[..., : self.size]
        dropped = x[..., self.size :]
        _, log_p = self.draw(dropped, z, condition, "inverse")
        return z, log_p

    def generate(
        self, z: Tensor, noise: Tensor | None = None, condition: Tensor | None = None
    ) -> Tensor:
        if self.augment:
            return z[..., : self.channels]
        dropped, _ = self.draw(noise, z, condition)
        return ops.concatenate([z, dropped], axis=-1)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class AbsoluteValue(Surjection):
    """Numbers of at least 0 as absolute values, x = |z|; inference draws the signs, 1/2 each.

    V = channels * log 2, a bound, and exact where p(z) is the same for all signs.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> surjection = ibnn.flows.AbsoluteValue()
        >>> surjection.build((None, 2))
        >>> float(surjection.generate(keras.ops.array([[-3.0, 1.0]]))[0, 0])
        3.0
    """

    def inference_and_contribution(
        self, x: Tensor, noise: Tensor | None, condition: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        x = ops.cast(x, self.dtype)
        z = ops.where(noise < 0, -x, x)
        log_number_of_signs = self.channels * math.log(2)
        contribution = ops.full_like(x[..., 0], log_number_of_signs)
        return z, contribution

    def generate(
        self, z: Tensor, noise: Tensor | None = None, condition: Tensor | None = None
    ) -> Tensor:
        return ops.abs(z)
