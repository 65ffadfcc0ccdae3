"""The models that candidates become, those with parameters for each class above all."""

import keras
import numpy as np
import pytest
from keras import layers
from scipy.special import softmax

import tfp_ibnn as ibnn
from tests.calibration.tools import LOGITS, classes, compiled
from tfp_ibnn.calibration import trials
from tfp_ibnn.calibration.examples import Examples, Validation, folds_of
from tfp_ibnn.calibration.scaling import scaled_model
from tfp_ibnn.calibration.scoring import cross_fitted
from tfp_ibnn.likelihoods import Labels

KINDS = {"as it is + vector scaling": "vector", "as it is + isotonic": "isotonic"}


def test_the_model_as_it_is_has_parameters_for_each_class(small, tmp_path, full_precision):
    report = small(compiled(LOGITS))
    x, y = small.x[60:], small.y[60:].astype(int)
    names = [candidate.name for candidate in report.candidates]
    assert names[:4] == ["as it is", "as it is + temperature", *KINDS]
    assert not any("vector" in name or "isotonic" in name for name in names[4:])
    raw = report.candidates[0].trial.watched()
    table = report.evaluate((x, y), verbose=False)
    for name, kind in KINDS.items():
        row = table[name]
        assert row["T"] == "by class"
        expected = report.output.parameter(raw, y, kind).probabilities(raw[:, 0])
        made = report.model_of(name)
        found = made.predict(x, verbose=0)["mean"]
        np.testing.assert_allclose(found, expected, atol=2e-5)
        assert row["NLL"] == pytest.approx(-np.log(expected[np.arange(100), y]).mean(), rel=1e-4)
        made.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        np.testing.assert_allclose(loaded.predict(x, verbose=0)["mean"], found, atol=1e-6)


def test_noise_inside_of_a_recurrent_layer_is_in_the_file(tmp_path, eagerly):
    """The config of such a layer lacks it."""
    inputs = keras.Input((3, 2))
    model = keras.Model(inputs, layers.Dense(3)(layers.GRU(4)(inputs)))
    sto = ibnn.to_stochastic(model, ibnn.NormalAffine(), 50, seed=0)
    made = scaled_model(classes(3, from_logits=True), sto, 2.0, samples=4, seed=0)
    x = np.random.default_rng(0).normal(size=(5, 3, 2)).astype("float32")
    found = made.predict(x, verbose=0)
    assert found["epistemic"].min() > 0
    made.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(x, verbose=0)["mean"], found["mean"], atol=1e-6)


class FakeEngine:
    """Gives the same outputs in every state."""

    samples = 1

    def __init__(self, outputs):
        self.outputs = outputs

    def read(self):
        return []

    def draw(self, state, x):
        return self.outputs


@pytest.mark.once
@pytest.mark.parametrize("kind", KINDS.values())
def test_the_labels_of_a_fold_do_not_change_its_predictions(kind):
    rng = np.random.default_rng(0)
    output = classes(3, from_logits=True)
    y = rng.integers(0, 3, 200)
    logits = (rng.normal(size=(200, 1, 3)) + np.eye(3)[y][:, None]).astype("float32")
    folds = folds_of(y, 5, 0)
    found = []
    for changed in (y, np.where(folds == 2, 2 - y, y)):
        trial = trials.Trial("fake", FakeEngine(logits))
        examples = Examples(np.zeros((200, 1)), changed)
        data = Validation(examples, examples, folds)
        trial.watch(data, output)
        found.append(cross_fitted(trial, output, data, kind))
    one, other = found
    np.testing.assert_array_equal(one[folds == 2], other[folds == 2])
    assert np.abs(one - other).max() > 0.01
    p = softmax(logits[:, 0], axis=1)
    assert np.abs(one - p).max() > 0.01


@pytest.mark.once
@pytest.mark.parametrize("from_logits", [True, False])
def test_yes_or_no(from_logits):
    rng = np.random.default_rng(0)
    raw = rng.random((200, 1, 1)).astype("float32")
    y = (rng.random(200) < raw[:, 0, 0]).astype(int)
    output = Labels(from_logits, 1)
    inputs = keras.Input((1,))
    model = keras.Model(inputs, keras.layers.Identity()(inputs))
    for kind in KINDS.values():
        parameter = output.parameter(raw, y, kind)
        made = scaled_model(output, model, parameter, samples=1, independent=True)
        found = made.predict(raw[:, 0], verbose=0)["mean"]
        np.testing.assert_allclose(found, output.predict(raw, parameter)[:, 1:], atol=2e-5)
