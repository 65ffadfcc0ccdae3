"""The study of `calibrate`: a run from end to end, what resumes, and its tables."""

import dataclasses
import os
import types

import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn
from lib import files, parts, probabilities, scenes, tasks, texts
from studies.calibrate import STUDY, dropout
from studies.calibrate import run as study
from studies.calibrate import tables as calibrate_tables
from tfp_ibnn.calibration import efforts

pytestmark = pytest.mark.once


@pytest.fixture
def here(monkeypatch):
    """Run in this process, which has loaded all that it takes."""
    monkeypatch.setattr(tasks, "apart", lambda function, *task: function(*task))


@pytest.mark.slow
def test_a_quick_run_is_stored_and_not_repeated(here, eagerly, tmp_path, capsys):
    command = ["--quick", "--pairs", "wine", "--seeds", "3", "--output", str(tmp_path)]
    command += ["--effort", "minutes"]
    assert STUDY.main(command) == 0
    assert "1 runs to do, 0 are there" in capsys.readouterr().out
    (record,) = tasks.read(tmp_path)
    options = {"quick": True, "effort": "minutes", "schedule": "own"}
    assert record.keys() >= {"versions", "hardware", "command", "backend", "python"}
    assert (record["pair"], record["seed"], record["options"]) == ("wine", 3, options)
    assert record["seconds"].keys() == {"training", "calibrate", "test"}
    assert record["chosen"] in record["candidates"]
    assert list(record["choices"]) == ["seconds", "minutes"]
    assert record["choices"]["minutes"] == record["chosen"]
    for row in record["candidates"].values():
        assert row.keys() >= {"accuracy", "NLL", "Brier", "ECE", "ECE floor"}
    assert STUDY.main(command) == 0
    assert "0 runs to do, 1 are there" in capsys.readouterr().out
    assert len(tasks.read(tmp_path)) == 1
    assert "wine 78" in (tmp_path / "table.md").read_text()


def network_with_dropout(rate):
    keras.utils.set_random_seed(0)
    parts = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(rate), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((4,)), *parts, keras.layers.Softmax()])
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


def test_dropout_is_tuned_on_validation_data_and_the_model_keeps_its_rate(eagerly):
    random = np.random.default_rng(0)
    x = random.normal(size=(50, 4)).astype("float32")
    y = random.integers(0, 3, 50)
    model = network_with_dropout(0.4)
    row = dropout.tuned_dropout(model, (x, y), (x, y), samples=4, seed=0)
    scores = []
    for rate in (0.2, 0.4, 0.6):
        options = {"samples": 4, "dropout": True, "seed": 0}
        averaged = ibnn.MonteCarlo(network_with_dropout(rate), **options)
        p, labels = dropout.probabilities(averaged, x, y)
        fitted = probabilities.best_temperature(p, labels)
        scores.append(probabilities.nll(probabilities.scaled(p, fitted), labels))
    assert row["NLL"] == pytest.approx(min(scores), rel=1e-5)
    assert row["factor"] == dropout.FACTORS[np.argmin(scores)]
    assert model.layers[1].rate == 0.4
    plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    assert dropout.tuned_dropout(plain, (x, y), (x, y), samples=2, seed=0) == {}


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["segmentation", "text", "imbalanced"])
def test_pairs_that_nothing_was_tuned_on_have_scores(eagerly, pair):
    record = study.run(pair, 0, quick=True, effort="seconds")
    assert record["chosen"] in record["candidates"]
    for row in record["candidates"].values():
        assert all(np.isfinite(row[key]) for key in ("accuracy", "NLL", "ECE"))


def test_texts_become_numbers_of_words():
    source = 'def f():\n    """One two three four five six seven eight.\n\n    Too short."""\n'
    (words,) = texts.paragraphs(source)
    assert words[:3] == ("one", "two", "three")
    found = texts.numbers(words)
    assert found.shape == (texts.WORDS,)
    assert (found[:8] > 0).all()
    assert not found[8:].any()


def test_scenes_show_two_garments_and_the_class_of_each_pixel():
    images = np.zeros((2, 28, 28))
    images[0, :, :14] = 255
    images[1] = 255
    x, y = scenes.scenes(images, np.array([3, 7]), 5, np.random.default_rng(0))
    assert x.shape == (5, 28, 28, 1)
    for scene, target in zip(x[..., 0], y, strict=True):
        assert set(np.unique(target)) <= {0, 4, 8}
        np.testing.assert_allclose(scene[target > 0], 1)
        assert scene[target == 0].max() <= 0.7
        assert (target == 8).sum() >= 14 * 7


def test_rare_examples_are_spread():
    x, y = parts.interleaved(np.arange(12), np.array([0] * 9 + [1] * 3))
    assert sorted(x) == list(range(12))
    assert [int(part.sum()) for part in np.split(y, 3)] == [1, 1, 1]


def test_runs_are_apart():
    assert tasks.apart(os.getpid) != os.getpid()


def test_a_failed_run_leaves_the_others(here, tmp_path, capsys, monkeypatch):
    def run(name, seed, quick, data_dir, effort, schedule):
        if seed == 1:
            raise MemoryError("too large")
        return made("digits", seed, [2.0, 1.0])

    monkeypatch.setattr(study, "run", run)
    command = ["--pairs", "digits", "--seeds", "0", "1", "2", "--output", str(tmp_path)]
    assert STUDY.main(command) == 1
    assert "error: digits, seed 1: MemoryError: too large" in capsys.readouterr().out
    assert sorted(record["seed"] for record in tasks.read(tmp_path)) == [0, 2]


def test_another_effort_or_schedule_is_another_run(here, tmp_path, capsys, monkeypatch):
    def run(name, seed, quick, data_dir, effort, schedule):
        options = {"quick": quick, "effort": effort, "schedule": schedule}
        return {**made("digits", seed, [2.0, 1.0]), "options": options}

    monkeypatch.setattr(study, "run", run)
    command = ["--pairs", "digits", "--seeds", "0", "--output", str(tmp_path)]
    for more in ([], ["--schedule", "cosine"], ["--effort", "seconds"], []):
        assert STUDY.main([*command, *more]) == 0
    assert capsys.readouterr().out.count("1 runs to do, 0 are there") == 3
    assert len(tasks.read(tmp_path)) == 3


@dataclasses.dataclass
class Ranking:
    """A report that chooses the last candidate."""

    candidates: list

    @property
    def chosen(self):
        return self.candidates[-1]


def test_the_choice_of_each_effort_is_among_its_candidates():
    trials = {
        "as it is": "seconds",
        "noise": "seconds",
        "fine-tuned": "minutes",
        "Laplace, all weights": "trainings",  # if it is too slow for "minutes"
        "SWAG": "trainings",
    }
    candidates = []
    for name, effort in trials.items():
        trial = types.SimpleNamespace(name=name, effort=effort)
        candidates.append(types.SimpleNamespace(name=f"{name} + temperature", trial=trial))
    found = study.choices(Ranking(candidates), "trainings")
    chosen = ["noise", "fine-tuned", "SWAG"]
    expected = [f"{name} + temperature" for name in chosen]
    assert found == dict(zip(["seconds", "minutes", "trainings"], expected, strict=True))
    assert list(study.choices(Ranking(candidates), "minutes")) == ["seconds", "minutes"]
    assert STUDY.options["effort"]["choices"] == tuple(efforts.METHODS)


def test_ensembles_of_the_same_cost():
    rows = {"as it is + temperature": {}, "Gaussian": {"trainings": 0.3, "passes": 32.0}}
    rows |= {f"ensemble of {size} + temperature": {} for size in study.SIZES}
    rows["cheap"] = {"trainings": 0.0, "passes": 1.2}
    record = {"candidates": rows}
    names = [f"ensemble of {size} + temperature" for size in study.SIZES]
    assert study.same_cost(record, "Gaussian") == [names[0], names[2]]
    assert study.same_cost(record, "cheap") == 2 * ["as it is + temperature"]
    del rows[names[2]]
    assert study.same_cost(record, "Gaussian") == names[:2]


def test_table_of_efforts():
    records = []
    for seed in range(2):
        record = made("digits", seed, [2.0, 1.5, 1.0 + 0.1 * seed])
        for place, row in enumerate(record["candidates"].values()):
            row |= {"passes": 1.0, "trainings": 0.1 * (place == 2)}
        record["candidates"]["ensemble of 2 + temperature"] = {"NLL": 0.9}
        record["options"] = {"schedule": "own"}
        record["choices"] = {"seconds": "as it is + temperature", "minutes": record["chosen"]}
        records.append(record)
    lines = calibrate_tables.by_effort(records).splitlines()[2:]
    seconds, minutes = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert seconds[:3] == ["seconds", "2", "+0.0000 ± 0.0000"]
    assert minutes[2].startswith("-0.4500")
    assert minutes[4].startswith("+0.1500")  # behind two networks
    assert minutes[6:] == ["1", "0.1"]
    assert calibrate_tables.by_effort(records, "cosine") == "Not run yet."


def test_table_of_methods():
    records = []
    for seed, gain in enumerate([0.1, 0.3]):
        record = made("digits", seed, [2.0, 1.5, 1.5 - gain])
        record["options"] = {"schedule": "cosine"}
        record["choices"] = {}
        for row in record["candidates"].values():
            row |= {"passes": 32.0, "trainings": 0.5}
        records.append(record)
    (line,) = calibrate_tables.by_method(records, "cosine").splitlines()[2:]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    # The standard error is 0.1, and t of one degree of freedom 12.706.
    assert cells == ["fine-tuned", "2", "-0.2000 ± 1.2706", "-0.2000", "2 / 0", "32", "0.5"]
    assert calibrate_tables.by_method(records, "own") == "Not run yet."


def made(pair, seed, nll, chosen=-1):
    names = ["as it is", "as it is + temperature", "fine-tuned + temperature"]
    rows = {
        name: {"NLL": x, "accuracy": 0.9, "ECE": 0.1} for name, x in zip(names, nll, strict=False)
    }
    about = {"pair": pair, "seed": seed, "seconds": {"training": 1}}
    return {**about, "chosen": names[: len(nll)][chosen], "candidates": rows}


def test_table_has_paired_margins():
    records = [made("digits", 0, [2.0, 1.5, 1.0]), made("digits", 1, [3.0, 2.5, 2.2], chosen=1)]
    _, _, row, _, missing = calibrate_tables.table(records, ["digits", "wine"]).splitlines()
    assert missing == "Not run yet: wine 78, MLP 32-32."
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    # Differences -1 and -0.5: the standard error is 0.25, and t of one degree of freedom 12.706.
    assert cells == [
        *(study.PAIRS["digits"][0], "2", "0.900 → 0.900", "0.100 → 0.100"),
        *("2.5000", "2.0000", "1.7500", "-0.7500 ± 3.1766", "-0.2500 ± 3.1766"),
        "1 × fine-tuned + temperature; 1 × as it is + temperature",
    ]


def test_regression_has_no_temperature():
    records = [made("diabetes", seed, [2.0]) for seed in range(2)]
    for record in records:
        record["candidates"]["as it is"] = {"NLL": 1.0, "RMSE": 0.5}
    cells = calibrate_tables.table(records, study.UNSEEN).splitlines()[2].split("|")
    assert [cell.strip() for cell in cells[3:5]] == ["-", "-"]
    assert cells[6].strip() == cells[9].strip() == "-"


def test_pages_are_filled_by_kind():
    text = "a\n<!-- calibrate: unseen -->\nold\n<!-- end -->\nb"
    records = [made("wine", 0, [2.0]), made("digits", 0, [2.0])]
    filled = files.filled(text, "calibrate", calibrate_tables.tables(records))
    assert "wine 78" in filled
    assert study.PAIRS["digits"][0] not in filled
    assert filled.startswith("a\n<!-- calibrate: unseen -->\n|")
    assert filled.endswith("<!-- end -->\nb")


@pytest.mark.parametrize("name", ["digits", "lstm", "efficientnet", "cancer", "wine", "diabetes"])
def test_seed_draws_the_examples(name):
    first, again, other = (study.load(name, seed) for seed in (0, 0, 1))
    for (x, y), (x_again, _), (x_other, _) in zip(first, again, other, strict=True):
        assert len(x) == len(y) >= 48
        np.testing.assert_array_equal(x, x_again)
        assert (x != x_other).any()


def test_unknown_pairs_are_named(capsys):
    with pytest.raises(SystemExit):
        STUDY.main(["--pairs", "nonsense"])
    assert "--pairs must be some of digits, " in capsys.readouterr().err
