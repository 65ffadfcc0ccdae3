"""A small classifier and what calibrates it."""

import numpy as np
import pytest
from scipy.special import softmax

import tfp_ibnn as ibnn
from tests.calibration.tools import classes, methods, mlp
from tfp_ibnn.calibration import Candidate, Report, fine_tuned, run, trials, untrained
from tfp_ibnn.calibration.engine import Engine
from tfp_ibnn.calibration.examples import Training
from tfp_ibnn.conversion.copying import copy_of


@pytest.fixture
def deterministic_only(monkeypatch):
    """Leave the other methods out, for what does not depend on them."""
    kept = methods(untrained.as_it_is, untrained.given, minutes=(fine_tuned.fine_tuned,))
    monkeypatch.setattr(run, "METHODS", kept)


@pytest.fixture
def as_it_is(deterministic_only, eagerly, monkeypatch):
    """Train nothing, for what is about data and outputs."""
    monkeypatch.setattr(Training, "epoch", lambda *args: None)


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


@pytest.fixture
def handmade(eagerly):
    """A report of small networks whose scores are made up; two candidates gain by a temperature.

    The network "fine-tuned" and the ensemble as it is are beaten at no higher cost.
    """
    rng = np.random.default_rng(0)
    network = mlp(4, 3, "softmax", features=2)
    ensemble = ibnn.DeepEnsemble(3 * [network])
    output = classes(3, from_logits=False)
    y = rng.integers(0, 3, 60)
    noise = rng.normal(size=(60, 3))
    candidates = []

    def add(name, made, parameter, quality, samples=1, trainings=0.0):
        trial = trials.Trial(name, Engine(made, samples), trainings=trainings)
        p = softmax(quality * np.eye(3)[y] + noise, axis=1)
        errors = (p.argmax(axis=1) != y).astype(float)
        nll = output.nll(p, y)
        candidates.append(Candidate(name, trial, parameter, 0.0, p, nll, errors))

    add("as it is", lambda: copy_of(network), 1.0, quality=0.0)
    add("as it is + temperature", lambda: copy_of(network), 2.0, quality=1.0)
    add("fine-tuned", lambda: copy_of(network), 1.0, quality=0.5, trainings=0.1)
    add("ensemble", lambda: ensemble, 1.0, quality=0.9, samples=3, trainings=2.0)
    add("ensemble + temperature", lambda: ensemble, 2.0, quality=3.0, samples=3, trainings=2.0)
    return Report(candidates, {"slow": "there was no time for it"}, output, y, {}, 0)
