"""Models with a `call` of their own, which become the one layer of a graph."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers
from scipy.special import softmax

import tfp_ibnn as ibnn
from tests.calibration.tools import LOGITS, drawn_labels, methods
from tfp_ibnn.calibration import fine_tuned, run, untrained
from tfp_ibnn.calibration.network import as_network, warn_of_own_training


@keras.saving.register_keras_serializable("tests.calibration")
class Classifier(keras.Model):
    """A network with a `call` of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = layers.Dense(4, "tanh")
        self.dense = layers.Dense(3)

    def call(self, x):
        return 3 * self.dense(self.hidden(x))


@pytest.fixture
def classifier():
    """A network that returns three times the logits of the labels."""
    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    x = random.normal(size=(120, 2)).astype("float32")
    model = Classifier()
    logits = keras.ops.convert_to_numpy(model(x)) / 3
    model.compile("sgd", LOGITS)
    return model, x, drawn_labels(logits, random)


def test_the_history_of_a_training_is_kept(classifier, eagerly):
    """It gives the batch size of fresh networks."""
    model, x, y = classifier
    assert as_network(model).history is None
    model.fit(x, y, verbose=0)
    assert as_network(model).history is model.history


@keras.saving.register_keras_serializable("tests.calibration")
class OwnStep(Classifier):
    """A network with a training of its own."""

    def train_step(self, data):
        return super().train_step(data)


def test_a_training_of_its_own_is_named():
    with pytest.warns(UserWarning, match="has a `train_step` of its own.*and `build` for fresh"):
        warn_of_own_training(OwnStep(), None)
    with warnings.catch_warnings(action="error"):
        warn_of_own_training(Classifier(), None)


def test_fresh_networks_with_a_call_of_their_own_make_an_ensemble(classifier, eagerly):
    model, x, y = classifier

    def build():
        network = Classifier()
        network(x)
        network.compile("sgd", LOGITS)
        return network

    model.fit(x, y, verbose=0)
    options = {"epochs": 1, "samples": 2, "batch_size": 32, "verbose": False, "seed": 0}
    report = ibnn.calibrate(model, (x, y), (x, y), effort="trainings", build=build, **options)
    assert "ensemble of 2" in report.table().rows


def test_a_part_of_an_epoch_is_no_wrong_train_size(classifier, monkeypatch, eagerly, recwarn):
    """A sixth of two epochs of training is a third of an epoch."""
    model, x, y = classifier
    model.fit(x, y, epochs=2, verbose=0)
    kept = methods(untrained.as_it_is, minutes=(fine_tuned.gaussian,))
    monkeypatch.setattr(run, "METHODS", kept)
    report = ibnn.calibrate(model, (x, y), (x, y), effort="minutes", samples=2, verbose=False)
    assert "Gaussian" in report.table().rows
    assert not [warning for warning in recwarn if "train_size" in str(warning.message)]


def test_a_call_of_its_own_is_calibrated(classifier, monkeypatch, eagerly, tmp_path):
    """It is fine-tuned, and made stochastic; Laplace leaves itself out with a line."""
    model, x, y = classifier
    trained = fine_tuned.fine_tuned, fine_tuned.gaussian
    kept = methods(untrained.as_it_is, untrained.laplace_of_the_last_layer, minutes=trained)
    monkeypatch.setattr(run, "METHODS", kept)
    options = {"epochs": 1, "samples": 2, "verbose": False}
    with pytest.warns(UserWarning, match="Laplace, last layer: left out, since .* of its own"):
        report = ibnn.calibrate(model, (x, y), (x, y), **options)
    before = keras.ops.convert_to_numpy(model(x))
    names = [candidate.name for candidate in report.candidates]
    assert {"as it is", "fine-tuned", "Gaussian"} <= {*names}
    scaled = report.candidates[1]
    assert scaled.parameter == pytest.approx(3, rel=0.5)
    made = report.model_of(scaled.name)
    mean = made.predict(x, verbose=0)["mean"]
    np.testing.assert_allclose(mean, softmax(before / scaled.parameter, axis=1), atol=1e-5)
    made.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(x, verbose=0)["mean"], mean, atol=1e-6)
    noisy = report.model_of("Gaussian").predict(x, verbose=0)
    assert noisy["epistemic"].min() > 0
    # A candidate may have such a call as well.
    monkeypatch.setattr(run, "METHODS", methods(untrained.as_it_is, untrained.given))
    given = ibnn.calibrate(model, (x, y), (x, y), candidates={"other": model}, **options)
    assert "other + temperature" in given.table().rows


class Unsymbolic(Classifier):
    def call(self, x):
        return super().call(keras.ops.convert_to_tensor(np.asarray(x)))


@pytest.mark.once
def test_what_cannot_be_a_layer_says_so():
    model = Unsymbolic()
    model(np.zeros((2, 2), "float32"))
    with pytest.raises(ValueError, match=r"symbolic inputs: give keras.Model\(inputs, model"):
        as_network(model)
    with pytest.raises(ValueError, match="must be built: call it on data"):
        as_network(Classifier())
