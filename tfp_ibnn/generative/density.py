"""Density estimation by normalizing flows."""

import math
import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import backend, checks, files
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.protocols import Density
from tfp_ibnn._core.serialization import SavesRandomState
from tfp_ibnn.data.datasets import is_dataset
from tfp_ibnn.data.examples import check_finite, unpacked
from tfp_ibnn.flows import Flow, Surjection
from tfp_ibnn.flows.batchnorm import refuse_batch_norm
from tfp_ibnn.flows.chain import copied, through
from tfp_ibnn.generative.conditions import checked_condition, size_of_condition
from tfp_ibnn.generative.mixture import add_mixture, mixture_log_prob, of_mixture
from tfp_ibnn.generative.unsupervised import Unsupervised, as_numbers
from tfp_ibnn.noise import counter
from tfp_ibnn.noise.hashing import hashed
from tfp_ibnn.posteriors.base import log_normal

_ADAPTING_EXAMPLES = 10_000  # by which a density with a surjection adapts


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class FlowDensity(SavesRandomState, Unsupervised, Density):
    """A density by flows, trained by maximum likelihood: x = loc + scale * NF(eps).

        log p(x) = log p(eps) - sum_i log|det J_i| - sum_c log scale_c

    `fit(x)` trains by the mean of -log p(x) in nats, times `sample_weight` if there is one, and
    reports `bits_per_dimension` too. The first `fit` on arrays sets loc and scale to the mean
    and deviation of the data; before `fit` on a dataset, call `adapt(x)` with some of it. Called,
    or by `predict(x)`, the model gives log p(x), one number per row, or per image. With a
    surjection that is its bound, with new noise in each training step; in evaluations the noise is
    a function of the row, so that neither its batch nor its place matters.

    Training maps data to noise: `SplineCoupling`, `AffineCoupling`, `MaskedAutoregressive` and
    `Inverse(Planar())` do it in one pass, `InverseAutoregressive` in one for each channel.

    Args:
        flows: flows, applied in order from noise to data; copied, with new weights. The last may be
            a surjection, such as `Dequantize(256)` for images (..., channels) of whole numbers.
        base: number of Gaussians of eps; above 1 their means and scales are learned.
        condition: None, or the size of a condition, for p(x | condition): data are then pairs, as
            in `fit((x, condition))`. Or a Keras model that turns a condition into a vector.
        **kwargs: those of `keras.Model`.

    Example:
        >>> import keras, numpy as np, tfp_ibnn as ibnn
        >>> x = np.random.default_rng(0).normal(size=(500, 2)).astype("float32")
        >>> couplings = [ibnn.flows.SplineCoupling(swap=swap) for swap in (False, True)]
        >>> density = ibnn.FlowDensity(couplings)
        >>> density.compile(keras.optimizers.Adam(1e-3))
        >>> history = density.fit(x, epochs=2, verbose=0)
        >>> density.log_prob(x).shape, density.sample(3, seed=0).shape
        ((500,), (3, 2))
    """

    def __init__(
        self,
        flows: Sequence[Flow],
        *,
        base: int = 1,
        condition: int | keras.Model | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**{**kwargs, "dtype": checks.full_precision(kwargs.get("dtype"))})
        self.base = checks.positive_integer("base", base, checks.LARGEST_SIZE)
        self.condition = condition
        condition_size = size_of_condition(condition)
        self.surjection = None
        self.event = ()
        has_flows = isinstance(flows, Sequence) and len(flows) > 0
        if has_flows and isinstance(flows[-1], Surjection):
            *flows, surjection = flows
            config = {
                **surjection.get_config(),
                "condition_size": condition_size,
                "dtype": self.dtype,
                "name": "surjection",
            }
            self.surjection = type(surjection).from_config(config)
            self.seeds = backend.SeedGenerator()
        self.flows = copied(flows, self.dtype, condition_size=condition_size, ndims=3)
        refuse_batch_norm(self.flows)
        self.bits = keras.metrics.Mean("bits_per_dimension")

    __getattr__ = checks.missing_attribute

    def build(self, input_shape: Any) -> None:
        x_shape, _ = self._pair(input_shape)
        shape = tuple(x_shape)
        event_ndims = [flow.event_ndims for flow in self.flows]
        ndims = max(event_ndims, default=1)
        if len(shape) <= ndims or None in shape[1:]:
            axes = "..., size" if ndims == 1 else "height, width, channels"
            raise ValueError(f"`x` must have the shape (examples, {axes}); got {shape}.")
        self.event = shape[1:]
        if self.surjection is not None:
            self.surjection.build(shape)
            shape = (*shape[:-1], self.surjection.latent_channels)
        self.latent = shape[1:]
        self.size = math.prod(self.latent)
        for flow in self.flows:
            flow.build(shape)
        self._add_moments(shape[-1:])
        if self.base > 1:
            add_mixture(self, self.base, self.size)

    def _add_moments(self, shape: tuple[int, ...]) -> None:
        """Add loc and scale by channel, which `adapt` finds, and whether it has."""
        self.loc = self.add_weight(shape, "zeros", trainable=False, name="loc")
        self.scale = self.add_weight(shape, "ones", trainable=False, name="scale")
        self.adapted = self.add_weight((), "zeros", trainable=False, name="adapted")

    def call(self, inputs: Any, training: bool = False) -> Tensor:
        """Return log p(x).

        Args:
            inputs: x, or pairs (x, condition).
            training: as in Keras; a surjection then takes new noise.

        Returns:
            Log-densities (examples,) in nats.
        """
        x, condition = self._pair(inputs)
        _check_shape(x, self.event)  # one column would be taken for all
        condition = self._features(condition, training)
        noise = self._noise(x, training)
        z, change = self._latents(x, condition, noise)
        standard = (z - self.loc) / self.scale
        eps, log_det = through(
            self.flows,
            standard,
            condition,
            "inverse",
            len(self.event),
        )
        positions = self.size / self.latent[-1]
        log_scales = ops.sum(ops.log(self.scale))
        standardization = positions * log_scales
        log_det += change - standardization
        eps = ops.reshape(eps, (-1, self.size))
        return self._base_log_prob(eps) + log_det

    def _base_log_prob(self, eps: Tensor) -> Tensor:
        """Return log p(eps), (examples,)."""
        if self.base == 1:
            return log_normal(eps)
        loc = ops.cast(self.base_loc, self.dtype)
        return mixture_log_prob(eps, loc, self.base_raw_scale)

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None]:
        shape, _ = self._pair(input_shape)
        return tuple(shape)[:1]

    def log_prob(self, x: Any, condition: Any = None, batch_size: int = 1000) -> np.ndarray:
        """Return log p(x), or log p(x | condition).

        Args:
            x: (examples, ...), data.
            condition: (examples, size), or inputs of the model that `condition` is.
            batch_size: how many examples to take at once.

        Returns:
            Log-densities (examples,) in nats.
        """
        return self.predict((x, condition), batch_size=batch_size, verbose=0)

    def sample(self, number: int, seed: int = 0, condition: Any = None) -> np.ndarray:
        """Return draws of p(x), or one of p(x | condition) for each row of a condition.

        Args:
            number: of draws; with a condition, the number of its rows.
            seed: equal seeds give equal draws.
            condition: (number, size), or inputs of the model that `condition` is.

        Returns:
            Draws (number, ...).

        Raises:
            ValueError: if the density is not built, or the condition is missing.
        """
        if not self.built:
            raise ValueError("The density is not built yet: call `fit` first.")
        number = checks.positive_integer("number", number)
        placeholder = np.zeros((number, *self.event))
        data = self.checked_data((placeholder, condition))
        _, condition = self._pair(data)
        seed = checks.whole("seed", seed)
        key = ops.convert_to_tensor(counter.key_from_seed(seed))
        draws = self._draw(number, key, condition)
        return ops.convert_to_numpy(draws)

    def adapt(self, x: Any) -> None:
        """Set loc and scale to the mean and the deviation of x (examples, ...), by channel.

        Args:
            x: an array, or a dataset of batches such as `fit` takes.
        """
        if is_dataset(x):
            pairs = [self._pair(inputs) for inputs, _, _ in unpacked(x, "x")]
            x = np.concatenate([ops.convert_to_numpy(part) for part, _ in pairs])
        x = self._rows(x)
        if not self.built:
            self.build(x.shape if self.condition is None else (x.shape, None))
        if self.surjection is not None:
            x = self._adapting_latents(x[:_ADAPTING_EXAMPLES])
        channels = self.latent[-1]
        values = ops.convert_to_numpy(x)
        values = values.astype("float64")
        values = values.reshape(-1, channels)
        deviation = values.std(axis=0)
        largest = np.abs(values).max(axis=0)
        smallest = 1e-12 * largest
        constant = np.flatnonzero(deviation <= smallest).tolist()
        if constant:
            raise ValueError(f"`x` must vary in every column; columns {constant} do not.")
        self.loc.assign(values.mean(axis=0))
        self.scale.assign(deviation)
        self.adapted.assign(1.0)

    def _adapting_latents(self, x: np.ndarray) -> Tensor:
        """Return what a surjection makes of x, at a condition of 0 if it takes one."""
        size = self.surjection.condition_size
        condition = None
        if size is not None:
            positions = (1,) * (x.ndim - 1)
            condition = ops.zeros((*positions, size))
        noise = backend.normal(self._noise_shape(x), self.dtype, (0, 0))
        z, _ = self._latents(x, condition, noise)
        return z

    def _begin(self, data: Any) -> None:
        x, _ = self._pair(data)
        takes_whole_numbers = bool(getattr(self.surjection, "levels", None))
        if not takes_whole_numbers and not (x % 1).any():
            if np.abs(x).max() >= 1 / np.finfo(self.dtype).eps:
                raise ValueError(
                    f"`x` is too large for the precision of {self.dtype}: center or scale it."
                )
            raise ValueError("`x` is whole numbers only: end `flows` with Dequantize(levels).")
        if not (self.built and float(self.adapted)):
            self.adapt(x)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        nats_per_bit = math.prod(self.event) * math.log(2)
        self.bits.update_state(-y_pred / nats_per_bit, sample_weight)
        return self.get_metrics_result()

    def export(self, path: str | os.PathLike) -> None:
        """Write a SavedModel with the signatures `log_prob` (x) and `sample` (number, seed)."""
        if self.condition is not None or not self.built:
            raise ValueError("`export` takes trained densities without a condition.")

        def log_prob(x: Tensor) -> dict[str, Tensor]:
            return {"log_prob": self.call(x)}

        def sample(number: Tensor, seed: Tensor) -> dict[str, Tensor]:
            key = ops.stack([seed, ops.zeros_like(seed)])
            return {"x": self._draw(number, key, None)}

        x = ((None, *self.event), self.dtype)
        count = ((), "int32")
        functions = {
            "log_prob": (log_prob, {"x": x}),
            "sample": (sample, {"number": count, "seed": count}),
        }
        with files.replacing_folder(path) as folder:
            backend.save_functions(str(folder), functions, [])

    def get_config(self) -> dict[str, Any]:
        flows = list(self.flows)
        if self.surjection is not None:
            flows.append(self.surjection)
        arguments = {"flows": flows, "base": self.base, "condition": self.condition}
        return {**super().get_config(), **keras.saving.serialize_keras_object(arguments)}

    def _pair(self, inputs: Any) -> Any:
        """Return x, or its shape, and the condition if any, or raise."""
        if self.condition is None:
            return inputs, None
        is_pair = isinstance(inputs, (tuple, list)) and len(inputs) == 2
        first = inputs[0] if is_pair else None
        if not (isinstance(first, (tuple, list)) or hasattr(first, "shape")):
            raise ValueError(
                "A density with a `condition` takes pairs, `(x, c)`; a dataset or generator must "
                "yield `((x, c),)`."
            )
        return inputs

    def _features(self, condition: Any, training: bool = False) -> Any:
        """Return vectors of a condition, with an axis for each position of x."""
        if isinstance(self.condition, keras.Model):
            condition = self.condition(condition, training=training)
        rank = len(self.event)
        if condition is None or rank == 1:
            return condition
        positions = (1,) * (rank - 1)
        size = condition.shape[-1]
        return ops.reshape(condition, (-1, *positions, size))

    def _noise_shape(self, x: Any) -> tuple[Any, ...]:
        return (*ops.shape(x)[:-1], self.surjection.noise_channels)

    def _noise(self, x: Any, training: bool) -> Tensor | None:
        """Return the noise of a surjection: new in training, or else what each row decides."""
        if self.surjection is None:
            return None
        shape = self._noise_shape(x)
        if training:
            return backend.normal(shape, self.dtype, self.seeds)
        rows, others = hashed(x, seed=0)
        second = others[:, None]
        first = ops.zeros_like(second)
        size = math.prod(shape[1:])
        bits = counter.bits((first, second), rows, 0, size)
        noise = counter.normal(bits, self.dtype)
        return ops.reshape(noise, shape)

    def _latents(self, x: Any, condition: Any, noise: Any) -> tuple[Tensor, Any]:
        """Return x before the surjection, and what that contributes to log p(x), (examples,)."""
        if self.surjection is None:
            return ops.cast(x, self.dtype), 0.0
        z, changes = self.surjection.inference_and_contribution(x, noise, condition)
        positions = tuple(range(1, len(self.event)))
        change = ops.sum(changes, axis=positions)
        return z, change

    def _draw(self, number: Any, key: Tensor, condition: Any) -> Tensor:
        """Return draws (number, ...) by a key; both may be tensors."""
        noise_channels = getattr(self.surjection, "noise_channels", 0)
        noise_shape = (*self.event[:-1], noise_channels)
        size = self.size
        columns = size + 1 + math.prod(noise_shape)
        normals = backend.normal((number, columns), self.dtype, key)
        eps = normals[:, :size]
        leftover = normals[:, size]
        noise = normals[:, size + 1 :]
        if self.base > 1:
            eps = of_mixture(
                eps,
                leftover,
                self.base_loc,
                self.base_raw_scale,
            )
        eps = ops.reshape(eps, (-1, *self.latent))
        condition = self._features(condition)
        standard, _ = through(
            self.flows,
            eps,
            condition,
            "forward",
            len(self.event),
        )
        z = self.loc + self.scale * standard
        if self.surjection is None:
            return z
        noise = ops.reshape(noise, (number, *noise_shape))
        return self.surjection.generate(z, noise, condition)

    def _rows(self, x: Any) -> np.ndarray:
        """Return data as an array, or raise."""
        x = as_numbers(x, self.dtype)
        _check_shape(x, self.event)
        check_finite(x, "values of `x`")
        if self.surjection is not None:
            self.surjection.check(x)
        return x

    def _checked(self, x: Any, condition: Any = None) -> Any:
        """Return data as the model takes them, or raise."""
        x = self._rows(x)
        if condition is None:
            return x
        return x, checked_condition(condition, self.condition, len(x))


def _check_shape(x: Any, event: tuple[int, ...]) -> None:
    """Raise unless x has examples, and each the shape of an event if that is known."""
    shape = tuple(x.shape)
    if len(shape) == 1 and event in ((), (1,)):
        size = event[0] if event else "size"
        raise ValueError(
            f"`x` must have the shape (examples, {size}); got {shape}: use x[:, None]."
        )
    is_known = len(event) > 0
    fits = len(shape) > 1 and 0 not in shape
    if is_known:
        fits = fits and shape[1:] == tuple(event)
    if not fits:
        axes = ", ".join(map(str, event)) if is_known else "size"
        raise ValueError(f"`x` must have the shape (examples, {axes}); got {shape}.")
