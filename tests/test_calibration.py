"""`calibrate`: on real digits, and its parts against closed forms and hand-made cases."""

import dataclasses
import functools
import math
import os
import re
import signal
import types

import keras
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import ndtr, softmax
from sklearn.datasets import load_diabetes, load_digits

import tfp_ibnn as ibnn
from tfp_ibnn.__main__ import main
from tfp_ibnn.calibration import examples, fine_tuning, run, trials
from tfp_ibnn.calibration.examples import Examples, Training, Validation, folds_of, prepare
from tfp_ibnn.calibration.report import Candidate, Report, choose
from tfp_ibnn.likelihoods import Categorical, Gaussian, Labels, Point
from tfp_ibnn.likelihoods.infer import likelihood_for_calibration
from tfp_ibnn.metrics.calibration import ece_floor

layers = keras.layers
TENSORFLOW = keras.backend.backend() == "tensorflow"
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def classes(width, from_logits):
    return Categorical(from_logits, width, one_hot=False)


def digits():
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x, y = (data.data[order] / 16).astype("float32"), data.target[order]
    return (x[:300], y[:300]), (x[300:1300], y[300:1300]), (x[1300:], y[1300:])


def mlp(units=32, outputs=10, activation=None, features=64, dropout=0.0):
    parts = [layers.Dense(units, activation="relu"), layers.Dense(outputs, activation=activation)]
    if dropout:
        parts.insert(1, layers.Dropout(dropout))
    return keras.Sequential([keras.Input((features,)), *parts])


@pytest.fixture(scope="module")
def overfitted():
    """An MLP that has learned the wrong labels among its training examples by heart."""
    keras.utils.set_random_seed(0)
    (x, y), validation, test = digits()
    y = np.where(np.random.default_rng(1).random(len(y)) < 0.1, (y + 1) % 10, y)
    model = mlp(64, dropout=0.05)
    model.compile(keras.optimizers.Adam(1e-2), LOGITS, metrics=["accuracy"])
    rng = np.random.default_rng(2)  # 150 epochs in one: each by itself takes Keras longer
    rows = np.concatenate([rng.permutation(len(y)) for _ in range(150)])
    model.fit(x[rows], y[rows], batch_size=100, shuffle=False, verbose=0)
    return model, (x, y), validation, test


@pytest.fixture(scope="module")
def before(overfitted):
    return snapshot(overfitted[0])


@pytest.fixture(scope="module")
def report(overfitted, before):
    model, train, validation, _ = overfitted
    options = {"samples": 8, "batch_size": 100, "seed": 3, "verbose": False}
    with pytest.MonkeyPatch.context() as patch:
        others = [x for x in trials.METHODS if x is not trials.laplace]  # which is tested apart
        patch.setattr(run, "METHODS", others)
        return ibnn.calibrate(model, train, validation, epochs=3, **options)


def snapshot(model):
    values = [keras.ops.convert_to_numpy(x) for x in (*model.variables, *model.optimizer.variables)]
    return [value.copy() for value in values], model.optimizer, model.loss, model.trainable


@pytest.fixture
def deterministic_only(monkeypatch):
    """Leave the other methods out, for what does not depend on them."""
    monkeypatch.setattr(run, "METHODS", (trials.deterministic, trials.given))


@pytest.fixture
def small(deterministic_only, eagerly):
    """A function that calibrates a small classifier on a few examples."""
    model = mlp(4, 3, "softmax", features=2)
    model.compile("sgd", "sparse_categorical_crossentropy")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(160, 2)).astype("float32")
    y = (x[:, 0] > 0) + (x[:, 1] > 0)

    def small(model=model, train=(x[:60], y[:60]), validation=(x[60:], y[60:]), **options):
        options = {"epochs": 1, "verbose": False, **options}
        return ibnn.calibrate(model, train, validation, **options)

    small.model, small.x, small.y = model, x, y
    return small


# On real data


def test_chosen_is_clearly_better_than_untreated_on_test_data(report, overfitted):
    test = report.evaluate(overfitted[3])
    untreated, chosen = test["as it is"], test[report.chosen.name]
    assert report.chosen.name != "as it is"
    assert chosen["NLL"] < 0.9 * untreated["NLL"]
    assert chosen["ECE"] < 0.75 * untreated["ECE"]
    assert chosen["accuracy"] > untreated["accuracy"] - 0.02


def test_candidates_are_all_there(report):
    names = [x.name for x in report.candidates]
    assert names[:6] == [
        *("as it is", "as it is + temperature", "fine-tuned", "fine-tuned + temperature"),
        *("MC dropout", "MC dropout + temperature"),
    ]
    # Two of six posteriors are left.
    assert len(names) == 10
    assert sum(name.startswith("Gaussian") for name in names) == 4
    assert len(report.dropped) == 4
    assert all(name.startswith("Gaussian") for name in report.dropped)


def test_model_given_is_not_changed(before, report, overfitted):
    (values, *parts), (now, *others) = before, snapshot(overfitted[0])
    for old, new in zip(values, now, strict=True):
        np.testing.assert_array_equal(old, new)
    assert others == parts


def test_temperature_is_that_of_an_independent_fit(report, overfitted):
    model, _, (x, y), _ = overfitted
    part = folds_of(y, 2, 3) == 0
    scaled = ibnn.TemperatureScaling(model, from_logits=True).fit(x[part], y[part])
    found = next(x for x in report.candidates if x.name == "as it is + temperature")
    assert found.parameter == pytest.approx(float(scaled.temperature), rel=0.05)
    assert 1.2 < found.parameter < float(scaled.temperature)


def test_few_right_answers_do_not_make_a_model_certain():
    p = np.tile([[[0.9, 0.1]]], (80, 1, 1))
    found = classes(2, from_logits=False).fit(p, np.zeros(80, int))
    assert 0.3 < found < 0.9
    many = classes(2, from_logits=False).fit(np.tile(p, (100, 1, 1)), np.zeros(8000, int))
    assert many < 0.3


def test_models_predict_what_the_table_scored(report, overfitted):
    x, y = overfitted[2]
    part = folds_of(y, 2, 3) == 1
    for candidate in report.candidates[5::4]:
        model = report.model_of(candidate.name)
        assert isinstance(model, ibnn.MonteCarlo)
        mean = model.predict(x[part], verbose=0)["mean"]
        np.testing.assert_allclose(mean, candidate.prediction, atol=2e-4)


def test_table(report):
    table = report.table()
    lines = str(table).splitlines()
    assert "500 validation examples, on which the choice was made" in lines[0]
    assert len(lines) == 4 + len(report.candidates)
    assert len({len(line) for line in lines[2:]}) == 1
    (marked,) = [line for line in lines if "**" in line]
    assert f"**{report.chosen.name}**" in marked
    row = table["as it is"]
    assert list(row) == [
        *("accuracy", "NLL", "Brier", "ECE", "ECE floor", "T"),
        *("behind best", "draws", "seconds", "parameters"),
    ]
    assert row["T"] == 1
    assert table["as it is + temperature"]["T"] == report.candidates[1].parameter
    assert row["draws"] == 1
    assert row["parameters"] == 64 * 64 + 64 + 64 * 10 + 10
    assert row["NLL"] == pytest.approx(report.candidates[0].nll.mean())
    assert 0 < row["ECE floor"] < row["ECE"]


def test_saved(report, overfitted, tmp_path):
    folder = report.save(tmp_path / "new" / "folder")
    files = {path.name for path in folder.iterdir()}
    assert files == {"model.keras", "table.md", "model_card.md", "calibration.png"}
    card = (folder / "model_card.md").read_text()
    versions = "training examples: 300", f"keras: {keras.__version__}"
    for part in (report.why(), "seed: 3", *versions, "`import tfp_ibnn`"):
        assert part in card
    x = overfitted[3][0][:20]
    loaded = keras.models.load_model(folder / "model.keras")
    a, b = (model.predict(x, verbose=0)["mean"] for model in (loaded, report.model))
    np.testing.assert_allclose(a, b, atol=1e-6)


def test_decisions(report, overfitted):
    """Coverage, share answered and AUROC are in the card; without data, that they are left out."""
    assert "decisions: left out" in report.card()
    x, y = overfitted[3]
    noise = np.random.default_rng(0).random(x.shape).astype("float32")
    found = report.decide((x, y), {"noise": noise})
    assert found.keys() == {
        "coverage of 90 % sets",
        "share answered at 1 % error",
        "OOD AUROC against noise",
    }
    assert 0.85 < found["coverage of 90 % sets"] < 0.95
    entropies = (report.model.predict(part, verbose=0)["entropy"] for part in (x, noise))
    auroc = found["OOD AUROC against noise"]
    assert auroc == pytest.approx(ibnn.metrics.auroc(*entropies), abs=0.03)
    p = report.model.predict(x, verbose=0)["mean"]
    share = ibnn.decisions.error_threshold(p, y)["answered"]
    assert found["share answered at 1 % error"] == pytest.approx(share, abs=1e-4)
    card = report.card()
    assert all(f"{name}: {value}" in card for name, value in found.items())
    few = report.decide((x[:100], y[:100]))
    assert few["left out"].startswith("The guarantee takes at least 299 answers")
    assert few["OOD AUROC"].startswith("left out")


def test_figure_shows_before_and_after(report):
    left, right = report.plot().axes
    assert left.get_title().startswith("before: as it is")
    assert right.get_title().startswith(f"after: {report.chosen.name}")
    for ax in (left, right):
        (whiskers,) = (x.lines[2][0] for x in ax.containers if hasattr(x, "lines"))
        lengths = [np.ptp(line[:, 1]) for line in whiskers.get_segments() if len(line)]
        assert lengths
        assert min(lengths) > 0


def test_figure_has_one_panel_if_nothing_was_changed(report):
    kept = dataclasses.replace(report, candidates=report.candidates[:1])
    (ax,) = kept.plot().axes
    assert ax.get_title().startswith("before and after: as it is")


def test_unknown_candidate(report):
    with pytest.raises(ValueError, match="must be one of 'as it is', .*got 'nonsense'"):
        report.model_of("nonsense")


# The rule of selection


def test_cheapest_within_one_standard_error_is_chosen():
    base = np.array([1.0, 2.0, 3.0, 4.0])
    noise = np.array([0.1, -0.1, 0.1, -0.1])
    error = noise.std(ddof=1) / 2
    near, far = base + noise + 0.9 * error, base + noise + 1.1 * error
    assert choose(np.stack([near, base]), [(1,), (2,)]) == 0
    assert choose(np.stack([far, base]), [(1,), (2,)]) == 1
    # In pairs: it is not the spread of the NLL itself that counts.
    assert choose(np.stack([base + 0.01, base]), [(1,), (2,)]) == 1
    # The best costs least; then, among equally cheap ones, the better.
    assert choose(np.stack([base, near]), [(1,), (2,)]) == 0
    assert choose(np.stack([near, base, near - 0.5 * error]), [(1,), (2,), (1,)]) == 2
    # Even if that one is so like the best that it is outside of its own standard error.
    assert choose(np.stack([near, base + 0.5 * error, base]), [(1,), (1,), (2,)]) == 1


def test_draws_cost_more_than_training_and_a_temperature_nothing(report):
    cost = {x.name: x.cost for x in report.candidates}
    posterior = next(x for x in cost if x.startswith("Gaussian"))
    assert cost["as it is"] < cost["fine-tuned"] < cost["MC dropout"] < cost[posterior]
    for name in ("as it is", "fine-tuned", "MC dropout"):
        assert cost[name] == cost[f"{name} + temperature"]


# Scores


def test_floor_is_the_error_of_a_calibrated_model():
    rng = np.random.default_rng(0)
    p = softmax(2 * rng.normal(size=(400, 4)), axis=1).astype("float32")
    edges, errors = np.arange(16) / 15, []
    for _ in range(300):
        labels = rng.multinomial(1, p.astype("float64") / p.sum(axis=1, keepdims=True)).argmax(
            axis=1
        )
        confidence, right = p.max(axis=1), p.argmax(axis=1) == labels
        gaps = [
            abs(np.sum(right[inside] - confidence[inside]))
            for low, high in zip(edges[:-1], edges[1:], strict=True)
            for inside in [(confidence > low) & (confidence <= high)]
        ]
        errors.append(sum(gaps) / len(p))
    assert ece_floor(p, 0) == pytest.approx(np.mean(errors), rel=0.06)
    assert ece_floor(p, 0) == ece_floor(p, 0)
    assert ece_floor(np.tile(p, (16, 1)), 0) < 0.4 * ece_floor(p, 0)


def test_temperature_minimises_the_nll_of_averaged_draws():
    rng = np.random.default_rng(0)
    logits = 3 * rng.normal(size=(500, 6, 4)).astype("float32")
    y = softmax(logits.mean(axis=1) / 2, axis=1).cumsum(axis=1)
    y = np.sum(rng.random((500, 1)) > y[:, :-1], axis=1)
    output = classes(4, from_logits=True)
    found = output.fit(logits, y)
    grid = np.exp(np.linspace(-1, 2, 301))
    nll = []
    for temperature in grid:
        p = softmax(logits / temperature, axis=-1).mean(axis=1)
        penalty = 2 * np.log(temperature) ** 2 / 500
        nll.append(-np.log(p[np.arange(500), y]).mean() + penalty)
    assert found == pytest.approx(grid[np.argmin(nll)], rel=0.02)
    # Not the temperature of one network with the averaged logits.
    assert abs(found / output.fit(logits.mean(axis=1, keepdims=True), y) - 1) > 0.05
    # Probabilities say the same as logits.
    p = softmax(logits, axis=-1)
    assert classes(4, from_logits=False).fit(p, y) == pytest.approx(found, rel=2e-3)


def test_one_output_is_two_classes():
    rng = np.random.default_rng(0)
    z = 3 * rng.normal(size=(300, 5, 1)).astype("float32")
    y = (rng.random(300) < ndtr(z.mean(axis=(1, 2)) / 2)).astype(int)
    both = np.concatenate([np.zeros_like(z), z], axis=-1)
    one, two = Labels(True, width=1), classes(2, from_logits=True)
    assert one.fit(z, y) == pytest.approx(two.fit(both, y))
    np.testing.assert_allclose(one.predict(z, 2.0), two.predict(both, 2.0), atol=1e-6)
    p = 1 / (1 + np.exp(-z))
    answer = Labels(False, width=1).predict(p, 2.0)
    np.testing.assert_allclose(answer, one.predict(z, 2.0), atol=1e-4)


def gaussian_raw(rng, draws=1):
    return rng.normal(size=(400, draws, 2)).astype("float32"), rng.normal(size=(400, 2))


def test_scale_of_a_point_prediction_is_the_root_mean_squared_error():
    raw, y = gaussian_raw(np.random.default_rng(0))
    expected = np.sqrt(np.mean((y - raw[:, 0]) ** 2, axis=0))
    np.testing.assert_allclose(Point(2).fit(raw, y), expected, rtol=1e-4)


def test_factor_of_predicted_scales_is_the_root_mean_squared_z():
    rng = np.random.default_rng(0)
    loc, y = gaussian_raw(rng)
    scale = np.exp(0.3 * rng.normal(size=loc.shape)).astype("float32")
    expected = np.sqrt(np.mean(((y - loc[:, 0]) / scale[:, 0]) ** 2))
    found = Gaussian(4).fit(np.concatenate([loc, scale], axis=-1), y)
    assert found == pytest.approx(expected, rel=1e-4)


def test_scale_leaves_the_spread_of_the_draws_out():
    rng = np.random.default_rng(0)
    raw = rng.normal(size=(4000, 50, 1)).astype("float32")
    y = math.sqrt(1 + 2.0**2) * rng.normal(size=(4000, 1))
    assert Point(1).fit(raw, y)[0] == pytest.approx(2.0, rel=0.05)


def test_scores_of_a_regression():
    rng = np.random.default_rng(0)
    output = Point(1)
    loc, scale, y = 0.3, 1.7, -0.9
    prediction = np.array([[[loc], [scale**2]]])
    scores = output.evidence(prediction, np.array([[y]]), 0)
    below = quad(lambda t: ndtr((t - loc) / scale) ** 2, -40, y)[0]
    above = quad(lambda t: (1 - ndtr((t - loc) / scale)) ** 2, y, 40)[0]
    assert scores["CRPS"] == pytest.approx(below + above, rel=1e-6)
    assert scores["RMSE"] == pytest.approx(1.2)
    nll = 0.5 * ((y - loc) / scale) ** 2 + math.log(scale * math.sqrt(2 * math.pi))
    assert scores["NLL"] == pytest.approx(nll)
    y = loc + scale * rng.normal(size=(20000, 1))
    covered = output.evidence(np.tile(prediction, (20000, 1, 1)), y, 0)["90 % coverage"]
    assert covered == pytest.approx(0.9, abs=0.01)


# Splits


def test_folds_are_stratified_and_seeded():
    y = np.random.default_rng(0).choice(3, size=331, p=[0.1, 0.3, 0.6])
    folds = folds_of(y, 5, 0)
    counts = np.array([np.bincount(y[folds == fold], minlength=3) for fold in range(5)])
    assert (np.ptp(counts, axis=0) <= 1).all()
    assert np.ptp(counts.sum(axis=1)) <= 1
    np.testing.assert_array_equal(folds, folds_of(y, 5, 0))
    assert (folds != folds_of(y, 5, 1)).any()


@pytest.mark.parametrize("count", [999, 1000])
def test_cross_fit_below_a_thousand(count):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(count, 1)), rng.integers(0, 3, count)
    model = mlp(outputs=3, features=1)
    training, validation = prepare((x, y), (x, y), model, classes(3, from_logits=False), None, 0)
    assert training.size == count
    if count < 1000:
        assert len(validation.fit.y) == len(validation.score.y) == 999
        assert set(validation.folds) == {0, 1, 2, 3, 4}
    else:
        assert validation.folds is None
        both = np.concatenate([validation.fit.x, validation.score.x])
        np.testing.assert_array_equal(np.sort(both, axis=0), np.sort(x, axis=0))


def test_large_samples_are_thinned_evenly(monkeypatch):
    monkeypatch.setattr(examples, "WATCHED", 300)
    y = np.repeat([0, 1], [1500, 500])
    both = np.arange(2000.0)[:, None], y
    fit = prepare(both, both, mlp(outputs=2, features=1), classes(2, from_logits=True), None, 0)[
        1
    ].fit
    assert len(fit.y) == 250
    assert 187 <= np.sum(fit.y == 0) <= 188


class FakeEngine:
    """Gives the outputs of one epoch after another."""

    samples = 1
    network = types.SimpleNamespace(count_params=lambda: 1)

    def __init__(self, epochs):
        self.epochs = iter(epochs)

    def read(self):
        return []

    def draw(self, state, x):
        return next(self.epochs)


def test_cross_fitted_prediction_knows_nothing_of_its_own_labels():
    rng = np.random.default_rng(0)
    output = classes(3, from_logits=True)
    y = rng.integers(0, 3, 100)
    folds = folds_of(y, 5, 0)
    # In fold 0 the second epoch is the better one, everywhere else the first.
    good, bad = 2 * np.eye(3)[y][:, None], rng.normal(size=(100, 1, 3))
    first, second = (
        np.where((folds == 0)[:, None, None] == swap, good, bad).astype("float32")
        for swap in (False, True)
    )
    trial = trials.Trial("fake", FakeEngine([first, second]))
    examples = Examples(np.zeros((100, 1)), y)
    data = Validation(examples, examples, folds)
    for _ in range(2):
        trial.watch(data, output)
    plain = run._cross_fitted(trial, output, data, False)
    np.testing.assert_allclose(plain[folds == 0], softmax(first[folds == 0, 0], axis=1), atol=1e-6)
    other = [output.fit(first[folds != fold], y[folds != fold]) for fold in range(5)]
    scaled = run._cross_fitted(trial, output, data, True)
    for fold in range(5):
        expected = softmax(first[folds == fold, 0] / other[fold], axis=1)
        np.testing.assert_allclose(scaled[folds == fold], expected, atol=1e-5)


# The training


def scripted(name, nlls, samples=4):
    """A trial that reaches given NLLs, epoch by epoch."""
    engine = types.SimpleNamespace(samples=samples, read=list)
    trial = trials.Trial(name, engine, trained=True)
    trial.script, trial.seen = list(nlls), 0

    def train(state, fit):
        trial.seen += 1
        return []

    def watch(data, output):
        nll = trial.script[trial.seen - 1]
        if nll is None:
            raise ValueError("not finite")
        trial._scores = [min([(nll, None), *trial._scores], key=lambda x: x[0])]
        return nll

    engine.train, trial.watch = train, watch
    return trial


def fine_tune(all_trials, epochs=None, end=math.inf):
    parts = dict.fromkeys(trials.Setting._fields)
    setting = trials.Setting(**{**parts, "end": end, "say": lambda line: None})
    fine_tuning.fine_tune(all_trials, setting, epochs)


def test_worse_half_of_the_posteriors_is_dropped_after_each_epoch():
    control = scripted("control", [9, 8, 7, 6], samples=1)
    six = [scripted(str(i), [i + 1, i + 0.9, i + 0.8, i + 0.7]) for i in range(6)]
    fine_tune([control, *six], epochs=4)
    assert [trial.seen for trial in six] == [4, 4, 2, 1, 1, 1]
    assert [bool(trial.fate) for trial in six] == [False, False, True, True, True, True]
    assert six[2].fate == "NLL 2.9000 after epoch 2"
    # The control is the worst, and stays.
    assert control.seen == 4
    assert not control.fate


def test_training_stops_when_nothing_gets_better():
    trial = scripted("a", [3, 2, 2.5, 2.1, 1])
    fine_tune([trial])
    assert (trial.seen, trial.epochs, trial.nll) == (4, 2, 2)


def test_nan_ends_a_training_but_not_what_came_before():
    early, late, fine = (
        scripted(x, y) for x, y in [("a", [None]), ("b", [1, None]), ("c", [2, 1])]
    )
    fine_tune([early, late, fine], epochs=2)
    assert early.fate == "not finite"
    assert (late.fate, late.epochs, late.seen) == ("", 1, 2)
    assert fine.seen == 2


def test_divergence_costs_one_candidate_only(small, monkeypatch, capsys):
    def diverge(training, network, *args):
        network.set_weights([np.full_like(x, np.nan) for x in network.get_weights()])

    monkeypatch.setattr(Training, "epoch", diverge)
    report = small(verbose=True)
    assert len(report.candidates) == 2
    assert "not finite" in report.dropped["fine-tuned"]
    assert "at the temperature or scale that suits it best" in capsys.readouterr().out


def test_time_runs_out(monkeypatch):
    clock = iter(np.arange(1000) * 10.0)
    monkeypatch.setattr(trials.time, "monotonic", lambda: next(clock))
    trial = scripted("a", -np.arange(100.0))
    fine_tune([trial], end=180.0)
    assert 1 <= trial.seen < 6


def test_interruption_keeps_what_is_there(small, monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Training, "epoch", stop)
    report = small()
    assert [x.name for x in report.candidates] == ["as it is", "as it is + temperature"]
    assert report.dropped == {"fine-tuned": "there was no time for it"}
    assert report.notes["interrupted"] == "yes"


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y, size=16):
        super().__init__()
        self.x, self.y, self.size = x, y, size

    @property
    def num_batches(self):
        return -(-len(self.y) // self.size)

    def __getitem__(self, index):
        part = slice(self.size * index, self.size * (index + 1))
        return self.x[part], self.y[part]


class Interrupting(Batches):
    """Somebody presses Ctrl-C while a batch is read."""

    armed = False

    def __getitem__(self, index):
        if self.armed and index == 1:
            self.armed = False
            os.kill(os.getpid(), signal.SIGINT)
        return super().__getitem__(index)


@pytest.mark.skipif(
    signal.getsignal(signal.SIGINT) is not signal.default_int_handler,
    reason="somebody else handles this signal",
)
def test_ctrl_c_keeps_what_was_trained(small, monkeypatch):
    data, epoch = Interrupting(small.x[:60], small.y[:60]), Training.epoch

    def second_is_interrupted(training, network, number, callback):
        data.armed = number == 2
        epoch(training, network, number, callback)

    monkeypatch.setattr(Training, "epoch", second_is_interrupted)
    report = small(train=data, epochs=5)
    assert [x.name for x in report.candidates][2] == "fine-tuned"
    assert report.notes["best epochs"] == "fine-tuned: 1"
    assert report.notes["interrupted"] == "yes"
    assert np.isfinite(report.model.predict(small.x, verbose=0)["mean"]).all()


def test_sizes_are_the_same_in_every_batch():
    # Or JAX would compile once more.
    seen = []
    network = types.SimpleNamespace(fit=lambda x, y, **options: seen.append((x[:, 0], options)))
    x = np.arange(70.0)[:, None]
    training = Training((x, x), 70, 3, 32, 0)
    training.epoch(network, 1, None)
    ((epoch, options),) = seen
    assert (len(epoch), options["batch_size"]) == (96, 32)
    assert set(epoch) == set(range(70))
    assert np.unique(epoch, return_counts=True)[1].max() == 2
    Training((x, x), 70, 1, 100, 0).epoch(network, 1, None)
    assert len(seen[-1][0]) == seen[-1][1]["batch_size"] == 70


def test_one_network_trains_several_trials_apart(overfitted):
    model, (x, y), _, _ = overfitted
    optimizer = keras.optimizers.Adam(1e-3)
    training = Training((x, y), 300, 3, 100, 0)
    setting = trials.Setting(
        model, classes(10, from_logits=True), optimizer, LOGITS, training, None, 4, 0
    )
    one, two, *_ = trials.gaussian(setting)
    assert one.engine is two.engine

    def train(trial, state, epoch):
        callback = keras.callbacks.Callback()
        return trial.engine.train(state, lambda x: training.epoch(x, epoch, callback))

    alone = train(two, train(two, two.state, 1), 2)
    half = train(two, two.state, 1)
    other = train(one, one.state, 1)
    in_turns = train(two, half, 2)
    for a, b in zip(alone, in_turns, strict=True):
        np.testing.assert_array_equal(a, b)
    assert any((a != b).any() for a, b in zip(half, other, strict=True))
    betas = [x.posterior.beta for x in ibnn.stochastic_layers(two.engine.network)]
    assert [float(keras.ops.convert_to_numpy(beta)) for beta in betas] == [10.0, 10.0]


def rate(model, given=None):
    return float(
        keras.ops.convert_to_numpy(fine_tuning.fine_tuning_optimizer(model, given).learning_rate)
    )


def test_learning_rate_is_a_tenth():
    model = mlp()
    assert rate(model) == pytest.approx(1e-4)  # not compiled
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9, weight_decay=1e-3), "mse")
    optimizer = fine_tuning.fine_tuning_optimizer(model, None)
    assert rate(model) == pytest.approx(0.002)
    assert (optimizer.momentum, optimizer.weight_decay) == (0.9, 1e-3)
    assert optimizer is not model.optimizer
    model.optimizer.learning_rate = 0.01  # by a callback
    assert rate(model) == pytest.approx(0.001)
    assert rate(model, keras.optimizers.SGD(0.5)) == 0.5
    schedules = keras.optimizers.schedules
    model.compile(keras.optimizers.SGD(schedules.PiecewiseConstantDecay([10], [1.0, 0.2])), "mse")
    model.optimizer.iterations.assign(20)
    assert rate(model) == pytest.approx(0.02)
    model.compile(keras.optimizers.SGD(schedules.CosineDecay(1.0, 20)), "mse")
    model.optimizer.iterations.assign(20)
    assert rate(model) == pytest.approx(0.001)  # not a tenth of 0


def test_number_of_epochs_follows_from_the_training_so_far(small, monkeypatch):
    wanted = []
    monkeypatch.setattr(run, "fine_tune", lambda *args: wanted.append(args[2]))
    small(epochs=None)
    small.model.optimizer.iterations.assign(2 * 200)  # 60 examples: 2 batches
    small(epochs=None)
    small(epochs=None, minutes=1)
    assert wanted == [3, 20, None]


# Regression


@pytest.mark.once
@pytest.mark.parametrize("has_scales", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_regression(has_scales, eagerly, monkeypatch):
    monkeypatch.setattr(trials, "PRIOR_SCALES", (0.1,))
    monkeypatch.setattr(trials, "BETAS", (10,))
    monkeypatch.setattr(trials, "PRIOR_FACTORS", (10,))
    data = load_diabetes()
    x, y = data.data.astype("float32") * 20, data.target / 100
    if has_scales:
        model = keras.Sequential(
            [
                keras.Input((10,)),
                layers.Dense(8, "relu"),
                layers.Dense(2),
                ibnn.layers.GaussianHead(),
            ]
        )
        model.compile(keras.optimizers.Adam(1e-2), ibnn.layers.GaussianNLL())
    else:
        model = mlp(8, 1, features=10)
        model.compile(keras.optimizers.Adam(1e-2), "mse")
    rows = np.tile(np.arange(200), 30)  # 30 epochs in one
    model.fit(x[rows], y[rows], batch_size=200, shuffle=False, verbose=0)
    train, validation, test = ((x[i], y[i]) for i in np.split(np.arange(442), [200, 342]))
    options = {"epochs": 1, "samples": 4, "batch_size": 200, "verbose": False}
    report = ibnn.calibrate(model, train, validation, **options)
    table = report.evaluate(test)
    row = table["as it is"]
    assert list(row)[:4] == ["RMSE", "NLL", "CRPS", "90 % coverage"]
    mean = keras.ops.convert_to_numpy(model(test[0]))[:, 0]
    assert row["RMSE"] == pytest.approx(np.sqrt(np.mean((test[1] - mean) ** 2)), rel=1e-4)
    assert ("as it is + scale" in table.rows) == has_scales
    if not has_scales:
        error = validation[1] - keras.ops.convert_to_numpy(model(validation[0]))[:, 0]
        scale = np.sqrt(np.mean(error**2))
        assert report.candidates[0].parameter[0] == pytest.approx(scale, rel=1e-3)
    laplace = next(x for x in report.candidates if x.name.startswith("Laplace, all weights"))
    for candidate in (report.candidates[1], laplace, report.candidates[-1]):
        made = report.model_of(candidate.name)
        scored = made.evaluate(*test, return_dict=True, verbose=0)
        for key in ("rmse", "nll"):
            expected = table[candidate.name][key.upper()]
            assert scored[key] == pytest.approx(expected, rel=2e-3, abs=2e-3)
    (ax,) = report.plot().axes
    drawn = [line for line in ax.lines if len(line.get_xdata()) > 2]
    assert len(drawn) == 1 + (report.chosen is not report.candidates[0])
    assert list(table["as it is"])[4] == ("factor" if has_scales else "scale")


def test_kl_counts_against_the_likelihood_not_the_squared_error():
    # MSE = 2 sigma^2 / D * (NLL - constant), so the KL is multiplied by that, too.
    output, rng = Point(2), np.random.default_rng(0)
    y, loc, scale = rng.normal(size=(50, 2)), rng.normal(size=(50, 2)), 0.7
    nll = [output.nll(np.stack([x, np.full_like(x, scale**2)], axis=1), y).mean() for x in (loc, y)]
    mse = np.mean((y - loc) ** 2)
    det = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    sto = ibnn.to_stochastic(det, ibnn.NormalAffine(), train_size=50)
    sto.compile("sgd", "mse", noise_scale=output.noise_scale(np.full(2, scale)))
    assert sto.get_compile_config()["kl_scale"] * (nll[0] - nll[1]) == pytest.approx(mse)
    assert classes(3, from_logits=True).noise_scale(2.0) is None


# Data, seeds and bad input


@pytest.mark.slow
def test_seed_repeats_everything(small, monkeypatch):
    def scores(seed):
        keras.utils.set_random_seed(len(found))  # on which nothing depends
        rows = small(model, samples=2, seed=seed).table().rows
        found.append({name: {**row, "seconds": 0} for name, row in rows.items()})

    found, model = [], compiled(LOGITS, dropout=0.3)
    scores(1)
    scores(2)
    assert found[0] != found[1]
    monkeypatch.setattr(run, "METHODS", (trials.deterministic, trials.mc_dropout, trials.gaussian))
    monkeypatch.setattr(trials, "PRIOR_SCALES", (0.3,))
    monkeypatch.setattr(trials, "BETAS", (1, 10))
    scores(1)
    scores(1)
    assert found[2] == found[3]
    assert len(found[2]) == 10


def test_datasets_give_what_arrays_do(small):
    x, y = small.x, small.y
    expected = small().candidates[0]
    found = small(train=Batches(x[:60], y[:60]), validation=Batches(x[60:], y[60:]))
    np.testing.assert_array_equal(found.candidates[0].prediction, expected.prediction)
    assert found.notes["training examples"] == 60
    assert len(found.candidates) == 4
    if TENSORFLOW:
        import tensorflow as tf

        data = tf.data.Dataset.from_tensor_slices
        found = small(
            train=data((x[:60], y[:60])).shuffle(60).batch(16),
            validation=data((x[60:], y[60:])).batch(7),
        )
        np.testing.assert_array_equal(found.candidates[0].prediction, expected.prediction)
        with pytest.raises(ValueError, match="`train` never ends"):
            small(train=data((x, y)).batch(16).repeat())


def test_weights_several_inputs_and_one_hot_labels(deterministic_only, eagerly):
    rng = np.random.default_rng(0)
    a, b = keras.Input((2,), name="a"), keras.Input((1,), name="b")
    outputs = layers.Dense(3, activation="softmax")(layers.Concatenate()([a, b]))
    model = keras.Model({"a": a, "b": b}, outputs)
    model.compile("sgd", "categorical_crossentropy")
    x = {"a": rng.normal(size=(100, 2)), "b": rng.normal(size=(100, 1))}
    y = np.eye(3)[rng.integers(0, 3, 100)]
    report = ibnn.calibrate(model, (x, y, np.ones(100)), (x, y), epochs=1, verbose=False)
    mean = report.model_of("as it is").predict(x, verbose=0)["mean"]
    np.testing.assert_allclose(mean, model.predict(x, verbose=0), atol=1e-6)


def test_binary_classifier(deterministic_only, eagerly):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 2)).astype("float32")
    y = (x[:, 0] + rng.normal(size=200) > 0).astype("float32")[:, None]
    model = mlp(4, 1, "sigmoid", features=2)
    model.compile("sgd", "binary_crossentropy")
    report = ibnn.calibrate(model, (x, y), (x, y), epochs=1, verbose=False)
    table = report.evaluate((x, y))
    for name in ("as it is", "as it is + temperature"):
        mean, row = report.model_of(name).predict(x, verbose=0)["mean"], table[name]
        right = np.mean((mean > 0.5) == y)
        assert row["accuracy"] == pytest.approx(right)
        nll = -np.mean(np.log(np.where(y == 1, mean, 1 - mean)))
        assert row["NLL"] == pytest.approx(nll, abs=1e-4)


def test_validation_is_split_off_and_said(small):
    x, y = np.tile(small.x, (2, 1)), np.tile(small.y, 2)
    with pytest.warns(UserWarning, match="64 of the 320 training examples are taken"):
        report = small(train=(x, y), validation=None)
    assert report.notes["training examples"] == 256


def test_method_joins_by_one_line(small, monkeypatch):
    def mine(setting):
        yield trials.Trial("mine", trials.Engine(lambda: trials.copy_of(setting.model)))

    monkeypatch.setattr(run, "METHODS", (trials.deterministic, mine))
    assert "mine + temperature" in small().table().rows


@pytest.mark.slow
def test_layers_that_cannot_be_converted_leave_the_rest(small, monkeypatch):
    monkeypatch.setattr(run, "METHODS", (trials.deterministic, trials.laplace, trials.gaussian))
    parts = [
        keras.Input((2,)),
        layers.Reshape((2, 1, 1)),
        layers.ConvLSTM1D(3, 1),
        layers.Flatten(),
    ]
    model = keras.Sequential(parts)
    model.compile("sgd", LOGITS)
    with pytest.warns(UserWarning, match="left out, since") as caught:
        report = small(model)
    assert len(report.candidates) == 4
    names = ["Laplace, last layer", "Laplace, all weights", "Gaussian"]
    assert list(report.dropped) == names
    texts = [str(x.message) for x in caught if "left out" in str(x.message)]
    assert [text.split(":")[0] for text in texts] == names
    assert "must be a Dense one" in texts[0]
    assert "`model` has no layer to convert" in texts[2]
    monkeypatch.setattr(run, "METHODS", (trials.deterministic, trials.gaussian))
    model = keras.Sequential([*parts, layers.Dense(3)])
    model.compile("sgd", LOGITS)
    monkeypatch.setattr(trials, "BETAS", (1,))
    with pytest.warns(UserWarning, match="stay deterministic") as caught:
        assert len(small(model).candidates) == 8
    assert sum("stay deterministic" in str(x.message) for x in caught) == 1


# Posteriors over weights


@pytest.fixture
def posteriors(small, monkeypatch):
    """A function that calibrates with posteriors over weights alone."""
    monkeypatch.setattr(run, "METHODS", (trials.deterministic, trials.given, trials.laplace))
    monkeypatch.setattr(trials, "PRIOR_FACTORS", (10,))

    def posteriors(*args, **options):
        return small(*args, **{"samples": 2, **options})

    posteriors.x, posteriors.y, posteriors.model = small.x, small.y, small.model
    return posteriors


@pytest.mark.parametrize("written", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_posteriors_over_weights_are_candidates(posteriors, tmp_path, written):
    x, y, model = posteriors.x, posteriors.y.astype(int), posteriors.model
    other = keras.models.clone_model(model)
    noisy = ibnn.to_stochastic(other, ibnn.NormalAffine(initial_scale=0.5), train_size=60)
    given = {"ensemble": ibnn.DeepEnsemble([model, other]), "other": other, "noisy": noisy}
    report = posteriors(candidates=given)
    names = [*given, "Laplace, last layer", "Laplace, all weights"]
    found = [name + end for name in names for end in ("", " + temperature")]
    assert [x.name for x in report.candidates][4:] == found
    table = report.evaluate((x, y))
    assert [table[name]["draws"] for name in names] == [2, 1, 2, 2, 2]
    p = np.mean([m.predict(x, verbose=0) for m in (model, other)], axis=0)
    assert table["ensemble"]["NLL"] == pytest.approx(-np.log(p[np.arange(160), y]).mean(), rel=1e-5)
    for name in ("noisy", "Laplace, all weights"):
        made = report.model_of(f"{name} + temperature")
        mean = made.predict(x, verbose=0)["mean"]
        scored = table[f"{name} + temperature"]
        assert scored["T"] != 1
        nll = -np.log(mean[np.arange(160), y]).mean()
        assert nll == pytest.approx(scored["NLL"], abs=1e-5)
        assert abs(nll - table[name]["NLL"]) > 1e-4
    if not written:
        return
    made.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(x, verbose=0)["mean"], mean, atol=1e-6)
    if TENSORFLOW:
        import tensorflow as tf

        path = ibnn.export(made, tmp_path / "exported")
        served = tf.saved_model.load(path).signatures["serve"](inputs=tf.constant(x))
        np.testing.assert_allclose(served["mean"], mean, atol=1e-5)


def test_prior_precision_of_laplace_is_that_of_the_least_nll(small):
    examples, output = (
        Examples(small.x[60:], small.y[60:].astype(int)),
        classes(3, from_logits=False),
    )
    training = Training((small.x[:60], small.y[:60]), 60, 2, None, 0)
    data = Validation(examples, examples)
    trial = next(
        trials.laplace(trials.Setting(small.model, output, *2 * [None], training, data, 2, 0))
    )
    place = [x is trial.engine.network.prior_precision for x in trial.engine.network.variables]
    priors = [float(state[place.index(True)]) for state in trial.states]
    np.testing.assert_allclose(np.divide(priors, priors[0]), trials.PRIOR_FACTORS, rtol=1e-5)
    trial.try_states(data, output)
    nll = [output.best_nll(trial.engine.draw(x, examples.x), examples.y) for x in trial.states]
    assert trial.nll == min(nll) < max(nll)
    assert trial.best is trial.states[np.argmin(nll)]


def test_laplace_uses_a_part_of_many_examples(small, monkeypatch):
    monkeypatch.setattr(trials, "EXAMPLES", 25)
    x, y, output = small.x[:60], small.y[:60], classes(3, from_logits=False)
    for data in ((x, y), Batches(x, y)):
        training = Training(data, 60, 2, None, 0)
        some = examples.read(data, small.model, output, "train", every=3)
        np.testing.assert_array_equal(some.x, x[::3])
        np.testing.assert_array_equal(some.y, y[::3])
    setting = trials.Setting(small.model, output, *2 * [None], training, None, 2, 0)
    posterior = next(trials.laplace(setting)).engine.network
    config = posterior.get_config()
    assert config["fit"]["examples"] == 20
    assert config["temperature"] == pytest.approx(1 / 3)


def test_what_laplace_is_not_for_is_said(posteriors, monkeypatch):
    monkeypatch.setattr(trials, "MOST_WEIGHTS", 20)
    with pytest.warns(UserWarning, match="Laplace, all weights: left out, since it is for at most"):
        report = posteriors()
    assert "Laplace, last layer" in report.table().rows
    x, y = posteriors.x[:60], posteriors.y[:60]
    with pytest.warns(UserWarning, match="it takes no weights of training examples"):
        assert len(posteriors(train=(x, y, np.ones(60))).dropped) == 2
    late = posteriors(minutes=1e-9)
    assert list(late.dropped.values()) == 3 * ["there was no time for it"]


def test_bad_candidates(posteriors):
    model = posteriors.model
    logits = mlp(4, 3, features=2)
    wide = mlp(4, 3, "softmax", features=3)
    cases = [
        ({"a": 3}, r"`candidates\['a'\]` must be a posterior over weights, .*; got int"),
        ({"a": ibnn.TemperatureScaling(logits)}, "or a plain Keras model; got TemperatureScaling"),
        ({"a": Subclass()}, "has no graph"),
        ({"a": wide}, r"`candidates\['a'\]` has inputs \[\(3,\)\] .*`model` has inputs \[\(2,\)"),
        ({"a": logits}, "not probabilities; `model` has .*, probabilities"),
        ({"a": ibnn.Laplace(model)}, "is not fitted"),
        ({"as it is + temperature": model}, "other names than 'as it is \\+ temperature'"),
    ]
    for candidates, message in cases:
        with pytest.raises(ValueError, match=message):
            posteriors(candidates=candidates)


def compiled(loss, outputs=3, **options):
    model = mlp(4, outputs, features=2, **options)
    model.compile("sgd", loss)
    return model


class Subclass(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x):
        return self.dense(x)


@functools.cache
def bad_models():
    return list(made_bad())


def made_bad():
    yield mlp(features=2), "not compiled with one loss"
    yield compiled("hinge"), "The loss hinge with 3 outputs cannot be calibrated"
    yield compiled("binary_crossentropy"), "The loss binary_crossentropy with 3 outputs"
    yield compiled(lambda y, p: p), "cannot be calibrated"
    yield compiled("sparse_categorical_crossentropy"), "are not probabilities, as its loss expects"
    yield "model.keras", "`model` must be a Keras model; got 'model.keras'"
    stochastic = ibnn.to_stochastic(mlp(features=2), ibnn.NormalAffine(), train_size=10)
    yield stochastic, "has stochastic layers: give ibnn.to_deterministic"
    yield ibnn.TemperatureScaling(mlp(features=2), from_logits=True), "TemperatureScaling already"
    inputs = keras.Input((4, 2))
    sequence = keras.Model(inputs, layers.Dense(3)(inputs))
    sequence.compile("sgd", LOGITS)
    yield sequence, r"one output of shape \(N, K\); got \(None, 4, 3\)\. .*TemperatureScaling"
    several = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD()))
    model = compiled(LOGITS)
    model.compile(several, LOGITS)
    yield model, "several optimizers"


@pytest.mark.parametrize("case", range(10))
def test_bad_models(small, case):
    model, message = bad_models()[case]
    with pytest.raises(ValueError, match=message) as caught:
        small(model)
    assert "\n" not in str(caught.value)


def test_subclass(small):
    model = Subclass()
    model.build((None, 2))
    model.compile("sgd", LOGITS)
    with pytest.raises(
        ValueError,
        match="Functional or Sequential one; .* has a `call` of its own.*TemperatureScaling",
    ):
        small(model)


BAD_DATA = {
    "`validation` must hold at least 50 examples; got 20": lambda x, y: {
        "validation": (x[:20], y[:20])
    },
    "`validation` is missing, and `train` is 160 examples, too few": lambda x, y: {
        "train": (x, y),
        "validation": None,
    },
    "`validation` is missing, and `train` is a dataset": lambda x, y: {
        "train": Batches(x, y),
        "validation": None,
    },
    "inputs of `train` hold NaN or infinity in 1 of 160 rows; the first is number 0": lambda x, y: {
        "train": (np.where(np.arange(320).reshape(160, 2) == 0, np.nan, x), y)
    },
    "labels of `validation` must be whole numbers from 0 to 2; got 7 at example 9": (
        lambda x, y: {"validation": (x, np.where(np.arange(160) == 9, 7, y))}
    ),
    "labels of `train` must be whole numbers": lambda x, y: {"train": (x, y - 1)},
    "labels of `train` must be whole numbers .* got nan at example 3": lambda x, y: {
        "train": (x, np.where(np.arange(160) == 3, np.nan, y))
    },
    "labels of `train` must be whole numbers .* got 'cat' at example 0": lambda x, y: {
        "train": (x, np.where(y == 0, "dog", "cat"))
    },
    r"of `train` .* the shape \(N,\); got \(160, 3\): give y.argmax\(axis=1\)": lambda x, y: {
        "train": (x, np.eye(3)[y.astype(int)])
    },
    r"labels of `train` must have the shape \(N,\); got \(160, 2\)\.": lambda x, y: {
        "train": (x, x)
    },
    r"labels of `validation` must .* \(N,\); got \(160, 3\): give": lambda x, y: {
        "validation": (x, np.eye(3)[y.astype(int)])
    },
    r"cannot take the inputs of `train`: .*shape=\(None, 2\).*shape=\(1, 4\)": lambda x, y: {
        "train": (np.tile(x, 2), y)
    },
    r"`model` .*inputs of `validation`.*\(1,": lambda x, y: {"validation": (x[:, 0], y)},
    "cannot take the inputs of `train`: .*expects 1 .*input.*received 2": lambda x, y: {
        "train": ((x, x), y)
    },
    r"inputs of `train` are objects: give x.astype\('float32'\)": lambda x, y: {
        "train": (x.astype(object), y)
    },
    "All labels of `validation` are 1": lambda x, y: {"validation": (x, 0 * y + 1)},
    r"`train` has inputs \(160, 2\) for 100 targets": lambda x, y: {"train": (x, y[:100])},
    r"`train` must give \(x, y\)": lambda x, y: {"train": (x,)},
    "Give arrays x and y, .*; `train` is a dict": lambda x, y: {"train": {"x": x}},
    "`train` holds no examples": lambda x, y: {"train": (x[:0], y[:0])},
    "`samples` must be a whole number of at least 2": lambda x, y: {"samples": 1},
    "`epochs` must be a whole number": lambda x, y: {"epochs": 0},
    "`minutes` must be above 0": lambda x, y: {"minutes": 0},
    "`seed` must be": lambda x, y: {"seed": -1},
}


@pytest.mark.parametrize("message", BAD_DATA)
def test_bad_data(small, message):
    with pytest.raises(ValueError, match=message) as caught:
        small(**BAD_DATA[message](small.x, small.y))
    assert "\n" not in str(caught.value)


def test_labels_that_do_not_suit_the_loss():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 2)), rng.integers(0, 2, 60)
    one_hot, binary, two = (
        compiled("categorical_crossentropy", activation="softmax"),
        compiled("binary_crossentropy", 1, activation="sigmoid"),
        compiled("mse", 2),
    )
    cases = [
        (one_hot, y, r"labels of `train` must have the shape \(N, 3\); got \(60,\): give keras"),
        (
            one_hot,
            np.full((60, 3), 1 / 3),
            r"of `train` must be one-hot; got \[0.33.* at example 0",
        ),
        (binary, np.eye(2)[y], r"of `train` .* got \(60, 2\): give y.argmax\(axis=1\)"),
        (two, np.where(x > 2, np.nan, x), r"targets of `train` must be finite numbers; got \["),
        (two, x.astype(str), "targets of `train` must be finite numbers; got"),
        (two, x[:, 0], r"must have the shape \(N, 2\); got \(60,\)"),
    ]
    for model, labels, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            ibnn.calibrate(model, (x, labels), (x, labels), verbose=False)
        assert "\n" not in str(caught.value)
        assert "np." not in str(caught.value)


def test_last_axis_of_one_may_be_left_out():
    inputs = keras.Input((2, 2, 1))
    model = keras.Model(inputs, layers.Flatten()(inputs))
    output, rng = classes(4, from_logits=True), np.random.default_rng(0)
    x, y = rng.normal(size=(60, 2, 2)), rng.integers(0, 4, 60)
    for one in (x, x[..., None], x[..., None, None]):
        assert prepare((one, y), (one, y), model, output, None, 0)[0].size == 60
    # Other sizes are refused, also where Keras's own check of a graph would let them pass.
    for one in (x[:, :1], np.tile(x[..., None], 3), x[..., None, None, None]):
        with pytest.raises(ValueError, match=r"inputs of `train`.*\(None, 2, 2, 1\)"):
            prepare((one, y), (one, y), model, output, None, 0)


def test_loss_of_a_function_or_a_list():
    for loss in ("mse", keras.losses.mean_squared_error, ["mse"], keras.losses.MeanSquaredError()):
        output, _ = likelihood_for_calibration(compiled(loss, 2), None)
        assert (type(output), output.size) == (Point, 2)
    assert likelihood_for_calibration(compiled("mse"), LOGITS)[0].from_logits


def test_why_names_the_best_and_what_is_as_good_for_less():
    def candidate(name, nll, samples):
        trial = types.SimpleNamespace(engine=types.SimpleNamespace(samples=samples), trained=False)
        return Candidate(name, trial, 1.0, 0.0, np.zeros((4, 2)), np.array(nll), np.zeros(4))

    def why(*candidates):
        report = Report.__new__(Report)
        report.candidates = list(candidates)
        costs = [x.cost for x in candidates]
        report.chosen = candidates[choose([x.nll for x in candidates], costs)]
        return report.why()

    dear = candidate("dear", [1.0, 1.0, 1.0, 1.0], 8)
    noisy = candidate("noisy", [0.0, 2.2, 0.0, 2.2], 1)
    only = why(candidate("cheap", [2.0, 2.0, 2.0, 2.1], 1), dear)
    assert only == "Chosen: dear, NLL 1.0000: the best of 2, and none as good is cheaper."
    text = "noisy, NLL 1.1000, 0.1000 ± 0.6351 behind the best of 2, dear, which costs more."
    assert why(noisy, dear) == f"Chosen: {text}"


# The command


def test_command(small, tmp_path, capsys):
    small.model.save(tmp_path / "model.keras")
    names = "x_train", "y_train", "x_val", "y_val", "x_test", "y_test"
    arrays = dict(zip(names, 3 * (small.x, small.y), strict=True))
    np.savez(tmp_path / "data.npz", **arrays)
    files = [str(tmp_path / name) for name in ("model.keras", "data.npz")]
    assert main(["calibrate", *files, "--output", str(tmp_path / "out"), "--epochs", "1"]) == 0
    printed = capsys.readouterr().out
    assert "as it is + temperature" in printed
    assert "160 test examples" in printed
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written >= {"model.keras", "table.md", "model_card.md", "test.md"}
    del arrays["y_val"]
    np.savez(tmp_path / "data.npz", **arrays)
    assert main(["calibrate", *files, "--output", str(tmp_path / "out")]) == 1
    assert re.search(r"^error: .* must hold x_val and y_val", capsys.readouterr().err)


def test_command_with_files_that_are_not_arrays(tmp_path, capsys):
    np.savez(tmp_path / "good.npz", x_train=np.zeros(3))
    good = (tmp_path / "good.npz").read_bytes()
    np.save(tmp_path / "single.npy", np.zeros(3))
    np.savez(tmp_path / "objects.npz", x_train=np.array([{}], object))
    for name, content in (("text.npz", b"hello"), ("empty.npz", b""), ("cut.npz", good[:-9])):
        (tmp_path / name).write_bytes(content)
    for name in ("single.npy", "objects.npz", "text.npz", "empty.npz", "cut.npz"):
        data = str(tmp_path / name)
        assert main(["calibrate", "model.keras", data, "--output", str(tmp_path / "out")]) == 1
        error = f"error: {data} is damaged or not an .npz file: write one with np.savez"
        assert capsys.readouterr().err.startswith(error)
    assert not (tmp_path / "out").exists()
