import keras
import numpy as np
import pytest
from keras import layers
from scipy.special import logsumexp, softmax
from sklearn.covariance import EmpiricalCovariance
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.neighbors import NearestNeighbors

import tfp_ibnn as ibnn
from tests.precision import at_least

RNG = np.random.default_rng(0)
X = RNG.normal(size=(150, 6)).astype("float32")
NEW, FAR = X[:40] + 0.1, X[:30] + 4
Y = np.arange(150) % 3
D = 4


@pytest.fixture(autouse=True)
def fast(eagerly):
    """Nothing said here is about compiled graphs."""


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(1)
    parts = [keras.Input((6,)), layers.Dense(D, "tanh", name="first")]
    found = keras.Sequential([*parts, layers.Dense(3, "softmax", name="last")])
    found.layers[-1].bias.assign([0.3, -0.2, 0.1])
    return found


def features(model, x):
    kernel, bias, *last = (w.astype("float64") for w in model.get_weights())
    return np.tanh(x @ kernel + bias), *last


def oracle(kind, model, x):
    """The scores by other means: scikit-learn, or the published code's way."""
    f, kernel, bias = features(model, X)
    new = features(model, x)[0]
    logits = new @ kernel + bias
    if kind == "max_probability":
        return -softmax(logits, axis=1).max(axis=1)
    if kind == "entropy":
        p = softmax(logits, axis=1)
        return -(p * np.log(p)).sum(axis=1)
    if kind == "energy":
        return -logsumexp(logits, axis=1)
    if kind == "knn":
        unit = [v / np.linalg.norm(v, axis=1, keepdims=True) for v in (f, new)]
        return NearestNeighbors(n_neighbors=5).fit(unit[0]).kneighbors(unit[1])[0][:, 4]
    if kind == "vim":
        u = -np.linalg.pinv(kernel.T) @ bias
        fitted = EmpiricalCovariance(assume_centered=True).fit(f - u)
        values, vectors = np.linalg.eig(fitted.covariance_)
        null = vectors.T[np.argsort(-values)[D // 2 :]].T
        alpha = (f @ kernel + bias).max(axis=-1).mean()
        alpha /= np.linalg.norm((f - u) @ null, axis=-1).mean()
        return np.linalg.norm((new - u) @ null, axis=-1) * alpha - logsumexp(logits, axis=1)
    means = [f[c == Y].mean(axis=0) for c in range(3)]
    within = EmpiricalCovariance(assume_centered=True).fit(f - np.array(means)[Y])
    near = np.min([within.mahalanobis(new - m) for m in means], axis=0)
    return near - (kind != "mahalanobis") * EmpiricalCovariance().fit(f).mahalanobis(new)


KINDS = (
    "max_probability",
    "entropy",
    "energy",
    "mahalanobis",
    "relative_mahalanobis",
    "knn",
    "vim",
)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_an_oracle(model, kind):
    found = ibnn.OODDetector(model, kind, k=5).fit(X, Y)
    close = {"rtol": 1e-3, "atol": 2 * at_least(5e-5)}  # two layers make the features
    for x in (NEW, FAR):
        np.testing.assert_allclose(found.score(x), oracle(kind, model, x), **close)


@pytest.mark.once
def test_evaluation_and_threshold(model):
    found = ibnn.OODDetector(model, "mahalanobis").fit(X)
    known, unknown = found.score(NEW), found.score(FAR)
    scores = found.evaluate(NEW, FAR)
    labels, both = np.r_[np.zeros(40), np.ones(30)], np.r_[known, unknown]
    assert scores["auroc"] == pytest.approx(roc_auc_score(labels, both))
    assert scores["aupr"] == pytest.approx(average_precision_score(labels, both))
    assert scores["auroc"] > 0.5  # higher is more unusual
    limit = found.threshold(0.9)
    assert np.mean(found.score(X) <= limit) == pytest.approx(0.9, abs=0.01)
    assert np.mean(known <= found.threshold(0.8, NEW)) == pytest.approx(0.8, abs=0.03)


@pytest.mark.once
def test_bank_and_layer(model):
    small = ibnn.OODDetector(model, "knn", k=5, bank=30).fit(X)
    whole = ibnn.OODDetector(model, "knn", k=5).fit(X)
    assert (small.score(FAR) >= whole.score(FAR) - 1e-4).all()
    assert small.score(FAR).sum() > whole.score(FAR).sum()
    inputs = ibnn.OODDetector(model, "mahalanobis", layer="first").fit(X)
    known = EmpiricalCovariance().fit(X).mahalanobis(FAR)
    np.testing.assert_allclose(inputs.score(FAR), known, rtol=1e-3)
    # Positions are averaged.
    image = keras.Sequential([keras.Input((2, 3, 4)), layers.Conv2D(2, 1), layers.Flatten()])
    image.add(layers.Dense(3, "softmax"))
    x = RNG.normal(size=(60, 2, 3, 4)).astype("float32")
    found = ibnn.OODDetector(image, "mahalanobis", layer=image.layers[0].name).fit(x)
    known = EmpiricalCovariance().fit(x.mean(axis=(1, 2))).mahalanobis(x.mean(axis=(1, 2)))
    np.testing.assert_allclose(found.score(x), known, rtol=1e-3)


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


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3, "softmax")

    def call(self, x):
        return self.dense(x)


def own():
    made = Own()
    made(X)
    return ibnn.MonteCarlo(made, 1, head="softmax", from_logits=False)


@pytest.mark.once
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: ibnn.OODDetector(m, "best"), "`score` must be one of"),
        (lambda m: ibnn.OODDetector(own(), "knn"), "needs features of a Functional"),
        (lambda m: ibnn.OODDetector(m, "knn", layer="none"), r"one of \['first', 'last'\]"),
        (lambda m: ibnn.OODDetector(m, "vim", layer="first"), "`layer`=None"),
        (lambda m: ibnn.OODDetector(m, "epistemic"), "needs a posterior"),
        (lambda m: ibnn.OODDetector(m, "knn", k=0), "`k` must be"),
        (lambda m: ibnn.OODDetector(m, "knn").score(X), "call `fit` first"),
        (lambda m: ibnn.OODDetector(m).threshold(0.9), "call `fit` first"),
        (lambda m: ibnn.OODDetector(m).threshold(95, X), "`true_positive_rate` must be between"),
        (lambda m: ibnn.OODDetector(m, "knn").fit(X[:49]), "k=50 neighbors .*; got 49"),
        (lambda m: ibnn.OODDetector(m, "relative_mahalanobis").fit(X), "`y` must hold the classes"),
        (lambda m: ibnn.OODDetector(m, "mahalanobis").fit(X, Y[1:]), "`y` must hold 150 numbers"),
        (lambda m: ibnn.OODDetector(m, "mahalanobis").fit(X, X), r"`y`.* one-hot; got \[.* 0"),
        (lambda m: ibnn.OODDetector(m, "knn").fit(np.nan * X), "holds? NaN"),
        (lambda m: ibnn.OODDetector(m, "knn").fit(X[:0]), "`x` holds no examples"),
        (lambda m: ibnn.OODDetector(m, "mahalanobis").fit(X, X[:, 0]), "several examples each"),
        (lambda m: ibnn.OODDetector(m, "vim").fit(X[:2]), "need more than .* examples; got 2"),
        (lambda m: ibnn.OODDetector(m).score(np.nan * X), "`x` holds NaN"),
    ],
)
def test_bad_input(model, make, message):
    with pytest.raises(ValueError, match=message):
        make(model)


@pytest.mark.once
def test_labels_may_be_one_hot(model):
    plain, one_hot = (
        ibnn.OODDetector(model, "relative_mahalanobis").fit(X, y)
        for y in (Y, np.eye(Y.max() + 1)[Y])
    )
    np.testing.assert_array_equal(plain.score(X), one_hot.score(X))


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
def test_targets_of_a_regression_are_no_classes():
    x = X[:, :2]
    regression = keras.Sequential([keras.Input((2,)), layers.Dense(2)])
    regression.compile("sgd", "mse")
    detector = ibnn.OODDetector(regression, "mahalanobis")
    for y in (x, x[:, 0], x[:, :1]):
        with pytest.raises(ValueError, match=r"predicts numbers: leave `y` out, fit\(x\)"):
            detector.fit(x, y)
    detector.fit(x, Y)  # classes of the user's
    with pytest.raises(ValueError, match="predicts numbers: take score='mahalanobis' or 'knn'"):
        ibnn.OODDetector(regression, "relative_mahalanobis").fit(x)


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


def head_of(features, kernel, bias=0.0):
    """A network whose features are its inputs, with a softmax head."""
    made = keras.Sequential([keras.Input((features,)), layers.Dense(len(kernel[0]), "softmax")])
    made.layers[0].set_weights([np.asarray(kernel), np.full(len(kernel[0]), bias)])
    return made


def test_dead_units_leave_vim_a_scale():
    """Half of the directions, and more, are without variance: their residual is 0."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 10)).astype("float32")
    x[:, 4:] = 0
    model = head_of(10, rng.normal(size=(10, 3)) * np.r_[np.ones(4), np.zeros(6)][:, None])
    made = ibnn.OODDetector(model, "vim").fit(x)
    assert np.isfinite(made.threshold())
    far = x + np.float32([0, 0, 0, 0, 2, 2, 2, 2, 2, 2])
    assert made.evaluate(x, far)["auroc"] > 0.9
    assert np.isfinite(keras.ops.convert_to_numpy(made.serve(far)["score"])).all()
    for constant in (x * 0, x * 0 + 1):
        with pytest.raises(ValueError, match="features and logits that vary"):
            ibnn.OODDetector(model, "vim").fit(constant)
        with pytest.raises(ValueError, match="vary within classes"):
            ibnn.OODDetector(model, "mahalanobis").fit(constant)


@pytest.mark.once
def test_vim_is_not_inverted_by_negative_logits():
    """Logits mean the same when all are shifted: the residual still counts as unusual."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(300, 8)) * [3, 3, 3, 3, 0.3, 0.3, 0.3, 0.3]
    far = x + [0, 0, 0, 0, 3, 3, 3, 3]
    kernel = rng.normal(size=(8, 3)) * np.r_[1, 1, 1, 1, 0, 0, 0, 0][:, None]
    made = ibnn.OODDetector(head_of(8, kernel, bias=-100.0), "vim").fit(x)
    assert keras.ops.convert_to_numpy(made.arrays["alpha"]) > 0
    assert made.evaluate(x, far)["auroc"] > 0.9


def test_mahalanobis_of_tight_classes():
    """Classes 10,000 times as far apart as they are wide."""
    rng = np.random.default_rng(2)
    y = np.arange(300) % 3
    x = (1e4 * rng.normal(size=(3, 4))[y] + rng.normal(size=(300, 4))).astype("float32")
    made = ibnn.OODDetector(head_of(4, rng.normal(size=(4, 3))), "mahalanobis").fit(x, y)
    means = np.stack([x[c == y].astype("float64").mean(axis=0) for c in range(3)])
    within = EmpiricalCovariance(assume_centered=True).fit(x - means[y])
    known = np.min([within.mahalanobis(x - m) for m in means], axis=0)
    found = made.score(x)
    assert (found >= 0).all()
    assert np.corrcoef(found, known)[0, 1] > 0.999


@pytest.mark.parametrize("at_once", [8192, 70])
def test_neighbours_of_close_features(at_once, monkeypatch):
    """Features of almost one direction, also where the bank takes several blocks."""
    monkeypatch.setattr("tfp_ibnn.decisions.feature_scores._AT_ONCE", at_once)
    rng = np.random.default_rng(3)
    x = (5 + 2e-3 * rng.normal(size=(200, 4))).astype("float32")
    made = ibnn.OODDetector(head_of(4, rng.normal(size=(4, 3))), "knn", k=5).fit(x[:150])
    unit = x.astype("float64") / np.linalg.norm(x.astype("float64"), axis=1, keepdims=True)
    near = NearestNeighbors(n_neighbors=5).fit(unit[:150])
    known = near.kneighbors(unit[150:])[0][:, 4]
    found = made.score(x[150:])
    assert len(np.unique(found)) > 40
    np.testing.assert_allclose(found, known, rtol=0.02)
