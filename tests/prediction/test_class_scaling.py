"""`VectorScaling` and `IsotonicScaling`: the models, against the fits in NumPy."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from scipy.special import expit, log_softmax, logit, softmax
from sklearn.isotonic import IsotonicRegression

import tfp_ibnn as ibnn
from tfp_ibnn.likelihoods.class_scaling import best_isotonic, best_vector
from tfp_ibnn.prediction.class_scaling import interpolated

RNG = np.random.default_rng(0)
LABELS = RNG.integers(3, size=150)
LOGITS = (RNG.standard_normal((150, 3)) + np.eye(3)[LABELS] * [1, 3, 1]).astype("float32")
FITS = {ibnn.VectorScaling: best_vector, ibnn.IsotonicScaling: best_isotonic}
KINDS = pytest.mark.parametrize("kind", FITS, ids=lambda kind: kind.__name__)


def identity(classes=3):
    """A classifier that returns its input."""
    return keras.Sequential([keras.Input((classes,)), layers.Identity()])


@keras.saving.register_keras_serializable(package="tests")
class Halved(keras.Model):
    """A model with a call of its own."""

    def call(self, inputs):
        return inputs / 2


@KINDS
@pytest.mark.parametrize("from_logits", [True, False])
def test_models_predict_what_was_fitted(kind, from_logits, tmp_path, request):
    if from_logits:  # the other form is compiled
        request.getfixturevalue("eagerly")
    given = LOGITS if from_logits else softmax(LOGITS, axis=1)
    model = kind(identity(), from_logits)
    before = model.predict(given, verbose=0)  # compiles
    expected = given if kind is ibnn.IsotonicScaling or not from_logits else log_softmax(given, 1)
    if kind is ibnn.IsotonicScaling and from_logits:
        before, expected = softmax(before, axis=1), softmax(given, axis=1)
    np.testing.assert_allclose(before, expected, atol=1e-5)
    weight = np.where(LABELS == 0, 3, 1)
    assert model.fit(given, LABELS, sample_weight=weight) is model
    found = model.predict(given, verbose=0)
    parameter = FITS[kind](LOGITS, LABELS, weight)
    expected = parameter.probabilities(LOGITS)
    np.testing.assert_allclose(softmax(found, 1) if from_logits else found, expected, atol=2e-5)
    scores = model.evaluate(given, LABELS, verbose=0, return_dict=True)
    assert scores["nll"] == pytest.approx(-np.log(expected[np.arange(150), LABELS]).mean(), 1e-4)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert (type(loaded), loaded.classes, loaded.from_logits) == (kind, 3, from_logits)
    np.testing.assert_array_equal(loaded.predict(given, verbose=0), found)


@pytest.mark.once
@KINDS
@pytest.mark.parametrize("from_logits", [True, False])
def test_two_classes_by_one_output(kind, from_logits, eagerly):
    logits, y = LOGITS[:, :1] - LOGITS[:, 1:2], (LABELS == 0).astype(int)
    given = logits if from_logits else expit(logits)
    model = kind(identity(1), from_logits).fit(given, y)
    both = np.concatenate([np.zeros_like(logits), logits], axis=1)
    expected = FITS[kind](both, y).probabilities(both)[:, 1:]
    found = model.predict(given, verbose=0)
    assert found.shape == (150, 1)
    np.testing.assert_allclose(found, logit(expected) if from_logits else expected, atol=1e-4)
    row = model.evaluate(given, y, verbose=0, return_dict=True)
    assert row["accuracy"] == pytest.approx(np.mean((expected[:, 0] > 0.5) == y))


def test_maps_are_those_of_scikit_learn():
    p = RNG.random((200, 2)).astype("float32")
    maps = [IsotonicRegression(out_of_bounds="clip") for _ in range(2)]
    y = RNG.random((200, 2)) < p
    corners = np.zeros((2, 2, 64), "float32")
    for number, one in enumerate(maps):
        one.fit(p[:, number].astype("float64"), y[:, number])
        size = len(one.X_thresholds_)
        corners[:, number] = np.c_[one.X_thresholds_, one.y_thresholds_][
            np.minimum(np.arange(64), size - 1)
        ].T
        assert size < 64
    x = np.concatenate([RNG.random((300, 2)), p, [[-1, -1], [0, 0], [1, 1], [2, 2]]])
    x = x.astype("float32")
    found = interpolated(ops.convert_to_tensor(x), *map(ops.convert_to_tensor, corners))
    expected = [one.predict(x[:, number].astype("float64")) for number, one in enumerate(maps)]
    np.testing.assert_allclose(ops.convert_to_numpy(found), np.stack(expected, 1), atol=1e-6)


@pytest.mark.once
def test_positions_and_draws(eagerly):
    dense = keras.Sequential([keras.Input((5, 3)), layers.Softmax()])
    scaled = ibnn.VectorScaling(dense).fit(LOGITS.reshape(30, 5, 3), LABELS.reshape(30, 5))
    expected = best_vector(LOGITS, LABELS)
    np.testing.assert_allclose(ops.convert_to_numpy(scaled.scales), expected.scale, rtol=1e-4)
    # Draws of a stochastic network are scaled before they are averaged.
    inner = keras.Sequential([keras.Input((3,)), ibnn.StochasticDense(3, train_size=9, seed=0)])
    options = {"samples": 4, "seed": 0, "return_samples": True, "head": "softmax"}
    plain = ibnn.MonteCarlo(inner, from_logits=True, **options).predict(LOGITS, verbose=0)
    for kind, fit in FITS.items():
        model = kind(inner, from_logits=True)
        parameter = fit(LOGITS, LABELS)
        model.assign(parameter)
        found = ibnn.MonteCarlo(model, **options).predict(LOGITS, verbose=0)
        draws = parameter.probabilities(np.log(plain["samples"]))
        np.testing.assert_allclose(found["mean"], draws.mean(axis=1), atol=1e-4)


@pytest.mark.once
@KINDS
def test_classes_must_be_known(kind, eagerly):
    with pytest.raises(ValueError, match="`classes` is unknown.*such as classes=10"):
        kind(Halved(), from_logits=True)
    model = kind(Halved(), from_logits=True, classes=3).fit(LOGITS, LABELS)
    np.testing.assert_allclose(
        softmax(model.predict(LOGITS, verbose=0), axis=1),
        FITS[kind](LOGITS / 2, LABELS).probabilities(LOGITS / 2),
        atol=2e-5,
    )
    with pytest.raises(ValueError, match="`classes` is 4, but model 'halved.*give classes=3"):
        kind(Halved(name="halved"), from_logits=True, classes=4).fit(LOGITS, LABELS)


@pytest.mark.once
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="SavedModel")
@KINDS
def test_exported(kind, tmp_path):
    import tensorflow as tf

    model = kind(keras.Sequential([keras.Input((3,), name="x"), layers.Softmax()]))
    model.fit(LOGITS, LABELS)
    path = ibnn.export(model, tmp_path / "exported", samples=1)
    served = tf.saved_model.load(path).signatures["serve"](x=tf.constant(LOGITS))
    expected = FITS[kind](LOGITS, LABELS).probabilities(LOGITS)
    np.testing.assert_allclose(served["mean"], expected, atol=2e-5)
