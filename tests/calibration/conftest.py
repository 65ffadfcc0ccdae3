"""A small classifier and what calibrates it."""

import numpy as np
import pytest

import tfp_ibnn as ibnn
from tests.calibration.tools import mlp
from tfp_ibnn.calibration import run, trials


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
