"""Density estimation by normalizing flows."""

import math
import os
from collections.abc import Sequence
from typing import Any, Self

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import backend, checks, constraints, files, keras_internals
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.serialization import SavesRandomState
from tfp_ibnn.data.examples import check_finite
from tfp_ibnn.flows import Flow, Surjection
from tfp_ibnn.flows.batchnorm import refuse_batch_norm
from tfp_ibnn.flows.chain import copied, through
from tfp_ibnn.noise import counter
from tfp_ibnn.noise.hashing import hashed
from tfp_ibnn.posteriors import base as gaussians


class Unsupervised(keras.Model):
    """A Keras model of x alone, trained by a loss per example; its `_checked` checks arrays."""

    condition = None

    def fit(self, x: Any = None, y: Any = None, **kwargs: Any) -> keras.callbacks.History:
        """Train as Keras does, without targets; arrays are checked."""
        weights, x = self._targets(y, **kwargs), self._data(x)
        held_out = _parts(kwargs.get("validation_data"))
        if held_out and held_out[0] is not None and len(held_out) <= 3:
            # (x, condition, weights), or as in Keras ((x, condition), None, weights)
            values, condition, held_weights = (*held_out, None, None)[:3]
            values = self._data(values if condition is None else (values, condition))
            kwargs["validation_data"] = (values, held_weights, held_weights)
        if isinstance(x, (tuple, np.ndarray)):
            self._begin(x)
        own = self.optimizer.variables if self.compiled else []
        with keras_internals.values_kept([*self.variables, *own]):
            return super().fit(x, weights, **kwargs)

    def evaluate(self, x: Any = None, y: Any = None, **kwargs: Any) -> Any:
        """Score as Keras does, without targets; arrays are checked."""
        x, weights = self._data(x), self._targets(y, **kwargs)
        with keras_internals.values_kept(self.variables):
            return super().evaluate(x, weights, **kwargs)

    def predict(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Predict as Keras does; arrays are checked."""
        x = self._data(x)
        with keras_internals.values_kept(self.variables):
            return super().predict(x, *args, **kwargs)

    def _targets(self, y: Any, sample_weight: Any = None, **_: Any) -> Any:
        """Return the weights: Keras drops those of data without targets."""
        if y is not None and not np.array_equal(y, sample_weight):
            raise ValueError("There are no targets: give `x`, or `(x, condition)`, alone.")
        given = self.get_compile_config() or {}
        if any(given.get(name) for name in ("loss", "metrics", "weighted_metrics")):
            raise ValueError("Losses and metrics are the model's own: write `compile(optimizer)`")
        return sample_weight

    def _data(self, x: Any) -> Any:
        """Return checked arrays, or datasets as they are."""
        parts = _parts(x)
        if parts is None:
            return x
        parts = [part for part in parts if part is not None]
        if len(parts) != 1 + (self.condition is not None):
            takes = "takes `x` alone, without condition or targets"
            takes = takes if self.condition is None else "needs a `condition`: `(x, condition)`"
            raise ValueError(f"This model {takes}; got {len(parts)} array(s).")
        return self._checked(*parts)

    def _begin(self, data: Any) -> None:
        """Take what is needed from the arrays of a training."""

    def example_losses(self, outputs: Any) -> Tensor:
        """Return the losses (examples,) from what `call` gives: log p(x), by default."""
        return -outputs

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Tensor:
        """Return the mean of the losses, times their weights if any, and what layers add to it."""
        losses = self.example_losses(y_pred)
        if sample_weight is not None:
            losses *= ops.reshape(ops.cast(sample_weight, losses.dtype), ops.shape(losses))
        return (backend.mean(losses) + sum(self.losses)) / backend.replica_count()

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Self:
        return cls(**keras.saving.deserialize_keras_object(config, custom_objects))


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class FlowDensity(SavesRandomState, Unsupervised):
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
        self.condition = size = condition
        if isinstance(condition, keras.Model):
            if not (condition.built and hasattr(condition, "output_shape")):
                wanted = "of known shape, as keras.Sequential([keras.Input((3,)), ...]) is"
                raise ValueError(f"`condition` must be a model {wanted}; got {condition.name!r}.")
            size = condition.output_shape[-1]
        elif condition is not None:
            size = checks.positive_integer("condition", condition, checks.LARGEST_SIZE)
        self.surjection, self.event = None, ()
        if isinstance(flows, Sequence) and flows and isinstance(flows[-1], Surjection):
            *flows, last = flows
            own = {"condition_size": size, "dtype": self.dtype, "name": "surjection"}
            self.surjection = type(last).from_config({**last.get_config(), **own})
            self.seeds = backend.SeedGenerator()
        self.flows = copied(flows, self.dtype, condition_size=size, ndims=3)
        refuse_batch_norm(self.flows)
        self.bits = keras.metrics.Mean("bits_per_dimension")

    __getattr__ = checks.missing_attribute

    def build(self, input_shape: Any) -> None:
        shape = tuple(self._pair(input_shape)[0])
        ndims = max((flow.event_ndims for flow in self.flows), default=1)
        if len(shape) <= ndims or None in shape[1:]:
            axes = "..., size" if ndims == 1 else "height, width, channels"
            raise ValueError(f"`x` must have the shape (examples, {axes}); got {shape}.")
        self.event = shape[1:]
        if self.surjection is not None:
            self.surjection.build(shape)
            shape = (*shape[:-1], self.surjection.latent_channels)
        self.latent, self.size = shape[1:], math.prod(shape[1:])
        for flow in self.flows:
            flow.build(shape)
        self.loc = self.add_weight(shape[-1:], "zeros", trainable=False, name="loc")
        self.scale = self.add_weight(shape[-1:], "ones", trainable=False, name="scale")
        self.adapted = self.add_weight((), "zeros", trainable=False, name="adapted")
        if self.base > 1:  # of variance 1 in all
            shape, spread = (self.base, self.size), keras.initializers.RandomNormal(stddev=0.5)
            raw = keras.initializers.Constant(constraints.inverse_scale(0.75**0.5))
            self.base_loc = self.add_weight(shape, spread, name="base_loc")
            self.base_raw_scale = self.add_weight(shape, raw, name="base_raw_scale")

    def call(self, inputs: Any, training: bool = False) -> Tensor:
        """Return log p(x), (examples,), of x or of pairs (x, condition)."""
        x, condition = self._pair(inputs)
        _check_shape(x, self.event)  # one column would be taken for all
        condition = self._features(condition, training)
        z, change = self._latents(x, condition, self._noise(x, training))
        eps = (z - self.loc) / self.scale
        eps, log_det = through(self.flows, eps, condition, "inverse", len(self.event))
        eps = ops.reshape(eps, (-1, self.size))
        log_det += change - self.size / self.latent[-1] * ops.sum(ops.log(self.scale))
        if self.base == 1:
            return gaussians.log_normal(eps) + log_det
        loc, scale = ops.cast(self.base_loc, self.dtype), constraints.scale(self.base_raw_scale)
        return gaussians.equal_mixture(loc, scale).log_prob(eps) + log_det

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None]:
        return tuple(self._pair(input_shape)[0])[:1]

    def log_prob(self, x: Any, condition: Any = None, batch_size: int = 1000) -> np.ndarray:
        """Return log p(x), or log p(x | condition), one number per row."""
        return self.predict((x, condition), batch_size=batch_size, verbose=0)

    def sample(self, number: int, seed: int = 0, condition: Any = None) -> np.ndarray:
        """Return draws (number, ...); with a condition, one for each of its `number` rows."""
        if not self.built:
            raise ValueError("The density is not built yet: call `fit` first.")
        number = checks.positive_integer("number", number)
        data = self._data((np.zeros((number, *self.event)), condition))
        key = ops.convert_to_tensor(counter.key_from_seed(checks.whole("seed", seed)))
        return ops.convert_to_numpy(self._draw(number, key, self._pair(data)[1]))

    def adapt(self, x: Any) -> None:
        """Set loc and scale to the mean and the deviation of x (examples, ...), by channel."""
        x = self._rows(x)
        if not self.built:
            self.build(x.shape if self.condition is None else (x.shape, None))
        if self.surjection is not None:
            size = self.surjection.condition_size
            x, condition = x[:10_000], size and ops.zeros((*(1,) * (x.ndim - 1), size))
            noise = backend.normal(self._noise_shape(x), self.dtype, (0, 0))
            x = self._latents(x, condition, noise)[0]
        x = ops.convert_to_numpy(x).reshape(-1, self.latent[-1]).astype("float64")
        deviation = x.std(axis=0)
        constant = np.flatnonzero(deviation <= 1e-12 * np.abs(x).max(axis=0)).tolist()
        if constant:
            raise ValueError(f"`x` must vary in every column; columns {constant} do not.")
        self.loc.assign(x.mean(axis=0))
        self.scale.assign(deviation)
        self.adapted.assign(1.0)

    def _begin(self, data: Any) -> None:
        x = self._pair(data)[0]
        if not getattr(self.surjection, "levels", None) and not (x % 1).any():
            problem = "is whole numbers only: end `flows` with Dequantize(levels)"
            if np.abs(x).max() >= 1 / np.finfo(self.dtype).eps:
                problem = f"is too large for the precision of {self.dtype}: centre or scale it"
            raise ValueError(f"`x` {problem}.")
        if not (self.built and float(self.adapted)):
            self.adapt(x)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self.bits.update_state(-y_pred / (math.prod(self.event) * math.log(2)), sample_weight)
        return self.get_metrics_result()

    def export(self, path: str | os.PathLike) -> None:
        """Write a SavedModel with the signatures `log_prob` (x) and `sample` (number, seed)."""
        if self.condition is not None or not self.built:
            raise ValueError("`export` takes trained densities without a condition.")

        def draw(number: Tensor, seed: Tensor) -> dict[str, Tensor]:
            return {"x": self._draw(number, ops.stack([seed, ops.zeros_like(seed)]), None)}

        x, count = ((None, *self.event), self.dtype), ((), "int32")
        functions = {
            "log_prob": (lambda x: {"log_prob": self.call(x)}, {"x": x}),
            "sample": (draw, {"number": count, "seed": count}),
        }
        with files.replacing_folder(path) as folder:
            backend.save_functions(str(folder), functions, [])

    def get_config(self) -> dict[str, Any]:
        flows = self.flows if self.surjection is None else [*self.flows, self.surjection]
        own = {"flows": flows, "base": self.base, "condition": self.condition}
        return {**super().get_config(), **keras.saving.serialize_keras_object(own)}

    def _pair(self, inputs: Any) -> Any:
        """Return x, or its shape, and the condition if any, or raise."""
        if self.condition is None:
            return inputs, None
        first = inputs[0] if isinstance(inputs, (tuple, list)) and len(inputs) == 2 else None
        if not (isinstance(first, (tuple, list)) or hasattr(first, "shape")):
            pairs = "pairs, `(x, c)`; a dataset or generator must yield `((x, c),)`"
            raise ValueError(f"A density with a `condition` takes {pairs}.")
        return inputs

    def _features(self, condition: Any, training: bool = False) -> Any:
        if isinstance(self.condition, keras.Model):
            condition = self.condition(condition, training=training)
        if condition is None or len(self.event) == 1:
            return condition
        return ops.reshape(condition, (-1, *(1,) * (len(self.event) - 1), condition.shape[-1]))

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
        key = ops.zeros_like(others)[:, None], others[:, None]
        bits = counter.bits(key, rows, 0, math.prod(shape[1:]))
        return ops.reshape(counter.normal(bits, self.dtype), shape)

    def _latents(self, x: Any, condition: Any, noise: Any) -> tuple[Tensor, Any]:
        if self.surjection is None:
            return ops.cast(x, self.dtype), 0.0
        z, change = self.surjection.inference_and_contribution(x, noise, condition)
        return z, ops.sum(change, axis=tuple(range(1, len(self.event))))

    def _draw(self, number: Any, key: Tensor, condition: Any) -> Tensor:
        shape = (*self.event[:-1], getattr(self.surjection, "noise_channels", 0))
        x = backend.normal((number, self.size + 1 + math.prod(shape)), self.dtype, key)
        x, extra, noise = x[:, : self.size], x[:, self.size], x[:, self.size + 1 :]
        if self.base > 1:  # the number left over chooses the Gaussian
            chosen = ops.floor(self.base * 0.5 * (1 + ops.erf(extra / math.sqrt(2))))
            parts = self.base_loc, constraints.scale(self.base_raw_scale)
            loc, scale = gaussians.of_component(ops.minimum(chosen, self.base - 1), *parts)
            x = loc + scale * x
        x, condition = ops.reshape(x, (-1, *self.latent)), self._features(condition)
        x = through(self.flows, x, condition, "forward", len(self.event))[0]
        x, noise = self.loc + self.scale * x, ops.reshape(noise, (number, *shape))
        return x if self.surjection is None else self.surjection.generate(x, noise, condition)

    def _rows(self, x: Any) -> np.ndarray:
        """Return data as an array, or raise."""
        x = np.asarray(x, dtype=self.dtype)
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
        condition = np.asarray(condition) if _is_nested(condition) else condition
        is_vector = not isinstance(self.condition, keras.Model)
        for part in keras.tree.flatten(condition):
            shape = np.shape(part)
            if shape[:1] != x.shape[:1] or (is_vector and shape[1:] != (self.condition,)):
                wanted = f"({len(x)}, {self.condition if is_vector else '...'})"
                raise ValueError(f"`condition` must have the shape {wanted}; got {shape}.")
            check_finite(np.asarray(part), "values of `condition`")
        return x, condition


def _check_shape(x: Any, event: tuple[int, ...]) -> None:
    shape = tuple(x.shape)
    if len(shape) < 2 or 0 in shape or shape[1:] != tuple(event or shape[1:]):
        wanted = ", ".join(map(str, ("examples", *(event or ("size",)))))
        remedy = ": use x[:, None]" if len(shape) == 1 and event in ((), (1,)) else ""
        raise ValueError(f"`x` must have the shape ({wanted}); got {shape}{remedy}.")


def _is_nested(x: Any) -> bool:
    """Whether x is a list of numbers, or of such lists, and not of arrays."""
    return isinstance(x, list) and all(isinstance(part, (list, float, int)) for part in x)


def _parts(x: Any) -> tuple | None:
    """Return the arrays that a user gives as one or several, or None for a dataset."""
    if x is None or hasattr(x, "shape") or _is_nested(x):
        return (x,)
    return tuple(x) if isinstance(x, (tuple, list)) else None
