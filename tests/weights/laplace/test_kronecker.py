"""Kronecker factors by brute force."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from tests.autodiff import whole_jacobian
from tests.weights.laplace.tools import fit_images
from tests.weights.laplace_tools import (
    OPTIONS,
    X,
    Y,
    gauss_newton,
    jacobian,
)
from tfp_ibnn.weights.features import LogitNetwork
from tfp_ibnn.weights.laplace.blocks import block_of
from tfp_ibnn.weights.laplace.curvature import collect
from tfp_ibnn.weights.laplace.structures import STRUCTURES

pytestmark = [
    pytest.mark.filterwarnings("ignore:The network does not seem to be trained"),
    pytest.mark.filterwarnings("ignore:The scale and shift"),
]


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
    la = fit_images(model, "kron")
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
