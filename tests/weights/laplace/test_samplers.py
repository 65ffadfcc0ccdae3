"""Draws of a Laplace approximation against networks with the drawn weights, and the probit."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from scipy.special import softmax

import tfp_ibnn as ibnn
from tests.precision import after_products
from tests.weights.laplace.tools import POINTS, fitted, with_options
from tests.weights.laplace_tools import dense, flat, jacobian, slow_on_jax

pytestmark = [
    pytest.mark.filterwarnings("ignore:The scale and shift"),
    pytest.mark.filterwarnings("ignore:The network does not seem to be trained"),
]


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
