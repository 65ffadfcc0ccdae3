"""The calibration error that a calibrated model has by chance."""

import numpy as np
import pytest
from scipy.special import softmax

from tfp_ibnn.metrics.calibration import ece_floor


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
