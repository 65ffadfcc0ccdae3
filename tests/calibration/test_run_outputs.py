"""`calibrate` for several outputs, several answers, rare classes and models of any kind."""

import keras
import numpy as np
import pytest
from keras import layers

import tfp_ibnn as ibnn
from tests.calibration.tools import LOGITS, drawn_labels
from tfp_ibnn.calibration import run
from tfp_ibnn.likelihoods import Labels

COUNT = 120


def calibrated(model, train, validation, **options):
    options = {"epochs": 1, "samples": 2, "verbose": False, **options}
    return ibnn.calibrate(model, train, validation, **options)


def data():
    """Logits, and labels of which they give the odds; numbers with noise; both at each step."""
    random = np.random.default_rng(0)
    x = random.normal(size=(COUNT, 4, 3)).astype("float32")
    kind = drawn_labels(x.mean(axis=1) * 3, random)
    step = drawn_labels(x, random)
    size = x.mean(axis=1)[:, :1] + 0.1 * random.normal(size=(COUNT, 1))
    return x, {"kind": kind, "size": size, "step": step}


def network(overconfidence=1.0):
    """A network that returns these odds, and others at each of its four steps."""
    inputs = keras.Input((4, 3))
    mean = layers.GlobalAveragePooling1D()(inputs)
    steps = layers.Identity()(inputs)
    outputs = {
        "kind": layers.Rescaling(6.0 * overconfidence, name="kind")(mean),
        "step": layers.Rescaling(2.0 * overconfidence, name="step")(steps),
        "size": layers.Dense(1, use_bias=False, name="size")(mean),
    }
    model = keras.Model(inputs, outputs)
    model.get_layer("size").set_weights([np.array([[1.0], [0.0], [0.0]])])
    return compiled(model)


def compiled(model):
    model.compile("sgd", {"kind": LOGITS, "step": LOGITS, "size": "mse"})
    return model


def alone(model, name):
    part = keras.Model(model.input, model.output[name])
    part.compile("sgd", "mse" if name == "size" else LOGITS)
    return part


def test_each_output_gets_the_parameter_that_it_gets_alone(as_it_is, tmp_path):
    model = network()
    x, y = data()
    report = calibrated(model, (x, y), (x, y))
    plain, scaled, *_ = report.candidates
    assert [plain.name, scaled.name] == ["as it is", "as it is + temperature"]
    total = 0
    row = report.evaluate((x, y))[scaled.name]
    for name in y:
        of_one = calibrated(alone(model, name), (x, y[name]), (x, y[name]))
        expected = of_one.candidates[0 if name == "size" else 1]
        np.testing.assert_allclose(scaled.parameter[name], expected.parameter, rtol=1e-5)
        nll = of_one.evaluate((x, y[name]), verbose=False)[expected.name]["NLL"]
        assert row[f"{name} NLL"] == pytest.approx(nll, rel=1e-4)
        total += nll
    assert row["NLL"] == pytest.approx(total, rel=1e-4)
    assert report.table()[scaled.name]["NLL"] == pytest.approx(scaled.nll.mean(), rel=1e-6)
    assert scaled.nll.mean() == pytest.approx(total, rel=0.02)
    assert plain.parameter["kind"] == plain.parameter["step"] == 1
    np.testing.assert_allclose(plain.parameter["size"], scaled.parameter["size"])
    assert scaled.parameter["kind"] == pytest.approx(2, rel=0.2)
    made = report.model_of(scaled.name)
    scores = made.evaluate(x, y, verbose=0, return_dict=True)
    for name in y:
        assert scores[f"{name}_nll"] == pytest.approx(row[f"{name} NLL"], abs=1e-4)
    _, *panels = report.plot().axes
    assert [ax.get_title().split(":")[0] for ax in panels] == [*made.likelihood.parts]
    folder = report.save(tmp_path / "saved")
    loaded = keras.models.load_model(folder / "model.keras").predict(x, verbose=0)
    found = report.model.predict(x, verbose=0)
    for name in y:
        np.testing.assert_allclose(loaded[name]["mean"], found[name]["mean"], atol=1e-6)


def test_one_choice_for_all_outputs_is_by_the_sum(as_it_is):
    """The other network knows more of one output, and less of another one."""
    x, y = data()
    for slope, chosen in ((0.9, "other"), (-9.0, "as it is")):
        inputs = keras.Input((4, 3))
        outputs = dict(network()(inputs))
        outputs["step"] = layers.Rescaling(0.0)(outputs["step"])
        other = network()
        other.get_layer("size").set_weights([np.array([[slope], [0.0], [0.0]])])
        model = compiled(keras.Model(inputs, outputs))
        report = calibrated(model, (x, y), (x, y), candidates={"other": other})
        assert report.chosen.name.startswith(chosen)
        scores = report.model.evaluate(x, y, verbose=0, return_dict=True)
        row = report.evaluate((x, y), verbose=False)[report.chosen.name]
        assert sum(scores[f"{name}_nll"] for name in y) == pytest.approx(row["NLL"], abs=1e-4)
        table = report.table()
        assert table["other"]["step NLL"] < table["as it is"]["step NLL"]
        assert table["other"]["size NLL"] > table["as it is"]["size NLL"]


def test_several_answers_of_yes_or_no(as_it_is, tmp_path):
    random = np.random.default_rng(0)
    x = random.normal(size=(COUNT, 5)).astype("float32")
    y = (random.logistic(size=x.shape) < x).astype("float32")
    for from_logits in (True, False):
        model = keras.Sequential([keras.Input((5,)), layers.Dense(5)])
        model.layers[0].set_weights([3 * np.eye(5), np.zeros(5)])
        if not from_logits:
            model.add(layers.Activation("sigmoid"))
        model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=from_logits))
        ensemble = ibnn.DeepEnsemble([model, model])
        report = calibrated(model, (x, y), (x, y), candidates={"ensemble": ensemble})
        scaled = report.candidates[1]
        assert not any("isotonic" in candidate.name for candidate in report.candidates)
        logits = 3 * x.reshape(-1, 1, 1)
        expected = Labels(True, 1).fit(logits, y.ravel().astype(int))
        assert scaled.parameter == pytest.approx(expected, rel=1e-3)
        assert scaled.parameter == pytest.approx(3, rel=0.2)
        assert len(report.y) == y.size
        row = report.evaluate((x, y))[scaled.name]
        made = report.model_of(scaled.name)
        p = made.predict(x, verbose=0)["mean"]
        np.testing.assert_allclose(p, 1 / (1 + np.exp(-3 * x / scaled.parameter)), atol=1e-4)
        nll = -np.log(np.where(y > 0, p, 1 - p)).mean()
        assert row["NLL"] == pytest.approx(nll, abs=1e-4)
        assert row["accuracy"] == pytest.approx(np.mean((p > 0.5) == (y > 0)))
        averaged = report.model_of("ensemble + temperature").predict(x, verbose=0)
        np.testing.assert_allclose(averaged["mean"], p, atol=1e-4)
        folder = report.save(tmp_path / str(from_logits))
        loaded = keras.models.load_model(folder / "model.keras")
        np.testing.assert_allclose(loaded.predict(x, verbose=0)["mean"], p, atol=1e-6)


@pytest.mark.parametrize("count", [120, 1200])
def test_three_examples_of_a_class(as_it_is, count):
    """They are spread over folds, or halves, and every score is finite."""
    random = np.random.default_rng(0)
    x = random.normal(size=(count, 3)).astype("float32")
    x[:, 2] = -4
    y = drawn_labels(x[:, :2], random)
    y[:3] = 2
    seen = []
    keep = run.prepare

    def prepare(*args):
        seen.append(keep(*args))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "prepare", prepare)
        model = keras.Sequential([keras.Input((3,)), layers.Rescaling(3.0)])
        model.compile("sgd", LOGITS)
        report = calibrated(model, (x, y), (x, y))
    ((_, validation),) = seen
    if count < 1000:
        assert len(set(validation.folds[:3])) == 3
    else:
        rare = [np.sum(part.y == 2) for part in (validation.fit, validation.score)]
        assert sorted(rare) == [1, 2]
    for row in report.evaluate((x, y)).rows.values():
        assert all(np.isfinite(row[name]) for name in ("NLL", "Brier", "ECE"))
    assert report.candidates[1].parameter > 1.5


def test_numbers_at_positions(as_it_is):
    random = np.random.default_rng(0)
    x = random.normal(size=(COUNT, 4, 2)).astype("float32")
    y = x + [0.5, 2.0] * random.normal(size=x.shape)
    model = keras.Sequential([keras.Input((4, 2)), layers.Identity()])
    model.compile("sgd", "mse")
    only = calibrated(model, (x, y), (x, y)).candidates[0]
    expected = np.sqrt(np.square(y - x).reshape(-1, 2).mean(axis=0))
    np.testing.assert_allclose(only.parameter, expected, rtol=1e-3)
