"""Checks of settings; each error names the setting, its value and what would be right."""

import math
import numbers
from collections.abc import Container, Sequence
from typing import Any

__all__ = ["finite", "fraction", "non_negative", "one_of", "positive", "positive_integer", "whole"]

_SMALLEST, _LARGEST = 2.0**-126, 3.4e38  # of float32


def finite(name: str, value: Any) -> float:
    """Return `value`, or raise if it is not a finite number, in float32 too."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or math.isnan(value) or not -_LARGEST <= value <= _LARGEST:
        raise ValueError(f"`{name}` must be a finite number; got {value!r}.")
    return value


def positive(name: str, value: Any) -> float:
    """Return `value`, or raise if it is not a finite number above zero."""
    if finite(name, value) < _SMALLEST:  # in float32 it would be 0
        raise ValueError(f"`{name}` must be above 0; got {value!r}.")
    return value


def non_negative(name: str, value: Any) -> float:
    """Return `value`, or raise if it is not a finite number of at least zero."""
    if finite(name, value) < 0:
        raise ValueError(f"`{name}` must be 0 or above; got {value!r}.")
    return value


def fraction(name: str, value: Any) -> float:
    """Return `value`, or raise if it is not in [0, 1)."""
    if not 0 <= finite(name, value) < 1:
        raise ValueError(f"`{name}` must be at least 0 and below 1; got {value!r}.")
    return value


def whole(name: str, value: Any, least: int = 0) -> int:
    """Return `value` as an int, or raise if it is not a whole number of at least `least`."""
    if finite(name, value) < least or value != int(value):
        raise ValueError(f"`{name}` must be a whole number of at least {least}; got {value!r}.")
    return int(value)


def positive_integer(name: str, value: Any) -> int:
    """Return `value` as an int, or raise if it is not a whole number of at least one."""
    return whole(name, value, 1)


def one_of(name: str, value: Any, choices: Container[Any] | Sequence[Any]) -> Any:
    """Return `value`, or raise if it is not among `choices`."""
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}; got {value!r}.")
    return value
