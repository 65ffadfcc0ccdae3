"""The comparison goes on whatever happens to one candidate."""

import types

import pytest

from tests.calibration.tools import methods
from tfp_ibnn.calibration import fine_tuned, run, scoring, stages, trials, untrained
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
    real = scoring.cross_fitted

    def cross_fitted(trial, *args):
        if trial.name == "last":
            raise MemoryError("too many draws")
        return real(trial, *args)

    monkeypatch.setattr(scoring, "cross_fitted", cross_fitted)
    with pytest.warns(UserWarning, match="^last: left out, since too many draws$"):
        report = small()
    assert report.dropped == {"last": "too many draws"}


def test_a_scaling_of_each_class_that_fails_costs_itself_alone(small, monkeypatch):
    monkeypatch.setattr(run, "METHODS", methods(untrained.as_it_is))
    real = scoring.cross_fitted

    def cross_fitted(trial, output, data, fitted):
        if fitted == "isotonic":
            raise MemoryError("too many classes")
        return real(trial, output, data, fitted)

    monkeypatch.setattr(scoring, "cross_fitted", cross_fitted)
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


@pytest.fixture
def interrupted_at(monkeypatch):
    """A function: Ctrl-C is pressed while a trial is scored."""

    def interrupted_at(name, times=1):
        real = stages.candidates_of
        left = [name] * times

        def candidates_of(trial, variants, setting):
            if trial.name + next(iter(variants)) in left:
                left.pop()
                raise KeyboardInterrupt
            return real(trial, variants, setting)

        monkeypatch.setattr(stages, "candidates_of", candidates_of)

    return interrupted_at


def test_ctrl_c_while_scoring_keeps_what_was_trained(small, monkeypatch, interrupted_at, capsys):
    """A second one keeps what was scored; what is missing is named, begun or not."""
    kept = methods(untrained.as_it_is, last, minutes=(fine_tuned.fine_tuned, fine_tuned.gaussian))
    monkeypatch.setattr(run, "METHODS", kept)
    interrupted_at("fine-tuned")
    report = small(samples=2)
    assert names_of(report) == ["as it is", "last", "fine-tuned", "Gaussian"]
    assert report.notes["interrupted"] == "yes"
    assert report.dropped == {}
    interrupted_at("fine-tuned", times=2)
    report = small(samples=2)
    assert names_of(report) == ["as it is", "last"]
    assert report.dropped == dict.fromkeys(["fine-tuned", "Gaussian"], trials.NO_TIME)
    capsys.readouterr()
    interrupted_at("last")
    report = small(samples=2, verbose=True)
    assert names_of(report) == ["as it is"]
    assert list(report.dropped) == ["last", "fine-tuned", "Gaussian"]
    assert "Ctrl-C left untried: last, fine-tuned, Gaussian.\n" in capsys.readouterr().out


def test_ctrl_c_while_the_model_itself_is_scored(small, monkeypatch, interrupted_at):
    monkeypatch.setattr(run, "METHODS", methods(untrained.as_it_is, last))
    interrupted_at("as it is")
    report = small()
    assert [x.name for x in report.candidates] == ["as it is", "as it is + temperature"]
    scalings = ["as it is + vector scaling", "as it is + isotonic"]
    assert report.dropped == dict.fromkeys([*scalings, "last"], trials.NO_TIME)
    interrupted_at("as it is", times=2)
    with pytest.raises(KeyboardInterrupt):
        small()


def test_only_what_was_trained_is_scored_after_the_time(small, monkeypatch, capsys):
    """The time is over as soon as the model itself is scored."""
    kept = methods(untrained.as_it_is, last, minutes=(fine_tuned.fine_tuned,))
    monkeypatch.setattr(run, "METHODS", kept)
    real = stages.candidates_of

    def candidates_of(*args):
        late = types.SimpleNamespace(monotonic=lambda: float("inf"))
        monkeypatch.setattr(stages, "time", late)
        return real(*args)

    monkeypatch.setattr(stages, "candidates_of", candidates_of)
    report = small(minutes=60, verbose=True)
    names = ["as it is", "as it is + temperature", "fine-tuned", "fine-tuned + temperature"]
    assert [x.name for x in report.candidates] == names
    late = ["as it is + vector scaling", "as it is + isotonic", "last"]
    assert report.dropped == dict.fromkeys(late, trials.NO_TIME)
    assert f"`minutes=60` left untried: {', '.join(late)}." in capsys.readouterr().out


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
