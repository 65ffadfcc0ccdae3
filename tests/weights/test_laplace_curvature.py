"""The Hessians of a Laplace approximation against Jacobians, and its evidence against algebra."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from scipy.stats import multivariate_normal

import tfp_ibnn as ibnn
from tests.autodiff import whole_jacobian
from tests.weights.laplace_tools import (
    OPTIONS,
    RNG,
    X,
    Y,
    dense,
    gauss_newton,
    jacobian,
    network,
    slow_on_jax,
)
from tfp_ibnn.weights.features import LogitNetwork
from tfp_ibnn.weights.laplace.blocks import block_of
from tfp_ibnn.weights.laplace.curvature import collect
from tfp_ibnn.weights.laplace.structures import STRUCTURES

pytestmark = [
    pytest.mark.filterwarnings("ignore:The network does not seem to be trained"),
    pytest.mark.filterwarnings("ignore:The scale and shift"),
]


@pytest.fixture(scope="module")
def plain():
    return network()


@pytest.fixture(scope="module")
def reference(plain):
    """The Gauss-Newton matrix over all weights but those of batch normalization."""
    variables = [v for v in plain.trainable_weights if "batch" not in v.path]
    return gauss_newton(*jacobian(plain, variables))


def fitted(model, structure, subset="all", **options):
    la = ibnn.Laplace(model, subset, structure, **options)
    return la.fit(X, Y, batch_size=5, verbose=0)  # the second batch is filled up


def test_full_and_diagonal_are_the_gauss_newton_matrix(eagerly, plain, reference):
    full = fitted(plain, "full")
    np.testing.assert_allclose(dense(full.structure), reference, atol=1e-6)
    last = fitted(plain, "full", "last_layer").structure  # which is summed in another way
    np.testing.assert_allclose(dense(last), reference[-last.size :, -last.size :], atol=1e-6)
    diagonal = fitted(plain, "diag")
    np.testing.assert_allclose(
        diagonal.structure.eigenvalues(), np.diag(reference), rtol=1e-6, atol=1e-8
    )


@slow_on_jax
def test_low_rank_has_the_largest_eigenvalues(plain, reference):
    values, vectors = np.linalg.eigh(reference)
    # The matrix has a rank of 14, two for each example.
    whole = fitted(plain, "lowrank", rank=16)
    np.testing.assert_allclose(dense(whole.structure), reference, atol=1e-6)
    part = fitted(plain, "lowrank", rank=3).structure
    np.testing.assert_allclose(np.sort(part.eigenvalues())[-3:], values[-3:], rtol=1e-4)
    wanted = (vectors[:, -3:] * values[-3:]) @ vectors[:, -3:].T
    np.testing.assert_allclose(dense(part), wanted, atol=2e-2 * values[-1])


@pytest.mark.slow
def test_layers_of_any_kind():
    """Depthwise convolutions and the scale of normalizations, if asked for."""
    model = network("other")
    la = fitted(model, "diag", "depthwise.*kernel|gamma")
    assert len(la.sampled) == 3
    wanted = gauss_newton(*jacobian(model, la.sampled))
    np.testing.assert_allclose(la.structure.eigenvalues(), np.diag(wanted), rtol=1e-5)


def patches(x, size, stride):
    """Return the patches of an image without padding, one position after the other."""
    places = range(0, x.shape[1] - size + 1, stride)
    parts = [x[:, i : i + size, j : j + size].reshape(len(x), -1) for i in places for j in places]
    return np.stack(parts, axis=1)


def test_kronecker_factors_by_brute_force(eagerly):
    """Of each layer, A from its inputs and G from the Jacobian by its pre-activations."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6, 6, 2), dtype="float64")
    convolution = layers.Conv2D(4, 3, 2, activation="relu", **OPTIONS)
    last = layers.Dense(3, activation="softmax", **OPTIONS)
    model = keras.Model(inputs, last(layers.Flatten(**OPTIONS)(convolution(inputs))))
    model.compile(loss="sparse_categorical_crossentropy")
    la = fitted(model, "kron")
    kernel, bias = map(ops.convert_to_numpy, (convolution.kernel, convolution.bias))
    a = patches(X, 3, 2)
    before = a @ kernel.reshape(-1, 4) + bias
    hidden = np.maximum(before, 0).reshape(len(X), -1)
    weights, shift = map(ops.convert_to_numpy, (last.kernel, last.bias))
    logits = hidden @ weights + shift

    def tail(s):
        return ops.reshape(ops.relu(s), (len(X), -1)) @ ops.convert_to_tensor(weights)

    by_position = np.einsum("nknpo->nkpo", whole_jacobian(tail, before))
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    hessians = np.stack([np.diag(q) - np.outer(q, q) for q in p])
    ones = np.ones((*a.shape[:2], 1))
    expected = [
        (
            np.concatenate([a, ones], -1),
            np.einsum("nkpo,nkl,nlpq->oq", by_position, hessians, by_position),
        ),
        (np.concatenate([hidden, ones[:, 0]], -1)[:, None], hessians.sum(axis=0)),
    ]
    for i, (full_input, g) in enumerate(expected):
        vectors_a, values_a, vectors_g, values_g = map(
            ops.convert_to_numpy, la.structure.variables[4 * i : 4 * i + 4]
        )
        mean = np.einsum("npi,npj->ij", full_input, full_input) / np.prod(full_input.shape[:2])
        np.testing.assert_allclose((vectors_a * values_a) @ vectors_a.T, mean, atol=1e-10)
        np.testing.assert_allclose((vectors_g * values_g) @ vectors_g.T, g, atol=1e-10)


@pytest.mark.once
def test_the_kronecker_product_is_exact_for_one_example(eagerly, plain):
    layer = plain.get_layer("last")
    structure = STRUCTURES["kron"]([block_of(layer, layer.weights)])
    found = collect(
        LogitNetwork(plain, lambda x: x is layer), structure, X[:1], Y[:1], 1, verbose=0
    )
    va, a, vg, g = found.values
    product = np.kron((va * a) @ va.T, (vg * g) @ vg.T)
    wanted = gauss_newton(*jacobian(plain, layer.weights, X[:1]))
    np.testing.assert_allclose(product, wanted, atol=1e-10)


@pytest.fixture(scope="module")
def linear():
    """A linear regression at its most probable weights for a prior and a noise scale."""
    prior, scale, x = 0.7, 0.4, RNG.normal(size=(20, 3))
    y = x @ [1.0, -2.0, 0.5] + 0.3 + scale * RNG.normal(size=20)
    model = keras.Sequential([keras.Input((3,), dtype="float64"), layers.Dense(1, **OPTIONS)])
    model.compile(loss="mse")
    design = np.concatenate([x, np.ones((20, 1))], axis=1)
    precision = design.T @ design / scale**2 + prior * np.eye(4)
    w = np.linalg.solve(precision, design.T @ y / scale**2)
    model.set_weights([w[:3, None], w[3:]])
    options = {"hessian_structure": "full", "prior_precision": prior, "noise_scale": scale}
    la = ibnn.Laplace(model, **options).fit(x, y, verbose=0)
    return la, design, y, precision, w


def test_the_evidence_of_a_linear_model_is_exact(linear):
    la, design, y, precision, w = linear
    covariance = 0.4**2 * np.eye(20) + design @ design.T / 0.7
    exact = multivariate_normal(np.zeros(20), covariance).logpdf(y)
    assert la.log_marginal_likelihood() == pytest.approx(exact, abs=1e-9)
    posterior = la.distribution()
    np.testing.assert_allclose(posterior.mean(), w, atol=1e-12)
    np.testing.assert_allclose(posterior.covariance(), np.linalg.inv(precision), atol=1e-12)


@pytest.mark.once
def test_the_fixed_point_maximises_the_evidence(linear):
    evidence = linear[0].evidence
    prior, scale = evidence.maximize()
    best = evidence.log_prob(prior, scale)
    for factor in (0.9, 0.99, 1.01, 1.1):
        assert evidence.log_prob(prior * factor, scale) < best
        assert evidence.log_prob(prior, scale * factor) < best
    assert evidence.maximize(2.0)[0] == 2.0
    assert evidence.maximize(None, 0.3)[1] == 0.3
    half = evidence._replace(temperature=0.5)
    double = evidence._replace(eigenvalues=2 * evidence.eigenvalues)
    assert half.log_prob(3.0, 0.4) == pytest.approx(double.log_prob(3.0, 0.4))
    assert half.log_prob(3.0, 0.4) < evidence.log_prob(3.0, 0.4)


@pytest.mark.once
def test_low_rank_warns_if_it_has_not_converged(eagerly, plain, monkeypatch):
    monkeypatch.setattr("tfp_ibnn.weights.laplace.full.LowRank.passes", 1)
    with pytest.warns(UserWarning, match="still change after 1 passes"):
        fitted(plain, "lowrank", rank=2)
