"""Weights that give the same function, and the number of modes without such copies."""

import keras
import numpy as np
import pytest
from keras import layers

import tfp_ibnn as ibnn
from tests.precision import after_products
from tfp_ibnn.diagnostics import canonical, modes
from tfp_ibnn.diagnostics.targets import target_of

dense = layers.Dense

once = pytest.mark.once
X = np.random.default_rng(0).normal(size=(20, 3)).astype("float32")
ODD, SCALED = {"tanh", "linear", "softsign"}, {"relu", "leaky_relu", "linear"}


def network(*activations, **options):
    hidden = [dense(4 + k, f, **options) for k, f in enumerate(activations)]
    return keras.Sequential([keras.Input((3,)), *hidden, dense(2)])


def outputs(model, row):
    """By numpy's own products, so that the order of the weights is checked, too."""
    y, start = X.astype("float64"), 0
    for layer in model.layers:
        size = y.shape[1] * layer.units
        kernel = row[start : start + size].reshape(-1, layer.units)
        bias = row[start + size : start + size + layer.units] if layer.use_bias else 0.0
        start += size + layer.use_bias * layer.units
        y = keras.ops.convert_to_numpy(layer.activation((y @ kernel + bias).astype("float32")))
    return y


def copied(model, row, seed):
    """Another copy of weights, by a random symmetry of each hidden layer."""
    rng, parts, start = np.random.default_rng(seed), [], 0
    factor, order = np.ones(3), np.arange(3)
    for layer in model.layers:
        size = len(order) * layer.units
        kernel = row[start : start + size].reshape(-1, layer.units)
        bias = row[start + size : start + size + layer.units * layer.use_bias]
        start += kernel.size + bias.size
        kernel = kernel[order] / factor[:, None]
        order, factor = np.arange(layer.units), np.ones(layer.units)
        if layer is not model.layers[-1]:
            name = layer.activation.__name__
            order = rng.permutation(layer.units)
            factor *= rng.choice([-1, 1], layer.units) if name in ODD else 1
            factor *= np.exp(rng.normal(size=layer.units)) if name in SCALED else 1
        bias = bias[order] * factor if bias.size else bias
        parts += [(kernel[:, order] * factor).ravel(), bias]
    return np.concatenate(parts)


@pytest.mark.parametrize(
    "activations",
    [["tanh"], ["relu"], ["linear"], ["gelu"], ["softmax"], ["relu", "tanh", "leaky_relu"]],
    ids="-".join,
)
def test_the_function_stays_and_copies_become_one(activations):
    model = network(*activations, use_bias="linear" not in activations)
    rng, size = np.random.default_rng(1), model.count_params()
    draws = rng.normal(size=(6, size))
    others = np.stack([copied(model, row, seed) for seed, row in enumerate(draws)])
    assert np.abs(others - draws).max() > 0.5
    for row, other in zip(draws, others, strict=True):
        np.testing.assert_allclose(outputs(model, row), outputs(model, other), rtol=1e-4, atol=1e-4)
    found = canonical(model, draws)
    for row, other in zip(draws, found, strict=True):
        np.testing.assert_allclose(outputs(model, other), outputs(model, row), rtol=1e-4, atol=1e-5)
    with_first = canonical(model, np.concatenate([draws[:1], others]))[1:]
    np.testing.assert_allclose(with_first, found, atol=1e-6)
    # It is nearer to the first draw than any of many copies.
    assert np.linalg.norm(found[1:]) <= np.linalg.norm(draws[1:]) + 1e-9
    for seed in range(20):
        copy = canonical(model, copied(model, found[1], seed))
        assert np.linalg.norm(found[1] - found[0]) <= np.linalg.norm(copy - found[0]) + 1e-9


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_unit_without_effect_stays_finite(dtype):
    model = network("relu")
    draws = np.random.default_rng(0).normal(size=(2, model.count_params())).astype(dtype)
    draws[1, [0, 4, 8, 12]] = 0  # nothing comes into the first unit
    found = canonical(model, draws)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(outputs(model, found[1]), outputs(model, draws[1]), atol=1e-5)


@pytest.mark.parametrize("center", [keras.ops.mean, keras.ops.max])
def test_units_that_are_mixed_are_not_rescaled(center):
    model = network(lambda x: keras.ops.relu(x) - center(x, axis=-1, keepdims=True))
    draws = np.random.default_rng(0).normal(size=(3, model.count_params()))
    for row, found in zip(draws, canonical(model, draws), strict=True):
        np.testing.assert_allclose(outputs(model, found), outputs(model, row), atol=1e-5)


class TwoUnits:
    """log p(y, w) of c + v1 tanh(w1 x + b1) + v2 tanh(w2 x + b2), with its gradients."""

    size, noise, prior = 7, 0.2, 2.0

    def __init__(self):
        self.x = np.linspace(-3, 3, 30)
        noise = self.noise * np.random.default_rng(0).normal(size=30)
        self.y = np.tanh(2 * self.x - 2) - 1.5 * np.tanh(1.5 * self.x + 3) + noise

    def _parts(self, w):
        h = np.tanh(w[:, :2, None] * self.x + w[:, 2:4, None])
        out = np.einsum("sk,skn->sn", w[:, 4:6], h) + w[:, 6:]
        return h, (self.y - out) / self.noise

    def values(self, w):
        return -((self._parts(w)[1] ** 2).sum(axis=1) + ((w / self.prior) ** 2).sum(axis=1)) / 2

    def gradients(self, w):
        h, error = self._parts(w)
        error = error[:, None] / self.noise
        inner = error * w[:, 4:6, None] * (1 - h**2)
        found = [(inner * self.x).sum(-1), inner.sum(-1), (error * h).sum(-1), error.sum(-1)]
        return np.concatenate(found, axis=1) - w / self.prior**2


@once
def test_the_copies_of_a_mode_are_counted_once():
    """Two units can change places, and each its sign: 2! * 2^2 = 8 copies."""
    model = keras.Sequential([keras.Input((1,)), dense(2, "tanh"), dense(1)])
    starts = 1.5 * np.random.default_rng(1).normal(size=(100, 7))
    every = modes(TwoUnits(), starts=starts)
    assert len(every.masses) == 8
    np.testing.assert_allclose(every.log_probs, every.log_probs[0], atol=1e-3)
    found = modes(TwoUnits(), starts=starts, model=model)
    assert found.masses.tolist() == [1]
    np.testing.assert_allclose(found.log_probs, every.log_probs[:1], atol=1e-3)
    together = canonical(model, every.locations)
    np.testing.assert_allclose(together, together[:1] + 0 * together, atol=1e-2)


@once
def test_draws_are_in_the_order_of_hmc_over_all_weights():
    x = np.linspace(-1, 1, 8, dtype="float32")[:, None]
    between = [dense(2, "relu"), layers.Dropout(0.5), dense(2), ibnn.layers.GaussianHead()]
    model = keras.Sequential([keras.Input((1,)), *between])
    model.compile("sgd", ibnn.layers.GaussianNLL())
    target = target_of(model, (x, x**2), "weights")
    samples = np.random.default_rng(0).normal(size=(2, 3, target.size))
    found = canonical(model, samples)
    assert found.shape == samples.shape
    before, after = (target.predict(w[1], x) for w in (samples, found))
    atol = after_products(1e-5, 6, np.abs(before).max())
    np.testing.assert_allclose(before, after, rtol=1e-4, atol=atol)


def branched():
    inputs = keras.Input((3,))
    x = dense(3, "tanh")(inputs)
    return keras.Model(inputs, dense(1)(layers.add([x, inputs])))


def shared():
    inputs, layer = keras.Input((3,)), dense(3, "tanh")
    return keras.Model(inputs, dense(1)(layer(layer(inputs))))


def chain(*between):
    return keras.Sequential([keras.Input((3,)), dense(4), *between, dense(1)])


REFUSED = {
    "a branch": (branched, "Dense, Add, Dense"),
    "a shared layer": (shared, "Dense, Dense, Dense"),
    "batch norm": (lambda: chain(layers.BatchNormalization()), "BatchNormalization"),
    "an activation apart": (lambda: chain(layers.ReLU()), "ReLU"),
}


@once
@pytest.mark.parametrize("name", REFUSED)
def test_other_networks_are_refused(name):
    make, got = REFUSED[name]
    model = make()
    with pytest.raises(ValueError, match=f"chain of Dense layers, each used once; got .*{got}"):
        canonical(model, np.zeros((1, model.count_params())))


@once
def test_what_is_not_draws_of_all_weights_is_refused():
    for draws in (np.zeros((2, 5)), np.zeros(30), 1.0, np.full((2, 26), np.nan)):
        with pytest.raises(ValueError, match="`draws`"):
            canonical(network("tanh"), draws)
    model = chain(dense(2, "tanh", trainable=False))  # whose draws have no values for it
    with pytest.raises(ValueError, match=r"`draws` must have the shape \(N, 29\)"):
        canonical(model, np.zeros((2, 19)))
    with pytest.raises(ValueError, match="must be a Keras model; got None"):
        canonical(None, np.zeros((2, 5)))
