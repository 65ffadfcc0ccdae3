"""`calibrate` warns of networks that nothing calibrates, and says what it left out."""

import types
import warnings

import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn
from tests.calibration.tools import methods
from tfp_ibnn._core import progress
from tfp_ibnn.calibration import fine_tuned, fine_tuning, run, trials, untrained
from tfp_ibnn.calibration.engine import Engine
from tfp_ibnn.calibration.examples import Examples, Training, Validation, prepare
from tfp_ibnn.calibration.report import Candidate, Report
from tfp_ibnn.conversion.copying import copy_of
from tfp_ibnn.likelihoods import Categorical, Point

layers = keras.layers
LOSS = "sparse_categorical_crossentropy"


@pytest.fixture(autouse=True)
def deterministic_only(monkeypatch, eagerly):
    """Leave the other methods out, which have nothing to do with it."""
    kept = methods(untrained.as_it_is, minutes=(fine_tuned.fine_tuned,))
    monkeypatch.setattr(run, "METHODS", kept)


def data(count, seed=0):
    """Points of two classes, which a linear classifier separates but for one in ten."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 2)).astype("float32")
    return x, ((x[:, 0] > 0) ^ (rng.random(count) < 0.1)).astype(int)


def linear(slope, **options):
    """A classifier by the sign of the first coordinate."""
    model = keras.Sequential([keras.Input((2,)), layers.Dense(2, "softmax")])
    model.layers[-1].set_weights([np.array([[-slope, slope], [0, 0]]), np.zeros(2)])
    model.compile("sgd", options.get("loss", LOSS))
    return model


def doubts(model, train, validation, **options):
    """The warnings of a call, and its report."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = {"epochs": 1, "verbose": False, **options}
        report = ibnn.calibrate(model, train, validation, **options)
    return [str(x.message) for x in caught if "`model` is" in str(x.message)], report


def test_a_good_network_is_not_doubted():
    found, report = doubts(linear(1.0), data(200), data(200, seed=1))
    assert found == []
    assert report.notes["doubts"] == "none"


def test_a_network_at_chance_is_named():
    train, (x, y) = data(200), data(200, seed=1)
    found, report = doubts(linear(0.0), train, (x, y))
    assert len(found) == 1
    assert "`model` is at chance on the validation data (accuracy 0." in found[0]
    assert found[0] in report.card()
    shuffled = np.random.default_rng(2).permutation(y)
    assert "at chance" in doubts(linear(1.0), train, (x, shuffled))[0][0]


def test_a_regression_at_chance_is_named():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 2)).astype("float32")
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    (found,) = doubts(model, (x, rng.normal(size=200)), (x, rng.normal(size=200)))[0]
    assert "at chance" in found
    assert "standard deviations of the targets" in found


def test_a_rare_class_is_not_chance():
    """One example in twenty: an accuracy of 0.95 is that of a constant, its NLL is better."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1000, 2)).astype("float32")
    y = (rng.random(1000) < 1 / (1 + np.exp(4 - 2 * x[:, 0]))).astype(int)
    model = keras.Sequential([keras.Input((2,)), layers.Dense(2, "softmax")])
    model.layers[0].set_weights([np.array([[-1, 1], [0, 0]]), np.array([2, -2])])
    model.compile("sgd", LOSS)
    assert doubts(model, (x[:500], y[:500]), (x[500:], y[500:]))[0] == []


def test_much_worse_than_on_training_data_is_named():
    x, y = data(900)
    wrong = np.where(np.arange(900) % 10 < 3, 1 - y, y)  # an accuracy near 0.66
    (found,) = doubts(linear(1.0), (x, y), (x, wrong))[0]
    assert "much worse on the validation data than on its training data: accuracy 0." in found
    assert "overfitted" in found


def test_averages_of_batch_normalization_that_lag_behind_are_named():
    """Features far from 0, and a network trained for so few steps that it has not seen it yet."""
    (x, y), validation = data(200), data(200, seed=1)
    model = keras.Sequential(
        [keras.Input((2,)), layers.BatchNormalization(), layers.Dense(2, "softmax")]
    )
    model.layers[-1].set_weights([np.array([[-3, 3], [0, 0]]), np.zeros(2)])
    model.compile(keras.optimizers.SGD(0.0), LOSS)
    shifted = (x + 10, y), (validation[0] + 10, validation[1])
    (found,) = doubts(model, *shifted)[0]
    assert "much worse in inference than in training" in found
    assert "BatchNormalization(momentum=0.9)" in found
    model.layers[0].set_weights([np.ones(2), np.zeros(2), (x + 10).mean(0), x.var(0)])
    assert doubts(model, *shifted)[0] == []


def test_training_data_is_read_once_and_sampled_evenly():
    """Batches that refuse a second reading, as a generator's order may; sorted by class."""
    x, y = data(2000)
    order = np.argsort(y, kind="stable")
    batches = ibnn.data.ShuffledBatches(x, y, 100)
    batches.order = order
    doubts(linear(1.0), batches, data(200, seed=1), minutes=1e-9)
    model, output = linear(1.0), Categorical(False, 2, one_hot=False)
    sample = prepare((x[order], y[order]), data(200, seed=1), model, output, None, 0)[0].sample
    assert 256 <= len(sample.y) <= 512
    assert abs(sample.y.mean() - y.mean()) < 0.02


def candidate(name, errors, nll, samples=1):
    engine = types.SimpleNamespace(samples=samples)
    trial = types.SimpleNamespace(engine=engine, trained=False, name=name)
    prediction, nll = np.zeros((len(errors), 2)), np.full(len(errors), nll)
    return Candidate(name, trial, 1.0, 0.0, prediction, nll, np.array(errors, float))


def report_of(candidates, output):
    report = Report.__new__(Report)
    report.candidates, report.output = candidates, output
    report.chosen = candidates[-1]
    return report


@pytest.mark.parametrize("output", [Categorical(True, 2, one_hot=False), Point(1)])
def test_a_loss_of_accuracy_is_named_beyond_its_margin(output):
    untreated = candidate("as it is", 180 * [0] + 20 * [1], 1.0)
    few = candidate("other", 178 * [0] + 22 * [1], 0.5)
    many = candidate("other", 160 * [0] + 40 * [1], 0.5)
    assert report_of([untreated, few], output).lost() == ""
    text = report_of([untreated, many], output).why()
    scores = {Categorical: "accuracy 0.8000 against 0.9000, 0.1000 ± 0.0417 less"}
    wanted = scores.get(type(output), "RMSE 0.4472 against 0.3162")
    assert f"less accurate than the model as it is: {wanted}" in text
    assert "report.model_of('as it is')" in text
    assert report_of([untreated], output).lost() == ""


def test_calibrate_warns_of_a_choice_that_loses_accuracy(monkeypatch):
    monkeypatch.setattr(Report, "lost", lambda self: "But it is less accurate.")
    with pytest.warns(UserWarning, match="^Chosen: as it is.*less accurate"):
        ibnn.calibrate(linear(1.0), data(100), data(100, seed=1), epochs=1, verbose=False)


# What `minutes` leaves out


def test_minutes_name_what_they_left_untried(capsys):
    report = doubts(linear(1.0), data(100), data(100, seed=1), minutes=1e-9, verbose=True)[1]
    names = ["as it is + vector scaling", "as it is + isotonic", "fine-tuned"]
    assert report.dropped == dict.fromkeys(names, "there was no time for it")
    printed = capsys.readouterr().out
    assert f"`minutes=1e-09` left untried: {', '.join(names)}." in printed


def test_an_epoch_that_minutes_cut_is_named():
    lines, clock = [], iter(np.arange(1000) * 10.0)
    names = ["a", "b"]

    def scripted(name):
        engine = types.SimpleNamespace(samples=1, read=list, train=lambda state, fit: [])
        trial = trials.Trial(name, engine, trained=True)
        trial.watch = lambda data, output: next(clock)
        return trial

    parts = dict.fromkeys(trials.Setting._fields)
    setting = trials.Setting(**{**parts, "end": 45.0, "epochs": 3, "say": lines.append})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials.time, "monotonic", lambda: next(clock))
        fine_tuning.fine_tune([scripted(name) for name in names], setting)
    assert lines[-1] == "`minutes` ended the training: epoch 1 of 3 is not finished for b."


@pytest.fixture(scope="module")
def evaluated():
    """A report of three candidates, the last of which is chosen."""
    from tests import autodiff

    autodiff.run_eagerly(True)
    x, y = data(100, seed=1)
    engines = [Engine(lambda own=slope: copy_of(linear(own))) for slope in (0.0, 0.05, 0.3)]
    output = Categorical(False, 2, one_hot=False)
    found = []
    for number, engine in enumerate(engines):
        trial = trials.Trial("as it is" if number == 0 else f"other {number}", engine)
        trial.watch(Validation(Examples(x, y), Examples(x, y)), output)
        p = output.predict(trial.watched(), 1.0)
        nll, errors = output.nll(p, y), np.zeros(len(y))
        found.append(Candidate(trial.name, trial, 1.0, 0.0, p, nll, errors))
    yield Report(found, {}, output, y, {}, 0)
    autodiff.run_eagerly(False)


def test_evaluation_begins_with_the_choice_and_shows_progress(evaluated, capsys):
    assert evaluated.chosen.name == "other 2"
    table = evaluated.evaluate(data(100, seed=2))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Scoring 3 candidates on 100 test examples."
    assert [line.split(":")[0] for line in lines[1:]] == ["other 2", "as it is", "other 1"]
    assert lines[1] == f"other 2: NLL {table['other 2']['NLL']:.4f}"
    assert [*table.rows] == ["as it is", "other 1", "other 2"]
    evaluated.evaluate(data(100, seed=2), verbose=False)
    assert not capsys.readouterr().out


def test_minutes_leave_out_the_rest_of_an_evaluation(evaluated, capsys):
    table = evaluated.evaluate(data(100, seed=2), minutes=1e-9)
    assert [*table.rows] == ["as it is", "other 2"]
    assert table.caption == "100 test examples; `minutes` left out other 1"
    assert "`minutes` ended the evaluation: other 1 are not scored." in capsys.readouterr().out
    assert table["other 2"]["behind best"] == "best"


def test_long_steps_say_that_they_go_on(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY", 0.02)
    slow = Training.epoch

    def epoch(self, *args):
        slow(self, *args)
        progress.time.sleep(0.1)

    monkeypatch.setattr(Training, "epoch", epoch)
    doubts(linear(1.0), data(100), data(100, seed=1), epochs=2, verbose=True)
    printed = capsys.readouterr().out
    assert "epoch 1 of 2: fine-tuned: " in printed
    assert "as it is: " in printed
