import keras
import numpy as np
import pytest
from scipy.special import softmax

import tfp_ibnn as ibnn
from tfp_ibnn.backend import tfp
from tfp_ibnn.metrics import expected_calibration_error, reliability


@pytest.fixture
def predictions():
    rng = np.random.default_rng(0)
    labels = rng.integers(5, size=503)
    logits = (
        rng.standard_normal((503, 5)).astype("float32") + 2 * np.eye(5, dtype="float32")[labels]
    )
    return logits, labels


def by_hand(probabilities, labels, bins=15, weights=None):
    weights = np.ones(len(labels)) if weights is None else weights
    confidence, correct = probabilities.max(-1), probabilities.argmax(-1) == labels
    total = 0.0
    for i in range(bins):
        inside = (confidence > i / bins) & (confidence <= (i + 1) / bins)
        if i == 0:
            inside |= confidence == 0
        if inside.any():
            accuracy = np.average(correct[inside], weights=weights[inside])
            mean = np.average(confidence[inside], weights=weights[inside])
            total += weights[inside].sum() * abs(accuracy - mean)
    return total / weights.sum()


def stream(metric, logits, labels, batch, weights=None):
    for start in range(0, len(labels), batch):
        part = slice(start, start + batch)
        weight = None if weights is None else weights[part]
        metric.update_state(labels[part], logits[part], sample_weight=weight)
    return float(metric.result())


@pytest.mark.parametrize("batch", [1, 7, 128, 1000])
def test_streaming_error_is_exact_under_any_batching(predictions, batch):
    logits, labels = predictions
    labels, logits = labels[:200], logits[:200]
    metric = ibnn.ExpectedCalibrationError(from_logits=True)
    expected = by_hand(softmax(logits, -1), labels)
    assert stream(metric, logits, labels, batch) == pytest.approx(expected, abs=1e-6)


def test_function_and_metric_agree_with_tfp(predictions):
    logits, labels = predictions
    expected = float(
        tfp.stats.expected_calibration_error(15, logits=logits, labels_true=labels.astype("int32"))
    )
    assert expected_calibration_error(softmax(logits, -1), labels) == pytest.approx(
        expected, abs=1e-6
    )


def test_weights_and_one_hot_labels(predictions):
    logits, labels = predictions
    weights = np.random.default_rng(1).uniform(size=len(labels)).astype("float32")
    expected = by_hand(softmax(logits, -1), labels, weights=weights)
    for given in (labels, labels[:, None], np.eye(5)[labels]):
        metric = ibnn.ExpectedCalibrationError(from_logits=True)
        assert stream(metric, logits, given, 100, weights) == pytest.approx(expected, abs=1e-6)


def test_bins_are_left_open_and_hold_both_ends():
    probabilities = np.array([[0.5, 0.5], [0.75, 0.25], [1.0, 0.0]])
    result = reliability(probabilities, [0, 0, 0], bins=4)
    np.testing.assert_array_equal(result.count, [0, 1, 1, 1])
    metric = ibnn.ExpectedCalibrationError(bins=4)
    metric.update_state([0, 0, 0], probabilities)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(metric.count), [0, 1, 1, 1])
    assert float(metric.result()) == pytest.approx(0.25)


def test_empty_then_reset():
    metric = ibnn.ExpectedCalibrationError()
    assert float(metric.result()) == 0
    metric.update_state([1], [[0.9, 0.1]])
    assert float(metric.result()) == pytest.approx(0.9)
    metric.reset_state()
    assert float(metric.result()) == 0


def test_dense_predictions_count_every_position(predictions):
    logits, labels = predictions
    metric = ibnn.ExpectedCalibrationError(from_logits=True)
    metric.update_state(labels[:500].reshape(5, 10, 10), logits[:500].reshape(5, 10, 10, 5))
    expected = by_hand(softmax(logits[:500], -1), labels[:500])
    assert float(metric.result()) == pytest.approx(expected, abs=1e-6)


def test_metric_in_fit_and_config():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    ece = ibnn.ExpectedCalibrationError(bins=10, from_logits=True)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(True), metrics=[ece])
    history = model.fit(np.ones((8, 3)), np.arange(8) % 4, verbose=0).history
    assert 0 <= history["ece"][0] <= 1
    again = ibnn.ExpectedCalibrationError.from_config(ece.get_config())
    assert (again.bins, again.from_logits) == (10, True)


@pytest.mark.parametrize(
    ("probabilities", "labels", "message"),
    [
        ([[0.5, 0.5]], [2], "labels"),
        ([[0.5, 0.5]], [-1], "labels"),
        ([[0.5, 0.5]], [0, 1], "labels"),
        ([[0.5, 0.4]], [0], "sum to 1"),
        ([[np.nan, 0.5]], [0], "finite"),
        ([0.5, 0.5], [0, 1], "probabilities"),
        (np.zeros((0, 2)), [], "one example"),
    ],
)
def test_bad_input_is_named(probabilities, labels, message):
    with pytest.raises(ValueError, match=message):
        reliability(probabilities, labels)


def test_bad_bins():
    with pytest.raises(ValueError, match="bins"):
        ibnn.ExpectedCalibrationError(bins=0)
