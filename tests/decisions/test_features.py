"""The features of networks, of posteriors and of mixtures, in which unusual inputs stand out."""

import keras
import numpy as np
import pytest
from keras import layers
from sklearn.covariance import EmpiricalCovariance

import tfp_ibnn as ibnn
from tests.decisions.tools import NEW, D, X, oracle


@pytest.fixture(autouse=True)
def fast(eagerly):
    """Nothing said here is about compiled graphs."""


def test_features_of_posteriors_are_those_at_the_mean(model):
    """Noise is off, a weight posterior is at its mean; outputs are averaged."""
    sto = ibnn.to_stochastic(model, ibnn.NormalAffine(initial_scale=0.5), train_size=150)
    plain = ibnn.to_deterministic(sto)
    mc = ibnn.MonteCarlo(sto, samples=4)
    found = ibnn.OODDetector(mc, "vim").fit(X).score(NEW)
    known = ibnn.OODDetector(plain, "vim").fit(X).score(NEW)
    np.testing.assert_allclose(found, known, rtol=1e-3, atol=1e-3)
    epistemic = ibnn.OODDetector(mc, "epistemic")
    known = ibnn.MonteCarlo(sto, samples=4, seed=0).predict(NEW, verbose=0)["epistemic"]
    np.testing.assert_allclose(epistemic.score(NEW), known, rtol=1e-4, atol=1e-6)

    other = keras.models.clone_model(model)
    ensemble = ibnn.DeepEnsemble([model, other])
    kept = model.get_weights()
    model.set_weights([0 * w for w in kept])  # the ensemble has its own copy
    with pytest.warns(UserWarning, match="the first of 2 networks"):
        found = ibnn.OODDetector(ensemble, "energy").fit(X).score(NEW)
    model.set_weights(kept)
    np.testing.assert_allclose(found, oracle("energy", model, NEW), rtol=1e-3)


def test_features_of_a_mixture_are_those_of_its_first_network(model, recwarn):
    mixture = ibnn.WeightMixture([model, keras.models.clone_model(model)])
    message = r"np\.mean\(\[ibnn\.OODDetector\(model, 'energy'\)\.fit\(x, y\)\.score\(new\)"
    with pytest.warns(UserWarning, match=message):
        found = ibnn.OODDetector(mixture, "energy").fit(X).score(NEW)
    np.testing.assert_allclose(found, oracle("energy", model, NEW), rtol=1e-3)
    recwarn.clear()
    ibnn.OODDetector(mixture, "entropy")  # of the average over all members
    ibnn.OODDetector(ibnn.WeightMixture([model]), "energy")
    assert not [x for x in recwarn if "networks only" in str(x.message)]


NO_LOOKUP = pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX has no lookups")


@pytest.mark.parametrize("kind", ["numbers", pytest.param("codes", marks=NO_LOOKUP)])
def test_adapted_preprocessing_stays_in_the_features_of_posteriors(kind, tmp_path):
    """Neither its numbers nor its vocabulary are weights that `set_weights` sets."""
    keras.utils.set_random_seed(2)
    data, inputs, adapted = 50 * X[:, :3] + 400, keras.Input((3,)), layers.Normalization()
    if kind == "codes":
        data = np.random.default_rng(1).integers(20, 24, (150, 1))
        inputs = keras.Input((1,), dtype="int64")
        adapted = layers.IntegerLookup(output_mode="one_hot")
    adapted.adapt(data)
    hidden = layers.Dense(D, "tanh")(adapted(inputs))
    model = keras.Model(inputs, layers.Dense(3, "softmax")(hidden))
    expected = ibnn.OODDetector(model, "knn", k=5).fit(data).score(data)
    for posterior in (ibnn.DeepEnsemble([model]), ibnn.WeightMixture([model])):
        detector = ibnn.OODDetector(posterior, "knn", k=5).fit(data)
        np.testing.assert_allclose(detector.score(data), expected, rtol=1e-3, atol=1e-4)
    detector.save(tmp_path / "detector.keras")
    loaded = keras.models.load_model(tmp_path / "detector.keras")
    np.testing.assert_allclose(loaded.score(data), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.once
def test_a_regression_has_features_but_no_classes():
    x = X[:, :2]
    regression = keras.Sequential([keras.Input((2,)), layers.Dense(2), ibnn.layers.GaussianHead()])
    with pytest.raises(ValueError, match="softmax over classes"):
        ibnn.OODDetector(regression)
    found = ibnn.OODDetector(regression, "mahalanobis").fit(x)
    np.testing.assert_allclose(
        found.score(x), EmpiricalCovariance().fit(x).mahalanobis(x), rtol=1e-3
    )


@pytest.mark.once
def test_last_layer_inside_of_a_nested_model():
    inner = keras.Sequential(
        [keras.Input((3,)), layers.Dense(2, "softmax", name="top")], name="inner"
    )
    inputs = keras.Input((2,))
    model = keras.Model(inputs, inner(layers.Dense(3, name="first")(inputs)), name="outer")
    for score in ("energy", "vim"):
        with pytest.raises(ValueError, match="'outer' itself; .* inside of the model 'inner'"):
            ibnn.OODDetector(model, score)
    with pytest.raises(ValueError, match=r"\['first', 'inner'\]; got 'top', which is inside of 'i"):
        ibnn.OODDetector(model, "knn", layer="top")
    assert ibnn.OODDetector(model, "knn", k=3).fit(X[:, :2]).score(X[:, :2]).shape == (len(X),)


@pytest.mark.once
def test_names_of_a_network_from_a_file_may_come_again():
    """Keras numbers automatic names anew in every process."""
    inputs = keras.Input((4, 4, 2))
    last = keras.ops.concatenate([inputs, inputs])._keras_history.operation.name
    stem, _, number = last.rpartition("_")
    name = f"{stem}_{int(number) + 1}" if stem else f"{last}_1"
    skip = layers.Concatenate(name=name)([inputs, layers.Conv2D(2, 1)(inputs)])
    model = keras.Model(inputs, layers.Conv2D(3, 1, activation="softmax")(skip))
    x = np.random.default_rng(0).normal(size=(20, 4, 4, 2)).astype("float32")
    detector = ibnn.OODDetector(model, "knn", k=3).fit(x)
    assert np.isfinite(detector.score(x)).all()
