"""The default prior precision of `Laplace`, and its warning, against the network's own NLL."""

import re

import keras
import numpy as np
import pytest
from keras import layers
from scipy.special import log_softmax, softmax
from sklearn.datasets import load_breast_cancer, load_digits

import tfp_ibnn as ibnn
from tfp_ibnn.weights.laplace.guard import MARGIN, Reservoir, guarded

RNG = np.random.default_rng(0)
SIZE, FEATURES, CLASSES = 300, 20, 5
TRUE = RNG.normal(size=(FEATURES, CLASSES))


def examples(size):
    x = RNG.normal(size=(size, FEATURES))
    noise = RNG.gumbel(size=(size, CLASSES))
    return x.astype("float32"), np.argmax(x @ TRUE + noise, axis=1)


TRAIN, TEST = examples(SIZE), examples(SIZE)


def network(factor):
    """Return the model that made the labels, its logits multiplied: by .5 it is underconfident."""
    inputs = keras.Input((FEATURES,))
    model = keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(inputs))
    model.set_weights([factor * TRUE, np.zeros(CLASSES)])
    return model


def nll(probabilities, y):
    return -np.mean(np.log(probabilities[np.arange(len(y)), y]))


def own_nll(factor, data):
    """Return the NLL of the network alone."""
    return nll(softmax(factor * data[0] @ TRUE, axis=1), data[1])


def test_the_default_costs_little_beside_the_network():
    """By the marginal likelihood alone, a network stopped early loses more than the margin."""
    posterior = ibnn.Laplace(network(0.5)).fit(*TRAIN, batch_size=100, verbose=0)
    averaged = ibnn.MonteCarlo(posterior, samples=32, seed=0)

    def cost(data):
        found = averaged.predict(data[0], batch_size=100, verbose=0)["mean"]
        return nll(found, data[1]) - own_nll(0.5, data)

    prior = float(posterior.prior_precision)
    assert cost(TRAIN) <= 1.001 * MARGIN
    assert cost(TEST) < 2 * MARGIN
    posterior.prior_precision.assign(prior / 10**0.5)  # the next smaller one would not do
    assert cost(TRAIN) > MARGIN
    posterior.prior_precision.assign(prior)
    # The evidence, and what refines the posterior, keep the prior of the marginal likelihood.
    evidence, scale = posterior.log_marginal_likelihood(), posterior.prior_scale
    unguarded = posterior.optimize_prior_precision("marglik")
    assert cost(TRAIN) > 3 * MARGIN
    assert posterior.log_marginal_likelihood() == pytest.approx(evidence)
    assert posterior.prior_scale == pytest.approx(scale) == pytest.approx(unguarded**-0.5)
    half_decades = 2 * np.log10(prior / unguarded)
    assert half_decades == pytest.approx(round(half_decades), abs=1e-3)


@pytest.mark.once
@pytest.mark.parametrize("factor", [0.5, 1.5])
def test_a_posterior_that_costs_nothing_keeps_the_marginal_likelihood(factor):
    """That of an overconfident network on training data; of any on data that it gets wrong."""
    x, y = TRAIN
    wrong = (x, np.argmin(x @ TRUE, axis=1)) if factor < 1 else None
    posterior = ibnn.Laplace(network(factor)).fit(x, y, validation_data=wrong, verbose=0)
    prior = float(posterior.prior_precision)
    assert posterior.optimize_prior_precision("marglik") == pytest.approx(prior)


@pytest.mark.once
def test_the_search_finds_the_next_half_decade():
    for limit in 10.0 ** np.arange(-6.25, 1):
        candidates = [10 ** (i / 2) for i in range(17)]
        best = next(p for p in candidates if 1 / p <= limit)
        assert guarded(1.0, lambda p: 1 / p, limit) == pytest.approx(best)


@pytest.mark.once
def test_a_reservoir_takes_all_examples_alike():
    counts = np.zeros(60)
    for seed in range(300):
        reservoir = Reservoir(10)
        reservoir._rng = np.random.default_rng(seed)
        for start in range(0, 60, 7):
            rows = np.arange(start, min(start + 7, 60))
            reservoir.add({"a": rows}, rows + 100)
        x, y = reservoir.examples()
        assert len(set(y)) == 10
        np.testing.assert_array_equal(x["a"] + 100, y)
        counts[y - 100] += 1
    # 50 each, with a standard deviation of 6.5
    assert 25 < counts.min()
    assert counts.max() < 75


def test_the_warning_promises_what_there_is():
    """The quadratic promises 9.5 nats where the whole loss is 1.3."""
    posterior = ibnn.Laplace(network(6.0), hessian_structure="full", prior_precision=0.01)
    with pytest.warns(UserWarning, match="does not seem to be trained") as caught:
        posterior.fit(*TRAIN, verbose=0)
    texts = "".join(str(warning.message) for warning in caught)
    gain = float(re.search(r"by ([0-9.e+]+) nats", texts)[1])
    x, y = TRAIN
    slope = np.eye(CLASSES)[y] - softmax(6 * x @ TRUE, axis=1)
    gradient = np.concatenate([(x.T @ slope).ravel(), slope.sum(axis=0)])
    step = np.asarray(posterior.distribution().covariance()) @ gradient
    assert gradient @ step / 2 / SIZE > 9
    assert gain < own_nll(6, TRAIN) < 1.3

    def loss(part):
        kernel = part * step[:-CLASSES].reshape(FEATURES, CLASSES) + 6 * TRUE
        logits = x @ kernel + part * step[-CLASSES:]
        return -log_softmax(logits, axis=1)[np.arange(SIZE), y].mean()

    best = loss(0) - min(loss(0.5**i) for i in range(8))
    assert gain == pytest.approx(best, rel=0.1)  # two digits are printed


@pytest.mark.once
def test_no_warning_where_little_can_be_gained(recwarn):
    """The quadratic promises 1.6 nats, and there are .28."""
    options = {"hessian_structure": "full", "prior_precision": 0.01}
    ibnn.Laplace(network(3.0), **options).fit(*TRAIN, verbose=0)
    assert not [w for w in recwarn if "seem to be trained" in str(w.message)]


def resnet():
    """Return a residual network with batch normalization, for 8 x 8 pixels."""

    def convolved(x, filters, size=3, strides=1):
        x = layers.Conv2D(filters, size, strides, padding="same", use_bias=False)(x)
        return layers.BatchNormalization(momentum=0.9)(x)

    inputs = keras.Input((64,))
    x = layers.ReLU()(convolved(layers.Reshape((8, 8, 1))(inputs), 8))
    for filters, strides in ((8, 1), (16, 2)):
        y = convolved(layers.ReLU()(convolved(x, filters, 3, strides)), filters)
        x = convolved(x, filters, 1, strides) if strides > 1 else x
        x = layers.ReLU()(layers.Add()([x, y]))
    outputs = layers.Dense(10, "softmax")(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, outputs)


def perceptron(inputs, classes):
    hidden = layers.Dense(32, "relu")
    return keras.Sequential([keras.Input((inputs,)), hidden, layers.Dense(classes, "softmax")])


# The data, the network, and epochs that stop it early, or leave it to overfit.
PROBLEMS = {
    "digits, 15 epochs": (load_digits, lambda: perceptron(64, 10), 15),
    "digits, 100 epochs": (load_digits, lambda: perceptron(64, 10), 100),
    "cancer, 60 epochs": (load_breast_cancer, lambda: perceptron(30, 2), 60),
    "digits, ResNet": (load_digits, resnet, 10),
}


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.filterwarnings("ignore:The scale and shift")
def test_the_default_is_not_worse_than_trained_networks(name, subset):
    """By the marginal likelihood alone the NLL grows by up to half a nat."""
    load, make, epochs = PROBLEMS[name]
    keras.utils.set_random_seed(0)
    x, y = load(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = ((x - x.mean(axis=0)) / (x.std(axis=0) + 0.1))[order].astype("float32"), y[order]
    half, model = len(x) // 2, make()
    model.compile(keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy")
    model.fit(x[:half], y[:half], epochs=epochs, verbose=0)
    posterior = ibnn.Laplace(model, subset).fit(x[:half], y[:half], verbose=0)
    averaged = ibnn.MonteCarlo(posterior, samples=32, seed=0)
    found = averaged.predict(x[half:], verbose=0)["mean"]
    assert nll(found, y[half:]) < nll(model.predict(x[half:], verbose=0), y[half:]) + 2 * MARGIN
