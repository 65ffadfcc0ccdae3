"""What a Laplace approximation predicts, how it is saved, and what it refuses."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from scipy.special import softmax

import tfp_ibnn as ibnn
from tests.precision import after_products
from tests.weights.laplace_tools import X, Y, dense, flat, jacobian, network, slow_on_jax

JAX = keras.backend.backend() == "jax"
RNG = np.random.default_rng(3)
CENTERS = 2 * RNG.normal(size=(3, 4))
LABELS = np.arange(60) % 3
POINTS = (CENTERS[LABELS] + RNG.normal(size=(60, 4))).astype("float32")

pytestmark = [
    pytest.mark.filterwarnings("ignore:The scale and shift"),
    pytest.mark.filterwarnings("ignore:The network does not seem to be trained"),
]


def small(units=3, loss="sparse_categorical_crossentropy", activation="softmax"):
    """Return a network of 4, 5 and `units` units with fixed weights that fit the points."""
    rng = np.random.default_rng(0)
    hidden = layers.Dense(5, activation="relu")
    last = layers.Dense(units, activation=activation)
    model = keras.Sequential([keras.Input((4,)), hidden, layers.Dropout(0.5), last])
    model.compile(loss=loss)
    kernel = rng.normal(size=(4, 5))
    phi = np.maximum(POINTS @ kernel, 0)
    design = np.concatenate([phi, np.ones((60, 1))], axis=1)
    targets = 4 * np.eye(3)[LABELS][:, np.arange(units) % 3]
    w = np.linalg.lstsq(design, targets, rcond=None)[0]
    model.set_weights([kernel, np.zeros(5), w[:-1], w[-1]])
    return model


@pytest.fixture(scope="module")
def model():
    return small()


def fitted(model, **options):
    return ibnn.Laplace(model, **options).fit(POINTS, LABELS, batch_size=3, verbose=0)


@pytest.fixture(scope="module")
def full(model):
    return fitted(model, hessian_structure="full", prior_precision=0.5)


@pytest.fixture(scope="module")
def by_hand(model):
    """Features with a 1, logits and the posterior covariance of the last layer, in float64."""
    kernel, bias, w, b = (x.astype("float64") for x in model.get_weights())
    phi = np.concatenate([np.maximum(POINTS @ kernel + bias, 0), np.ones((60, 1))], axis=1)
    matrix = np.concatenate([w, b[None]])
    hessian = 0.5 * np.eye(18)
    for row in phi:
        p = softmax(row @ matrix)
        hessian += np.kron(np.outer(row, row), np.diag(p) - np.outer(p, p))
    return phi, phi @ matrix, np.linalg.inv(hessian)


def test_the_last_layer_by_hand(full, by_hand):
    """An independent computation; the draws have a root of that covariance."""
    covariance = by_hand[2]
    found = ops.convert_to_numpy(full.distribution().covariance())
    np.testing.assert_allclose(found, covariance, rtol=2e-3, atol=2e-5)
    root = dense(full.structure, lambda values: ops.sqrt(full.scale(values)))
    np.testing.assert_allclose(root @ root.T, covariance, rtol=2e-3, atol=2e-5)


def test_draws_are_linearised_and_shared(eagerly, full, by_hand):
    phi, logits, _ = by_hand
    mc = ibnn.MonteCarlo(full, samples=3, seed=0, return_samples=True)
    key = ops.cast(mc._key, "int32")
    steps = [
        np.concatenate([np.reshape(x, (-1, 3)) for x in full.deviation(key, i)]) for i in range(3)
    ]
    drawn = np.stack([logits + phi @ step for step in steps], axis=1)
    wanted, atol = softmax(drawn, axis=-1), after_products(1e-4, 2, np.abs(drawn).max())
    found = mc.predict(POINTS, batch_size=25, verbose=0)
    np.testing.assert_allclose(found["samples"], wanted, atol=atol)
    np.testing.assert_allclose(found["mean"], wanted.mean(axis=1), atol=atol)
    assert found["epistemic"].min() > 0
    one = ops.convert_to_numpy(mc.draw(POINTS, 2)["mean"])
    np.testing.assert_allclose(one, wanted[:, 2], atol=atol)
    atol = after_products(1e-5, 2, np.abs(logits).max())
    np.testing.assert_allclose(mc.at_mean(POINTS)["mean"], softmax(logits, axis=-1), atol=atol)


@slow_on_jax
@pytest.mark.parametrize("structure", ["diag", "kron", "full", "lowrank"])
def test_probit_of_the_last_layer(model, by_hand, structure):
    phi, logits, _ = by_hand
    options = {"prior_precision": 0.5, "link_approx": "probit", "rank": 7, "temperature": 2.0}
    la = fitted(model, hessian_structure=structure, **options)
    mc = ibnn.MonteCarlo(la)
    assert mc.samples == 1
    covariance = np.linalg.inv(dense(la.structure).astype("float64") / 2 + 0.5 * np.eye(18))
    jacobians = np.stack([np.kron(row, np.eye(3)) for row in phi])
    variance = np.einsum("nkw,wv,nkv->nk", jacobians, covariance, jacobians)
    wanted = softmax(logits / np.sqrt(1 + np.pi / 8 * variance), axis=-1)
    found = {k: ops.convert_to_numpy(v) for k, v in mc(POINTS).items()}
    np.testing.assert_allclose(found["mean"], wanted, atol=1e-5)
    assert found["epistemic"].max() == 0


@slow_on_jax
def test_all_weights_linearised():
    """Draws by Jacobian-vector products, and the probit, against Jacobians in float64."""
    inputs = keras.Input((4,), dtype="float64")
    x = layers.Dense(5, activation="relu", dtype="float64")(inputs)
    model = keras.Model(inputs, layers.Dense(3, dtype="float64")(x))
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    la = fitted(model, subset_of_weights="all", prior_precision=2.0)
    x = POINTS.astype("float64")
    logits, j = jacobian(model, la.sampled, x)
    mc = ibnn.MonteCarlo(la, samples=2, seed=0)
    wanted = softmax(logits + j @ flat(la.deviation(ops.cast(mc._key, "int32"), 1)), axis=-1)
    found = ops.convert_to_numpy(mc.draw(x, 1)["mean"])
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    covariance = dense(la.structure, la.scale)
    variance = np.einsum("nkw,wv,nkv->nk", j, covariance, j)
    wanted = softmax(logits / np.sqrt(1 + np.pi / 8 * variance), axis=-1)
    probit = ibnn.MonteCarlo(with_options(la, link_approx="probit"))
    np.testing.assert_allclose(probit(x)["mean"], wanted, atol=1e-6)
    inverse = np.linalg.inv(dense(la.structure) + 2 * np.eye(la.structure.size))
    np.testing.assert_allclose(covariance, inverse, atol=1e-9)


def test_materialized_it_predicts_the_same_or_is_refused(model, full):
    """The linearised network has no weights of its own."""
    draws = [ibnn.MonteCarlo(x, samples=4, seed=0) for x in (full, full.materialize(4))]
    found, expected = (ops.convert_to_numpy(mc(POINTS)["mean"]) for mc in draws)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    linear, probit = (
        fitted(model, subset_of_weights="all", hessian_structure="diag"),
        with_options(full, link_approx="probit"),
    )
    for posterior in (linear, probit, ibnn.WeightMixture([full, linear])):
        with pytest.raises(ValueError, match=r"networks with sampled weights.*pred_type='nn'\)"):
            posterior.materialize(4)
    assert with_options(linear, pred_type="nn").materialize(2).count == 2


def with_options(la, **options):
    """Return the same posterior with other options."""
    other = ibnn.Laplace.from_config({**la.get_config(), **options})
    other.set_weights([np.array(w) for w in la.get_weights()])
    return other


@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_sampled_weights(model, full, subset):
    is_last = subset == "last_layer"
    la = with_options(full, pred_type="nn", link_approx="probit") if is_last else None
    la = la or fitted(model, subset_of_weights="all", hessian_structure="diag", pred_type="nn")
    mc = ibnn.MonteCarlo(la, samples=3, seed=1)
    values = la.sample(ops.cast(mc._key, "int32"), 1)
    before = model.get_weights()
    for variable, value in zip(la.sampled, values, strict=True):
        variable.assign(ops.convert_to_numpy(value))
    la_network = ops.convert_to_numpy(la.network(POINTS))
    la.network.set_weights(before)
    np.testing.assert_allclose(mc.draw(POINTS, 1)["mean"], la_network, atol=1e-6)


@slow_on_jax
@pytest.mark.parametrize("subset", ["all", "kernel", "second"])
def test_networks_share_their_first_layer(eagerly, subset):
    """Whatever of it is drawn, the average is that of networks with the drawn weights."""
    images = keras.Input((5, 4, 2))
    x = layers.Conv2D(3, 2, 2, padding="same", activation="relu", name="first")(images)
    x = layers.Conv2D(2, 2, activation="tanh", name="second")(x)
    model = keras.Model(images, layers.Dense(3)(layers.Flatten()(x)))
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.set_weights([w + 0.3 for w in model.get_weights()])  # biases too
    x, y = np.random.default_rng(0).normal(size=(9, 5, 4, 2)).astype("float32"), np.arange(9) % 3
    la = ibnn.Laplace(model, subset, "kron", pred_type="nn", prior_precision=5.0)
    la.fit(x, y, verbose=0)
    mc = ibnn.MonteCarlo(la, samples=5, seed=1)  # more than run at once
    key, networks = ops.cast(mc._key, "int32"), []
    sets = [[ops.convert_to_numpy(w) for w in la.sample(key, i)] for i in range(5)]
    sets.append([ops.convert_to_numpy(v) for v in la.sampled])  # what they are again at the end
    for values in sets:
        for variable, value in zip(la.sampled, values, strict=True):
            variable.assign(value)
        networks.append(softmax(ops.convert_to_numpy(model(x)), axis=-1))
    networks.pop()
    assert np.ptp(networks, axis=0).max() > 0.01
    np.testing.assert_allclose(mc(x)["mean"], np.mean(networks, axis=0), atol=1e-5)
    np.testing.assert_allclose(mc.draw(x, 4)["mean"], networks[4], atol=1e-5)


@slow_on_jax
@pytest.mark.parametrize("options", [{}, {"link_approx": "probit"}, {"pred_type": "nn"}])
def test_files(full, tmp_path, options):
    mc = ibnn.MonteCarlo(with_options(full, **options), samples=2, seed=0)
    before = ops.convert_to_numpy(mc(POINTS)["mean"])
    mc.save(tmp_path / "laplace.keras")
    loaded = keras.models.load_model(tmp_path / "laplace.keras")
    np.testing.assert_allclose(loaded(POINTS)["mean"], before, atol=1e-6)
    assert loaded.inner.log_marginal_likelihood() == pytest.approx(full.log_marginal_likelihood())


@pytest.mark.slow
@pytest.mark.once
@pytest.mark.skipif(JAX, reason="TensorFlow writes SavedModels")
@pytest.mark.parametrize(
    "options", [{}, {"link_approx": "probit"}, {"pred_type": "nn"}, {"subset_of_weights": "all"}]
)
def test_export(model, tmp_path, options):
    import tensorflow as tf

    mc = ibnn.MonteCarlo(fitted(model, **options), samples=4, seed=0)
    ibnn.export(mc, tmp_path / "1")
    served = tf.saved_model.load(str(tmp_path / "1")).signatures
    inputs = tf.constant(POINTS)
    np.testing.assert_allclose(
        served["serve"](inputs=inputs)["mean"], mc(POINTS)["mean"], atol=1e-6
    )
    found = served["sample"](inputs=inputs, seed=tf.constant(1))["mean"]
    np.testing.assert_allclose(found, mc.draw(POINTS, 1)["mean"], atol=1e-6)


@slow_on_jax
@pytest.mark.parametrize(
    ("units", "loss", "activation", "targets"),
    [
        (3, "binary_crossentropy", "sigmoid", np.eye(3)[LABELS]),
        (2, "mse", None, 4 * np.eye(2)[LABELS % 2]),
        (4, ibnn.layers.GaussianNLL(), "head", np.eye(2)[LABELS % 2]),
    ],
)
def test_other_heads(eagerly, units, loss, activation, targets):
    model = small(units, loss, None if activation == "head" else activation)
    if activation == "head":
        model = keras.Model(model.inputs, ibnn.layers.GaussianHead()(model.outputs[0]))
        model.compile(loss=loss)
    la = ibnn.Laplace(model).fit(POINTS, targets, verbose=0)
    found = ibnn.MonteCarlo(la, samples=4, seed=0)(POINTS)
    assert ops.convert_to_numpy(found["epistemic"]).min() > 0
    assert np.isfinite(la.log_marginal_likelihood())
    if activation is None:
        error = np.mean((targets - ops.convert_to_numpy(model(POINTS))) ** 2)
        assert float(la.noise_scale) ** 2 == pytest.approx(error, rel=0.3)
        with pytest.raises(ValueError, match="probit.*classifiers"):
            ibnn.Laplace(model, link_approx="probit")
    else:
        assert float(la.noise_scale) == 1
    if activation == "sigmoid":
        probit = ibnn.Laplace(model, link_approx="probit").fit(POINTS, targets, verbose=0)
        mean = ops.convert_to_numpy(ibnn.MonteCarlo(probit)(POINTS)["mean"])
        plain = ops.convert_to_numpy(model(POINTS))
        assert np.all(np.abs(mean - 0.5) < np.abs(plain - 0.5))


class Batches(keras.utils.PyDataset):
    """The points in batches of unequal size."""

    def __len__(self):
        return 3

    def __getitem__(self, number):
        rows = slice(*[(0, 25), (25, 35), (35, 60)][number])
        return POINTS[rows], LABELS[rows]


@slow_on_jax
def test_datasets(model, full):
    same = ibnn.Laplace(model, hessian_structure="full", prior_precision=0.5).fit(
        Batches(), verbose=0
    )
    np.testing.assert_allclose(dense(same.structure), dense(full.structure), atol=1e-3)
    assert same.log_marginal_likelihood() == pytest.approx(full.log_marginal_likelihood(), abs=1e-3)
    if not JAX:
        import tensorflow as tf

        data = tf.data.Dataset.from_tensor_slices((POINTS, LABELS)).batch(32)
        same.fit(data, verbose=0)
        np.testing.assert_allclose(dense(same.structure), dense(full.structure), atol=1e-3)
        with pytest.raises(ValueError, match="never ends"):
            same.fit(data.repeat(), verbose=0)


@pytest.mark.once
@pytest.mark.slow
def test_the_prior_precision(model, monkeypatch):
    la = fitted(model)
    best = la.log_marginal_likelihood()
    for factor in (0.8, 1.25):
        assert la.log_marginal_likelihood(factor * float(la.prior_precision)) < best
    grid = np.array([0.01, 0.1, 10.0])
    monkeypatch.setattr("tfp_ibnn.weights.laplace.prior.GRID", grid)
    chosen = ibnn.Laplace(model, prior_precision="validation", link_approx="probit")
    data = POINTS, LABELS
    chosen.fit(*data, validation_data=data, verbose=0)
    found, mc, losses = float(chosen.prior_precision), ibnn.MonteCarlo(chosen), []
    for prior in grid:
        chosen.prior_precision.assign(prior)
        losses.append(mc.evaluate(*data, verbose=0, return_dict=True)["loss"])
    assert found == pytest.approx(grid[np.argmin(losses)])
    with pytest.raises(ValueError, match="needs `validation_data`"):
        chosen.fit(*data, verbose=0)


@pytest.mark.once
def test_an_interrupted_fit_changes_nothing(model, monkeypatch):
    la = fitted(model)
    before = [np.array(w) for w in la.get_weights()]

    def interrupted(*_, **options):
        yield POINTS[:8], LABELS[:8]
        raise KeyboardInterrupt

    monkeypatch.setattr("tfp_ibnn.weights.laplace.curvature.labelled_batches", interrupted)
    with pytest.raises(KeyboardInterrupt):
        la.fit(POINTS, LABELS, verbose=0)
    for old, new in zip(before, la.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.once
def test_warnings(model):
    untrained = small()
    untrained.set_weights([w - 3 * (w.shape == (5, 3)) * w for w in untrained.get_weights()])
    with pytest.warns(UserWarning, match="does not seem to be trained"):
        fitted(untrained)
    with pytest.warns(UserWarning, match="batch normalization .*stay as they are"):
        ibnn.Laplace(network(), "all", "diag").fit(X, Y, verbose=0)


def called_twice():
    inputs, layer = keras.Input((3,)), layers.Dense(3)
    model = keras.Model(inputs, layer(layer(inputs)))
    model.compile(loss="mse")
    return model


def recurrent():
    model = keras.Sequential([keras.Input((4, 3)), layers.LSTM(2), layers.Dense(3)])
    model.compile(loss="mse")
    return model


@pytest.mark.once
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ibnn.Laplace(called_twice(), "all"), "is called 2 times"),
        (lambda: ibnn.Laplace(recurrent(), "all"), "is recurrent"),
        (lambda: ibnn.Laplace(network("other"), "all", "kron"), "DepthwiseConv2D: use 'diag'"),
        (lambda: ibnn.Laplace(small(), "nothing"), "chooses no weight"),
        (lambda: ibnn.Laplace(small(), 3), "`subset_of_weights` must be"),
        (lambda: ibnn.Laplace(small(loss=None, activation=None)), "is unknown what the output"),
        (lambda: ibnn.Laplace(small(loss="huber", activation=None)), "not minus a log-likelihood"),
        (lambda: ibnn.Laplace(layers.Dense(2)), "must be a Keras model"),
        (lambda: ibnn.Laplace(small(), prior_precision=0.0), "`prior_precision` must be above 0"),
        (lambda: ibnn.Laplace(small(), prior_precision="grid"), "`prior_precision` must be one of"),
        (lambda: ibnn.MonteCarlo(ibnn.Laplace(small())), "is not fitted"),
        (lambda: ibnn.Laplace(small()).fit(POINTS[:2], LABELS[:2], verbose=0), "at least 3 exam"),
        (lambda: ibnn.Laplace(small()).fit(POINTS, LABELS + 1, verbose=0), "from 0 to 2; got 3"),
        (lambda: ibnn.Laplace(small()).fit(POINTS * np.nan, LABELS, verbose=0), "NaN"),
    ],
)
def test_what_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.once
def test_a_matrix_that_is_too_large():
    wide = keras.Sequential([keras.Input((2000,)), layers.Dense(10, activation="softmax")])
    with pytest.raises(ValueError, match=r"20,010 x 20,010 numbers, 3.2 GB"):
        ibnn.Laplace(wide, hessian_structure="full")
    broken = small()
    broken.set_weights([w + np.inf for w in broken.get_weights()])
    with pytest.raises(ValueError, match="gradients are NaN or infinite"):
        fitted(broken)


@pytest.mark.once
@pytest.mark.parametrize("option", [{"sampling": "qmc"}, {"independent": True}, {"dropout": True}])
def test_options_of_noise_are_refused(full, option):
    with pytest.raises(ValueError, match=f"`{next(iter(option))}` must be"):
        ibnn.MonteCarlo(full, **option)
