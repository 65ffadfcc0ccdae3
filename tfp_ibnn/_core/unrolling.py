"""Loops of known length, written out where a graph is to go into a file of another runtime."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras import ops

_is_unrolled = contextvars.ContextVar("tfp_ibnn_unrolled", default=False)


@contextlib.contextmanager
def unrolled() -> Iterator[None]:
    """Write loops out in this context; to be opened inside of the function that is traced."""
    token = _is_unrolled.set(True)
    try:
        yield
    finally:
        _is_unrolled.reset(token)


def is_unrolled() -> bool:
    """Whether loops are to be written out."""
    return _is_unrolled.get()


def map_first_axis(function: Callable[[Any], Any], values: Any) -> Any:
    """Do as `keras.ops.map` does: apply a function along the first axis, and stack what it returns.

    Args:
        function: of a nest of tensors without that axis.
        values: a nest of tensors whose first axes have one size, a known one if it is unrolled.

    Returns:
        A nest of tensors with that axis.
    """
    if not is_unrolled():
        return ops.map(function, values)
    parts = [ops.unstack(x) for x in keras.tree.flatten(values)]
    results = []
    for leaves in zip(*parts, strict=True):
        results.append(function(keras.tree.pack_sequence_as(values, list(leaves))))
    return keras.tree.map_structure(lambda *slices: ops.stack(slices), *results)


def repeat(count: int, body: Callable[[Any, Any], Any], state: Any) -> Any:
    """Do as `keras.ops.fori_loop` does from 0 on.

    Args:
        count: how many steps.
        body: makes the next state of a number and a state.
        state: the first state, a nest of tensors.

    Returns:
        The last state.
    """
    if not is_unrolled():
        return ops.fori_loop(0, count, body, state)
    for number in range(count):
        state = body(number, state)
    return state


def quantiles(values: Any, probabilities: Sequence[float]) -> list[Any]:
    """Return quantiles along the first axis, as `keras.ops.quantile` interpolates them.

    Args:
        values: (count, ...), with a known count if it is unrolled.
        probabilities: of the quantiles.

    Returns:
        A tensor (...) for each probability.
    """
    if not is_unrolled():
        points = ops.convert_to_tensor(probabilities, dtype=values.dtype)
        return ops.unstack(ops.quantile(values, points, axis=0))
    ordered = ops.sort(values, axis=0)
    last = values.shape[0] - 1
    results = []
    for probability in probabilities:
        place = probability * last
        below = int(place)
        above = min(below + 1, last)
        share = place - below
        results.append((1 - share) * ordered[below] + share * ordered[above])
    return results


_ERFC = (
    *(-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806),
    *(0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277),
)


def erf(x: Any) -> Any:
    """Return the error function, which LiteRT lacks, to 1.2e-7.

    Unrolled, it is Chebyshev's approximation of Numerical Recipes (`erfcc`), with t = 1 / (1 +
    |x| / 2): 1 - erf(|x|) = t exp(-x^2 + sum_i c_i t^i).

    Args:
        x: a tensor of any shape.
    """
    if not is_unrolled():
        return ops.erf(x)
    size = ops.abs(x)
    t = 1 / (1 + 0.5 * size)
    exponent = ops.zeros_like(t)
    for coefficient in reversed(_ERFC):
        exponent = exponent * t + coefficient
    rest = t * ops.exp(exponent - size * size)
    return ops.sign(x) * (1 - rest)
