"""Flows of discrete data, by enumeration of small spaces."""

import itertools

import keras
import numpy as np
import pytest
from keras import ops
from scipy import stats

from tests import autodiff
from tests.flows.tools import close, draws, numpy
from tests.registry import DISCRETE, perturb
from tfp_ibnn import flows

ONCE = {"modulo-prime-reverse"}  # another setting of a flow that is there already
every_flow = pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.once) if x in ONCE else x for x in DISCRETE]
)
CHANNELS = 3


def test_registry_holds_every_flow():
    public = {kind for kind in vars(flows).values() if isinstance(kind, type)}
    known = {kind for kind in public if issubclass(kind, flows.DiscreteFlow)}
    assert {type(make()) for make in DISCRETE.values()} == known - {flows.DiscreteFlow}


def made(name, seed=2, **kwargs):
    flow = DISCRETE[name](**kwargs)
    flow.build((None, CHANNELS * flow.width))
    if seed is not None:
        perturb(flow, seed)
    return flow


def space(flow, edge=3):
    """All points of the space, or a box of it."""
    values = range(flow.levels) if flow.width > 1 else range(-edge, edge + 1)
    points = np.array(list(itertools.product(values, repeat=CHANNELS)))
    return encoded(flow, points)


def encoded(flow, points):
    return np.eye(flow.levels)[points].reshape(len(points), -1) if flow.width > 1 else points


def decoded(flow, x):
    return x.reshape(len(x), CHANNELS, -1).argmax(-1) if flow.width > 1 else x


@every_flow
@pytest.mark.parametrize(
    "condition",
    [None, pytest.param(np.array([[0.5, -1.0]]), marks=pytest.mark.slow)],
    ids=["plain", "condition"],
)
def test_it_is_a_permutation(float64, name, condition):
    flow = made(name, condition_size=None if condition is None else 2)
    x = space(flow)
    y, back = numpy(flow.forward(x, condition), flow.inverse(x, condition))
    np.testing.assert_array_equal(numpy(flow.inverse(y, condition)), x)
    np.testing.assert_array_equal(numpy(flow.forward(back, condition)), x)
    assert len(np.unique(y, axis=0)) == len(x)
    assert (y != x).any()
    if flow.width > 1:
        assert {tuple(row) for row in y} == {tuple(row) for row in x}


@pytest.mark.once
@every_flow
def test_probabilities_sum_to_one(float64, name):
    flow, rng = made(name), np.random.default_rng(0)
    if flow.width > 1:
        y, base = space(flow), rng.dirichlet(np.ones(flow.levels), size=CHANNELS)
        x = decoded(flow, numpy(flow.inverse(y)))
        chances = base[range(CHANNELS), x]
    else:
        y = space(flow, edge=24)
        cdf = stats.logistic.cdf
        x = numpy(flow.inverse(y))
        chances = cdf(2 * x + 1) - cdf(2 * x - 1)
    assert chances.prod(-1).sum() == pytest.approx(1, abs=1e-3)


@every_flow
def test_channels_move_as_their_formula_says(float64, name):
    """Given the channels before it, one channel is shifted, or scaled and shifted mod K."""
    flow = made(name)
    points = decoded(flow, space(flow)).astype(int)
    y = decoded(flow, numpy(flow.forward(space(flow)))).astype(int)
    order = range(CHANNELS)[:: -1 if flow.reverse else 1]
    seen = set()
    for position, channel in enumerate(order):
        before = list(order[:position])
        for key in np.unique(y[:, before], axis=0):
            rows = (y[:, before] == key).all(-1)
            pairs = dict(zip(points[rows, channel], y[rows, channel], strict=True))
            if flow.width == 1:
                assert len({new - old for old, new in pairs.items()}) == 1
                continue
            k = flow.levels
            shift, scale = pairs[0], (pairs[1] - pairs[0]) % k
            assert np.gcd(scale, k) == 1
            assert pairs == {old: (scale * old + shift) % k for old in range(k)}
            seen.add((scale, shift))
    assert flow.width == 1 or len({scale for scale, _ in seen}) > 1


@every_flow
def test_start_is_the_identity(name):
    flow = made(name, seed=None)
    np.testing.assert_array_equal(numpy(flow.forward(space(flow))), space(flow))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["modulo", "integer"])
def test_compiled_equals_eager(name):
    flow = made(name)
    x = ops.convert_to_tensor(space(flow)[::7].reshape(-1, 1, CHANNELS * flow.width), "float32")

    def both(x):
        return flow.forward(x), flow.inverse(x)

    for one, other in zip(autodiff.jit(both, flow.weights)(x), both(x), strict=True):
        np.testing.assert_array_equal(numpy(one), numpy(other))


@every_flow
def test_gradients_pass_straight_through(name):
    flow, y = made(name, condition_size=2), space(made(name))
    condition, weight = draws((len(y), 2)), draws(y.shape)

    def loss():
        return ops.sum(flow.inverse(y, condition) * weight.astype("float32"))

    for gradient in autodiff.weight_gradients(loss, flow.trainable_weights):
        assert np.isfinite(gradient).all()
        assert gradient.any()


def test_gradient_of_a_shift_is_that_without_the_rounding():
    flow, y = made("integer"), space(made("integer")).astype("float32")
    bias = flow.network.output_bias

    def loss():
        return ops.sum(flow.inverse(y))

    (found,) = autodiff.weight_gradients(loss, [bias])
    close(found[0], -3.0 * len(y), 1e-5)  # d/db of y - levels * (... + b)
    close(found[1], 0, 1e-9)


@pytest.mark.once
@pytest.mark.slow
def test_training_removes_most_of_a_dependence():
    """y_1 = (y_0 + 1) mod 4: independent categories need log 4 for it, the right flow nothing."""
    rng = np.random.default_rng(0)
    first = rng.integers(0, 4, 256)
    y = np.eye(4)[np.column_stack([first, (first + 1) % 4])].reshape(-1, 8).astype("float32")
    keras.utils.set_random_seed(0)

    class Likelihood(keras.Model):
        def __init__(self):
            super().__init__()
            self.flow = flows.ModuloAffine(4)
            self.logits = self.add_weight((2, 4), "zeros")

        def build(self, shape):
            self.flow.build(shape)

        def call(self, y):
            x = ops.reshape(self.flow.inverse(y), (-1, 2, 4))
            return -ops.sum(x * ops.log_softmax(self.logits), axis=(1, 2))

    model = Likelihood()
    model.compile(keras.optimizers.Adam(0.03), loss=lambda _, nll: ops.mean(nll))
    history = model.fit(y, y[:, :1], epochs=60, batch_size=64, verbose=0).history["loss"]
    assert history[0] > 1.9 * np.log(4)
    assert history[-1] < 1.5 * np.log(4)


@pytest.mark.parametrize("policy_name", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_leaves_whole_numbers_exact(policy, policy_name):
    policy(policy_name)
    flow = made("integer")
    x = np.array([[255.0, 254.0, 1001.0]])
    y = flow.forward(x)
    assert keras.backend.standardize_dtype(y.dtype) == "float32"
    np.testing.assert_array_equal(numpy(flow.inverse(y)), x)


@every_flow
def test_config_round_trip(name):
    flow = made(name, condition_size=2)
    config = keras.saving.serialize_keras_object(flow)
    twin = keras.saving.deserialize_keras_object(config)
    assert keras.saving.serialize_keras_object(twin) == config
    twin.build((None, CHANNELS * flow.width))
    twin.set_weights(flow.get_weights())
    x, condition = space(flow), draws((1, 2))
    np.testing.assert_array_equal(
        numpy(twin.forward(x, condition)), numpy(flow.forward(x, condition))
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: flows.ModuloAffine(1), "`levels`"),
        (lambda: flows.IntegerAdditive(4, hidden=0), "`hidden`"),
        (lambda: flows.ModuloAffine(4).build((None, 6)), "4 numbers per channel; got 6"),
        (lambda: flows.IntegerAdditive(4).build((None, None)), "shape"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
