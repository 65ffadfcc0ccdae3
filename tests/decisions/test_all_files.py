"""Sets and detectors of every kind of posterior: the same from a file, and from a SavedModel."""

import functools

import keras
import numpy as np
import pytest
from keras import layers

import tfp_ibnn as ibnn

X = np.random.default_rng(0).normal(size=(60, 3)).astype("float32")
Y = np.arange(60) % 3
NEW = X[:20] + 0.3
needs_tensorflow = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="TensorFlow writes a SavedModel"
)


@pytest.fixture(autouse=True)
def fast(eagerly):
    """What is exported is a graph all the same."""


@functools.cache
def plain(dtype=None):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh", dtype=dtype)])
    model.add(layers.Dense(3, "softmax", dtype=dtype))
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def posterior(kind):
    if kind == "plain":
        return plain()
    if kind == "stochastic":
        scale = ibnn.NormalAffine(initial_scale=0.5)
        return ibnn.MonteCarlo(ibnn.to_stochastic(plain(), scale, train_size=60), samples=4)
    if kind == "ensemble":
        return ibnn.DeepEnsemble([plain(), keras.models.clone_model(plain())])
    options = {"link_approx": "probit"} if kind == "linearised" else {"pred_type": "nn"}
    laplace = ibnn.Laplace(plain(), prior_precision=1.0, **options).fit(X, Y, verbose=0)
    return ibnn.MonteCarlo(laplace, samples=4)


def served(model, folder, x):
    import tensorflow as tf

    signature = tf.saved_model.load(str(ibnn.export(model, folder))).signatures["serve"]
    return {name: value.numpy() for name, value in signature(inputs=tf.constant(x)).items()}


def detector(score):
    return lambda model: ibnn.OODDetector(model, score, k=5)


def sets(method, **options):
    return lambda model: ibnn.Conformal(model, method, 0.4, by="class", **options)


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("plain", detector("relative_mahalanobis")),
        ("plain", sets("aps", randomized=3)),
        ("stochastic", sets("aps")),
        pytest.param("ensemble", detector("knn"), marks=pytest.mark.slow),
        pytest.param("ensemble", sets("raps"), marks=pytest.mark.slow),
        pytest.param("stochastic", detector("vim"), marks=pytest.mark.slow),
        pytest.param("linearised", sets("aps"), marks=pytest.mark.slow),
        pytest.param("linearised", detector("energy"), marks=pytest.mark.slow),
        pytest.param("sampled", sets("lac"), marks=pytest.mark.slow),
        pytest.param("sampled", detector("epistemic"), marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:The network does not seem to be trained")
def test_file_and_export_answer_like_the_object(eagerly, kind, make, tmp_path):
    made = make(posterior(kind)).fit(X, Y)
    is_set = isinstance(made, ibnn.Conformal)

    def answer(model):
        return model.predict(NEW) if is_set else model.score(NEW)

    known = answer(made)
    assert known.min() < known.max()
    made.save(tmp_path / "made.keras")
    loaded = keras.saving.load_model(tmp_path / "made.keras")
    np.testing.assert_allclose(answer(loaded), known, rtol=1e-6, atol=1e-6)
    if keras.backend.backend() == "tensorflow":
        found = served(made, tmp_path / "served", NEW)
        score = found["set" if is_set else "score"]
        np.testing.assert_allclose(score, known, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(found["mean"], made.inner.predict(NEW)["mean"], atol=1e-6)
    if not is_set:
        assert loaded.threshold() == made.threshold()
        # The weights of the network come from the file too, not from a new one.
        np.testing.assert_allclose(answer(loaded.fit(X, Y)), known, atol=1e-6)


@needs_tensorflow
def test_a_detector_with_dead_units_is_exported(tmp_path):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(3, "softmax")])
    x = X * np.float32([1, 0, 0])
    made = ibnn.OODDetector(model, "vim").fit(x)
    score = served(made, tmp_path / "served", NEW)["score"]
    assert np.isfinite(score).all()
    np.testing.assert_allclose(score, made.score(NEW), rtol=1e-5, atol=1e-5)


@pytest.mark.once
def test_intervals_of_a_squared_loss_are_loaded_without_a_word(eagerly, tmp_path, recwarn):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    found = ibnn.Conformal(model, "cqr").fit(X, X[:, 0])
    found.save(tmp_path / "intervals.keras")
    loaded = keras.models.load_model(tmp_path / "intervals.keras")
    assert not [warning for warning in recwarn if "`interval` holds" in str(warning.message)]
    np.testing.assert_array_equal(loaded.predict(NEW), found.predict(NEW))


@needs_tensorflow
def test_intervals_are_exported(eagerly, tmp_path):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2), ibnn.layers.GaussianHead()])
    found = ibnn.Conformal(model, "cqr").fit(X, X[:, 0])
    interval = served(found, tmp_path / "served", NEW)["interval"]
    np.testing.assert_allclose(interval, found.predict(NEW), rtol=1e-6, atol=1e-6)


@pytest.mark.once
def test_what_is_not_exported(tmp_path):
    with pytest.raises(ValueError, match="call `fit`"):
        ibnn.export(ibnn.Conformal(plain()), tmp_path / "a")
    with pytest.raises(ValueError, match="call `fit`"):
        ibnn.OODDetector(plain(), "knn").export(tmp_path / "a")
    fitted = ibnn.Conformal(plain()).fit(X, Y)
    with pytest.raises(ValueError, match="`samples` and `seed`.*leave them out"):
        ibnn.export(fitted, tmp_path / "a", samples=3)
    with pytest.raises(ValueError, match="for `predict` alone"):
        ibnn.export(fitted.fit(X, Y, np.arange(60) % 2), tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="JAX writes no SavedModel")
def test_export_needs_tensorflow(tmp_path):
    with pytest.raises(RuntimeError, match="written by TensorFlow"):
        ibnn.export(ibnn.Conformal(plain()).fit(X, Y), tmp_path / "a")


def test_what_another_model_has_learned_is_refused(tmp_path):
    """Before `fit` there is nothing in a file; after it, what fits the model."""
    wide = keras.Sequential([keras.Input((3,)), layers.Dense(3, "softmax")])
    other = ibnn.OODDetector(wide, "knn", k=5).fit(X)
    detector = ibnn.OODDetector(plain(), "knn", k=5)
    other.save(tmp_path / "other.keras")
    detector.save(tmp_path / "new.keras")
    with pytest.raises(ValueError, match="call `fit` first"):
        keras.saving.load_model(tmp_path / "new.keras").score(X)
    store = {}
    other.save_own_variables(store)
    detector.load_own_variables(store)
    with pytest.raises(ValueError, match="another model's 3 features; `model` has 4"):
        detector.score(X)


def test_half_precision():
    """Scores have full precision, whatever the network has."""
    found = ibnn.Conformal(plain("mixed_float16"), "aps", 0.8).fit(X, Y)
    assert found.evaluate(X, Y)["coverage"] >= 0.8
    exact = keras.models.clone_model(plain())
    exact.set_weights(plain("mixed_float16").get_weights())
    for score in ("knn", "vim"):
        scores = ibnn.OODDetector(plain("mixed_float16"), score, k=5).fit(X, Y).score(NEW)
        assert scores.dtype == "float32"
        known = ibnn.OODDetector(exact, score, k=5).fit(X, Y).score(NEW)
        np.testing.assert_allclose(scores, known, rtol=0.05, atol=0.02)


def test_thresholds_of_a_file_of_0_1_0():
    """They were the scores themselves, rounded to the nearest number."""
    for made in (sets("aps")(plain()).fit(X, Y), ibnn.Conformal(plain(), "lac", 0.8).fit(X, Y)):
        known = made.predict(NEW)
        old = {"thresholds": made.thresholds}
        loaded = ibnn.Conformal(plain(), made.method, made.coverage, by=made.by)
        loaded.load_own_variables(old)
        np.testing.assert_array_equal(loaded.predict(NEW), known)
        np.testing.assert_allclose(loaded.thresholds, made.thresholds, rtol=3e-7)
        assert (loaded.thresholds >= made.thresholds).all()


def test_a_bank_of_a_file_of_0_1_0():
    made = ibnn.OODDetector(plain(), "knn", k=5).fit(X)
    names = ("bank", "center", "known")
    loaded = ibnn.OODDetector(plain(), "knn", k=5)
    loaded.load_own_variables(
        {name: keras.ops.convert_to_numpy(made.arrays[name]) for name in names}
    )
    np.testing.assert_allclose(loaded.score(NEW), made.score(NEW), rtol=1e-6, atol=1e-6)
