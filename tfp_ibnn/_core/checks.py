"""Argument checks of the whole package; each error names the argument, its value and a remedy."""

import contextlib
import functools
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
_SIZE = "0, or of a size between 1e-9 and 1e9"
_SMALLEST, _LARGEST = (float(getattr(np.finfo("float32"), name)) for name in ("tiny", "max"))


def shown(value: Any) -> str:
    """Return a value as errors show it: np.float64(0.3) as 0.3."""
    value = str(value) if isinstance(value, np.str_) else value
    return str(value) if isinstance(value, (np.number, np.bool_)) else repr(value)


def finite(name: str, value: Any) -> float:
    """Return `value` as a float, or raise if it is not a finite number, in float32 too."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    with contextlib.suppress(OverflowError):  # of a whole number beyond all floats
        if is_number and abs(float(value)) <= _LARGEST:
            return float(value)
    raise ValueError(f"`{name}` must be a finite number; got {shown(value)}.")


def _number(name: str, value: Any, is_good: Callable[[float], bool], want: str) -> float:
    """Return `value` as a float, or raise if it is not finite or not good."""
    number = finite(name, value)
    if not is_good(number):
        raise ValueError(f"`{name}` must be {want}; got {shown(value)}.")
    return number


# Smaller than that, a number is 0 in float32.
positive = functools.partial(_number, is_good=lambda x: x >= _SMALLEST, want="above 0")
non_negative = functools.partial(_number, is_good=lambda x: x >= 0, want="0 or above")
fraction = functools.partial(_number, is_good=lambda x: 0 <= x < 1, want="at least 0 and below 1")
probability = functools.partial(_number, is_good=lambda x: 0 < x < 1, want="between 0 and 1")
# Squares of it stay in the range of float32.
moderate = functools.partial(_number, is_good=lambda x: x == 0 or 1e-9 <= abs(x) <= 1e9, want=_SIZE)


def scale(name: str, value: Any) -> float:
    """Return a positive number of moderate size as a float, or raise."""
    return moderate(name, positive(name, value))


def positive_integer(name: str, value: Any, most: int | None = None, least: int = 1) -> int:
    """Return `value` as an int, or raise if it is not a whole number from `least` to `most`."""
    want = f"a whole number of at least {least}"
    # Not as a float, which has no 2^53 + 1.
    _number(name, value, lambda x: x >= least and value == int(value), want)
    if most is not None and value > most:
        raise ValueError(f"`{name}` must be at most {most}; got {shown(value)}.")
    return int(value)


whole = functools.partial(positive_integer, least=0)


def one_of(name: str, value: Any, choices: Sequence[str]) -> str:
    """Return `value`, or raise if it is not among `choices`."""
    if value not in choices:
        want = ", ".join(map(repr, choices))
        raise ValueError(f"`{name}` must be one of {want}; got {shown(value)}.")
    return value


@contextlib.contextmanager
def known_keywords(
    owner: str, given: Iterable[str], takers: Iterable[Callable[..., Any]], but: Sequence[str] = ()
) -> Iterator[None]:
    """Let an error inside name keywords of `owner` that `takers` do not take, or are in `but`."""
    try:
        yield
        return
    except (TypeError, ValueError) as error:
        cause = error
    parameters = [p for taker in takers for p in inspect.signature(taker).parameters.values()]
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes = dict.fromkeys(x for x in (*named, "name", "dtype", "trainable") if x not in but)
    unknown = [name for name in given if name not in takes]
    if not unknown:
        raise cause
    message = f"{owner} does not take {', '.join(f'`{name}`' for name in unknown)}."
    if any(name.endswith(_OF_TFP) for name in unknown):
        message += " The layers of TensorFlow Probability do: see docs/from_tfp.md."
    raise TypeError(f"{message} It takes: {', '.join(takes)}.")


def warn_of_regularizer(owner: str, name: str, remedy: str) -> None:
    """Warn that a penalty on weights comes on top of their prior."""
    problem = f"{owner} has a `{name}`, which counts the prior twice"
    warnings.warn(f"{problem}: leave it out, or {remedy}.", stacklevel=4)


def channels_of(owner: str, input_shape: Any) -> int:
    """Return the size of the last axis of a shape, or raise if it is unknown."""
    is_shape = isinstance(input_shape, (tuple, list)) and all(
        size is None or (isinstance(size, numbers.Integral) and not isinstance(size, bool))
        for size in input_shape
    )
    if not is_shape or not input_shape or not input_shape[-1] or input_shape[-1] < 1:
        wanted = "works on the last axis of one tensor, of known size: (batch, channels), say"
        raise ValueError(f"{owner} {wanted}; got the input shape {input_shape!r}.")
    return int(input_shape[-1])


def missing_attribute(layer: keras.layers.Layer, name: str) -> Any:
    """Raise as `__getattr__` should, with the usual cause: the layer is not built."""
    remedy = "" if layer.__dict__.get("built") else " yet: call it on data first, to build it"
    raise AttributeError(f"{type(layer).__name__} has no attribute {name!r}{remedy}.")


def full_precision(dtype: Any = None) -> str:
    """Return float64 or float32, by a Keras policy: half precision is too little for a KL."""
    policy = keras.config.dtype_policy() if dtype is None else keras.dtype_policies.get(dtype)
    if not isinstance(policy, keras.dtype_policies.DTypePolicy):  # Keras passes broken configs on
        raise ValueError(f"`dtype` must be a type or a policy such as 'float32'; got {dtype!r}.")
    return "float64" if policy.variable_dtype == "float64" else "float32"
