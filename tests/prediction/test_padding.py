"""Padded steps count nowhere: with them, every number is as it is without them."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfp_ibnn as ibnn
from tfp_ibnn.prediction.padding import without_padding

COUNT, STEPS, PADDED = 30, 4, 9
RNG = np.random.default_rng(0)
X = RNG.normal(size=(COUNT, STEPS, 3)).astype("float32") + 3
Y = RNG.integers(3, size=(COUNT, STEPS))
WEIGHTS = RNG.uniform(0.5, 2, size=(COUNT, STEPS)).astype("float32")


def padded(values, filler=0):
    """Return arrays whose further steps hold a filler, 0 for inputs."""
    widths = [(0, 0), (0, PADDED - STEPS), *[(0, 0)] * (values.ndim - 2)]
    return np.pad(values, widths, constant_values=filler)


class Own(keras.Model):
    """A model whose `call` is its own: its mask is in no graph."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = list(parts)

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x


def classifier(kind):
    parts = layers.Masking(), layers.Dense(5, "tanh"), layers.Dense(3, "softmax")
    if kind == "functional":
        model = keras.Sequential([keras.Input((None, 3)), *parts])
    else:
        model = Own(*parts)
        model(X)
    for number, weight in enumerate(model.weights):
        weight.assign(0.5 * np.random.default_rng(number).normal(size=weight.shape))
    return model


@pytest.fixture(autouse=True)
def fast(eagerly):
    """Nothing said here is about compiled graphs."""


both_kinds = pytest.mark.parametrize("kind", ["functional", "own"])


@both_kinds
def test_metrics_of_keras_leave_padding_out(kind):
    model = classifier(kind)
    made = ibnn.ExpectedCalibrationError(), ibnn.NegativeLogLikelihood(), ibnn.BrierScore()
    options = {"loss": "sparse_categorical_crossentropy", "run_eagerly": True}
    model.compile(metrics=["accuracy"], weighted_metrics=[*made], **options)
    one = {"verbose": 0, "batch_size": COUNT, "return_dict": True}
    found = model.evaluate(padded(X), padded(Y, 2), sample_weight=padded(WEIGHTS, 1), **one)
    expected = model.evaluate(X, Y, sample_weight=WEIGHTS, **one)
    assert {"accuracy", "ece", "nll", "brier"} < found.keys()
    assert found == pytest.approx(expected, abs=1e-5)
    p = ops.convert_to_numpy(model(X)).astype("float64")
    ece = ibnn.metrics.expected_calibration_error(p, Y, sample_weight=WEIGHTS)
    assert found["ece"] == pytest.approx(ece, abs=1e-5)


@both_kinds
@pytest.mark.parametrize("weights", [None, WEIGHTS, WEIGHTS[:, 0]], ids=["no", "each", "first"])
def test_temperature_is_not_fitted_to_padding(kind, weights):
    model = classifier(kind)
    expected = ibnn.TemperatureScaling(model, from_logits=False).fit(X, Y, weights)
    wide = padded(weights, 1) if np.ndim(weights) == 2 else weights
    found = ibnn.TemperatureScaling(model, from_logits=False).fit(padded(X), padded(Y, -1), wide)
    assert float(found.temperature) == pytest.approx(float(expected.temperature), rel=1e-4)
    if kind == "functional":
        halves = [slice(None, 10), slice(10, None)]
        parts = [(padded(X)[i], padded(Y)[i], None if wide is None else wide[i]) for i in halves]
        found = ibnn.TemperatureScaling(model, from_logits=False).fit(iter(parts))
        assert float(found.temperature) == pytest.approx(float(expected.temperature), rel=1e-4)


@both_kinds
def test_monte_carlo_does_not_score_padding(kind):
    with pytest.warns(UserWarning, match="one is enough"):
        mc = ibnn.MonteCarlo(classifier(kind), 2, head="softmax", from_logits=False)
    mc.compile(metrics=[ibnn.BrierScore(name="added")], run_eagerly=True)
    one = {"verbose": 0, "batch_size": COUNT, "return_dict": True}
    expected = mc.evaluate(X, Y, **one)
    assert mc.evaluate(padded(X), padded(Y), **one) == pytest.approx(expected, abs=1e-5)
    assert expected["added"] == pytest.approx(expected["brier"], abs=1e-6)


@pytest.mark.parametrize("score", ["max_probability", "entropy", "mahalanobis", "knn", "energy"])
def test_ood_scores_leave_padding_out(score):
    detector = ibnn.OODDetector(classifier("functional"), score, k=3).fit(X)
    expected = detector.score(X)
    close = {"rtol": 1e-3, "atol": 1e-4}
    np.testing.assert_allclose(detector.score(padded(X)), expected, **close)
    np.testing.assert_allclose(ops.convert_to_numpy(detector(padded(X))), expected, **close)
    again = ibnn.OODDetector(detector.inner, score, k=3).fit(padded(X))
    np.testing.assert_allclose(again.score(X), expected, **close)


def test_ood_scores_of_masked_outputs_take_datasets():
    detector = ibnn.OODDetector(ibnn.MonteCarlo(classifier("functional"), 1), "entropy").fit(X)
    found = detector.score(keras_batches())
    np.testing.assert_allclose(found, detector.score(X), rtol=1e-3, atol=1e-4)


def keras_batches():
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return (X,)

    return Batches()


def test_weights_of_several_answers_at_a_position():
    mask, weight = np.array([[1, 0]]), np.array([[[1.0, 2.0], [3.0, 4.0]]])
    found = ops.convert_to_numpy(without_padding(ops.convert_to_tensor(mask), weight, False))
    np.testing.assert_array_equal(found, [[[1, 2], [0, 0]]])


def test_what_is_for_one_answer_per_example_refuses_sequences():
    model = classifier("functional")
    model.compile("adam", "sparse_categorical_crossentropy")
    data = padded(X), padded(Y)
    fits = {
        r"output of shape \(N, K\)": lambda: ibnn.GaussianVI(model).fit(*data, verbose=0),
        r"of shape \(N, K\)": lambda: ibnn.LastLayerHMC(model).fit(*data, verbose=0),
    }
    for message, fit in fits.items():
        with pytest.raises(ValueError, match=message):
            fit()
