import dataclasses
import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import tfp_ibnn as ibnn
from lib import RunError, Scores, Settings, data, figures, run_many, store, study
from lib import write_results as write
from lib.markdown import fill
from lib.plan import PLANS
from lib.run import _network, _stochastic, identity
from tests.scripts.test_reproduce import check, made_images

pytestmark = pytest.mark.once

SCRIPT = Path(__file__).parents[2] / "scripts" / "reproduce.py"
SEEDS = [3, 4]
IMAGES = 400
VGG16, LENET = PLANS["vgg16"], PLANS["lenet"]
WITHOUT_POSTERIOR = ("deterministic", "deterministic_continued", "mc_dropout", "channel_dropout")
DRAWS = list(VGG16.parts["draws"].evaluations)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("reproduce", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def chosen():
    trials = VGG16.trial_runs(0)
    found = {tuple(name.split("/")[1:3]): name for name in reversed(trials)}
    return {of: trials[name] for of, name in found.items()}


def equal(chosen, seed=0):
    """The runs at equal budget, by method."""
    runs = VGG16.runs("equal", [seed], chosen=chosen)
    return {name.split("/")[2]: settings for name, settings in runs.items()}


def ablations(seed=0):
    runs = VGG16.runs("ablations", [seed])
    return {name.split("/")[2]: settings for name, settings in runs.items()}


def evaluations(name):
    return VGG16.parts[name.split("/")[0]].evaluations if not name.startswith("trials") else {}


def rows_of(results, *budgets):
    """The records of some parts, or of all that are compared."""
    found = results.records
    if not budgets:
        return [record for record in found if store.is_shown(record)]
    return [record for record in found if record["budget"] in budgets]


# The plan.


def test_trials_do_not_see_what_they_are_scored_on():
    for method in VGG16.trials:
        found = VGG16.trial_runs(0, [method])
        assert len(found) == len(set(found.values())) >= 2
        assert {settings.validation for settings in found.values()} == {5000}


def test_every_method_has_one_budget(chosen):
    runs = equal(chosen, seed=7)
    assert set(runs) == set(VGG16.methods)
    for settings in runs.values():
        assert (settings.validation, settings.seed, settings.pretrain_epochs) == (0, 7, 0)
        assert (settings.epochs, settings.batch_size, settings.samples) == (100, 128, 128)


def test_posteriors_differ_in_nothing_else(chosen):
    """Else a difference in the results could be that of something that was tuned."""
    runs = equal(chosen)
    of_posteriors = {
        *("posterior", "affine", "components", "mean_spread", "initial_scale"),
        *("flow_layers", "base_components"),
    }
    pairs = [("gaussian", name) for name in runs if name.startswith(("flow", "mixture"))]
    pairs.remove(("gaussian", "mixture_16_ibnn"))  # a recipe of its own
    pairs.remove(("gaussian", "flow_elbo"))
    for first, second in [*pairs, ("gaussian_elbo", "flow_elbo")]:
        assert different(runs[first], runs[second]) <= of_posteriors, second
    assert different(runs["gaussian"], runs["gaussian_inner"]) == {"deterministic_layers"}
    fixed = {"stochastic_learning_rate", "initial_scale"}
    assert different(runs["gaussian_inner"], runs["fixed_inner"]) == fixed


def different(one, other):
    one, other = dataclasses.asdict(one), dataclasses.asdict(other)
    return {key for key in one if one[key] != other[key]}


def small(settings):
    """The same of a network that is built in no time."""
    return dataclasses.replace(settings, model="lenet", precision="float32")


@pytest.mark.parametrize("method", VGG16.methods)
def test_every_method_can_be_built(chosen, method):
    settings = small(equal(chosen)[method])
    (images, _), _ = made_images("cifar10")
    layers = ibnn.stochastic_layers(_stochastic(_network(settings, images), settings, 100))
    expected = dict.fromkeys(WITHOUT_POSTERIOR, 0) | {"gaussian_inner": 4, "fixed_inner": 4}
    assert len(layers) == expected.get(method, 5)
    assert any(getattr(layer.posterior, "flows", ()) for layer in layers) == ("flow" in method)
    several = {"mixture_4": 4, "flow_over_mixture": 4, "mixture_16": 16, "mixture_16_ibnn": 16}
    assert {layer.posterior.components for layer in layers} <= {several.get(method, 1)}


def test_channels_are_dropped_on_the_input_of_every_layer_but_the_first(chosen):
    settings = small(equal(chosen)["channel_dropout"])
    (images, _), _ = made_images("cifar10")
    model = _network(settings, images)
    dropped = [layer for layer in model.layers if layer.name.endswith("_dropout")]
    kinds = ["SpatialDropout2D", *["Dropout"] * 3]
    assert [type(layer).__name__ for layer in dropped] == kinds
    assert [layer.output.shape[-1] for layer in dropped] == [6, 256, 120, 84]
    for layer in dropped:
        before = model.get_layer(layer.name.removesuffix("_dropout"))
        assert (layer.rate, before.input is layer.output) == (settings.dropout, True)
    plain = small(dataclasses.replace(settings, dropout=0.0, dropout_layers=None))
    plain = _network(plain, images)
    assert plain.count_params() == model.count_params()
    for one, other in zip(plain.non_trainable_weights, model.non_trainable_weights, strict=True):
        assert (one.path, one.shape) == (other.path, other.shape)
    model.set_weights(plain.get_weights())
    same = (np.asarray(one(images[:2] * 1.0)) for one in (plain, model))
    np.testing.assert_allclose(*same, atol=1e-5)
    with pytest.raises(ValueError, match="`dropout_layers` 'conv9' matches no layer of lenet"):
        _network(dataclasses.replace(settings, dropout_layers="conv9"), images)


def test_an_ablation_changes_what_it_says():
    runs = ablations(seed=1)
    base = dataclasses.asdict(runs.pop("reference"))
    assert base["validation"] == 5000
    for name, settings in runs.items():
        changed = {
            key: value for key, value in dataclasses.asdict(settings).items() if value != base[key]
        }
        told = dict(part.split("=", 1) for part in name.split(","))
        assert {
            key: f"{value:g}" if isinstance(value, float) else str(value)
            for key, value in changed.items()
        } == told


def test_half_of_the_classes_is_held_out(chosen):
    runs = VGG16.runs("half", [0], chosen=chosen)
    assert len(runs) == 5
    for name, settings in runs.items():
        assert settings.classes == 5
        shifts = evaluations(name)["robustness"]
        assert shifts.classes == 5
        assert "foreign" in shifts.shifts


def test_methods_narrow_what_is_run(chosen):
    assert {name.split("/")[2] for name in VGG16.trial_runs(0, ["flow_last"])} == {"gaussian"}
    assert {name.split("/")[2] for name in VGG16.trial_runs(0, ["mc_dropout"])} == {"mc_dropout"}
    found = VGG16.runs("equal", [0, 1], ["gaussian"], chosen=chosen)
    assert list(found) == ["equal/cifar10/gaussian/seed0", "equal/cifar10/gaussian/seed1"]
    only = {("cifar10", "deterministic"): chosen["cifar10", "deterministic"]}
    assert set(VGG16.runs("half", [0], ["deterministic"], chosen=only)) == {
        "half/cifar10/deterministic/seed0"
    }


@pytest.mark.parametrize("option", [{"parts": ["all"]}, {"methods": ["flow"]}])
def test_unknown_parts_and_methods_are_named(tmp_path, option):
    with pytest.raises(ValueError, match="`(parts|methods)` must be one of"):
        study.study(VGG16, tmp_path, [0], **option)


def test_the_script_knows_the_same_names(script):
    assert script.METHODS["vgg16"] == VGG16.methods
    assert set(script.IN_PARTS) <= set(PLANS)
    assert script.METHODS["lenet"] == LENET.methods
    assert set(script.EXPERIMENTS) == set(PLANS)


# The results, of runs that are made up: they are finished, so nothing is trained.


def made_up(rng, classes=10):
    labels = rng.integers(0, classes, IMAGES)
    logits = rng.normal(size=(IMAGES, classes)) + 3 * np.eye(classes)[labels]
    mean = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return Scores(mean, rng.uniform(0, 0.1, IMAGES), labels, 128)


def finish(folder, name, settings):
    """Write what a finished run leaves."""
    rng = np.random.default_rng([settings.seed, *name.encode()])
    scores = made_up(rng, settings.classes or 10)
    path = folder / name
    path.mkdir(parents=True)
    known = {"parameters": 10**6, "backend": "jax", "hardware": "none", "versions": {}}
    known["options"] = settings.as_dict()
    metrics = {**scores.summary(), **known, "python": "3", "seconds": {"training": 5.0}}
    (path / "settings.json").write_text(json.dumps(identity(settings)))
    (path / "metrics.json").write_text(json.dumps(metrics))
    np.savez_compressed(path / "probabilities.npz", **scores.arrays())
    stochastic = ["nll", "kl", "conv1/kl", "conv1/z_std", "conv2/kl", "conv2/z_std"]
    names = ["loss", "accuracy", *(stochastic if settings.is_stochastic else [])]
    names += [f"test_{key}" for key in ("accuracy", "nll", "ece")]
    rows = [[str(epoch), *("0.5" for _ in names)] for epoch in (1, 2)]
    lines = [["epoch", *names], *rows]
    (path / "training.csv").write_text("\n".join(map(",".join, lines)))
    for evaluation, shifts in evaluations(name).items():
        (path / evaluation).mkdir()
        record = {"options": shifts.as_dict(), "rows": shifted(rng, shifts)}
        (path / evaluation / "robustness.json").write_text(json.dumps(record))


def shifted(rng, shifts):
    labelled = [("clean", "", 0)]
    if "corruptions" in shifts.shifts:
        labelled += [("corruption", "contrast", level) for level in shifts.severities]
        labelled += [("rotation", "", level) for level in shifts.degrees]
    rows = [
        {"shift": shift, "name": name, "level": level, "images": 5}
        | {key: float(rng.uniform()) for key in ("accuracy", "nll", "brier", "ece")}
        for shift, name, level in labelled
    ]
    foreign = [*shifts.foreign, *(["held-out classes"] if shifts.classes else [])]
    rows += [
        {"shift": "foreign", "name": name, "level": None, "images": 5}
        | {"entropy_auroc": float(rng.uniform()), "epistemic_auroc": None}
        for name in foreign
    ]
    return rows


@pytest.fixture(scope="module")
def runs(tmp_path_factory, chosen):
    folder = tmp_path_factory.mktemp("runs")
    trials = VGG16.trial_runs(SEEDS[0])
    for name, settings in trials.items():
        finish(folder, name, settings)
    found = {name: json.loads((folder / name / "metrics.json").read_text()) for name in trials}
    for part in VGG16.parts:
        best = {key: trials[name] for key, name in study.best(trials, found).items()}
        for name, settings in VGG16.runs(part, SEEDS, chosen=best).items():
            finish(folder, name, settings)
    return folder


@pytest.fixture(scope="module")
def results(runs):
    return study.study(VGG16, runs, SEEDS, log=print)


@pytest.fixture(scope="module")
def written(results, runs, tmp_path_factory):
    """A folder with all that the results leave but figures; for tests that only read."""
    folder = tmp_path_factory.mktemp("results") / "vgg16"
    folder.mkdir()
    options = {"seeds": SEEDS, "methods": None, "parts": None}
    write(folder, results.records, options, runs=runs)
    return folder


@pytest.fixture(scope="module")
def drawn(results, written, runs, tmp_path_factory):
    """The same with figures."""
    folder = tmp_path_factory.mktemp("drawn") / "vgg16"
    shutil.copytree(written, folder)
    figures.save(figures.vgg16(results.records, runs, folder), folder)
    return folder


def test_finished_runs_are_gathered(results):
    assert len(rows_of(results)) == len(SEEDS) * (len(VGG16.methods) + 3 + 5 + 5)
    assert len(rows_of(results, "trials")) == sum(map(len, VGG16.trials.values()))
    assert len(rows_of(results, "ablations")) == len(ablations())
    (reference,) = rows_of(results, "draws")
    assert list(reference["evaluations"]) == DRAWS
    shifted = [record for record in rows_of(results) if "evaluations" in record]
    assert {row["budget"] for row in shifted} == {"equal", "half"}
    assert {row["seed"] for row in shifted} == set(SEEDS)
    for row in rows_of(results):
        stochastic = row["method"] not in WITHOUT_POSTERIOR
        assert ("train_kl" in row) == stochastic
        assert row.get("z_std") == ({"conv1": 0.5, "conv2": 0.5} if stochastic else None)
        assert row["train_nll"] == 0.5


def test_what_is_not_finished_is_left_out_and_named(runs, tmp_path):
    folder = tmp_path / "runs"
    shutil.copytree(runs, folder)
    gone, tested = (f"equal/cifar10/flow_last/seed{seed}" for seed in SEEDS[:2])
    shutil.rmtree(folder / gone)
    (folder / tested / "robustness" / "robustness.json").unlink()
    wanted = {"parts": ["equal"], "methods": ["deterministic", "gaussian", "flow_last"]}
    results = study.study(VGG16, folder, SEEDS, **wanted, train=False)
    assert results.missing == [f"{gone}: not run", f"{tested}/robustness: not run"]
    assert len(rows_of(results)) == len(SEEDS) * 3 - 1
    write(tmp_path, results.records, {}, results.missing, runs=folder)
    figures.save(figures.vgg16(results.records, folder, tmp_path), tmp_path)
    for trial in VGG16.trial_runs(SEEDS[0], ["deterministic"]):
        shutil.rmtree(folder / trial)
    with pytest.raises(RunError, match="No trial of deterministic"):
        study.study(VGG16, folder, SEEDS, **wanted, train=False)
    with pytest.raises(RunError, match="nothing holds none of the trials"):
        study.study(VGG16, tmp_path / "nothing", SEEDS, **wanted, train=False)


def test_why_a_run_is_missing_needs_no_folder(tmp_path):
    gone = Settings(pretrained=str(tmp_path / "none.keras"))
    assert run_many.Task("a", gone, tmp_path, {}).failure() is None


def test_a_model_that_is_gone_cannot_be_evaluated(runs, chosen, tmp_path):
    name = f"equal/cifar10/flow_last/seed{SEEDS[0]}"
    shutil.copytree(runs / name, tmp_path / name)
    (tmp_path / name / "robustness" / "robustness.json").unlink()
    settings = Settings(**json.loads((tmp_path / name / "metrics.json").read_text())["options"])
    with pytest.raises(RunError, match=r"1 of 1 runs failed. .*model.keras is gone"):
        run_many.run_many(
            {name: settings}, tmp_path, evaluations={name: evaluations(name)}, log=print
        )


def test_parts_without_a_row_of_the_table(script, runs, tmp_path, capsys):
    seeds = [str(seed) for seed in SEEDS]
    command = ["vgg16", "--finished", "--seeds", *seeds, "--results", str(tmp_path / "results")]
    (tmp_path / "runs").mkdir()
    shutil.copytree(runs, tmp_path / "runs" / "vgg16")
    assert script.main([*command, "--runs", str(tmp_path / "runs"), "--parts", "ablations"]) == 0
    records, _ = store.read(tmp_path / "results" / "vgg16")
    assert {record["budget"] for record in records} == {"ablations"}
    assert len(records) == len(ablations())
    capsys.readouterr()
    other = ["--runs", str(tmp_path / "none"), "--parts", "report", "--force"]
    assert script.main([*command, *other]) == 1
    assert "no finished run" in capsys.readouterr().err


# Runs that are added to results whose own runs are gone.


def test_what_is_kept_is_not_run_again(written, tmp_path, monkeypatch):
    kept = store.read(written)
    monkeypatch.setattr(run_many, "run", None)
    again = study.study(VGG16, tmp_path / "none", SEEDS, kept=kept)
    assert (again.records, again.missing) == kept
    assert again.kept == {record["name"] for record in kept[0]}


def test_new_runs_join_those_that_are_kept(results, runs, tmp_path):
    """Runs of all kinds are taken away, and come back from folders that hold nothing else."""
    taken = [f"long/cifar10/{method}/seed{SEEDS[1]}" for method in ("deterministic", "flow_last")]
    taken += [f"ablations/cifar10/epochs=120/seed{SEEDS[0]}"]
    taken += [f"equal/cifar10/gaussian/seed{SEEDS[1]}"]
    missing = [f"{name}: not run" for name in taken[:3]] + [f"{taken[3]}: diverged: too fast"]
    kept = without(results.records, taken), missing
    for name in taken[:3]:
        shutil.copytree(runs / name, tmp_path / "new" / name)
    found = study.study(VGG16, tmp_path / "new", SEEDS, kept=kept, train=False)
    assert found.missing == [f"{taken[3]}: diverged: too fast"]
    assert found.records == without(results.records, taken[3:])
    shutil.copytree(runs / taken[3], tmp_path / "new" / taken[3])
    kept = found.records, found.missing
    found = study.study(VGG16, tmp_path / "new", SEEDS, kept=kept, train=False)
    assert found.missing == []

    def but_scaled(records):
        return [{key: v for key, v in record.items() if key != "scaled"} for record in records]

    assert but_scaled(found.records) == but_scaled(results.records)
    # No trial's predictions are there to fit a temperature to.
    (last,) = (record for record in found.records if record["name"] == taken[3])
    assert last["scaled"]["crosswise"] is True


def without(records, names):
    return [record for record in records if record["name"] not in names]


def test_settings_that_changed_are_run_again(results, tmp_path, monkeypatch):
    def changed(part, **change):
        part = VGG16.parts[part]
        return part._replace(base={**part.base, **change})

    parts = {name: changed(name, batch_size=64) for name in ("ablations", "draws", "report")}
    other = VGG16._replace(parts={**VGG16.parts, **parts})
    kept = results.records, []
    found = study.study(
        other, tmp_path, SEEDS, parts=["ablations", "draws"], kept=kept, train=False
    )
    assert len([line for line in found.missing if "/draws" not in line]) == len(ablations()) + 1
    assert rows_of(found, "ablations", "draws") == []
    assert rows_of(found) == rows_of(results)
    wanted = {"parts": ["report"], "seeds": SEEDS[1:2], "kept": kept, "train": False}
    found = study.study(other, tmp_path, **wanted)
    assert len(found.missing) == 5
    assert len(rows_of(found)) == len(rows_of(results)) - 5


@pytest.mark.slow
def test_adding_by_the_script(script, results, drawn, runs, tmp_path, capsys):
    folder = tmp_path / "results" / "vgg16"
    shutil.copytree(drawn, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    probabilities = {path: path.read_bytes() for path in (folder / "probabilities").iterdir()}
    finish(tmp_path / "runs" / "vgg16", *next(iter(VGG16.runs("report", [9]).items())))
    foreign = tmp_path / "runs" / "vgg16" / "equal" / "cifar10" / "gaussian" / f"seed{SEEDS[0]}"
    shutil.copytree(runs / "equal" / "cifar10" / "deterministic" / f"seed{SEEDS[1]}", foreign)
    command = ["vgg16", "--finished", "--parts", "report", "--seeds", "9"]
    command += ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    assert script.main(command) == 1  # that would replace the others
    assert "--force" in capsys.readouterr().err
    assert script.main([*command, "--add"]) == 0
    record = json.loads((folder / "summary.json").read_text())
    assert len(store.read(folder)[0]) == len(results.records) + 1
    assert record["options"]["seeds"] == [*SEEDS, 9]
    assert record["options"]["parts"] is None
    for name in ("training.png", "curves.png"):  # drawn from folders
        assert (folder / name).read_bytes() == before[name]
    added = set((folder / "probabilities").iterdir()) - set(probabilities)
    assert [path.name for path in added] == ["report-deterministic-seed9.npz"]
    assert all(path.read_bytes() == content for path, content in probabilities.items())


def test_results_of_something_else_are_not_added_to(tmp_path):
    for content in ("", '{"runs": []}', "[]", '{"key": "k"}'):
        (tmp_path / "runs.jsonl").write_text(content)
        with pytest.raises(RunError, match="results of something else"):
            store.read(tmp_path)


def test_settings_of_the_least_held_out_nll_are_trained(results):
    for method in ("gaussian", "mc_dropout", "deterministic"):
        tried = [row for row in rows_of(results, "trials") if row["method"] == method]
        best = min(tried, key=lambda row: row["nll"])
        (final,) = {row["training"] for row in rows_of(results, "equal") if row["method"] == method}
        assert final == best["training"].replace(" --validation 5000", "")


def test_results_hold_what_any_score_needs(results, written, runs, tmp_path):
    assert all(row["seeds"] == SEEDS for row in check(written))
    for row in rows_of(results):
        name = f"{row['budget']}-{row['method']}-seed{row['seed']}.npz"
        with np.load(written / "probabilities" / name) as found:
            assert found["probabilities"].dtype == "float16"
            assert found["epistemic"].dtype == "float16"
            again = Scores(found["probabilities"].astype("float64"), None, found["labels"], 1)
        summary = again.summary()
        assert summary["accuracy"] == row["accuracy"]
        assert summary["nll"] == pytest.approx(row["nll"], abs=1e-3)
        assert summary["ece"] == pytest.approx(row["ece"], abs=2e-3)
    # Of fewer runs, nothing else stays behind.
    folder = tmp_path / "results"
    shutil.copytree(written, folder)
    table = write(folder, rows_of(results)[:2], {}, runs=runs)
    assert check(folder) == json.loads(json.dumps(table))
    assert len(list((folder / "probabilities").iterdir())) == 2


def test_temperatures_are_of_the_held_out_images(results, runs):
    for method in ("deterministic", "mc_dropout", "gaussian"):
        mine = [row for row in rows_of(results, "equal") if row["method"] == method]
        assert [row["seed"] for row in mine] == SEEDS
        (temperature,) = {row["scaled"]["temperature"] for row in mine}
        trials = [row for row in rows_of(results, "trials") if row["method"] == method]
        held_out = predicted(runs / min(trials, key=lambda row: row["nll"])["name"])
        tried = np.linspace(0.2, 2, 361)
        best = tried[np.argmin([tempered(held_out, t)[0] for t in tried])]
        assert temperature == pytest.approx(best, abs=0.01)
        for row in mine:
            nll, accuracy = tempered(predicted(runs / row["name"]), best)
            assert row["scaled"]["nll"] == pytest.approx(nll, abs=1e-3)
            assert row["scaled"]["accuracy"] == accuracy


def predicted(folder):
    with np.load(folder / "probabilities.npz") as found:
        return found["probabilities"].astype("float64"), found["labels"]


def tempered(prediction, temperature):
    """NLL and accuracy of a run at a temperature."""
    probabilities, labels = prediction
    powers = probabilities ** (1 / temperature)
    mean = powers / powers.sum(axis=1, keepdims=True)
    return -np.log(mean[np.arange(len(mean)), labels]).mean(), np.mean(mean.argmax(1) == labels)


def test_an_ensemble_is_the_mean_of_the_seeds(written, runs):
    averaged = json.loads((written / "summary.json").read_text())["averaged"]
    assert [row["method"] for row in averaged if row["budget"] == "equal"] == list(VGG16.methods)
    assert len([row for row in averaged if row["budget"] == "long"]) == 3
    row = averaged[0]
    folders = [runs / "equal" / "cifar10" / row["method"] / f"seed{seed}" for seed in SEEDS]
    means = [np.load(folder / "probabilities.npz")["probabilities"] for folder in folders]
    labels = np.load(folders[0] / "probabilities.npz")["labels"]
    mean = np.mean(means, axis=0)
    assert row["nll"] == pytest.approx(-np.log(mean[np.arange(len(mean)), labels]).mean(), rel=1e-3)
    assert row["seeds"] == SEEDS


@pytest.fixture(scope="module")
def of_one_seed(results, runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "vgg16"
    folder.mkdir()
    few = [row for row in rows_of(results, "half") if row["seed"] == SEEDS[0]]
    write(folder, few, {}, runs=runs)
    return folder.parent


@pytest.mark.parametrize("kind", ["paired", "shifts", "ood", "post_hoc", "baselines"])
def test_a_table_of_one_seed_or_of_nothing_is_no_error(of_one_seed, kind):
    assert "nan" not in fill(f"<!-- {kind}: vgg16 budget=half -->\n<!-- end -->", of_one_seed)


KINDS = (
    *("table", "scores", "paired", "pooled", "cost", "kl", "ablations", "draws"),
    *("shifts", "ood", "pooled_shifts", "post_hoc", "baselines"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_table_can_be_filled(results, written, kind):
    condition = "" if kind in ("ablations", "draws") else " budget=equal"
    if kind.startswith("pooled"):
        condition += f" method={','.join(VGG16.methods)}"
    filled = fill(f"<!-- {kind}: vgg16{condition} -->\n<!-- end -->", written.parent)
    lines = filled.splitlines()[1:-1]
    assert len({line.count("|") for line in lines}) == 1
    expected = {"ablations": len(ablations()) + 1, "draws": len(DRAWS)}  # the reference again
    expected["baselines"] = 4 * len(VGG16.methods)  # one, with a temperature, averaged, and both
    if kind != "paired":
        assert len(lines) - 2 == expected.get(kind, len(VGG16.methods))


def test_nothing_of_other_budgets_is_in_a_table(written):
    filled = fill("<!-- post_hoc: vgg16 budget=half -->\n<!-- end -->", written.parent)
    _, head, _, *lines, _ = [line.split(" | ") for line in filled.splitlines()]
    averaged = json.loads((written / "summary.json").read_text())["averaged"]
    half = [f"{row['nll']:.4f} / {row['ece']:.4f}" for row in averaged if row["budget"] == "half"]
    assert [line[head.index("seeds averaged")] for line in lines] == half


def test_baselines_are_what_was_stored(results, written):
    comment = "<!-- baselines: vgg16 budget=half method=gaussian -->\n<!-- end -->"
    lines = [line.split(" | ") for line in fill(comment, written.parent).splitlines()[3:-1]]
    names = [many + more for many in ("", f" x {len(SEEDS)}") for more in ("", " + temperature")]
    assert [line[0] for line in lines] == [f"| gaussian{name}" for name in names]
    summary = json.loads((written / "summary.json").read_text())["averaged"]
    (row,) = (row for row in summary if (row["budget"], row["method"]) == ("half", "gaussian"))
    probabilities = [
        store.predictions(written, f"probabilities/half-gaussian-seed{seed}.npz") for seed in SEEDS
    ]
    mean, labels = np.mean([found[0] for found in probabilities], axis=0), probabilities[0][1]
    scaled, _ = store.cross_fit(mean, labels)
    again = Scores(scaled, None, labels, 1).scores()
    assert row["scaled"]["nll"] == pytest.approx(again["nll"], abs=1e-6)
    for line, found in zip(lines[2:], (row, row["scaled"]), strict=True):
        assert line[1:4] == [f"{found[key]:.4f}" for key in ("accuracy", "nll", "ece")]
    floors = [float(line[4].strip(" |")) for line in lines]
    assert all(0 < floor < 0.1 for floor in floors)
    assert floors[2:] == [round(floor, 4) for floor in row["ece_floor"].values()]


def test_a_misspelt_method_is_named(written):
    comment = "<!-- scores: vgg16 budget=equal method={} -->\n<!-- end -->"
    assert len(fill(comment.format("gaussian,flow_last"), written.parent).splitlines()) == 2 + 2 + 2
    with pytest.raises(ValueError, match="method flow_lost"):
        fill(comment.format("gaussian,flow_lost"), written.parent)


@pytest.mark.parametrize(
    ("comments", "says"),
    [
        ("<!-- tables: vgg16 budget=equal -->\n<!-- end -->", "tables: vgg16 .* known are table"),
        ("<!-- table: vgg16 equal -->\n<!-- end -->", "form key=value"),
        ("<!-- table: vgg16 bugdet=equal -->\n<!-- end -->", "with bugdet equal"),
        ("<!-- draws: vgg16 method=other -->\n<!-- end -->", "with method other"),
        ("<!-- pooled: vgg16 budget=equal -->\n<!-- end -->", "need methods"),
        ("<!-- draws: vgg16 -->\ntext\n<!-- draws: vgg16 -->\n<!-- end -->", "1 have no end"),
        ("<!-- draws: vgg16 -->\ntext", "1 have no end"),
    ],
)
def test_a_comment_that_is_wrong_is_refused(written, comments, says):
    with pytest.raises(ValueError, match=says):
        fill(comments, written.parent)


def test_differences_are_those_of_the_means(results, written):
    comment = "<!-- pooled: vgg16 budget=equal method=gaussian,deterministic -->\n<!-- end -->"
    _, head, _, first, second, _ = fill(comment, written.parent).splitlines()
    place = head.split(" | ").index("NLL")
    means = [
        np.mean(
            [row["nll"] for row in rows_of(results) if (row["budget"], row["method"]) == wanted]
        )
        for wanted in (("equal", "gaussian"), ("equal", "deterministic"))
    ]
    assert first.split(" | ")[place] == f"{means[0]:.4f}"
    assert second.split(" | ")[place].startswith(f"{means[1] - means[0]:+.4f} ± ")


# Of a part of the results they are drawn in `test_what_is_not_finished_is_left_out_and_named`.
@pytest.mark.slow
def test_every_figure_is_drawn(drawn):
    paths = list(drawn.glob("*.png"))
    assert {path.name for path in paths} == {
        *("scores.png", "reliability.png", "training.png", "robustness.png", "foreign.png"),
        *("curves.png", "posteriors.png"),
    }
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("drawn", [figures._DRAWN, figures._POSTERIORS, LENET.methods])
def test_methods_of_one_figure_have_colours_of_their_own(drawn):
    assert len({figures.look(method)["color"] for method in drawn}) == len(drawn)
    looks = [figures.look(method) for method in figures.NAMES]
    assert len({(look["color"], look["ls"], look["marker"]) for look in looks}) == len(looks)


def test_the_distance_from_the_confidence_is_drawn(results, written, runs):
    rows = [row for row in rows_of(results, "half") if row["method"] == "gaussian"]
    found = [store.predictions(runs / row["name"]) for row in rows]
    mean, labels = (np.concatenate(parts) for parts in zip(*found, strict=True))
    confidence, correct = mean.max(axis=1), mean.argmax(axis=1) == labels
    parts = np.array_split(np.argsort(confidence), 12)
    (ax,) = figures.reliability(pd.DataFrame(rows), written).axes
    x, y = ax.containers[0].lines[0].get_data(orig=False)
    np.testing.assert_allclose(x, [1 - confidence[part].mean() for part in parts], rtol=1e-3)
    gap = [correct[part].mean() - confidence[part].mean() for part in parts]
    np.testing.assert_allclose(y, gap, atol=1e-3)


def test_an_evaluation_on_other_images_is_refused(runs, chosen, tmp_path):
    (name, settings), *_ = VGG16.runs("equal", [9], ["gaussian"], chosen=chosen).items()
    finish(tmp_path, name, settings)
    other = {"robustness": dataclasses.replace(evaluations(name)["robustness"], limit=10)}
    with pytest.raises(RunError, match="another evaluation"):
        run_many.run_many({name: settings}, tmp_path, evaluations={name: other})


# All of it, on a small network.


@pytest.mark.slow
def test_a_quick_run(script, tmp_path, monkeypatch):
    lenet = {"model": "lenet", "precision": "float32"}
    parts = {
        name: part._replace(base=part.base and {**part.base, **lenet})
        for name, part in VGG16.parts.items()
    }
    quick = VGG16._replace(base={**VGG16.base, **lenet}, parts=parts)
    monkeypatch.setitem(PLANS, "vgg16", quick)
    monkeypatch.setattr(data, "load", made_images)
    methods = ["deterministic", "gaussian", "flow_last"]
    arguments = ["vgg16", "--quick", "--seeds", "0", "--methods", *methods]
    arguments += ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    assert script.main(arguments) == 0
    table = check(tmp_path / "results" / "vgg16")
    assert {row["method"] for row in table if row["budget"] == "equal"} == set(methods)
    records, _ = store.read(tmp_path / "results" / "vgg16")
    half = [record for record in records if record["budget"] == "half"]
    assert "held-out classes" in [row["name"] for row in half[0]["evaluations"]["robustness"]]

    # A second time nothing is trained.
    monkeypatch.setattr(run_many, "run", None)
    assert script.main(arguments) == 0
