"""Argument checks of the whole package; each error names the argument, its value and a remedy."""

import inspect
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np

__all__ = [
    "LARGEST_SIZE",
    "channels_of",
    "finite",
    "fraction",
    "full_precision",
    "known_keywords",
    "moderate",
    "non_negative",
    "one_of",
    "positive",
    "positive_integer",
    "whole",
]


LARGEST_SIZE = 2**20
"""More units, components or bins than anybody needs, and less than takes a machine's memory."""

_OF_ALL_LAYERS = ("name", "dtype", "trainable")
_OF_TFP = (
    *(
        f"{weight}_{role}"
        for weight in ("kernel", "bias")
        for role in ("prior_fn", "posterior_fn", "posterior_tensor_fn", "divergence_fn")
    ),
    *("make_posterior_fn", "make_prior_fn", "kl_weight", "kl_use_exact"),
)
_MODERATE = 1e9
_SMALLEST, _LARGEST = (float(getattr(np.finfo("float32"), name)) for name in ("tiny", "max"))


def finite(name: str, value: Any) -> float:
    """Return `value` as a float, or raise if it is not a finite number, in float32 too."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        if is_number and abs(float(value)) <= _LARGEST:
            return float(value)
    except OverflowError:
        pass  # a whole number beyond all floats
    raise ValueError(f"`{name}` must be a finite number; got {value!r}.")


def positive(name: str, value: Any) -> float:
    """Return `value` as a float, or raise if it is not a finite number above zero."""
    number = finite(name, value)
    if number < _SMALLEST:  # in float32 it would be 0
        raise ValueError(f"`{name}` must be above 0; got {value!r}.")
    return number


def moderate(name: str, value: Any) -> float:
    """Return `value` as a float, or raise if squares of it would leave the range of float32."""
    number = finite(name, value)
    if not _MODERATE >= abs(number) >= 1 / _MODERATE and number != 0:
        raise ValueError(
            f"`{name}` must be 0, or of a size between {1 / _MODERATE:g} and {_MODERATE:g}; got "
            f"{value!r}."
        )
    return number


def non_negative(name: str, value: Any) -> float:
    """Return `value` as a float, or raise if it is not a finite number of at least zero."""
    number = finite(name, value)
    if number < 0:
        raise ValueError(f"`{name}` must be 0 or above; got {value!r}.")
    return number


def fraction(name: str, value: Any) -> float:
    """Return `value` as a float, or raise if it is not in [0, 1)."""
    number = finite(name, value)
    if not 0 <= number < 1:
        raise ValueError(f"`{name}` must be at least 0 and below 1; got {value!r}.")
    return number


def positive_integer(name: str, value: Any, most: int | None = None) -> int:
    """Return `value` as an int, or raise if it is not a whole number from one to `most`."""
    if finite(name, value) < 1 or value != int(value):
        raise ValueError(f"`{name}` must be a whole number of at least 1; got {value!r}.")
    if most is not None and value > most:
        raise ValueError(f"`{name}` must be at most {most}; got {value!r}.")
    return int(value)


def whole(name: str, value: Any) -> int:
    """Return `value` as an int, or raise if it is not a whole number of at least zero."""
    non_negative(name, value)
    if value != int(value):  # not as a float, which has no 2^53 + 1
        raise ValueError(f"`{name}` must be a whole number; got {value!r}.")
    return int(value)


def one_of(name: str, value: Any, choices: Sequence[str]) -> str:
    """Return `value`, or raise if it is not among `choices`."""
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}; got {value!r}.")
    return value


def known_keywords(
    owner: str, given: Iterable[str], takers: Iterable[Callable[..., Any]], but: Sequence[str] = ()
) -> None:
    """Raise if a keyword is none of those that a layer or a recipe takes.

    Args:
        owner: what the user has called.
        given: the keywords that it was called with.
        takers: the functions whose arguments they may be.
        but: arguments of theirs that the owner gives by itself.
    """
    takes = [
        name
        for taker in takers
        for name, parameter in inspect.signature(taker).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    takes = [name for name in dict.fromkeys([*takes, *_OF_ALL_LAYERS]) if name not in but]
    unknown = [name for name in given if name not in takes]
    if not unknown:
        return
    message = f"{owner} does not take {', '.join(f'`{name}`' for name in unknown)}."
    if any(name in _OF_TFP for name in unknown):
        message += (
            " The layers of TensorFlow Probability do; docs/from_tfp.md says what corresponds to "
            "their arguments here."
        )
    raise TypeError(f"{message} It takes: {', '.join(takes)}.")


def channels_of(owner: str, input_shape: Any) -> int:
    """Return the size of the last axis of a shape, or raise if there is none to be had."""
    is_shape = isinstance(input_shape, (tuple, list)) and all(
        size is None or (isinstance(size, numbers.Integral) and not isinstance(size, bool))
        for size in input_shape
    )
    if not is_shape or len(input_shape) < 1:
        raise ValueError(
            f"{owner} works on the last axis of one tensor; got the input shape {input_shape!r}, "
            "which has no such axis. Give a shape like (batch, channels)."
        )
    channels = input_shape[-1]
    if channels is None or channels < 1:
        raise ValueError(
            f"{owner} needs a last axis of known size, at least 1; got the input shape "
            f"{tuple(input_shape)!r}."
        )
    return int(channels)


def full_precision(dtype: Any = None) -> str:
    """Return the dtype of posteriors under a Keras dtype policy: float64, or else float32.

    Log-determinants and KL terms lose their meaning in half precision, so mixed and half-precision
    policies fall back to float32.
    """
    policy = keras.config.dtype_policy() if dtype is None else keras.dtype_policies.get(dtype)
    if not isinstance(policy, keras.dtype_policies.DTypePolicy):  # Keras passes broken configs on
        raise ValueError(f"`dtype` must be a type or a policy such as 'float32'; got {dtype!r}.")
    return "float64" if policy.variable_dtype == "float64" else "float32"
