"""What each effort includes, and what the next one is said to gain."""

import re

import pytest

from tests.calibration.tools import methods
from tfp_ibnn.calibration import efforts, run, trials, untrained
from tfp_ibnn.calibration.engine import Engine


@pytest.mark.once
def test_an_effort_includes_those_before():
    assert efforts.up_to("seconds") == ["seconds"]
    assert efforts.up_to("trainings") == ["seconds", "minutes", "trainings"]


def test_effort_decides_what_is_tried(small, monkeypatch, capsys):
    tried = []

    def noted(stage):
        def method(setting):
            tried.append(stage)
            return []

        return (method,)

    kept = methods(untrained.as_it_is, *noted("seconds"))
    kept |= {"minutes": noted("minutes"), "trainings": noted("trainings")}
    monkeypatch.setattr(run, "METHODS", kept)
    small(epochs=None)
    small(epochs=None, minutes=60)  # a limit, no wish
    assert tried == 2 * ["seconds"]
    tried.clear()
    small(epochs=None, effort="minutes")
    small(epochs=1)
    small(epochs=None, optimizer="adam")
    assert tried == 3 * ["seconds", "minutes"]
    tried.clear()
    with pytest.raises(ValueError, match="optimizer has taken none: load the model together"):
        small(epochs=None, effort="trainings")
    small.model.optimizer.iterations.assign(4)
    small(epochs=None, effort="trainings", verbose=True)
    assert tried == ["seconds", "minutes", "trainings"]
    times = r"On this machine: seconds about \d+ (s|min|h), .*, trainings"
    assert re.search(times, capsys.readouterr().out)
    small.model.optimizer.iterations.assign(0)


@pytest.mark.once
def test_a_candidate_has_the_effort_that_tries_it(small, monkeypatch):
    def method(name):
        def one(setting):
            yield trials.Trial(name, Engine(lambda: untrained.copy_of(setting.model)))

        return one

    kept = methods(untrained.as_it_is, method("second"), minutes=[method("third")])
    monkeypatch.setattr(run, "METHODS", kept)
    report = small(epochs=None, effort="minutes")
    found = {candidate.trial.name: candidate.trial.effort for candidate in report.candidates}
    assert found == {"as it is": "seconds", "second": "seconds", "third": "minutes"}


@pytest.mark.once
def test_bad_efforts(small):
    with pytest.raises(ValueError, match="'seconds', 'minutes', 'trainings'; got 'hours'"):
        small(effort="hours")
    with pytest.raises(ValueError, match="`build` is for effort='trainings'; got effort='minutes'"):
        small(build=lambda: small.model)
    small.model.optimizer.iterations.assign(4)
    with pytest.raises(ValueError, match="`build` must be a function .*; got 'network'"):
        small(effort="trainings", build="network")


@pytest.mark.once
def test_the_next_effort_is_named(small, capsys):
    small(verbose=True, epochs=None)
    assert efforts.GAINS["seconds"] in capsys.readouterr().out
