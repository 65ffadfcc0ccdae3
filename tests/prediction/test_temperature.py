import contextlib
import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_softmax, softmax

import tfp_ibnn as ibnn
from tfp_ibnn.data.positions import PositionSample
from tfp_ibnn.likelihoods import temperature as module
from tfp_ibnn.prediction import scaling

pytestmark = pytest.mark.once

RNG = np.random.default_rng(0)
LABELS = RNG.integers(3, size=120)
LOGITS = (3 * (RNG.standard_normal((120, 3)) + np.eye(3)[LABELS])).astype("float32")
PROBABILITIES = softmax(LOGITS, -1)
WEIGHTS = np.where(LOGITS.argmax(-1) == LABELS, 2, 1)


def best(logits, labels, weights=None):
    """The temperature by another way: a search over T itself."""

    def loss(t):
        return np.average(
            -log_softmax(logits / t, -1)[np.arange(len(labels)), labels], weights=weights
        )

    return minimize_scalar(loss, bounds=(0.05, 50), options={"xatol": 1e-9}).x


def identity(classes=3, **kwargs):
    """A classifier that returns its input."""
    return keras.Sequential([keras.Input((classes,)), layers.Identity()], **kwargs)


def scaled(model=None, from_logits=True, x=LOGITS, y=LABELS, **kwargs):
    wrapped = ibnn.TemperatureScaling(model or identity(), from_logits)
    return wrapped.fit(x, y, **kwargs)


@keras.saving.register_keras_serializable(package="tests")
class Means(keras.Model):
    """As a Monte Carlo model: several statistics of the probabilities."""

    def call(self, inputs):
        return {"mean": ops.softmax(inputs), "std": 0 * inputs}


@keras.saving.register_keras_serializable(package="tests")
class Opaque(keras.Model):
    def call(self, inputs):
        return 2 * inputs


# The fit.


def test_temperature_has_the_least_loss():
    model = scaled()
    assert float(model.temperature) == pytest.approx(best(LOGITS, LABELS), rel=1e-5)
    assert float(model.temperature) > 1.5
    wider = scaled(x=4 * LOGITS)
    assert float(wider.temperature) == pytest.approx(4 * float(model.temperature), rel=1e-5)


def test_probabilities_have_the_same_temperature_as_their_logits():
    expected = best(LOGITS, LABELS)
    model = scaled(from_logits=False, x=PROBABILITIES)
    assert float(model.temperature) == pytest.approx(expected, rel=1e-4)
    found = ops.convert_to_numpy(model(PROBABILITIES))
    np.testing.assert_allclose(found, softmax(LOGITS / expected, -1), atol=1e-5)
    found = ops.convert_to_numpy(scaled()(LOGITS))
    np.testing.assert_allclose(found, LOGITS / expected, rtol=1e-4)


@pytest.mark.parametrize("from_logits", [True, False])
def test_two_classes_by_one_output(from_logits):
    labels, logits = LABELS % 2, LOGITS[:, 1:2] - LOGITS[:, :1]
    expected = best(np.c_[np.zeros_like(logits), logits], labels)
    given = logits if from_logits else expit(logits)
    model = scaled(identity(1), from_logits, given, labels)
    assert float(model.temperature) == pytest.approx(expected, rel=1e-3)
    found = ops.convert_to_numpy(model(given))
    outputs = logits / expected
    np.testing.assert_allclose(found, outputs if from_logits else expit(outputs), rtol=2e-3)


def test_weights_labels_and_positions():
    weights = WEIGHTS
    expected = best(LOGITS, LABELS, weights)
    assert expected != pytest.approx(best(LOGITS, LABELS), rel=1e-2)
    model = scaled(y=np.eye(3)[LABELS], sample_weight=weights)
    assert float(model.temperature) == pytest.approx(expected, rel=1e-5)
    dense = ibnn.TemperatureScaling(
        keras.Sequential([keras.Input((4, 3)), layers.Identity()]), from_logits=True
    )
    dense.fit(LOGITS.reshape(30, 4, 3), LABELS.reshape(30, 4), weights.reshape(30, 4))
    assert float(dense.temperature) == pytest.approx(expected, rel=1e-5)


def test_positions_are_sampled_without_those_that_do_not_count(monkeypatch):
    """Masked steps and those of weight 0 may hold any label; all others are as likely."""
    masked = keras.Sequential([keras.Input((4, 3)), layers.Masking(), layers.Identity()])
    x, y, weights = LOGITS.reshape(30, 4, 3).copy(), LABELS.reshape(30, 4).copy(), WEIGHTS.copy()
    weights = weights.reshape(30, 4)
    counts = np.ones((30, 4), bool)
    counts[:, 3] = counts[::2, 1] = False
    x[:, 3], y[~counts] = 0, 99
    weights[::2, 1] = 0
    rows = counts.ravel()
    expected = best(LOGITS[rows], LABELS[rows], WEIGHTS[rows])
    found = ibnn.TemperatureScaling(masked, from_logits=True).fit(x, y, weights, batch_size=7)
    assert float(found.temperature) == pytest.approx(expected, rel=1e-5)
    found = ibnn.TemperatureScaling(masked, from_logits=True).fit(iter([(x, y, weights)]))
    assert float(found.temperature) == pytest.approx(expected, rel=1e-5)
    temperatures = []
    for seed in range(20):
        sample = PositionSample(40, seed)
        monkeypatch.setattr(scaling, "PositionSample", lambda sample=sample: sample)
        fitted = ibnn.TemperatureScaling(masked, from_logits=True).fit(x, y, weights)
        assert len(sample.rows()[0]) == 40
        temperatures.append(float(fitted.temperature))
    assert np.ptp(temperatures) > 0.01
    assert np.median(temperatures) == pytest.approx(expected, rel=0.15)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="at least one position that counts"):
        ibnn.TemperatureScaling(masked, from_logits=True).fit(x, y, 0 * weights)


def test_classifier_stays_as_it_is():
    inner = keras.Sequential([keras.Input((3,)), layers.Dense(3)])
    before = [w.copy() for w in inner.get_weights()]
    model = scaled(inner, None)
    for old, new in zip(before, inner.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert inner.trainable
    assert [w.path for w in model.trainable_weights] == [w.path for w in inner.trainable_weights]
    assert any(w is model.temperature for w in model.non_trainable_weights)


def test_calibration_is_better_after_it(eagerly):
    model = ibnn.TemperatureScaling(identity(), from_logits=True)
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", ibnn.ExpectedCalibrationError(from_logits=True)],
    )
    before = model.evaluate(LOGITS, LABELS, verbose=0, return_dict=True)
    model.fit(LOGITS, LABELS)
    after = model.evaluate(LOGITS, LABELS, verbose=0, return_dict=True)
    assert after["loss"] < before["loss"] - 0.05
    assert after["ece"] < before["ece"] - 0.05
    assert after["accuracy"] == before["accuracy"]


def test_impossible_and_certain_predictions():
    certain = np.array([[1, 0, 0], [0, 1, 0], [0, 1, 0], [0.2, 0.2, 0.6]], "float32")
    model = scaled(from_logits=False, x=certain, y=np.array([0, 1, 2, 2]))
    assert 1 < float(model.temperature) < 100
    found = ops.convert_to_numpy(model(certain))
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-5)
    excluded = LOGITS.copy()
    excluded[np.arange(120), (LABELS + 1) % 3] = -np.inf
    kept = np.take_along_axis(LOGITS, np.c_[LABELS, (LABELS + 2) % 3], -1)
    expected = best(kept, np.zeros(120, int))
    assert float(scaled(x=excluded).temperature) == pytest.approx(expected, rel=1e-4)


# Datasets.


class Batches(keras.utils.PyDataset):
    def __init__(self, weights=None):
        super().__init__()
        self.arrays = (LOGITS, LABELS) if weights is None else (LOGITS, LABELS, weights)

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return tuple(part[40 * index : 40 * index + 40] for part in self.arrays)


def test_datasets_bring_their_labels():
    expected = best(LOGITS, LABELS)
    for data in (Batches(), (Batches()[i] for i in range(3))):
        assert float(scaled(x=data, y=None).temperature) == pytest.approx(expected, rel=1e-5)
    model = scaled(x=Batches(WEIGHTS), y=None)
    assert float(model.temperature) == pytest.approx(best(LOGITS, LABELS, WEIGHTS), rel=1e-5)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="tf.data")
def test_shuffled_dataset_keeps_labels_with_their_inputs():
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((LOGITS, LABELS)).shuffle(120).batch(50)
    found = float(scaled(x=data, y=None).temperature)
    assert found == pytest.approx(best(LOGITS, LABELS), rel=1e-5)


def test_dictionaries_are_taken_at_their_mean():
    for x, y in ((LOGITS, LABELS), (Batches(), None)):
        model = scaled(Means(), None, x, y)
        assert float(model.temperature) == pytest.approx(best(LOGITS, LABELS), rel=1e-4)
        outputs = ops.convert_to_numpy(model(LOGITS))
        np.testing.assert_allclose(outputs, softmax(LOGITS / best(LOGITS, LABELS), -1), atol=1e-4)


# Logits or probabilities.


def functional(*tail):
    inputs = outputs = keras.Input((3,))
    for part in tail:
        outputs = part(outputs)
    return keras.Model(inputs, outputs)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: functional(layers.Dense(3)), True),
        (lambda: functional(layers.Dense(3, activation="log_softmax")), True),
        (lambda: functional(layers.Dense(3, activation="softmax")), False),
        (lambda: functional(layers.Dense(1, activation="sigmoid")), False),
        (lambda: functional(layers.Dense(3), layers.Softmax()), False),
        (lambda: functional(layers.Dense(3), layers.Activation("softmax")), False),
        (lambda: functional(layers.Dense(3), ops.softmax), False),
        (lambda: functional(layers.Dense(3, "softmax"), layers.Activation("linear")), False),
        (lambda: functional(layers.Dense(3), layers.Activation("linear")), True),
        (lambda: functional(layers.Dense(6), layers.Reshape((2, 3))), True),
        (lambda: functional(functional(layers.Dense(3, "softmax"))), False),
        (lambda: functional(ibnn.StochasticDense(3, "softmax", train_size=9)), False),
        (lambda: functional(ibnn.StochasticDense(3, train_size=9)), True),
        (lambda: keras.Sequential([layers.Dense(4), layers.Dense(3, "softmax")]), False),
        (lambda: functional(layers.Dense(3, "relu")), None),
        (lambda: functional(layers.Dense(3), lambda x: x * 2), None),
        (Opaque, None),
    ],
)
def test_last_layer_tells_logits_from_probabilities(model, expected):
    model = model()
    scaling = ibnn.TemperatureScaling(model)
    x = np.ones((2, 3), "float32")
    if expected is None:
        with pytest.raises(ValueError, match=f"{model.name!r}, .*Give from_logits=True"):
            scaling(x)
        scaling = ibnn.TemperatureScaling(model, from_logits=True)
        expected = True
    scaling.temperature.assign(2.0)
    with ibnn.noise_off(model) if ibnn.stochastic_layers(model) else contextlib.nullcontext():
        found, plain = (ops.convert_to_numpy(one(x)) for one in (scaling, model))
    if expected:
        np.testing.assert_allclose(found, plain / 2, rtol=1e-5)
    elif plain.shape[-1] == 1:
        np.testing.assert_allclose(found, expit(np.log(plain / (1 - plain)) / 2), rtol=1e-5)
    else:
        np.testing.assert_allclose(found, softmax(np.log(plain) / 2, -1), rtol=1e-5)


# Saving.


@pytest.mark.parametrize("make", [identity, Means, lambda: functional(layers.Dense(3))])
def test_saved_with_its_temperature(make, tmp_path):
    model = scaled(make(), True if make is identity else None)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="You are saving a model that has not yet been")
        model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded, ibnn.TemperatureScaling)
    assert float(loaded.temperature) == float(model.temperature) != 1
    assert loaded.from_logits == model.from_logits
    np.testing.assert_array_equal(*(one.predict(LOGITS, verbose=0) for one in (model, loaded)))


def test_config_keeps_all_but_the_temperature():
    model = scaled(identity(name="inner"), x=LOGITS)
    again = ibnn.TemperatureScaling.from_config(model.get_config())
    assert (again.name, again.model.name, again.from_logits) == (model.name, "inner", True)
    assert float(again.temperature) == 1
    assert again.get_config() == model.get_config()


@pytest.mark.parametrize("name", ["mixed_float16", "mixed_bfloat16", "float64"])
def test_policies(policy, name):
    policy(name)
    model = scaled(functional(layers.Activation("softmax")), None)
    dtype = "float64" if name == "float64" else "float32"
    assert model.temperature.dtype == dtype
    assert keras.backend.standardize_dtype(model(LOGITS).dtype) == dtype
    assert float(model.temperature) == pytest.approx(best(LOGITS, LABELS), rel=0.1)


# What cannot be fitted.


@pytest.mark.parametrize("from_logits", [True, False])
def test_separable_data_stop_at_the_bound(from_logits):
    perfect = np.eye(3, dtype="float32")[LABELS]
    given = 5 * perfect if from_logits else 0.7 * perfect + 0.1
    with pytest.warns(UserWarning, match="stops at 0.01, because .* every prediction is right"):
        model = scaled(from_logits=from_logits, x=given)
    assert float(model.temperature) == pytest.approx(module.BOUNDS[0])
    assert np.isfinite(ops.convert_to_numpy(model(given))).all()


def test_predictions_worse_than_chance_stop_at_the_bound():
    with pytest.warns(UserWarning, match="stops at 100, because .* no better than chance"):
        model = scaled(x=-5 * np.eye(3, dtype="float32")[LABELS])
    assert float(model.temperature) == pytest.approx(module.BOUNDS[1])


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (LOGITS[:0], LABELS[:0], "`x` must hold at least one example"),
        (iter(()), None, "`x` must hold at least one example"),
        (LOGITS, None, "`y` must hold the labels"),
        (Batches(), LABELS, "`y` and `sample_weight` must come from `x`"),
        (iter([(LOGITS,)]), None, "batches .x, y. with labels"),
        (LOGITS, np.ones(120, int), "`y` must hold at least two classes .*; got only 1"),
        (LOGITS, LABELS + 1, "`y` must be whole numbers from 0 to 2.*got .3."),
        (LOGITS, LABELS[:7], r"`y` must have the shape \(120,\)"),
        (np.full((2, 3), np.nan), [0, 1], r"`model\(x\)` must be logits"),
    ],
)
def test_bad_data_are_named(x, y, message):
    model = ibnn.TemperatureScaling(identity(), from_logits=True)
    with pytest.raises(ValueError, match=message):
        model.fit(x, y)
    assert float(model.temperature) == 1


def test_bad_model():
    with pytest.raises(ValueError, match="`model` must be a Keras classifier"):
        ibnn.TemperatureScaling(layers.Dense(3))
    inputs = keras.Input((3,))
    two = keras.Model(inputs, [layers.Dense(3)(inputs), layers.Dense(3)(inputs)])
    with pytest.raises(ValueError, match="`model` must return one tensor"):
        ibnn.TemperatureScaling(two).fit(LOGITS, LABELS)


def test_a_scaled_model_can_be_scaled_again():
    twice = ibnn.TemperatureScaling(scaled())
    assert twice.returns_logits
    twice.temperature.assign(4.0)
    np.testing.assert_allclose(twice(LOGITS), twice.model(LOGITS) / 4, rtol=1e-5)


def test_one_number_of_a_model_of_its_own_is_scored_as_yes_or_no(eagerly):
    x, y = LOGITS[:, :1], (LABELS == 0).astype(int)
    model = scaled(Opaque(), x=x, y=y)
    scores = model.evaluate(x, y, verbose=0, return_dict=True)
    known = -np.log(expit(np.where(y, 1, -1) * ops.convert_to_numpy(model(x))[:, 0]))
    assert scores["nll"] == pytest.approx(known.mean(), rel=1e-4)


@pytest.mark.parametrize("loss", ["mse", ibnn.layers.GaussianNLL()])
def test_numbers_are_refused_by_what_they_are(loss):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)], name="prices")
    model.compile("sgd", loss)
    for verb in (ibnn.TemperatureScaling(model).fit, ibnn.TemperatureScaling(model).evaluate):
        with pytest.raises(ValueError, match=r"'prices', predicts numbers.*ibnn\.calibrate fits"):
            verb(LOGITS, LOGITS[:, :2])
    brier = keras.Sequential([keras.Input((3,)), layers.Softmax()])
    brier.compile("sgd", "mse")  # a Brier score
    ibnn.TemperatureScaling(brier).fit(LOGITS, LABELS)
