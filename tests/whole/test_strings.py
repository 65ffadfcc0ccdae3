"""Models of texts take strings in any array, and keep their vocabulary."""

import keras
import numpy as np
import pytest
from keras import layers

import tfp_ibnn as ibnn
from tests.calibration.tools import methods
from tfp_ibnn.calibration import fine_tuned, run, untrained
from tfp_ibnn.decisions.hashing import uniform_of_arrays

pytestmark = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="TensorFlow's")

TEXTS = np.array(["good film", "bad film", "great fun", "no fun"] * 10)
LABELS = np.array([1, 0, 1, 0] * 10)
KINDS = {
    "strings": TEXTS,
    "objects": TEXTS.astype(object),
    "bytes": np.char.encode(TEXTS),
    "column": TEXTS[:, None],
}

PINNED = [0.42563909, 0.23897117]  # random numbers of two texts


@pytest.fixture(autouse=True)
def fast(eagerly):
    """Nothing said here is about compiled graphs."""


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    words = layers.TextVectorization(20, output_sequence_length=3)
    words.adapt(TEXTS)
    inputs = keras.Input((), dtype="string")
    x = layers.Flatten()(layers.Embedding(20, 2)(words(inputs)))
    made = keras.Model(inputs, layers.Dense(2)(layers.Dense(4, "tanh")(x)))
    made.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_strings_in_any_array(model, kind):
    x = KINDS[kind]
    stochastic = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=40)
    mc = ibnn.MonteCarlo(stochastic, 2, seed=0, head="softmax", from_logits=True)
    expected = mc.predict(KINDS["objects"], verbose=0)["mean"]
    np.testing.assert_allclose(mc.predict(x, verbose=0)["mean"], expected, rtol=1e-5)
    assert np.isfinite(mc.evaluate(x, LABELS, verbose=0)).all()
    ibnn.TemperatureScaling(model).fit(x, LABELS)
    assert ibnn.Conformal(model).fit(x, LABELS).predict(x).shape == (40, 2)
    assert ibnn.OODDetector(model, "knn", k=3).fit(x).score(x).shape == (40,)
    laplace = ibnn.Laplace(model).fit(x, LABELS, verbose=0)
    assert ibnn.MonteCarlo(laplace, 2).predict(x, verbose=0)["mean"].shape == (40, 2)


def test_a_list_of_strings_is_refused(model):
    mc = ibnn.MonteCarlo(model, 1, head="softmax", from_logits=True)
    with pytest.raises(ValueError, match=r"give an array of them: np.array\(x\)"):
        mc.predict(TEXTS.tolist(), verbose=0)


@pytest.mark.parametrize("verb", ["calibrate", "laplace", "temperature", "distill", "fit"])
def test_a_list_of_strings_is_refused_by_all(model, verb):
    x = TEXTS.tolist()
    sto = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=40)
    sto.compile("sgd", model.loss)
    verbs = {
        "calibrate": lambda: ibnn.calibrate(model, (x, LABELS), (x, LABELS)),
        "laplace": lambda: ibnn.Laplace(model).fit(x, LABELS),
        "temperature": lambda: ibnn.TemperatureScaling(model).fit(x, LABELS),
        "distill": lambda: ibnn.distill(ibnn.MonteCarlo(sto, 2), x),
        "fit": lambda: sto.fit(x, LABELS),
    }
    with pytest.raises(ValueError, match=r"single strings; give an array of them: np.array\(x\)"):
        verbs[verb]()


def test_a_dataset_of_strings(model):
    tf = pytest.importorskip("tensorflow")
    data = tf.data.Dataset.from_tensor_slices((TEXTS, LABELS)).batch(16)
    expected = ibnn.Laplace(model).fit(KINDS["objects"], LABELS, verbose=0)
    found = ibnn.Laplace(model).fit(data, verbose=0)
    one, other = (float(x.prior_precision) for x in (found, expected))
    assert one == pytest.approx(other, rel=1e-4)


def made_text_model():
    """A classifier of texts with dropout, as a stranger would write it, trained for a moment."""
    keras.utils.set_random_seed(0)
    words = layers.TextVectorization(20, output_sequence_length=3)
    words.adapt(TEXTS)
    inputs = keras.Input((1,), dtype="string", name="review")
    x = layers.Embedding(20, 4, mask_zero=True)(words(inputs))
    x = layers.GlobalAveragePooling1D()(x)
    x = layers.Dropout(0.2)(layers.Dense(4, "relu")(x))
    made = keras.Model(inputs, layers.Dense(2, "softmax")(x))
    made.compile("adam", "sparse_categorical_crossentropy")
    return made


def same(loaded, model, x):
    found, expected = (each.predict(x, verbose=0)["mean"] for each in (loaded, model))
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("kind", ["strings", "objects"])
def test_a_text_classifier_through_every_verb(kind, tmp_path):
    x, plain = KINDS[kind], made_text_model()
    stochastic = ibnn.to_stochastic(plain, ibnn.NormalAffine(), train_size=40, seed=0)
    stochastic.compile("adam", "sparse_categorical_crossentropy")
    history = stochastic.fit(x, LABELS, validation_data=(x, LABELS), verbose=0).history
    assert np.isfinite(history["val_loss"]).all()
    assert np.isfinite(stochastic.evaluate(x, LABELS, verbose=0)).all()
    assert stochastic.predict(x, verbose=0).shape == (40, 2)
    assert np.isfinite(stochastic.train_on_batch(x, LABELS)).all()
    mc = ibnn.MonteCarlo(stochastic, 2, seed=0)
    mc.save(tmp_path / "mc.keras")
    same(keras.models.load_model(tmp_path / "mc.keras"), mc, x)
    stochastic.save(tmp_path / "stochastic.keras")
    loaded = keras.models.load_model(tmp_path / "stochastic.keras")
    assert np.isfinite(loaded.fit(x, LABELS, verbose=0).history["loss"]).all()
    assert ibnn.MonteCarlo(plain, 2, dropout=True).predict(x, verbose=0)["mean"].shape == (40, 2)
    scaled = ibnn.TemperatureScaling(plain).fit(x, LABELS)
    assert scaled.predict(x, verbose=0).shape == (40, 2)
    assert np.isfinite(scaled.evaluate(x, LABELS, verbose=0)).all()
    scaled.save(tmp_path / "scaled.keras")
    found = keras.models.load_model(tmp_path / "scaled.keras").predict(x, verbose=0)
    np.testing.assert_allclose(found, scaled.predict(x, verbose=0), atol=1e-6)


@pytest.mark.parametrize("kind", ["strings", "objects"])
def test_decisions_on_texts_are_saved_and_loaded(kind, tmp_path):
    x = KINDS[kind]
    mc = ibnn.MonteCarlo(ibnn.Laplace(made_text_model()).fit(x, LABELS, verbose=0), 2, seed=0)
    mc.save(tmp_path / "laplace.keras")
    same(keras.models.load_model(tmp_path / "laplace.keras"), mc, x)
    sets = ibnn.Conformal(mc, "aps").fit(x, LABELS)
    sets.save(tmp_path / "sets.keras")
    loaded = keras.saving.load_model(tmp_path / "sets.keras")
    np.testing.assert_array_equal(loaded.predict(x), sets.predict(x))
    for score in ("entropy", "mahalanobis"):
        detector = ibnn.OODDetector(mc, score).fit(x, LABELS)
        assert detector.evaluate(x[:20], x[20:])["auroc"] >= 0
        detector.save(tmp_path / "detector.keras")
        loaded = keras.saving.load_model(tmp_path / "detector.keras")
        np.testing.assert_allclose(loaded.score(x), detector.score(x), rtol=1e-4)
        np.testing.assert_allclose(detector.predict(x, verbose=0), detector.score(x), rtol=1e-4)


@pytest.mark.parametrize("kind", ["strings", "objects"])
def test_texts_are_calibrated(kind, monkeypatch):
    kept = methods(untrained.as_it_is, untrained.mc_dropout, minutes=(fine_tuned.fine_tuned,))
    monkeypatch.setattr(run, "METHODS", kept)
    x, y = np.tile(KINDS[kind], 2), np.tile(LABELS, 2)
    options = {"epochs": 1, "samples": 2, "verbose": False}
    report = ibnn.calibrate(made_text_model(), (x, y), (x, y), **options)
    assert report.evaluate((x, y), verbose=False)["fine-tuned"]["accuracy"] >= 0
    assert report.model.predict(x, verbose=0)["mean"].shape == (80, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_randomized_sets_of_texts(model, kind):
    x = KINDS[kind]
    sets = ibnn.Conformal(model, "aps", 0.7, randomized=0).fit(x, LABELS)
    expected = ibnn.Conformal(model, "aps", 0.7, randomized=0).fit(KINDS["objects"], LABELS)
    np.testing.assert_array_equal(sets.thresholds, expected.thresholds)
    found = sets.predict(x)
    np.testing.assert_array_equal(found, expected.predict(KINDS["objects"]))
    alone = [sets.predict(x[row : row + 1])[0] for row in range(4)]
    np.testing.assert_array_equal(alone, found[:4])
    called = sets(keras.ops.convert_to_tensor(x.astype(object)))["set"]
    np.testing.assert_array_equal(called, found)


def test_a_text_decides_its_random_number():
    texts = np.array([f"text {number}" for number in range(2000)])
    u = uniform_of_arrays(texts, 0)
    assert abs(u.mean() - 0.5) < 4 * (1 / 12 / len(u)) ** 0.5
    assert len(np.unique(u)) == len(u)
    assert (u != uniform_of_arrays(texts, 1)).all()
    order = np.random.default_rng(0).permutation(len(texts))
    np.testing.assert_array_equal(uniform_of_arrays(texts[order].astype(object), 0), u[order])
    # What this version has given stays, since thresholds in files are made with it.
    np.testing.assert_allclose(
        uniform_of_arrays(np.array(["good film", "é"]), 7), PINNED, rtol=1e-6
    )


def test_randomized_sets_of_texts_are_saved_and_exported(tmp_path):
    tf = pytest.importorskip("tensorflow")
    tf.config.run_functions_eagerly(False)
    data = tf.data.Dataset.from_tensor_slices((TEXTS[:, None], LABELS)).batch(16)
    sets = ibnn.Conformal(made_text_model(), "aps", 0.7, randomized=0).fit(data)
    expected = sets.predict(TEXTS[:, None])
    np.testing.assert_array_equal(sets.predict(data), expected)
    sets.save(tmp_path / "sets.keras")
    loaded = keras.saving.load_model(tmp_path / "sets.keras")
    np.testing.assert_array_equal(loaded.predict(TEXTS[:, None]), expected)
    sets.export(tmp_path / "served")
    serve = tf.saved_model.load(str(tmp_path / "served")).signatures["serve"]
    np.testing.assert_array_equal(serve(review=tf.constant(TEXTS[:, None]))["set"], expected)


def test_texts_are_exported(tmp_path):
    tf = pytest.importorskip("tensorflow")
    tf.config.run_functions_eagerly(False)  # a file holds compiled functions
    stochastic = ibnn.to_stochastic(made_text_model(), ibnn.NormalAffine(), train_size=40)
    mc = ibnn.MonteCarlo(stochastic, 2, seed=0)
    path = ibnn.export(mc, tmp_path / "served")
    serve = tf.saved_model.load(str(path)).signatures["serve"]
    found = serve(review=tf.constant(TEXTS[:, None]))["mean"]
    np.testing.assert_allclose(found, mc.predict(TEXTS, verbose=0)["mean"], atol=1e-5)
    scores = ibnn.exported_scores(path, TEXTS[:, None], LABELS)
    assert scores["nll"] == pytest.approx(mc.evaluate(TEXTS, LABELS, verbose=0)[0], abs=1e-5)
