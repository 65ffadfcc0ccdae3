"""Outputs with positions: each pixel or step is a row; those that do not count change nothing."""

import keras
import numpy as np
import pytest
from keras import layers
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

import tfp_ibnn as ibnn
from tests.calibration.tools import LOGITS, drawn_labels
from tfp_ibnn.calibration import examples, reading, rows
from tfp_ibnn.calibration.examples import prepare
from tfp_ibnn.calibration.rows import Rows
from tfp_ibnn.likelihoods import Categorical
from tfp_ibnn.likelihoods.temperature import DOUBT

COUNT, SIZE, CLASSES = 60, 6, 3


def pixels(overconfidence=3.0):
    """A network of one 1x1 convolution, with images and labels of which it knows the odds."""
    random = np.random.default_rng(0)
    x = random.normal(size=(COUNT, SIZE, SIZE, CLASSES)).astype("float32")
    model = keras.Sequential([keras.Input((None, None, CLASSES)), layers.Conv2D(CLASSES, 1)])
    kernel = overconfidence * np.eye(CLASSES)
    model.layers[0].set_weights([kernel[None, None], np.zeros(CLASSES)])
    model.compile("sgd", LOGITS)
    return model, x, drawn_labels(x, random)


def best_temperature(logits, y, weight=None):
    """The temperature of single rows, by a search of its own, and its standard error."""
    weight = np.ones(len(y)) if weight is None else weight

    def loss(log_temperature):
        log_p = log_softmax(logits / np.exp(log_temperature), axis=-1)
        nll = -np.sum(weight * log_p[np.arange(len(y)), y])
        return nll + DOUBT * log_temperature**2

    best = minimize_scalar(loss, bounds=(-3, 3), method="bounded", options={"xatol": 1e-8}).x
    step = 1e-3
    curvature = (loss(best + step) - 2 * loss(best) + loss(best - step)) / step**2
    return np.exp(best), np.exp(best) / np.sqrt(curvature)


def calibrated(model, train, validation, **options):
    options = {"epochs": 1, "samples": 2, "verbose": False, **options}
    return ibnn.calibrate(model, train, validation, **options)


def test_a_pixel_classifier_gets_its_temperature(as_it_is, tmp_path):
    model, x, y = pixels()
    report = calibrated(model, (x, y), (x, y))
    scaled = report.candidates[1]
    expected, error = best_temperature(3 * x.reshape(-1, CLASSES), y.ravel())
    assert scaled.parameter == pytest.approx(expected, rel=1e-4)
    assert abs(expected - 3) < 2 * error
    row = report.evaluate((x, y))[scaled.name]
    scores = report.model_of(scaled.name).evaluate(x, y, verbose=0, return_dict=True)
    for name in ("accuracy", "nll", "brier", "ece"):
        column = {"nll": "NLL", "brier": "Brier", "ece": "ECE"}.get(name, name)
        assert scores[name] == pytest.approx(row[column], abs=1e-3)
    assert report.table().caption.startswith("60 validation examples with 2,160 outputs")
    by_class = report.model_of("as it is + vector scaling")
    scores = by_class.evaluate(x, y, verbose=0, return_dict=True)
    nll = report.evaluate((x, y), verbose=False)["as it is + vector scaling"]["NLL"]
    assert scores["nll"] == pytest.approx(nll, abs=1e-4)
    folder = report.save(tmp_path / "saved")
    loaded = keras.models.load_model(folder / "model.keras")
    found, before = (each.predict(x[:2], verbose=0)["mean"] for each in (loaded, report.model))
    assert found.shape == (2, SIZE, SIZE, CLASSES)
    np.testing.assert_allclose(found, before, atol=1e-6)


def test_pixels_of_weight_0_change_nothing(as_it_is):
    model, x, y = pixels()
    random = np.random.default_rng(1)
    weight = random.integers(0, 3, y.shape).astype("float32")
    x = np.where(weight[..., None] > 0, x, 1e4 * random.normal(size=x.shape)).astype("float32")
    y = np.where(weight > 0, y, 99)
    report = calibrated(model, (x, y, weight), (x, y[..., None], weight))
    counts = weight.ravel() > 0
    kept = y.ravel()[counts], weight.ravel()[counts]
    expected, _ = best_temperature(3 * x.reshape(-1, CLASSES)[counts], *kept)
    assert report.candidates[1].parameter == pytest.approx(expected, rel=1e-4)
    assert len(report.y) == counts.sum()
    # Weights of images are those of all their pixels.
    of_images = weight[:, 0, 0] + 1
    found = calibrated(model, (x, 0 * y, of_images), (x, 0 * y + (weight > 1), of_images))
    assert len(found.y) == y.size
    np.testing.assert_array_equal(found.weight, np.repeat(of_images, SIZE**2))


def steps(poison):
    """A network for sequences of several lengths, padded by zeros, with a label for each step."""
    random = np.random.default_rng(0)
    x = random.normal(size=(COUNT, 7, CLASSES)).astype("float32")
    y = drawn_labels(x, random).astype("float64")
    is_padding = np.arange(7) >= random.integers(2, 8, COUNT)[:, None]
    x[is_padding] = 0
    y[is_padding] = poison
    inputs = keras.Input((None, CLASSES))
    masked = layers.Masking()(inputs)
    outputs = layers.TimeDistributed(layers.Dense(CLASSES))(masked)
    model = keras.Model(inputs, outputs)
    model.layers[-1].set_weights([3 * np.eye(CLASSES), np.zeros(CLASSES)])
    model.compile("sgd", LOGITS)
    return model, x, y, ~is_padding


def test_padded_steps_change_nothing(as_it_is):
    model, x, y, counts = steps(poison=np.nan)
    report = calibrated(model, (x, y), (x, y))
    expected, error = best_temperature(3 * x[counts], y[counts].astype(int))
    scaled = report.candidates[1]
    assert scaled.parameter == pytest.approx(expected, rel=1e-4)
    assert abs(expected - 3) < 2 * error
    assert len(report.y) == counts.sum()
    row = report.evaluate((x, y))[scaled.name]
    assert row["NLL"] == pytest.approx(scaled.nll.mean(), abs=0.02)
    clean = np.where(counts, y, 0)
    scores = report.model_of(scaled.name).evaluate(x, clean, verbose=0, return_dict=True)
    assert scores["nll"] == pytest.approx(row["NLL"], abs=1e-4)


@pytest.mark.once
def test_memory_is_bounded(monkeypatch):
    """Of many positions some are drawn at random, the same for all candidates."""
    model, x, y = pixels()
    output = Categorical(True, CLASSES, one_hot=False)
    monkeypatch.setattr(examples, "FITTED_ROWS", 100)
    monkeypatch.setattr(reading, "SCORED_ROWS", 500)
    _, data = prepare((x, y), (x, y), model, output, None, 0)
    assert data.fit.size == len(data.fit.y) == len(data.folds) == 100
    assert data.fit.x.share == pytest.approx(100 / y.size)
    monkeypatch.setattr(examples, "CROSS_FIT_BELOW", 10)
    training, data = prepare((x, y), (x, y), model, output, None, 0)
    assert len(training.sample.y) == len(data.fit.y) == 100
    assert len(data.score.y) == pytest.approx(250, abs=60)
    # No image serves both to fit and to choose.
    assert not set(data.fit.x.groups) & set(data.score.x.groups)
    assert data.shares.startswith("30 with 100 outputs (0.0")
    sizes = []

    def draw(inputs):
        sizes.append(len(inputs))
        return {"": inputs[:, None]}

    numbers = 4 * SIZE**2 * CLASSES + 1
    monkeypatch.setattr(rows, "_BLOCK", numbers)
    found = data.score.x.outputs(draw, 1)
    assert max(sizes) <= 4
    groups, _, place = data.score.x._index
    np.testing.assert_array_equal(found[:, 0], x.reshape(COUNT, -1, CLASSES)[groups, place])
    np.testing.assert_array_equal(data.score.y, y.reshape(COUNT, -1)[groups, place])


@pytest.mark.once
def test_rows_of_an_unknown_number_of_positions_are_refused():
    output = Categorical(True, CLASSES)
    index = np.zeros((3, 1), int)
    with pytest.raises(ValueError, match="have 5 positions for each .*returns 4"):
        Rows(np.zeros((2, 3)), output, {"": 5}, index).outputs(
            lambda inputs: {"": np.zeros((1, 1, 4, CLASSES))}, 1
        )
