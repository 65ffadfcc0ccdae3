"""Loops of known length, written out where a graph is to go into a file of another runtime."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
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
