"""Density estimation by normalizing flows."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import backend, checks, constraints, files
from tfp_ibnn._core.backend import Tensor, mean
from tfp_ibnn.flows import Affine, Flow
from tfp_ibnn.noise import counter
from tfp_ibnn.posteriors import base as gaussians
from tfp_ibnn.posteriors.flow import copied


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class FlowDensity(keras.Model):
    """A density by flows, trained by maximum likelihood: x = loc + scale * NF(eps).

        log p(x) = log p(eps) - sum_i log|det J_i| - sum_c log scale_c

    `fit(x)` trains it, by the mean of -log p(x) in nats, with `bits_per_dimension` beside it. The
    first `fit` on arrays sets loc and scale to the mean and the deviation of the data. Called, or
    by `predict(x)`, it gives log p(x), one number per row.

    Training maps data to noise. `SplineCoupling`, `AffineCoupling`, `MaskedAutoregressive` and
    `Inverse(Planar())` are quick that way; `InverseAutoregressive` takes a pass for each channel.

    Args:
        flows: flows, applied in order from noise to data; they are copied.
        base: number of Gaussians of eps; above 1 their means and scales are learned.
        condition: None, or the size of a condition, for p(x | condition): data are then pairs, as
            in `fit((x, condition))`. Or a Keras model that makes of the condition a vector.
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
        self.base = checks.positive_integer("base", base)
        self.condition = condition
        if condition is not None and not isinstance(condition, keras.Model):
            self.condition = checks.positive_integer("condition", condition, checks.LARGEST_SIZE)
        size = condition.output_shape[-1] if isinstance(condition, keras.Model) else condition
        self.flows = copied(flows, self.dtype, condition_size=size)
        self.affine = Affine(dtype=self.dtype, name="affine")
        self.bits = keras.metrics.Mean("bits_per_dimension")
        self.size: int | None = None

    def build(self, input_shape: Any) -> None:
        if self.condition is not None:
            input_shape = input_shape[0]
        if len(input_shape) != 2 or input_shape[-1] is None:
            raise ValueError(f"`x` must have the shape (examples, size); got {input_shape}.")
        self.size = input_shape[-1]
        for flow in (*self.flows, self.affine):
            flow.build(input_shape)
        self.adapted = self.add_weight((), "zeros", trainable=False, name="adapted")
        if self.base > 1:
            shape, spread = (self.base, self.size), keras.initializers.RandomNormal(stddev=0.5)
            raw = keras.initializers.Constant(constraints.inverse_scale(0.75**0.5))
            self.base_loc = self.add_weight(shape, spread, name="base_loc")
            self.base_raw_scale = self.add_weight(shape, raw, name="base_raw_scale")

    def call(self, inputs: Any) -> Tensor:
        """Return log p(x), (examples,), of x or of pairs (x, condition)."""
        x, condition = (inputs, None) if self.condition is None else inputs
        condition = self._features(condition)
        eps, log_det = self.affine.inverse_and_log_det(x)
        for flow in reversed(self.flows):
            eps, change = flow.inverse_and_log_det(eps, condition)
            log_det = log_det + change
        return self._base().log_prob(eps) + log_det

    def log_prob(self, x: Any, condition: Any = None, batch_size: int = 1000) -> np.ndarray:
        """Return log p(x), or log p(x | condition), one number per row."""
        x, condition = self._checked(x, condition)
        data = x if self.condition is None else (x, condition)
        return self.predict(data, batch_size=batch_size, verbose=0)

    def sample(self, number: int, condition: Any = None, seed: int = 0) -> np.ndarray:
        """Return draws (number, size); with a condition, one for each of its `number` rows."""
        if not self.built:
            raise ValueError("The density is not built yet: call `fit` first.")
        number = checks.positive_integer("number", number)
        if condition is not None and len(condition) != number:
            got = f"{len(condition)} rows for {number} draws"
            raise ValueError(f"`condition` must have a row for each draw; got {got}.")
        key = ops.convert_to_tensor(counter.key_from_seed(seed))
        return ops.convert_to_numpy(self._draw(number, key, condition))

    def adapt(self, x: Any) -> None:
        """Set loc and scale to the mean and the deviation of x (examples, size)."""
        x = np.asarray(x, dtype="float64")
        deviation = x.std(axis=0)
        if not (deviation > 0).all():
            constant = np.flatnonzero(deviation == 0).tolist()
            raise ValueError(f"`x` must vary in every column; columns {constant} do not.")
        self.affine.shift.assign(x.mean(axis=0))
        self.affine.raw_scale.assign([constraints.inverse_scale(float(d)) for d in deviation])
        self.adapted.assign(1.0)

    def fit(self, x: Any = None, y: Any = None, **kwargs: Any) -> keras.callbacks.History:
        """Train as Keras does; arrays are checked, and the first ones give loc and scale."""
        if y is not None:
            raise ValueError("A density has no targets; for p(x | c) call `fit((x, c))`.")
        arrays = x if self.condition is None else (x[0] if isinstance(x, (tuple, list)) else None)
        if hasattr(arrays, "shape"):
            x = self._checked(*(x if self.condition is not None else (x, None)))
            x = x[0] if self.condition is None else x
            if not self.built:
                self.build(keras.tree.map_structure(np.shape, x) if self.condition else x.shape)
            if not float(self.adapted):
                self.adapt(x[0] if self.condition is not None else x)
        return super().fit(x, **kwargs)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Tensor:
        """Return the mean of -log p(x), weighted if there are weights."""
        weighted = y_pred if sample_weight is None else y_pred * ops.cast(sample_weight, self.dtype)
        return -mean(weighted) + sum(self.losses)

    def compute_metrics(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None
    ) -> dict[str, Any]:
        self.bits.update_state(-y_pred / (self.size * math.log(2)), sample_weight)
        return self.get_metrics_result()

    def export(self, path: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Write a SavedModel with the signatures `log_prob` and `sample` (number, seed)."""
        if args or kwargs or self.condition is not None:
            raise ValueError("`export` takes a path only, and densities without a condition.")
        x = {"x": ((None, self.size), self.dtype)}
        count = {"number": ((), "int32"), "seed": ((), "int32")}

        def draw(number: Tensor, seed: Tensor) -> dict[str, Tensor]:
            return {"x": self._draw(number, ops.stack([seed, ops.zeros_like(seed)]), None)}

        functions = {"log_prob": (lambda x: {"log_prob": self.call(x)}, x), "sample": (draw, count)}
        with files.replacing_folder(Path(path)) as folder:
            backend.save_functions(str(folder), functions, [])

    def get_config(self) -> dict[str, Any]:
        own = {"flows": self.flows, "base": self.base, "condition": self.condition}
        return {**super().get_config(), **keras.saving.serialize_keras_object(own)}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "FlowDensity":
        return cls(**keras.saving.deserialize_keras_object(config, custom_objects))

    def _features(self, condition: Any) -> Any:
        is_model = isinstance(self.condition, keras.Model)
        return self.condition(condition) if is_model else condition

    def _base(self) -> Any:
        if self.base == 1:
            zeros = ops.zeros((self.size,), dtype=self.dtype)
            return gaussians.diagonal_normal(zeros, ops.ones_like(zeros))
        loc = ops.convert_to_tensor(self.base_loc)
        return gaussians.equal_mixture(loc, constraints.scale(self.base_raw_scale))

    def _draw(self, number: Any, key: Tensor, condition: Any) -> Tensor:
        x = backend.normal((number, self.size + 1), self.dtype, key)
        x, extra = x[:, : self.size], x[:, self.size]
        if self.base > 1:  # the number left over chooses the Gaussian
            chosen = ops.floor(self.base * 0.5 * (1 + ops.erf(extra / math.sqrt(2))))
            chosen = ops.cast(ops.clip(chosen, 0, self.base - 1), "int32")
            scales = constraints.scale(self.base_raw_scale)
            loc, scale = gaussians.of_component(chosen, self.base_loc, scales)
            x = loc + scale * x
        condition = self._features(condition)
        for flow in self.flows:
            x = flow.forward_and_log_det(x, condition)[0]
        return self.affine.forward_and_log_det(x)[0]

    def _checked(self, x: Any, condition: Any) -> tuple[np.ndarray, Any]:
        """Return the data, or raise."""
        if (condition is None) != (self.condition is None):
            wanted = "without a condition" if self.condition is None else "given a condition"
            raise ValueError(f"This is a density {wanted}; got `condition` {type(condition)}.")
        x = np.asarray(x, dtype=self.dtype)
        size = self.size or x.shape[-1]
        if x.ndim != 2 or x.shape[-1] != size:
            raise ValueError(f"`x` must have the shape (examples, {size}); got {x.shape}.")
        if not np.isfinite(x).all():
            rows = np.flatnonzero(~np.isfinite(x).all(axis=-1))
            raise ValueError(f"`x` must be finite; {len(rows)} rows are not, as row {rows[0]}.")
        return x, condition
