"""What is scored before a failure or an interruption is returned."""

import re

import numpy as np
import pytest

from tfp_ibnn.calibration import evaluation

RNG = np.random.default_rng(0)
TEST = RNG.normal(size=(40, 2)).astype("float32"), RNG.integers(0, 3, 40)


def breaking(monkeypatch, errors):
    """Let the prediction of some trials raise, by their names."""
    predict = evaluation.predict

    def broken(trial, *args):
        if trial.name in errors:
            raise errors[trial.name]
        return predict(trial, *args)

    monkeypatch.setattr(evaluation, "predict", broken)


def test_a_candidate_that_fails_is_left_out(handmade, monkeypatch, capsys):
    whole = handmade.evaluate(TEST)
    capsys.readouterr()
    breaking(monkeypatch, {"ensemble": MemoryError("no room\nfor it")})
    table = handmade.evaluate(TEST)
    assert table.caption == "40 test examples; ensemble failed: no room"
    assert "ensemble failed: no room" in capsys.readouterr().out.splitlines()
    assert [*table.rows] == [name for name in whole.rows if name != "ensemble"]
    for name, row in table.rows.items():
        assert row["NLL"] == whole[name]["NLL"]


def test_ctrl_c_keeps_what_is_scored(handmade, monkeypatch, capsys):
    breaking(monkeypatch, {"fine-tuned": KeyboardInterrupt()})
    table = handmade.evaluate(TEST)
    # The chosen one and the model as it is come first.
    names = "fine-tuned, ensemble"
    assert [*table.rows] == ["as it is", "as it is + temperature", "ensemble + temperature"]
    assert table.caption == f"40 test examples; Ctrl-C left out {names}"
    assert f"Ctrl-C ended the evaluation: {names} are not scored." in capsys.readouterr().out
    assert f"**{handmade.chosen.name}**" in str(table)


def test_without_any_score_the_first_error_is_raised(handmade, monkeypatch):
    names = [candidate.trial.name for candidate in handmade.candidates]
    chosen = handmade.chosen.name
    breaking(monkeypatch, {name: ValueError(name) for name in names})
    with pytest.raises(ValueError, match=f"^{re.escape(chosen)}$"):
        handmade.evaluate(TEST, verbose=False)
    breaking(monkeypatch, {chosen: KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        handmade.evaluate(TEST, verbose=False)
