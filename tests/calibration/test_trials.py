"""Trials: what an attempt gives, and what is left of one that fails."""

import math

import pytest

from tfp_ibnn.calibration.trials import OutOfTime, Setting, Trial, attempt, deadline

pytestmark = pytest.mark.once


def setting(end=math.inf):
    parts = dict.fromkeys(Setting._fields)
    return Setting(**{**parts, "end": end})


def failing(error):
    def make():
        raise error

    return make


def test_an_attempt_gives_a_trial_whatever_happens():
    made = Trial("made")
    assert attempt("name", lambda: made, setting()) is made
    failed = attempt("name", failing(MemoryError("first\nsecond")), setting())
    assert (failed.name, failed.fate) == ("name", "first")
    assert attempt("name", failing(KeyError()), setting()).fate == "KeyError"
    late = attempt("name", failing(OutOfTime()), setting())
    assert (late.fate, late.engine) == ("", None)
    with pytest.raises(KeyboardInterrupt):
        attempt("name", failing(KeyboardInterrupt()), setting())


def test_nothing_is_attempted_after_the_end():
    late = attempt("name", failing(AssertionError("called")), setting(end=deadline(1e-9)))
    assert (late.fate, late.engine, late.nll) == ("", None, math.inf)
