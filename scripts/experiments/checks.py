"""Settings that check themselves; each error names the setting, its value and what would be right.

@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Checked):
epochs: int = option(50, count, "of training")
"""

import dataclasses
import math
import numbers
import re

__all__ = ["Checked", "option"]

_SMALLEST, _LARGEST = 2.0**-126, 3.4e38  # of float32


def option(default, check, help):
    """Return a field with a default, a check and a description; None as the default allows None."""
    return dataclasses.field(default=default, metadata={"check": check, "help": help})


class Checked:
    """The base of a frozen dataclass whose fields are options."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                checked = field.metadata["check"](field.name, value)
                object.__setattr__(self, field.name, checked)


def fail(name, must, value):
    raise ValueError(f"`{name}` must {must}; got {value!r}.")


def finite(name, value):
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or math.isnan(value) or not -_LARGEST <= value <= _LARGEST:
        fail(name, "be a finite number", value)
    return value


def positive(name, value):
    # Below that it would be 0 in float32.
    return value if finite(name, value) >= _SMALLEST else fail(name, "be above 0", value)


def non_negative(name, value):
    return value if finite(name, value) >= 0 else fail(name, "be 0 or above", value)


def fraction(name, value):
    inside = 0 <= finite(name, value) < 1
    return value if inside else fail(name, "be at least 0 and below 1", value)


def whole(name, value, least=0):
    if finite(name, value) < least or value != int(value):
        fail(name, f"be a whole number of at least {least}", value)
    return int(value)  # 3.0 counts as 3, and is the same run


def count(name, value):
    return whole(name, value, 1)


def seed(name, value):
    return value if (value := whole(name, value)) < 2**31 else fail(name, "be below 2**31", value)


def text(name, value):
    return value if isinstance(value, str) else fail(name, "be a text", value)


def pattern(name, value):
    try:
        re.compile(value)
    except (TypeError, re.error, OverflowError, RecursionError):
        fail(name, "be a regular expression", value)
    return value


def one_of(name, value, choices):
    if value not in choices:
        fail(name, f"be one of {', '.join(map(repr, choices))}", value)
    return value


def choice(*choices):
    return lambda name, value: one_of(name, value, choices)


def flag(name, value):
    return bool(one_of(name, value, (True, False)))


def each(check, empty=False):
    """Return a check of sequences: each value once, since a mean must not count one twice."""

    def check_all(name, values):
        found = tuple(dict.fromkeys(check(name, value) for value in values))
        return found if found or empty else fail(name, "hold one value at least", found)

    return check_all


def units(name, values):
    """Check sizes of layers."""
    return tuple(count(name, value) for value in values)


def rising(name, values):
    """Check lengths of flows: they rise from 0, the Gaussian that flows are compared with."""
    found = tuple(whole(name, value) for value in values)
    if len(found) < 2 or found[0] != 0 or list(found) != sorted(set(found)):
        fail(name, "rise from 0, the Gaussian, as in (0, 3, 6)", values)
    return found
