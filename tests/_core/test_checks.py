import functools
from fractions import Fraction

import keras
import numpy as np
import pytest

from tfp_ibnn._core import checks

pytestmark = pytest.mark.once

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("check", "value"),
    [
        *[(checks.finite, bad) for bad in (NAN, INF, -INF, "1", None, True, [1.0], 1j)],
        *[(checks.positive, bad) for bad in (0, -1.5, NAN, INF, "1", None, False)],
        *[(checks.non_negative, bad) for bad in (-1e-9, NAN, -INF, "0", None)],
        *[(checks.positive_integer, bad) for bad in (0, -3, 2.5, NAN, INF, "2", None, True)],
        *[(checks.whole, bad) for bad in (-1, Fraction(2**54 + 1, 2))],
    ],
)
def test_bad_numbers_are_refused_by_name_and_value(check, value):
    with pytest.raises(ValueError, match="`width`") as caught:
        check("width", value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("check", "value", "text"),
    [
        (checks.fraction, np.float64(1.3), "1.3"),
        (checks.positive, np.float32(-0.3), "-0.3"),
        (checks.finite, np.float64("nan"), "nan"),
        (checks.positive_integer, np.int64(-5), "-5"),
        (functools.partial(checks.positive_integer, most=4), np.int64(5), "5"),
        (checks.whole, np.True_, "True"),
        (functools.partial(checks.one_of, choices=("b", "c")), np.str_("a"), "'a'"),
    ],
)
def test_errors_show_numpy_scalars_as_plain_values(check, value, text):
    with pytest.raises(ValueError, match="`width`") as caught:
        check("width", value)
    assert str(caught.value).endswith(f"; got {text}.")


@pytest.mark.parametrize(
    "value", [np.array([1.0, 2.0]), np.array(3.0), np.str_("a"), np.array(None), np.complex64(1)]
)
def test_arrays_are_not_numbers(value):
    with pytest.raises(ValueError, match="`width`"):
        checks.finite("width", value)


@pytest.mark.parametrize(
    ("check", "value", "expected"),
    [
        (checks.finite, -2, -2.0),
        (checks.finite, np.float32(0.5), 0.5),
        (checks.positive, 1e-9, 1e-9),
        (checks.positive, np.int64(4), 4.0),
        (checks.non_negative, 0, 0.0),
        (checks.positive_integer, 1, 1),
        (checks.positive_integer, 8.0, 8),
        (checks.positive_integer, np.int32(8), 8),
        (checks.positive_integer, 2**53 + 1, 2**53 + 1),
        (checks.positive_integer, np.int64(2**53 + 1), 2**53 + 1),
        (checks.whole, np.uint64(2**63 + 1), 2**63 + 1),
        (checks.whole, 0.0, 0),
    ],
)
def test_good_numbers_come_back_as_python_numbers(check, value, expected):
    found = check("width", value)
    assert found == expected
    assert type(found) is type(expected)


def test_one_of():
    assert checks.one_of("start", "b", ("a", "b")) == "b"
    with pytest.raises(ValueError, match="`start` must be one of 'a', 'b'; got 'c'"):
        checks.one_of("start", "c", ("a", "b"))


@pytest.mark.parametrize(
    ("shape", "channels"), [((3,), 3), ((None, 4), 4), ([None, 8, 8, 1], 1), ((None, None, 2), 2)]
)
def test_channels_of(shape, channels):
    assert checks.channels_of("Owner", shape) == channels


@pytest.mark.parametrize(
    "shape",
    [(), None, 3, "ab", (None,), (2, 0), (2, -1), (2, 2.0), [(2, 3), (2, 3)], {"a": (2, 3)}],
)
def test_channels_of_refuses_what_has_no_channels(shape):
    with pytest.raises(ValueError, match="Owner") as caught:
        checks.channels_of("Owner", shape)
    assert repr(shape) in str(caught.value)


@pytest.mark.parametrize(
    ("policy_name", "expected"),
    [
        ("float64", "float64"),
        ("float32", "float32"),
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("mixed_float16", "float32"),
        ("mixed_bfloat16", "float32"),
    ],
)
def test_full_precision(policy, policy_name, expected):
    assert checks.full_precision(policy_name) == expected
    assert checks.full_precision(keras.DTypePolicy(policy_name)) == expected
    policy(policy_name)
    assert checks.full_precision() == expected
