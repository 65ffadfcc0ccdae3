"""Settings that check themselves; each error names the setting, its value and what would be right.

@settings("train")
class Settings(Checked):
...  # has the options of the table [train] in settings.toml, and their defaults
"""

import dataclasses
import math
import numbers
import re
import tomllib
from pathlib import Path

OPTIONS = tomllib.loads(Path(__file__).with_name("settings.toml").read_text(encoding="utf-8"))
_SMALLEST, _LARGEST = 2.0**-126, 3.4e38  # of float32


def settings(table):
    """Return a decorator that makes a class a frozen dataclass with the options of a table."""

    def decorate(kind):
        for name, option in OPTIONS[table].items():
            default = option.get("default")
            default = tuple(default) if isinstance(default, list) else default
            kind.__annotations__[name] = object
            setattr(kind, name, dataclasses.field(default=default, metadata=option))
        return dataclasses.dataclass(frozen=True, kw_only=True)(kind)

    return decorate


class Checked:
    """The base of settings."""

    def __init_subclass__(cls):
        cls.__annotations__ = {}

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                object.__setattr__(self, field.name, _check(field)(field.name, value))


def _check(field):
    kind = field.metadata.get("kind", field.metadata.get("each"))
    check = choice(*kind) if isinstance(kind, list) else KINDS[kind]
    return each(check, field.metadata.get("empty")) if "each" in field.metadata else check


def rule(must, good, convert=lambda value: value):
    """Return a check: a function of a name and a value, which returns the value or raises."""

    def check(name, value):
        if not good(value):
            raise ValueError(f"`{name}` must {must}; got {value!r}.")
        return convert(value)

    return check


def _number(value, least=-_LARGEST):
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and not math.isnan(value) and least <= value <= _LARGEST


def _whole(least):
    return lambda value: _number(value, least) and value == int(value)


def _compiles(value):
    try:
        return bool(re.compile(value))
    except (TypeError, re.error, OverflowError, RecursionError):
        return False


KINDS = {
    "finite": rule("be a finite number", _number),
    "positive": rule("be above 0", lambda value: _number(value, _SMALLEST)),  # else 0 in float32
    "non_negative": rule("be 0 or above", lambda value: _number(value, 0)),
    "fraction": rule("be at least 0 and below 1", lambda value: _number(value, 0) and value < 1),
    # 3.0 counts as 3, and is the same run.
    "whole": rule("be a whole number of at least 0", _whole(0), int),
    "count": rule("be a whole number of at least 1", _whole(1), int),
    "several": rule("be a whole number of at least 2", _whole(2), int),
    "seed": rule("be from 0 to 2**31 - 1", lambda v: _whole(0)(v) and v < 2**31, int),
    "text": rule("be a text", lambda value: isinstance(value, str)),
    "flag": rule("be True or False", lambda value: value in (True, False), bool),
    "pattern": rule("be a regular expression", _compiles),
}


def choice(*choices):
    return rule(f"be one of {', '.join(map(repr, choices))}", lambda value: value in choices)


def each(check, empty=False):
    """Return a check of sequences: each value once, since a mean must not count one twice."""
    filled = rule("hold one value at least", lambda values: values or empty)
    return lambda name, values: filled(name, tuple(dict.fromkeys(check(name, v) for v in values)))
