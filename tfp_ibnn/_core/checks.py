"""Argument checks of the whole package; each error names the argument, its value and a remedy."""

import contextlib
import inspect
import numbers
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

LARGEST_SIZE = 2**20
"""More units, components or bins than anybody needs, and less than takes a machine's memory."""

_OF_TFP = ("prior_fn", "posterior_fn", "tensor_fn", "divergence_fn", "kl_weight", "kl_use_exact")
_SMALLEST = float(np.finfo("float32").tiny)
_LARGEST = float(np.finfo("float32").max)


def shown(value: Any) -> str:
    """Return a value as errors show it: np.float64(0.3) as 0.3."""
    if isinstance(value, np.str_):
        return repr(str(value))
    if isinstance(value, (np.number, np.bool_)):
        return str(value)
    return repr(value)


def finite(name: str, value: Any) -> float:
    """Return a number as a float, or raise if it is not finite, in float32 too.

    Args:
        name: of the argument, for the error.
        value: what the caller gave.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    with contextlib.suppress(OverflowError):  # of a whole number beyond all floats
        if is_number and abs(float(value)) <= _LARGEST:
            return float(value)
    raise ValueError(f"`{name}` must be a finite number; got {shown(value)}.")


def positive(name: str, value: Any) -> float:
    """Return a number above 0 as a float, or raise.

    Args:
        name: of the argument, for the error.
        value: what the caller gave.
    """
    number = finite(name, value)
    # Smaller than that, it is 0 in float32.
    if number < _SMALLEST:
        raise ValueError(f"`{name}` must be above 0; got {shown(value)}.")
    return number


def non_negative(name: str, value: Any) -> float:
    """Return a number that is not below 0 as a float, or raise.

    Args:
        name: of the argument, for the error.
        value: what the caller gave.
    """
    number = finite(name, value)
    if number < 0:
        raise ValueError(f"`{name}` must be 0 or above; got {shown(value)}.")
    return number


def fraction(name: str, value: Any) -> float:
    """Return a number from 0 on and below 1 as a float, or raise.

    Args:
        name: of the argument, for the error.
        value: what the caller gave.
    """
    number = finite(name, value)
    if not 0 <= number < 1:
        raise ValueError(f"`{name}` must be at least 0 and below 1; got {shown(value)}.")
    return number


def probability(name: str, value: Any) -> float:
    """Return a number between 0 and 1 as a float, or raise.

    Args:
        name: of the argument, for the error.
        value: what the caller gave.
    """
    number = finite(name, value)
    if not 0 < number < 1:
        raise ValueError(f"`{name}` must be between 0 and 1; got {shown(value)}.")
    return number


def moderate(name: str, value: Any) -> float:
    """Return a number whose square stays in the range of float32 as a float, or raise.

    Args:
        name: of the argument, for the error.
        value: what the caller gave.
    """
    number = finite(name, value)
    if number != 0 and not 1e-9 <= abs(number) <= 1e9:
        raise ValueError(
            f"`{name}` must be 0, or of a size between 1e-9 and 1e9; got {shown(value)}."
        )
    return number


def scale(name: str, value: Any) -> float:
    """Return a positive number of moderate size as a float, or raise.

    Args:
        name: of the argument, for the error.
        value: what the caller gave.
    """
    return moderate(name, positive(name, value))


def positive_integer(name: str, value: Any, most: int | None = None, least: int = 1) -> int:
    """Return a whole number as an int, or raise.

    Args:
        name: of the argument, for the error.
        value: what the caller gave.
        most: the largest allowed value; None is any.
        least: the smallest allowed value.
    """
    number = finite(name, value)
    # Compared as it is, not as a float, which has no 2^53 + 1.
    if number < least or value != int(value):
        raise ValueError(
            f"`{name}` must be a whole number of at least {least}; got {shown(value)}."
        )
    if most is not None and value > most:
        raise ValueError(f"`{name}` must be at most {most}; got {shown(value)}.")
    return int(value)


def whole(name: str, value: Any) -> int:
    """Return a whole number from 0 on as an int, or raise.

    Args:
        name: of the argument, for the error.
        value: what the caller gave.
    """
    return positive_integer(name, value, least=0)


def one_of(name: str, value: Any, choices: Sequence[str]) -> str:
    """Return a value that is among the choices, or raise.

    Args:
        name: of the argument, for the error.
        value: what the caller gave.
        choices: the allowed values.
    """
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"`{name}` must be one of {listed}; got {shown(value)}.")
    return value


@contextlib.contextmanager
def known_keywords(
    owner: str, given: Iterable[str], takers: Iterable[Callable[..., Any]], but: Sequence[str] = ()
) -> Iterator[None]:
    """Let an error inside name the keywords that nothing takes, if there are any.

    Args:
        owner: name of the class or function that the user calls.
        given: the keywords that the user gave.
        takers: functions that take keywords, between them.
        but: names of their parameters that are not the user's to give.

    Raises:
        TypeError: In place of an error inside, if a keyword is unknown.
    """
    try:
        yield
    except (TypeError, ValueError):
        taken = [name for name in _keywords_of(takers) if name not in but]
        unknown = [name for name in given if name not in taken]
        if not unknown:
            raise
        names = ", ".join(f"`{name}`" for name in unknown)
        known = ", ".join(taken)
        if any(name.endswith(_OF_TFP) for name in unknown):
            raise TypeError(
                f"{owner} does not take {names}. The layers of TensorFlow Probability do: see "
                f"docs/from_tfp.md. It takes: {known}."
            ) from None
        raise TypeError(f"{owner} does not take {names}. It takes: {known}.") from None


def _keywords_of(functions: Iterable[Callable[..., Any]]) -> list[str]:
    """Return the keywords that functions take between them, and those of each Keras layer."""
    names = []
    for function in functions:
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                names.append(parameter.name)
    return list(dict.fromkeys([*names, "name", "dtype", "trainable"]))


def warn_of_regularizer(owner: str, name: str, remedy: str) -> None:
    """Warn that a penalty on weights comes on top of their prior.

    Args:
        owner: what has the penalty, as "Layer 'dense'".
        name: of its argument, such as "kernel_regularizer".
        remedy: what else to do than to leave it out.
    """
    warnings.warn(
        f"{owner} has a `{name}`, which counts the prior twice: leave it out, or {remedy}.",
        stacklevel=_level_of_user(),
    )


def _level_of_user() -> int:
    """Return the `stacklevel` by which the caller of this warns at the user's line.

    That is the first one outside of this package and of Keras, which may call a layer or optimizer.
    """
    level = 1
    frame = inspect.currentframe().f_back
    while frame.f_back is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("tfp_ibnn", "keras"):
            break
        frame = frame.f_back
        level += 1
    return level


def channels_of(owner: str, input_shape: Any) -> int:
    """Return the size of the last axis of a shape, or raise if it is unknown.

    Args:
        owner: name of the class that asks.
        input_shape: of one tensor, with the axis of the examples.
    """
    if not _is_shape(input_shape) or not input_shape[-1] or input_shape[-1] < 1:
        raise ValueError(
            f"{owner} works on the last axis of one tensor, of known size: (batch, channels), say; "
            f"got the input shape {input_shape!r}."
        )
    return int(input_shape[-1])


def _is_shape(value: Any) -> bool:
    """Whether a value is the shape of one tensor with axes, of which sizes may be None."""
    if not isinstance(value, (tuple, list)) or not value:
        return False
    for size in value:
        is_size = isinstance(size, numbers.Integral) and not isinstance(size, bool)
        if size is not None and not is_size:
            return False
    return True


def missing_attribute(layer: keras.layers.Layer, name: str) -> Any:
    """Raise as `__getattr__` should, with the usual cause: the layer is not built.

    Args:
        layer: that lacks an attribute.
        name: of the attribute.
    """
    kind = type(layer).__name__
    if layer.__dict__.get("built"):
        raise AttributeError(f"{kind} has no attribute {name!r}.")
    raise AttributeError(
        f"{kind} has no attribute {name!r} yet: call it on data first, to build it."
    )


def full_precision(dtype: Any = None) -> str:
    """Return float64 or float32, by a Keras policy: half precision is too little for a KL."""
    policy = keras.config.dtype_policy() if dtype is None else keras.dtype_policies.get(dtype)
    if not isinstance(policy, keras.dtype_policies.DTypePolicy):  # Keras passes broken configs on
        raise ValueError(f"`dtype` must be a type or a policy such as 'float32'; got {dtype!r}.")
    return "float64" if policy.variable_dtype == "float64" else "float32"
