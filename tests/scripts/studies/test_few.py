"""The study of few data: its images, trials and tables, and a run from end to end."""

import re

import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn
from lib import tasks
from studies.few import STUDY
from studies.few import run as study
from studies.few import tables as few_tables

pytestmark = pytest.mark.once


@pytest.fixture
def few(monkeypatch):
    """Random images in place of CIFAR-10, 30 of them for training and 20 for validation."""
    rng = np.random.default_rng(0)
    parts = [(rng.integers(0, 256, (n, 32, 32, 3), "uint8"), np.arange(n) % 10) for n in (70, 40)]
    monkeypatch.setattr(study.data, "load", lambda name, folder: parts)
    monkeypatch.setattr(study, "IMAGES", 30)
    monkeypatch.setattr(study, "VALIDATION", 20)
    study.all_images.cache_clear()
    yield parts
    study.all_images.cache_clear()


def test_each_image_is_in_one_part_and_validation_is_the_same_for_all_seeds(few):
    every = {x.tobytes() for images, _ in few for x in images}
    drawn = []
    for seed in (0, 1):
        problem = study.Problem("few_lenet", seed)
        parts = [problem.train, problem.validation, problem.test]
        assert [len(y) for _, y in parts] == [30, 20, 60]
        found = [{x.tobytes() for x in images} for images, _ in parts]
        assert set.union(*found) == every
        assert sum(map(len, found)) == len(every) == 110
        drawn.append(found)
    (train, held, _), (other_train, other_held, _) = drawn
    assert held == other_held
    assert train != other_train


@pytest.mark.parametrize("pair", study.PAIRS)
def test_every_method_has_four_trials(pair):
    for grid in study.GRIDS[pair].values():
        assert len({few_tables.shown(settings) for settings in grid}) == 4
    trials = study.GRIDS[pair]["Gaussian"]
    for first, second in (("rate", "beta"), ("rate", "prior_scale"), ("beta", "prior_scale")):
        assert len({(trial[first], trial[second]) for trial in trials}) == 4


def trial(method, number, value):
    about = {"pair": "few_lenet", "seed": 8, "method": method, "trial": number}
    return about | {"validation": {"NLL": value, "NLL, T": value, "accuracy": 0.5}}


def test_the_best_trial_is_chosen_when_all_are_there():
    records = [trial("flow", number, value) for number, value in enumerate([1.3, None, 1.1, 1.2])]
    best = study.GRIDS["few_lenet"]["flow"][2]
    assert study.chosen(records, "few_lenet", "flow") == best
    assert study.chosen(records[:3], "few_lenet", "flow") is None
    assert study.chosen(records, "few_vgg16", "flow") is None
    flow, gaussian = (("few_lenet", 0, name, None) for name in ("flow", "Gaussian"))
    assert study.settings_of(records, flow, ".") == best
    assert study.settings_of(records, gaussian, ".") is None
    assert study.settings_of([], ("few_lenet", 8, "flow", 2), ".") == best
    lines = few_tables.settings(records, "few_lenet").splitlines()
    assert ["**" in line for line in lines[2:]] == [False, False, True, False]


def test_scores_take_the_temperature_of_validation_images():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (20_000, 10))
    p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    y = (rng.random((len(p), 1)) > np.cumsum(p, axis=-1)[:, :-1]).sum(axis=-1)
    sharp = 2 * logits - np.log(np.exp(2 * logits).sum(axis=-1, keepdims=True))
    found = study.scores(sharp[:5000], y[:5000], sharp[5000:], y[5000:])
    assert found["T"] == pytest.approx(2, rel=0.05)
    true = -np.log(p[np.arange(5000, len(p)), y[5000:]]).mean()
    assert found["NLL, T"] == pytest.approx(true, abs=2e-3)
    assert found["NLL"] == pytest.approx(-sharp[np.arange(5000, len(p)), y[5000:]].mean())
    assert found["ECE, T"] < 0.02 < found["ECE"]
    held = study.held_out(sharp[:5000], y[:5000])
    assert held["NLL, T"] < held["NLL"]
    assert study.held_out(sharp * np.nan, y)["NLL, T"] is None


def test_posteriors_are_where_they_should_be(eagerly, few):
    problem = study.Problem("few_lenet", 0)
    model, found = problem.build(0), {}
    for method in ("fixed noise", "Gaussian", "joint flow"):
        settings = study.GRIDS["few_lenet"][method][0]
        options = {name: value for name, value in settings.items() if name != "rate"}
        posterior = study.posterior_of("few_lenet", method, options)
        found[method] = ibnn.to_stochastic(model, posterior, 30)
    names = {name: [x.name for x in ibnn.stochastic_layers(sto)] for name, sto in found.items()}
    inner = names.pop("fixed noise")
    assert len(inner) == 4
    assert not any("conv1" in name for name in inner)
    assert {len(each) for each in names.values()} == {5}
    assert ibnn.stochastic_layers(found["joint flow"])[0].posterior.joint.channels == 469


def test_methods_train_what_they_should(eagerly, few):
    problem, fits = study.Problem("few_lenet", 0), {}

    def made(method, settings):
        problem.fit = lambda model, **options: fits.update({method: (model, options)})
        predictor = problem.trained(method, settings)
        return predictor, *fits[method]

    scale = {"rate": 1e-3, "prior_scale": 0.2}
    _, model, _ = made("fixed noise", scale)
    z = keras.ops.convert_to_numpy(model.layers[-1].posterior.summary().z)
    assert np.std(z) == pytest.approx(0.2, rel=0.1)
    assert not any(getattr(weight, "of_posterior", False) for weight in model.trainable_weights)
    _, model, options = made("mean-field", {**scale, "beta": 0.1})
    rates = [
        getattr(options["optimizer"], part).learning_rate
        for part in ("deterministic", "stochastic")
    ]
    assert [float(rate) for rate in rates] == pytest.approx([1e-3, 5e-3])
    assert options["optimizer"].deterministic.weight_decay == 0
    falling, annealing = options["callbacks"]
    assert [falling.schedule(epoch) for epoch in (0, 30)] == pytest.approx([1e-3, 5e-4])
    assert annealing.epochs == 20
    predictor, dropped, options = made("channel dropout", {"rate": 1e-3, "dropout": 0.15})
    assert predictor.dropout
    assert options["optimizer"].weight_decay == study.DECAY
    kinds = [x for x in dropped.layers if isinstance(x, keras.layers.Dropout)]
    assert [x.name for x in kinds] == [f"{x}_dropout" for x in ("conv2", "fc1", "fc2", "fc3")]
    assert {x.rate for x in kinds} == {0.15}
    plain, model, options = made("deterministic", {"rate": 1e-3, "decay": 1.0})
    assert plain is model
    assert options["optimizer"].weight_decay == 1


def records(methods, seeds=(1, 0)):
    """Made-up runs, in which each method is worse than the one before."""
    rest = dict.fromkeys(few_tables.COLUMNS, 0.5)
    return [
        {"pair": "few_vgg16", "seed": seed, "method": name, "trial": None}
        | {"scores": rest | {"NLL, T": seed + 0.1 * place, "NLL": seed + 0.3 * place}}
        for seed in seeds
        for place, name in enumerate(methods)
    ]


def test_contrasts_are_paired_by_seed():
    found = few_tables.tables(records(["deterministic", "Gaussian", "flow", "member1"]))
    assert "| Gaussian | 2 | 0.5000 ± 0.0000 | 0.8000 ± 0.7071 |" in found["few_vgg16"]
    assert "member1" not in found["few_vgg16"]
    lines = found["few_vgg16 contrasts"].splitlines()
    rows = {line.split(" | ")[0]: line.split(" | ")[1:] for line in lines[2:]}
    against = rows["| flow - deterministic at a temperature"]
    assert against == ["2", "+0.2000 ± 0.0000", "+0.6000 ± 0.0000 |"]
    assert rows["| flow - Gaussian"] == ["2", "+0.1000 ± 0.0000", "+0.3000 ± 0.0000 |"]
    assert "| MNF - mean-field" not in rows  # was not run
    assert lines[-1].startswith(f"6 of {few_tables.NUMBER} planned contrasts")
    assert found["few_lenet contrasts"] == "Not run yet."


@pytest.mark.slow
def test_a_quick_run_is_stored_and_not_repeated(few, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(study, "METHODS", ["deterministic", "Gaussian", "channel dropout"])
    command = ["--quick", "--pairs", "few_lenet", "--seeds", "0", "--output", str(tmp_path)]
    assert STUDY.main(command) == 0
    records = tasks.read(tmp_path)
    found = {record["method"]: record["scores"] for record in records if record["trial"] is None}
    assert found.keys() == {*study.METHODS, "member1", "ensemble"}
    assert all(np.isfinite(scores["NLL, T"]) for scores in found.values())
    single = [found[name]["NLL"] for name in ("deterministic", "member1")]
    assert found["ensemble"]["NLL"] < np.mean(single)  # by convexity
    assert STUDY.main(command) == 0
    assert re.search("0 runs to do, 7 are there", capsys.readouterr().out)
