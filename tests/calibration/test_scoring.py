"""Scores of trials on examples that nothing was fitted to."""

import types

import numpy as np
from scipy.special import softmax

from tests.calibration.tools import classes
from tfp_ibnn.calibration import trials
from tfp_ibnn.calibration.examples import Examples, Validation, folds_of
from tfp_ibnn.calibration.scoring import cross_fitted


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
    plain = cross_fitted(trial, output, data, False)
    np.testing.assert_allclose(plain[folds == 0], softmax(first[folds == 0, 0], axis=1), atol=1e-6)
    other = [output.fit(first[folds != fold], y[folds != fold]) for fold in range(5)]
    scaled = cross_fitted(trial, output, data, True)
    for fold in range(5):
        expected = softmax(first[folds == fold, 0] / other[fold], axis=1)
        np.testing.assert_allclose(scaled[folds == fold], expected, atol=1e-5)
