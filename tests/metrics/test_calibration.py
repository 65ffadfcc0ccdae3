import keras
import numpy as np
import pytest
from scipy.special import softmax

import tfp_ibnn as ibnn
from tfp_ibnn._core.backend import tfp
from tfp_ibnn.metrics import (
    adaptive_calibration_error,
    classwise_calibration_error,
    expected_calibration_error,
    reliability,
)

pytestmark = pytest.mark.once


@pytest.fixture
def predictions():
    rng = np.random.default_rng(0)
    labels = rng.integers(5, size=510)
    logits = rng.standard_normal((510, 5)) + 2 * np.eye(5)[labels]
    return softmax(logits, -1), labels


def gaps(confidence, correct, bins=15, weights=None):
    """Weight and error of each filled bin, one bin after another."""
    weights = np.ones(len(correct)) if weights is None else weights
    found = []
    for i in range(bins):
        inside = (confidence > i / bins) & (confidence <= (i + 1) / bins)
        if i == 0:
            inside |= confidence == 0
        if weights[inside].sum() > 0:
            accuracy = np.average(correct[inside], weights=weights[inside])
            mean = np.average(confidence[inside], weights=weights[inside])
            found.append((weights[inside].sum() / weights.sum(), abs(accuracy - mean)))
    return np.array(found)


def top(probabilities, labels):
    return probabilities.max(-1), probabilities.argmax(-1) == labels


# Equal widths.


@pytest.mark.parametrize("bins", [1, 4, 15])
@pytest.mark.parametrize("weighted", [False, True])
def test_errors_are_those_of_a_loop_over_the_bins(predictions, bins, weighted):
    probabilities, labels = predictions
    weights = np.random.default_rng(1).uniform(size=len(labels)) if weighted else None
    share, gap = gaps(*top(probabilities, labels), bins, weights).T
    options = {"bins": bins, "sample_weight": weights}
    found = expected_calibration_error(probabilities, labels, **options)
    assert found == pytest.approx(np.sum(share * gap), abs=1e-12)
    found = reliability(probabilities, labels, **options).mce
    assert found == pytest.approx(np.max(gap), abs=1e-12)
    each = [gaps(probabilities[:, k], labels == k, bins, weights) for k in range(5)]
    found = classwise_calibration_error(probabilities, labels, **options)
    expected = np.mean([np.sum(share * gap) for share, gap in (part.T for part in each)])
    assert found == pytest.approx(expected, abs=1e-12)


def test_function_agrees_with_tfp(predictions):
    probabilities, labels = predictions
    logits = np.log(probabilities).astype("float32")
    expected = tfp.stats.expected_calibration_error(
        15, logits=logits, labels_true=labels.astype("int32")
    )
    found = expected_calibration_error(logits, labels, from_logits=True)
    assert found == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_bins_are_left_open_and_hold_both_ends(dtype):
    # 0.2, 0.6 and 0.8 lie on edges of the fifteen bins, whatever their rounding.
    confidence = np.array([0.2, 0.6, 0.8, 1.0])
    probabilities = np.full((4, 5), 0.2)
    probabilities[1:] = ((1 - confidence[1:]) / 4)[:, None]
    probabilities[:, 0] = confidence
    probabilities = probabilities.astype(dtype)
    count = np.zeros(15)
    count[[2, 8, 11, 14]] = 1
    labels = [1, 0, 0, 1]  # so that no bin has the gap 0
    np.testing.assert_array_equal(reliability(probabilities, labels).count, count)
    metric = ibnn.ExpectedCalibrationError()
    metric.update_state(labels, probabilities)
    gap = keras.ops.convert_to_numpy(metric.gap.value())
    np.testing.assert_allclose(gap[count > 0], [-0.2, 0.4, 0.2, -1.0], rtol=1e-6)
    assert not gap[count == 0].any()


def test_probability_zero_is_in_the_first_bin():
    # Never happens, never said: a perfect pair of classes. Said never, happens: the worst.
    assert classwise_calibration_error([[1.0, 0.0]], [0]) == 0
    assert classwise_calibration_error([[1.0, 0.0]], [1]) == 1


def test_reliability_fields():
    result = reliability([[0.5, 0.5], [0.75, 0.25], [0.7, 0.3]], [0, 0, 1], bins=4)
    np.testing.assert_array_equal(result.edges, [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_array_equal(result.count, [0, 1, 2, 0])
    np.testing.assert_allclose(result.confidence, [np.nan, 0.5, 0.725, np.nan])
    np.testing.assert_allclose(result.accuracy, [np.nan, 1, 0.5, np.nan])
    assert result.ece == pytest.approx((0.5 + 2 * 0.225) / 3)
    assert result.mce == pytest.approx(0.5)


# Equal mass.


def test_adaptive_error_is_that_of_sorted_equal_parts(predictions):
    confidence, correct = top(*predictions)
    order = np.argsort(confidence)
    parts = zip(np.split(confidence[order], 15), np.split(correct[order], 15), strict=True)
    expected = np.mean([abs(c.mean() - r.mean()) for c, r in parts])
    assert adaptive_calibration_error(*predictions) == pytest.approx(expected, abs=1e-12)


def test_adaptive_error_of_whole_weights_is_that_of_repeated_examples(predictions):
    probabilities, labels = predictions
    weights = np.random.default_rng(1).integers(4, size=len(labels))
    found = adaptive_calibration_error(probabilities, labels, sample_weight=weights)
    again = np.repeat(probabilities, weights, axis=0), np.repeat(labels, weights)
    assert found == pytest.approx(adaptive_calibration_error(*again), abs=1e-12)
    assert found != pytest.approx(adaptive_calibration_error(probabilities, labels), abs=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_ties_are_shared_whatever_the_order(seed):
    # Six of one confidence over three bins, each with half of the six right.
    order = np.random.default_rng(seed).permutation(6)
    probabilities = np.tile([0.9, 0.1], (6, 1))
    labels = np.array([0, 0, 0, 1, 1, 1])[order]
    assert adaptive_calibration_error(probabilities, labels, bins=3) == pytest.approx(0.4)


def test_one_example_in_all_bins():
    assert adaptive_calibration_error([[0.7, 0.3]], [0]) == pytest.approx(0.3)
    assert adaptive_calibration_error([[0.7, 0.3]], [1]) == pytest.approx(0.7)


@pytest.mark.parametrize(
    "make",
    [
        ibnn.ExpectedCalibrationError,
        lambda bins: reliability([[0.5, 0.5]], [0], bins),
        lambda bins: adaptive_calibration_error([[0.5, 0.5]], [0], bins),
        lambda bins: classwise_calibration_error([[0.5, 0.5]], [0], bins),
    ],
)
def test_bad_bins(make):
    for value in (0, 2.5):
        with pytest.raises(ValueError, match=f"`bins`.*{value}"):
            make(bins=value)
