"""Which rows of a stochastic layer's input belong to which example.

A stochastic layer takes its input's first axis for the examples, which may be cut into several rows
each, one after another. Transposing puts the examples elsewhere, and then a draw would be one for a
time step, say, and not for an example.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

from tfp_ibnn import noise
from tfp_ibnn._core import keras_internals
from tfp_ibnn.layers import inside
from tfp_ibnn.noise import Pass

_KNOWN = ("keras.", "keras_hub.", "tfp_ibnn.")
"""Modules whose layers keep the examples on the first axis, each a row."""

_SIZE = 16
"""The size of made-up inputs along axes that the model leaves open."""

_TOLERANCE = 0.01
"""How far values may be from those expected, as a share of the largest."""

_REPEATED = 1e-5
"""The same for values of a second run: only noise makes them differ by more than rounding."""

_checked: "weakref.WeakSet[keras.Model]" = weakref.WeakSet()
"""Models that need no second check."""

Run = Callable[[Any, Pass], Any]
"""How to run a model: (inputs, forward pass)."""


class LayerInput(NamedTuple):
    """A stochastic layer, and what it was called with in a run."""

    layer: keras.layers.Layer
    values: np.ndarray


def may_move_examples(model: keras.Model) -> bool:
    """Whether a model contains what need not keep the examples on the first axis, each a row."""
    layers = [model, *(place.layer for place in inside.places(model).values())]
    for layer in layers:
        is_known = type(layer).__module__.startswith(_KNOWN)
        if not is_known or isinstance(layer, keras.layers.Lambda):
            return True
        if keras_internals.is_functional(layer):
            nodes = keras_internals.nodes_in_order(layer)
            if not all(_keeps_rows(node) for node in nodes):
                return True
    return False


def check_rows(model: keras.Model, run: Run | None = None) -> None:
    """Raise if an example's rows are not consecutive in the input of a stochastic layer.

    It is found by running the model on two examples, and on three of which the first and the last
    are the same two. A model that fails on made-up inputs is not checked.

    Args:
        model: a built model.
        run: how to run it, if another way than by a call.

    Raises:
        ValueError: If a layer is found; the error names it.
    """
    if model in _checked or not may_move_examples(model):
        return
    try:
        misplaced = _first_misplaced(model, run)
    except Exception:  # whatever does not suit the model
        return
    if misplaced is not None:
        layer, of_two = misplaced
        raise ValueError(
            f"Layer {layer.name!r} does not have the examples on the first axis of its input, one "
            f"after another (its shape is {of_two.shape} for two of them), so an example could not "
            "keep one draw. Transpose the input back before this layer, call the layer once for "
            "each tensor instead of on all of them concatenated, or leave it deterministic: "
            "`to_stochastic` takes posteriors by patterns of layer names."
        )
    if run is None:
        _checked.add(model)


def _keeps_rows(node: Any) -> bool:
    """Whether a call in a graph is of a layer, or leaves each example its shape."""
    if isinstance(node.operation, keras.layers.Layer):
        return True
    before = [x.shape for x in node.input_tensors]
    after = [x.shape for x in node.outputs]
    if not all(_has_only_batch_open(shape) for shape in (*before, *after)):
        return False
    return all(shape in before for shape in after)


def _has_only_batch_open(shape: tuple[int | None, ...]) -> bool:
    return bool(shape) and shape[0] is None and None not in shape[1:]


def _made_up_inputs(model: keras.Model) -> Any:
    """Return random inputs of three examples."""
    generator = np.random.default_rng(0)

    def zeros_and_ones(shape: Any, dtype: str) -> np.ndarray:
        sizes = [size or _SIZE for size in shape[1:]]
        return generator.integers(0, 2, (3, *sizes)).astype(dtype)

    def of_tensor(x: Any) -> np.ndarray:
        made_up = zeros_and_ones(x.shape, x.dtype)
        is_float = keras.backend.is_float_dtype(x.dtype)
        noise_around = generator.normal(size=made_up.shape).astype(x.dtype)
        return made_up + noise_around * is_float

    if keras_internals.is_functional(model):
        return keras.tree.map_structure(of_tensor, model.input)
    owner = getattr(model, "model", model)
    if keras_internals.is_functional(owner):
        return keras.tree.map_structure(of_tensor, owner.input)
    # The types are unknown: numbers that can also be indices.
    shape = owner.get_build_config()["input_shape"]
    return zeros_and_ones(shape, keras.config.floatx())


class _Runs(NamedTuple):
    """How a model is run on some of three made-up examples."""

    model: keras.Model
    examples: Any
    run: Run | None

    def on(self, *chosen: int) -> list[LayerInput]:
        """Return the stochastic layers in the order of their calls, each with its input."""
        rows = list(chosen)
        inputs = keras.tree.map_structure(lambda x: x[rows], self.examples)
        inputs = keras.tree.map_structure(keras.ops.convert_to_tensor, inputs)
        # Nothing of the run stays.
        with keras.StatelessScope(), noise.scope(off=True, losses=False) as forward_pass:
            forward_pass.seen = []
            if self.run is None:
                self.model(inputs, training=False)
            else:
                self.run(inputs, forward_pass)
        return [
            LayerInput(layer, keras.ops.convert_to_numpy(values))
            for layer, values in forward_pass.seen
        ]


def _first_misplaced(model: keras.Model, run: Run | None) -> LayerInput | None:
    """Return the first stochastic layer, with its input, whose rows are not those of examples."""
    runs = _Runs(model, _made_up_inputs(model), run)
    of_two = runs.on(0, 2)
    of_three = runs.on(0, 1, 2)
    suspects = [
        number
        for number, layer_input in enumerate(of_two)
        if not _agree_on_rows(layer_input.values, of_three[number].values)
    ]
    if not suspects:
        return None
    swapped = runs.on(2, 0)
    again = runs.on(0, 2)
    replaced = runs.on(1, 2)
    for number in suspects:
        values = of_two[number].values
        has_equal_rows = 2 * len(of_three[number].values) == 3 * len(values)
        others = (x[number].values for x in (swapped, again, replaced))
        if len(values) % 2 or not has_equal_rows or not _is_excused(values, *others):
            return of_two[number]
    return None


def _is_excused(
    values: np.ndarray, swapped: np.ndarray, again: np.ndarray, replaced: np.ndarray
) -> bool:
    """Whether rows may be in order although they depend on the other examples.

    Args:
        values: the input of a layer for two examples.
        swapped: that for the two in the other order.
        again: that for the same two in another run.
        replaced: that with another first example.
    """
    half = len(values) // 2
    # A user's layer may normalize by the batch,
    keeps_order = _is_close(values, np.roll(swapped, half, axis=0))
    # draw noise at prediction by seeds of Keras, which start afresh in each run,
    keeps_apart = _is_close(values[half:], replaced[half:])
    # or draw it in another way, in which case the values show nothing.
    is_random = not _is_close(values, again, _REPEATED)
    return keeps_order or keeps_apart or is_random


def _agree_on_rows(of_two: np.ndarray, of_three: np.ndarray) -> bool:
    """Whether arrays for two and three examples have the same consecutive rows for each, if any."""
    rows = len(of_two) // 2
    if len(of_two) != 2 * rows or len(of_three) != 3 * rows:
        return False
    first = of_three[:rows]
    third = of_three[2 * rows :]
    return _is_close(of_two, np.concatenate([first, third]))


def _is_close(values: np.ndarray, expected: np.ndarray, tolerance: float = _TOLERANCE) -> bool:
    expected = expected.astype("float64")
    size = np.max(np.abs(expected), initial=0)
    return np.allclose(values, expected, atol=tolerance * size)
