"""What a Laplace approximation predicts, how it is saved, and what it refuses."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfp_ibnn as ibnn
from tests.weights.laplace.tools import LABELS, POINTS, fitted, small, with_options
from tests.weights.laplace_tools import X, Y, dense, network, slow_on_jax
from tfp_ibnn.data.examples import Examples

pytestmark = [
    pytest.mark.filterwarnings("ignore:The scale and shift"),
    pytest.mark.filterwarnings("ignore:The network does not seem to be trained"),
]

JAX = keras.backend.backend() == "jax"


def test_the_last_layer_by_hand(full, by_hand):
    """An independent computation; the draws have a root of that covariance."""
    covariance = by_hand[2]
    found = ops.convert_to_numpy(full.distribution().covariance())
    np.testing.assert_allclose(found, covariance, rtol=2e-3, atol=2e-5)
    root = dense(full.structure, lambda values: ops.sqrt(full.scale(values)))
    np.testing.assert_allclose(root @ root.T, covariance, rtol=2e-3, atol=2e-5)


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
def test_an_interrupted_fit_changes_nothing(model, monkeypatch):
    la = fitted(model)
    before = [np.array(w) for w in la.get_weights()]

    def interrupted(*_, **options):
        yield Examples(POINTS[:8], LABELS[:8])
        raise KeyboardInterrupt

    monkeypatch.setattr("tfp_ibnn.weights.laplace.curvature.labelled_examples", interrupted)
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
