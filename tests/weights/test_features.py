"""The likelihoods of heads, and the last layer of a network as a linear model of features."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from scipy.special import log_expit, log_softmax
from scipy.stats import norm

import tfp_ibnn as ibnn
from tests.autodiff import gradient
from tfp_ibnn.data.examples import labelled_batches as batches
from tfp_ibnn.likelihoods import Categorical, Gaussian, Labels, Point
from tfp_ibnn.likelihoods.infer import likelihood_for_weights
from tfp_ibnn.weights.features import LastLayer, LogitNetwork
from tfp_ibnn.weights.target import Target

RNG = np.random.default_rng(0)
Z = RNG.normal(size=(5, 4))
X = RNG.normal(size=(10, 4, 4, 2)).astype("float32")


def network(*ends, loss=None):
    model = keras.Sequential([keras.Input((4, 4, 2)), layers.Conv2D(3, 2), layers.Flatten(), *ends])
    if loss is not None:
        model.compile("sgd", loss)
    return model


CASES = {
    "softmax": (Categorical(True, 4), np.array([0, 1, 2, 3, 0])),
    "sigmoid": (Labels(True, 4), RNG.integers(0, 2, (5, 4))),
    "gaussian": (Point(4, 0.5), RNG.normal(size=(5, 4))),
}


@pytest.mark.once
@pytest.mark.parametrize("name", CASES)
def test_factors_are_a_root_of_the_hessian(name):
    likelihood, y = CASES[name]
    y = likelihood.targets(y)

    def slope(z):
        return gradient(lambda z: ops.sum(likelihood.log_prob(z, y)), z)

    eps, hessian = 1e-5, np.zeros((5, 4, 4))
    for k in range(4):
        step = eps * np.eye(4)[k]
        difference = np.asarray(slope(Z + step)) - np.asarray(slope(Z - step))
        hessian[:, :, k] = -difference.reshape(5, 4) / (2 * eps)
    s = ops.convert_to_numpy(likelihood.hessian_factors(ops.convert_to_tensor(Z)))
    np.testing.assert_allclose(s @ np.swapaxes(s, 1, 2), hessian, atol=1e-8)


@pytest.mark.once
def test_log_probs():
    z = ops.convert_to_tensor(Z)
    y = np.array([0, 1, 2, 3, 0])
    for labels in (y, y[:, None], np.eye(4)[y]):
        target = Categorical(True, 4).targets(labels)
        found = ops.convert_to_numpy(Categorical(True, 4).log_prob(z, target))
        np.testing.assert_allclose(found, log_softmax(Z, axis=1)[np.arange(5), y], rtol=1e-10)
    yes = CASES["sigmoid"][1]
    found = ops.convert_to_numpy(Labels(True, 4).log_prob(z, Labels(True, 4).targets(yes)))
    np.testing.assert_allclose(found, log_expit((2 * yes - 1) * Z).sum(axis=1), rtol=1e-10)
    numbers = CASES["gaussian"][1]
    found = ops.convert_to_numpy(Point(4, 0.5).log_prob(z, Point(4, 0.5).targets(numbers)))
    np.testing.assert_allclose(found, norm(Z, 0.5).logpdf(numbers).sum(axis=1), rtol=1e-10)


@pytest.mark.once
def test_a_gaussian_head_has_the_expected_hessian():
    """For the mean and the logit of the scale; the average of the squared score says the same."""
    head = ibnn.layers.GaussianHead(dtype="float64")
    likelihood = Gaussian(layer=head)
    z = np.tile([[0.3, -0.7]], (200_000, 1))
    scale = np.log1p(np.exp(-0.7)) + 1e-3
    y = 0.3 + scale * RNG.normal(size=(200_000, 1))
    score = np.asarray(gradient(lambda z: ops.sum(likelihood.log_prob(z, y)), z)).reshape(-1, 2)
    s = ops.convert_to_numpy(likelihood.hessian_factors(ops.convert_to_tensor(z[:1])))[0]
    np.testing.assert_allclose(s @ s.T, score.T @ score / len(y), atol=0.05)


@pytest.mark.parametrize(
    ("end", "loss", "kind", "activation"),
    [
        ([layers.Dense(3)], "sparse", Categorical, "linear"),
        ([layers.Dense(3, activation="softmax")], None, Categorical, "softmax"),
        ([layers.Dense(3, activation="log_softmax")], None, Categorical, "log_softmax"),
        ([layers.Dense(3), layers.Softmax()], None, Categorical, "softmax"),
        ([layers.Dense(3), layers.Activation("sigmoid")], None, Labels, "sigmoid"),
        ([layers.Dense(3), layers.Dropout(0.5)], "mse", Point, "linear"),
        ([layers.Dense(4), ibnn.layers.GaussianHead()], None, Gaussian, "gaussian"),
        # One position, whose axis is removed behind the layer.
        (
            [layers.Reshape((1, 27)), layers.Dense(3), layers.Flatten(), layers.Softmax()],
            None,
            Categorical,
            "softmax",
        ),
    ],
)
def test_the_last_layer_is_the_network(end, loss, kind, activation, full_precision):
    if loss == "sparse":
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = network(*end, loss=loss)
    last = LastLayer(model)
    assert type(last.likelihood) is kind
    assert last.likelihood.end == activation
    y = np.zeros((10, last.width // 2 if kind is Gaussian else last.width))
    y = np.zeros(10) if kind is Categorical else y
    values, y = last.cache(X, y, batch_size=4, verbose=0)
    logits = last.logits(values)
    found = ops.convert_to_numpy(last.likelihood.outputs(logits))
    np.testing.assert_allclose(found, ops.convert_to_numpy(model(X)), atol=1e-6)
    (features,) = values.values()
    kernel, bias = (ops.convert_to_numpy(v.value) for v in last.layer.weights)
    features = features.reshape(len(features), -1)
    np.testing.assert_allclose(features @ kernel + bias, logits, atol=1e-6)
    noise = 1.0 if kind is Point else None
    target = Target(model, None, X, y, 1.0, noise, batch_size=4, verbose=0)
    w = np.stack([target.start, target.start + 1])
    each = target.log_likelihoods(ops.convert_to_tensor(w), *target.data)
    moved = ops.convert_to_tensor(features @ (kernel + 1) + bias + 1)
    for row, own in zip(each, (logits, moved), strict=True):
        np.testing.assert_allclose(row, last.likelihood.log_prob(own, y), rtol=1e-4, atol=1e-4)


def test_an_operation_may_end_the_network():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, ops.log_softmax(layers.Dense(3)(inputs)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    last = LastLayer(model)
    assert last.likelihood.end == "log_softmax"
    x = Z.astype("float32")
    values, _ = last.cache(x, np.zeros(5), verbose=0)
    outputs = last.likelihood.outputs(last.logits(values))
    np.testing.assert_allclose(outputs, ops.convert_to_numpy(model(x)), atol=1e-6)


def own_softmax(x):
    return ops.softmax(x / 2)


own_softmax.__name__ = "softmax"
SHARED = layers.Softmax()

# What stands between the last weighted layer's kernel and the output, and the head. The first can
# be linear in the weights, and the second be put behind logits.
ENDS = {
    "relu, softmax": ([layers.Dense(3, "relu"), layers.Softmax()], {}),
    "tanh, sigmoid": ([layers.Dense(3, "tanh"), layers.Activation("sigmoid")], {}),
    "relu, Gaussian": ([layers.Dense(4, "relu"), ibnn.layers.GaussianHead()], {}),
    "a layer as activation": ([layers.Dense(3, layers.LeakyReLU())], {"from_logits": True}),
    "permuted": (
        [layers.Dense(6), layers.Reshape((2, 3)), layers.Permute((2, 1)), layers.Flatten()],
        {"from_logits": True},
    ),
    "scaled": ([layers.Dense(3), layers.Rescaling(0.3), layers.Softmax()], {}),
    "sigmoid of a number": ([layers.Dense(3, "sigmoid")], {"head": "point"}),
}


@pytest.mark.parametrize("name", ENDS)
def test_ends_are_applied_or_refused(name):
    """By all weights the network is what it is; as a linear last layer it is refused."""
    end, options = ENDS[name]
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5,)), layers.Dense(4, "tanh"), *end])
    for weight in model.weights:
        weight.assign(RNG.normal(size=weight.shape))
    x = RNG.normal(size=(8, 5)).astype("float32")
    whole = LogitNetwork(model, lambda layer: bool(getattr(layer, "weights", ())), **options)
    outputs = whole.likelihood.outputs(whole.logits(whole.prefix(x)))
    np.testing.assert_allclose(outputs, ops.convert_to_numpy(model(x)), atol=1e-6)
    with pytest.raises(ValueError, match="must be a Dense one"):
        LastLayer(model, **options)
    if type(whole.likelihood) is not Categorical:
        return
    outer = ibnn.MonteCarlo(model, samples=1, **options)
    with pytest.raises(ValueError, match="must be a Dense one"):
        ibnn.OODDetector(outer, "energy")


def masked_softmax(x):
    return layers.Softmax()(layers.Dense(3)(x), x[:, :3] > 0)


def softmax_of_each_half(x):
    halves = layers.Reshape((2, 3))(layers.Dense(6)(x))
    return layers.Flatten()(layers.Softmax()(halves))


def softmax_by_a_lambda(x):
    return layers.Lambda(ops.softmax)(layers.Dense(3)(x))


def softmax_called_twice(x):
    return SHARED(layers.Dense(3)(SHARED(layers.Dense(4)(x))))


PROBABILITIES = {"head": "softmax", "from_logits": False}


@pytest.mark.parametrize(
    ("end", "options", "words"),
    [
        (layers.Dense(3, own_softmax), {}, "does not end in Keras's own softmax"),
        (softmax_by_a_lambda, PROBABILITIES, "Keras's own softmax"),
        (layers.Dense(3), PROBABILITIES, "Keras's own softmax"),
        (layers.Dense(3, "sigmoid"), {"head": "softmax"}, "Keras's own softmax"),
        (softmax_called_twice, {}, "has other calls"),
        (masked_softmax, {}, "such as a mask"),
        (softmax_of_each_half, {}, "must be over all 6 outputs"),
    ],
)
def test_ends_that_are_not_known(end, options, words):
    inputs = keras.Input((5,))
    model = keras.Model(inputs, end(layers.Dense(5)(inputs)))
    with pytest.raises(ValueError, match=words):
        LogitNetwork(model, lambda layer: bool(getattr(layer, "weights", ())), **options)


@pytest.mark.once
def test_a_softmax_shared_with_the_frozen_part():
    inputs = keras.Input((5,))
    model = keras.Model(inputs, softmax_called_twice(inputs))
    last, x = LastLayer(model), RNG.normal(size=(8, 5)).astype("float32")
    found = last.likelihood.outputs(last.logits(last.prefix(x)))
    np.testing.assert_allclose(found, ops.convert_to_numpy(model(x)), atol=1e-6)


@pytest.mark.parametrize("make", [ibnn.Laplace, ibnn.GaussianVI, ibnn.LastLayerHMC])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_of_half_precision_are_refused(make, dtype):
    options = {"dtype": keras.DTypePolicy(dtype)}
    model = keras.Sequential([keras.Input((5,)), layers.Dense(3, "softmax", **options)])
    with pytest.raises(ValueError, match=f"has {dtype} weights.*mixed_{dtype}"):
        make(model).fit(np.zeros((9, 5), "float32"), np.arange(9) % 3, verbose=0)


def test_what_is_refused():
    with pytest.raises(ValueError, match="must be a Dense one"):
        LastLayer(network(layers.Dense(3), layers.BatchNormalization(), loss="mse"))
    with pytest.raises(ValueError, match="followed by relu"):
        LastLayer(network(layers.Dense(3, activation="relu"), loss="mse"))
    with pytest.raises(ValueError, match="is unknown what the output"):
        LastLayer(network(layers.Dense(3)))
    for loss in ("huber", keras.losses.CategoricalFocalCrossentropy(from_logits=True)):
        with pytest.raises(ValueError, match="not minus a log-likelihood"):
            likelihood_for_weights(network(layers.Dense(3), loss=loss))
    assert isinstance(
        likelihood_for_weights(network(layers.Dense(3), loss="huber"), head="point"), Point
    )
    inputs = keras.Input((3,))
    split = keras.Model(inputs, layers.Dense(3)(inputs) + inputs)
    with pytest.raises(ValueError, match="more than|followed by"):
        LastLayer(split, head="point")
    inputs = keras.Input((2, 3))
    each = keras.Model(inputs, layers.Flatten()(layers.Dense(3)(inputs)))
    with pytest.raises(ValueError, match=r"output \(N, K\)"):
        LastLayer(each, head="point")


def test_batches():
    x, y = np.arange(10.0)[:, None], np.arange(10)
    sizes = [len(labels) for _, labels in batches(x, y, 4)]
    assert sizes == [4, 4, 2]
    with pytest.raises(ValueError, match="as many examples"):
        list(batches(x, y[:3], 4))
    with pytest.raises(ValueError, match="no examples"):
        list(batches(x[:0], y[:0], 4))
    with pytest.raises(ValueError, match="NaN or infinity in 1 of"):
        list(batches(np.where(x == 5, np.nan, x), y, 4))
    with pytest.raises(ValueError, match="Give arrays"):
        list(batches([x], None, 4))


@pytest.mark.parametrize(
    ("likelihood", "y", "words"),
    [
        (
            Categorical(True, 4),
            [0, 4],
            "whole numbers from 0 to 3; got 4 at example 1",
        ),
        (Categorical(True, 4), [[1, 1, 0, 0]], "one-hot"),
        (Categorical(True, 4), np.zeros((2, 3)), "must have the shape"),
        (Labels(True, 4), [[0, 1, 2, 0]], "0 or 1"),
        (Point(4), [[0, 1, np.nan, 0]], "finite"),
        (Point(4), [[0, 1]], "must have the shape"),
    ],
)
def test_wrong_targets(likelihood, y, words):
    with pytest.raises(ValueError, match=words):
        likelihood.targets(y)
