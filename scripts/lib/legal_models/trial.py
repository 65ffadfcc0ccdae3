"""One model under test: itself, its stochastic copy, data, and how closely numbers must agree."""

import functools
from typing import Any

import keras
import numpy as np
from keras import ops

import tfp_ibnn as ibnn
from lib.legal_models.draw import Case, build, data

__all__ = ["Inapplicable", "Trial", "Wrong", "array"]

_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "mixed_bfloat16": 2.0**-8}
_EPS["mixed_float16"] = 2.0**-11
JAX = keras.backend.backend() == "jax"


class Wrong(Exception):
    """A number that is not what it must be."""


class Inapplicable(Exception):
    """A check that says nothing about a model."""


def array(x: Any) -> np.ndarray:
    """Return a number or a tensor of any precision in float64."""
    if isinstance(x, (float, np.ndarray)):
        return np.asarray(x, "float64")
    return ops.convert_to_numpy(ops.cast(ops.convert_to_tensor(x), "float64"))


class _Probe(keras.layers.Layer):
    """Returns the mask that Keras hands on with a tensor."""

    def call(self, inputs: Any, mask: Any = None) -> Any:
        return mask


class Trial:
    """A case, made; its precision must be set as long as it is used.

    Attributes:
        case: what was drawn.
        model: the Keras model.
        x: its inputs, y: targets, weight: of the examples, or None.
        sto: the stochastic model.
        folder: where files may be written.
    """

    def __init__(self, case: Case, folder: Any) -> None:
        self.case, self.folder = case, folder
        self.rng = np.random.default_rng(case.seed + 2)
        self.model = build(case)
        self.x = data(case, self.functional)
        self.plain = self.outputs(self.model(self.x))
        self.y = [self._targets(*pair) for pair in zip(case.heads, self.plain, strict=True)]
        self.weight = None
        if case.weighted:
            self.weight = self.rng.uniform(0.5, 2, case.batch).astype(keras.config.floatx())
        posterior = eval(case.posterior, {"ibnn": ibnn})
        self.sto = ibnn.to_stochastic(self.model, posterior, train_size=50, **case.convert)

    @property
    def functional(self) -> keras.Model:
        """The functional model, inside of a subclassed one perhaps."""
        return self.model.inner if self.case.form == "subclass" else self.model

    @staticmethod
    def outputs(found: Any) -> list[np.ndarray]:
        """Return a model's outputs as a list of arrays."""
        return [array(x) for x in keras.tree.flatten(found)]

    @property
    def names(self) -> list[str]:
        """The names of several outputs, by which predictions and scores go."""
        if len(self.case.heads) == 1:
            return []
        if self.case.form == "subclass":
            return [str(number) for number in range(len(self.case.heads))]
        return list(self.sto.output_names)

    def by_name(self, values: list[Any]) -> Any:
        """Return what belongs to the outputs: itself for one, a dict for several."""
        return dict(zip(self.names, values, strict=True)) if self.names else values[0]

    def average(self, model: keras.Model | None = None, **options: Any) -> ibnn.MonteCarlo:
        """Return a `MonteCarlo` of a model, not compiled."""
        head = self.by_name([head.kind for head in self.case.heads])
        logits = self.by_name([head.from_logits for head in self.case.heads])
        options = {**self.case.predict, **options}
        model = self.sto if model is None else model
        found = ibnn.MonteCarlo(model, head=head, from_logits=logits, **options)
        found.compile(run_eagerly=True)
        return found

    def quiet(self, model: keras.Model | None = None) -> list[np.ndarray]:
        """Return the outputs of a stochastic model without noise."""
        model = self.sto if model is None else model
        with ibnn.noise_off(model):
            return self.outputs(model(self.x))

    def stir(self, size: float = 0.3) -> None:
        """Move the posteriors away from their start."""
        for layer in ibnn.stochastic_layers(self.sto):
            for weight in layer.posterior.trainable_weights:
                step = size * self.rng.normal(size=weight.shape)
                weight.assign(weight + step.astype(keras.backend.standardize_dtype(weight.dtype)))
        self.__dict__.pop("rounding", None)

    @property
    def eps(self) -> float:
        """The rounding of a number in the precision of the case."""
        # Keras computes some functions of JAX, and has adapters, in float32 only.
        is_float32 = JAX or any(weight.dtype == "float32" for weight in self.model.weights)
        return max(_EPS[self.case.policy], _EPS["float32"] if is_float32 else 0)

    @functools.cached_property
    def rounding(self) -> float:
        """By how much outputs change, at most, if all weights do by the rounding of a number."""
        before, rng = self.quiet(), np.random.default_rng(0)
        kept = [array(weight) for weight in self.sto.weights]
        is_real = [keras.backend.is_float_dtype(weight.dtype) for weight in self.sto.weights]
        largest, scale = 0.0, max(np.abs(x).max(initial=0) for x in before)
        step = max(self.eps, 1e-6 if self.case.policy != "float64" else 1e-12)
        for _ in range(2):
            for weight, value, real in zip(self.sto.weights, kept, is_real, strict=True):
                if real and weight.trainable:
                    moved = value * (1 + step * rng.normal(size=value.shape))
                    weight.assign(moved.astype(keras.backend.standardize_dtype(weight.dtype)))
            change = max(
                np.abs(x - y).max(initial=0) for x, y in zip(before, self.quiet(), strict=True)
            )
            largest = max(largest, change * self.eps / step)
        for weight, value in zip(self.sto.weights, kept, strict=True):
            weight.assign(value.astype(keras.backend.standardize_dtype(weight.dtype)))
        return largest + self.eps * scale

    def close(
        self, what: str, found: Any, wanted: Any, times: float = 30, slack: Any = float
    ) -> None:
        """Raise unless numbers agree, but for so many times the rounding and some slack.

        Args:
            what: the numbers are.
            found: numbers of the library.
            wanted: what they must be.
            times: how many times the rounding they may be off.
            slack: returns by how much more, if it matters.
        """
        found, wanted = array(found), array(wanted)
        if found.shape != wanted.shape:
            raise Wrong(f"{what} has the shape {found.shape} for {wanted.shape}")
        is_finite = np.isfinite(wanted)
        if not np.array_equal(np.isfinite(found), is_finite):
            raise Wrong(f"{what} is not finite where it must be, or the other way round")
        error = np.abs(found[is_finite] - wanted[is_finite]).max(initial=0)
        allowed = times * self.eps * max(1.0, np.abs(wanted[is_finite]).max(initial=0))
        if error <= allowed:  # which saves the passes that show the rounding
            return
        allowed += times * self.rounding + slack()
        if error > allowed:
            raise Wrong(f"{what} is off by {error:.2g}, where {allowed:.1g} is allowed")

    def _targets(self, head: Any, output: np.ndarray) -> np.ndarray:
        shape = output.shape
        if head.kind == "softmax":
            return self.rng.integers(0, shape[-1], shape[:-1])
        if head.kind == "sigmoid":
            return self.rng.integers(0, 2, shape).astype("float32")
        size = shape[-1] // 2 if head.kind == "gaussian" else shape[-1]
        return self.rng.normal(size=(*shape[:-1], size)).astype(keras.config.floatx())

    def masks(self) -> list[np.ndarray | None]:
        """Return the masks that Keras gives the outputs."""
        masks = [_Probe()(x) for x in keras.tree.flatten(self.model(self.x))]
        return [None if mask is None else ops.convert_to_numpy(mask) for mask in masks]
