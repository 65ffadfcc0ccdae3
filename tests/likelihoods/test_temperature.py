"""The temperature that suits the classes of averaged draws."""

import numpy as np
import pytest
from scipy.special import softmax

from tests.calibration.tools import classes


def test_few_right_answers_do_not_make_a_model_certain():
    p = np.tile([[[0.9, 0.1]]], (80, 1, 1))
    found = classes(2, from_logits=False).fit(p, np.zeros(80, int))
    assert 0.3 < found < 0.9
    many = classes(2, from_logits=False).fit(np.tile(p, (100, 1, 1)), np.zeros(8000, int))
    assert many < 0.3


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
