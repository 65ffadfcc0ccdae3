"""What takes arrays takes datasets of batches as well, and finds the same."""

import keras
import numpy as np
import pytest
from keras import layers

import tfp_ibnn as ibnn

RNG = np.random.default_rng(0)
X = RNG.normal(size=(90, 4)).astype("float32")
Y = (X[:, 0] > 0).astype("int64") + (X[:, 1] > 0)
SIZE = 40  # the last batch is not full


@pytest.fixture(autouse=True)
def fast(eagerly):
    """Nothing said here is about compiled graphs."""


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    made = keras.Sequential([keras.Input((4,)), layers.Dense(6, "tanh"), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(keras.optimizers.Adam(0.05), loss)
    made.fit(X, Y, epochs=20, batch_size=len(X), verbose=0)
    return made


def batches():
    for start in range(0, len(X), SIZE):
        yield X[start : start + SIZE], Y[start : start + SIZE]


class Indexed(keras.utils.PyDataset):
    def __len__(self):
        return -(-len(X) // SIZE)

    def __getitem__(self, index):
        return list(batches())[index]


def shuffled():
    """Another order in each pass."""
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(len(X)).batch(SIZE)


@pytest.fixture(params=[batches, Indexed, shuffled])
def data(request):
    return request.param


def test_conformal(model, data):
    for method, randomized in (("lac", None), ("aps", 0)):
        sets = ibnn.Conformal(model, method, 0.8, randomized=randomized)
        expected = sets.fit(X, Y).thresholds
        np.testing.assert_allclose(sets.fit(data()).thresholds, expected, rtol=1e-5)
        scores = sets.evaluate(data())
        assert scores == pytest.approx(sets.evaluate(X, Y), rel=0.05)
    if data is not shuffled:
        np.testing.assert_array_equal(sets.predict(data()), sets.predict(X))


def test_temperature(model, data, capsys):
    expected = float(ibnn.TemperatureScaling(model).fit(X, Y).temperature)
    scaled = ibnn.TemperatureScaling(model).fit(data())
    assert not capsys.readouterr().out
    assert float(scaled.temperature) == pytest.approx(expected, rel=1e-4)
    ibnn.TemperatureScaling(model).fit(data(), verbose=1)
    assert "s/step" in capsys.readouterr().out


@pytest.mark.parametrize("score", ["entropy", "mahalanobis", "relative_mahalanobis", "energy"])
def test_detector(model, data, score):
    expected = ibnn.OODDetector(model, score).fit(X, Y).score(X)
    detector = ibnn.OODDetector(model, score).fit(data(), verbose=0)
    np.testing.assert_allclose(detector.score(X), expected, rtol=1e-3, atol=1e-3)
    found = detector.evaluate(data(), 9 * X, verbose=0)
    assert found == pytest.approx(detector.evaluate(X, 9 * X), rel=1e-3)


def test_laplace(model, data):
    expected = ibnn.Laplace(model, prior_precision=1.0).fit(X, Y, verbose=0)
    found = ibnn.Laplace(model, prior_precision=1.0).fit(data(), verbose=0)
    assert found.log_marginal_likelihood() == pytest.approx(
        expected.log_marginal_likelihood(), rel=1e-4
    )


def test_refine(model, data):
    gaussian = ibnn.GaussianVI(model).fit(data(), steps=3, verbose=0)
    flows, options = [ibnn.flows.AffineCoupling()], {"steps": 1, "draws": 2, "verbose": 0}
    expected = ibnn.refine(gaussian, flows, X, Y, validation=(X, Y), **options)
    found = ibnn.refine(gaussian, flows, data(), validation=data(), **options)
    assert found.history[0] == pytest.approx(expected.history[0], rel=1e-4)


def test_density(data):
    arrays, batched = (ibnn.FlowDensity([ibnn.flows.Affine()]) for _ in range(2))
    arrays.adapt(X)
    batched.adapt(data())
    np.testing.assert_allclose(batched.loc, arrays.loc, atol=1e-6)
    np.testing.assert_allclose(batched.scale, arrays.scale, rtol=1e-5)
    batched.compile("sgd")
    assert np.isfinite(batched.fit(data(), verbose=0).history["loss"]).all()
    assert np.isfinite(batched.evaluate(data(), verbose=0)).all()
    pairs = ibnn.FlowDensity([ibnn.flows.Affine()], condition=1)
    pairs.adapt(((x, y[:, None]),) for x, y in batches())
    np.testing.assert_allclose(pairs.loc, arrays.loc, atol=1e-6)


@pytest.mark.once
@pytest.mark.parametrize(("verbose", "lines"), [("auto", 2), (1, 2), (0, 0), (False, 0)])
def test_an_ensemble_takes_the_words_of_keras_for_verbose(model, verbose, lines, capsys):
    def build():
        copy = keras.models.clone_model(model)
        copy.compile("sgd", model.loss)
        return copy

    ibnn.DeepEnsemble.train(build, 2, Indexed(), verbose=verbose)
    assert capsys.readouterr().out.count("\n") == lines


@pytest.mark.once
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: ibnn.Conformal(m).fit(batches(), Y), "`y` must come from `x`, a dataset"),
        (lambda m: ibnn.Conformal(m).fit(batches(), groups=Y), "`groups` are for arrays"),
        (lambda m: ibnn.Conformal(m).fit(batches(), batch_size=9), "`batch_size` is for arrays"),
        (lambda m: ibnn.Conformal(m).fit(iter([X])), "`x` must give batches .x, y. with labels"),
        (lambda m: ibnn.Conformal(m).fit(iter([(X, Y, Y)])), "sets take no `sample_weight`"),
        (lambda m: ibnn.Conformal(m).fit(iter([])), "`x` must hold at least one example"),
        (lambda m: ibnn.Conformal(m).fit(shuffled().repeat()), "`x` never ends"),
        (lambda m: ibnn.TemperatureScaling(m).fit(shuffled().repeat()), "`x` never ends"),
        (lambda m: ibnn.OODDetector(m, "knn").fit(shuffled().repeat()), "`x` never ends"),
        (
            lambda m: ibnn.Laplace(m, hessian_structure="lowrank").fit(batches(), verbose=0),
            "`x` is a generator, which can be read only once",
        ),
        (
            lambda m: ibnn.DeepEnsemble.train(lambda: m, 2, batches()),
            "`x` is a generator, which the first of 2 members would use up",
        ),
        (lambda m: ibnn.Laplace(m).fit(X), "Give arrays x and y, a tf.data.Dataset or a PyDataset"),
        (
            lambda m: ibnn.FlowDensity([ibnn.flows.Affine()]).log_prob(Indexed()),
            "`x` must be an array; got a Indexed. `fit`, `evaluate` and `predict` take datasets",
        ),
        (
            lambda m: ibnn.FlowDensity([ibnn.flows.Affine()]).adapt(shuffled().repeat()),
            "`x` never ends",
        ),
    ],
)
def test_what_is_refused(model, make, message):
    with pytest.raises(ValueError, match=message):
        make(model)
