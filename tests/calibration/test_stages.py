"""The comparison goes on whatever happens to one candidate."""

import pytest

from tests.calibration.tools import methods
from tfp_ibnn.calibration import fine_tuned, run, trials, untrained
from tfp_ibnn.calibration.engine import Engine


def plain(name, setting):
    return trials.Trial(name, Engine(lambda: untrained.copy_of(setting.model)))


def names_of(report):
    """The names of the trials that are compared, in order."""
    return list(dict.fromkeys(candidate.trial.name for candidate in report.candidates))


def failing(setting):
    yield plain("first", setting)
    raise MemoryError("there is no memory left\nfor this")


def last(setting):
    yield plain("last", setting)


def test_a_method_that_fails_costs_itself_alone(small, monkeypatch):
    monkeypatch.setattr(run, "METHODS", methods(untrained.as_it_is, failing, last))
    with pytest.warns(UserWarning, match="^failing: left out, since there is no memory left$"):
        report = small()
    assert names_of(report) == ["as it is", "first", "last"]
    assert report.dropped == {"failing": "there is no memory left"}


def test_a_candidate_that_cannot_be_scored_costs_itself_alone(small, monkeypatch):
    monkeypatch.setattr(run, "METHODS", methods(untrained.as_it_is, last))
    real = run._cross_fitted

    def cross_fitted(trial, *args):
        if trial.name == "last":
            raise MemoryError("too many draws")
        return real(trial, *args)

    monkeypatch.setattr(run, "_cross_fitted", cross_fitted)
    with pytest.warns(UserWarning, match="^last: left out, since too many draws$"):
        report = small()
    assert report.dropped == {"last": "too many draws"}


def test_a_scaling_of_each_class_that_fails_costs_itself_alone(small, monkeypatch):
    monkeypatch.setattr(run, "METHODS", methods(untrained.as_it_is))
    real = run._cross_fitted

    def cross_fitted(trial, output, data, fitted):
        if fitted == "isotonic":
            raise MemoryError("too many classes")
        return real(trial, output, data, fitted)

    monkeypatch.setattr(run, "_cross_fitted", cross_fitted)
    with pytest.warns(
        UserWarning, match=r"^as it is \+ isotonic: left out, since too many classes$"
    ):
        report = small()
    endings = ("", " + temperature", " + vector scaling")
    assert [x.name for x in report.candidates] == [f"as it is{end}" for end in endings]
    assert report.dropped == {"as it is + isotonic": "too many classes"}


def test_ctrl_c_keeps_what_was_tried(small, monkeypatch):
    def interrupted(setting):
        yield plain("first", setting)
        raise KeyboardInterrupt

    kept = methods(untrained.as_it_is, interrupted, last, minutes=(fine_tuned.fine_tuned,))
    monkeypatch.setattr(run, "METHODS", kept)
    report = small()
    assert names_of(report) == ["as it is", "first"]
    assert report.notes["interrupted"] == "yes"


def test_a_name_that_is_taken(small, monkeypatch):
    """It is refused as long as nothing is lost, and later left out."""
    candidates = {"fine-tuned": small.model}
    with pytest.warns(
        UserWarning, match="fine-tuned: left out, since `candidates` must have other"
    ):
        report = small(candidates=candidates)
    assert names_of(report) == ["as it is", "fine-tuned"]
    with pytest.raises(ValueError, match="other names than 'as it is'"):
        small(candidates={"as it is": small.model})
