from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfp_ibnn as ibnn
from tests import autodiff
from tests.flows.tools import (
    close,
    draws,
    forward,
    inverse,
    jacobian,
    log_det,
    slope_by_differences,
)
from tests.registry import FLOWS, make_flow, min_channels, perturb
from tfp_ibnn import flows

pytestmark = pytest.mark.once

needs_two = [name for name in FLOWS if min_channels(name) == 2]


def test_some_flows_need_two_channels():
    assert {name.split("-")[0] for name in needs_two} == {"coupling", "glow"}


@pytest.mark.parametrize("name", needs_two)
def test_one_channel_is_refused_with_a_remedy(name):
    flow = FLOWS[name]()
    with pytest.raises(ValueError, match="at least 2 channels.*got 1.*Planar") as caught:
        flow.build((None, 1))
    assert type(flow).__name__ in str(caught.value)


@pytest.mark.parametrize("channels", [2, 3, 6, 7])
@pytest.mark.parametrize("name", ["coupling", "coupling-swap"])
def test_one_part_is_kept_and_steers_the_other(float64, name, channels):
    flow, x = make_flow(name, channels, seed=2), draws((5, channels))
    first, last = np.split(np.arange(channels), [channels // 2])
    kept, moved = (last, first) if name == "coupling-swap" else (first, last)
    y = forward(flow, x)
    np.testing.assert_array_equal(y[:, kept], x[:, kept])
    assert np.all(y[:, moved] != x[:, moved])
    found = jacobian(flow, x)
    among = found[:, moved][:, :, moved]
    close(among, among * np.eye(len(moved)), 1e-14)
    assert np.all(found[:, moved][:, :, kept].any(axis=0))


@pytest.mark.parametrize("sign", [-1, 1])
def test_log_scale_is_bounded(float64, sign):
    flow, x = make_flow("coupling", 4, seed=2), draws((5, 4))
    flow.network.output_bias.assign(np.full((2, 2), sign * 1e6))
    close(log_det(flow, x), sign * 2 * flow.limit, 1e-10)


def test_gradients_against_finite_differences(float64):
    flow, x = make_flow("coupling", 3, seed=2), draws((6, 3))

    def loss():
        v = ops.convert_to_tensor(x)
        y, found = flow.forward_and_log_det(v)
        back = flow.bijector().inverse(v)
        return ops.sum(ops.square(y)) + ops.sum(ops.exp(found)) + ops.sum(ops.square(back))

    weights = flow.trainable_weights
    value = autodiff.quick(loss, weights)
    for weight, gradient in zip(weights, autodiff.weight_gradients(loss, weights), strict=True):
        close(gradient, slope_by_differences(value, weight), 1e-6)


class Power(NamedTuple):
    """y = sign(x) |x|^exponent."""

    exponent: Any

    def forward(self, x):
        y = ops.sign(x) * ops.abs(x) ** self.exponent
        return y, ops.log(self.exponent) + (self.exponent - 1) * ops.log(ops.abs(x))

    def inverse(self, y):
        x, log_slopes = Power(1 / self.exponent).forward(y)
        return x, log_slopes


@pytest.mark.parametrize("kept", [[0, 1], [2, 3, 4], [1, 3], [0, 2, 4], [0, 1, 4]])
def test_a_coupling_takes_any_transform_and_any_channels(float64, kept):
    moved = np.setdiff1d(np.arange(5), kept)

    def exponents(x):
        return 1 + ops.sum(x * x, axis=-1, keepdims=True)

    def bijector():
        options = {"network": exponents, "transform": Power, "dtype": "float64"}
        return flows.CouplingBijector(kept=np.array(kept), moved=moved, **options)

    x = draws((6, 5))
    exponent = 1 + np.sum(x[:, kept] ** 2, axis=-1, keepdims=True)
    expected = x.copy()
    expected[:, moved] = np.sign(x[:, moved]) * np.abs(x[:, moved]) ** exponent
    y, found = bijector().forward_and_log_det(ops.convert_to_tensor(x))
    close(ops.convert_to_numpy(y), expected, 1e-12)
    log_slopes = np.log(exponent) + (exponent - 1) * np.log(np.abs(x[:, moved]))
    close(ops.convert_to_numpy(found), log_slopes.sum(axis=-1), 1e-12)
    back, found_back = bijector().inverse_and_log_det(y)
    close(ops.convert_to_numpy(back), x, 1e-9)
    close(ops.convert_to_numpy(found_back), -ops.convert_to_numpy(found), 1e-9)


def test_a_bijector_of_splines_can_be_copied(float64):
    flow, x = make_flow("coupling-spline", seed=2), ops.convert_to_tensor(draws((4, 3)))
    bijector = flow.bijector()
    assert type(bijector) is flows.SplineCouplingBijector
    close(ops.convert_to_numpy(bijector.copy().forward(x)), forward(flow, x), 1e-14)
    tiny = bijector.copy(interval=1e-6)  # and the identity beyond it
    close(ops.convert_to_numpy(tiny.forward(x)), ops.convert_to_numpy(x), 1e-14)


# A network of the user.

KINDS = (flows.AffineCoupling, flows.AdditiveCoupling, flows.SplineCoupling)


def deep(features=6):
    return keras.Sequential([layers.Dense(8, "relu"), layers.Dense(features, "sigmoid")])


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_any_network_gives_a_flow(float64, kind, size):
    flow, x = kind(network=deep(), condition_size=size), draws((2, 2, 5))
    flow.build((None, 5))
    assert (2 + (size or 0), 8) in [tuple(w.shape) for w in flow.weights]
    condition = None if size is None else draws((2, 1, size), seed=3)
    close(forward(flow, x, condition), x, 1e-12)  # it starts as the identity
    perturb(flow, 2)
    y = forward(flow, x, condition)
    assert np.all((np.abs(y - x) > 1e-4) == [False, False, True, True, True])
    close(inverse(flow, y, condition), x, 1e-8)
    expected = np.linalg.slogdet(jacobian(flow, x, condition=condition))[1]
    close(log_det(flow, x, condition=condition), expected, 1e-9)
    if kind is flows.AdditiveCoupling:
        close(expected, 0, 1e-14)


def test_shift_and_log_scale_are_linear_in_the_features(float64):
    flow, x = flows.AffineCoupling(network=deep(), swap=True), draws((6, 4))
    flow.build((None, 4))
    perturb(flow, 2)
    network = flow.network
    features = ops.convert_to_numpy(network.inner.network(x[:, 2:])) / 6**0.5
    kernel, bias = map(ops.convert_to_numpy, (network.output_kernel, network.output_bias))
    shift, raw = (features @ kernel[i] + bias[i] for i in range(2))
    close(forward(flow, x)[:, :2], x[:, :2] * np.exp(2 * np.tanh(raw / 2)) + shift, 1e-12)


def test_network_of_any_kind_is_trained_and_saved_with_the_flow(tmp_path):
    inner = keras.Input((2,), dtype="float32")
    functional = keras.Model(inner, layers.Dense(4, "tanh")(layers.Dense(8, "relu")(inner)))
    inputs = keras.Input((7, 4))  # which the network sees as rows
    model = keras.Model(inputs, flows.AffineCoupling(network=functional)(inputs))
    model.compile("sgd", "mse")
    x = draws((8, 7, 4), dtype="float32")
    perturb(model.layers[1], 2)
    before = model.get_weights()
    model.fit(x, -x, verbose=0)
    assert all(np.any(old != new) for old, new in zip(before, model.get_weights(), strict=True))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))


def test_copies_of_a_flow_have_networks_of_their_own():
    network = deep()
    flow = flows.AffineCoupling(network=network)
    density = ibnn.FlowDensity([flow, flow])
    density.build((None, 4))
    assert not network.built
    one, other = (part.network.inner.network for part in density.flows)
    assert one is not other
    assert np.any(one.get_weights()[0] != other.get_weights()[0])
    assert len(density.trainable_weights) == 12


def test_network_of_mixed_precision_leaves_the_flow_in_float32():
    network = keras.Sequential([layers.Dense(4, dtype="mixed_bfloat16")])
    flow, x = flows.AffineCoupling(network=network), draws((5, 4), dtype="float32")
    flow.build((None, 4))
    y = forward(flow, x)
    assert y.dtype == np.float32
    close(inverse(flow, y), x, 1e-5)


def test_network_that_loses_axes_is_refused():
    network = keras.Sequential([layers.Conv2D(4, 3)])
    flow = flows.AffineCoupling(network=network, event_ndims=3)
    message = r"must map the shape \(None, 4, 4, 2\) to .*; got \(None, 2, 2, 4\)"
    with pytest.raises(ValueError, match=message):
        flow.build((None, 4, 4, 4))


def test_a_given_network_runs_as_in_inference():
    hidden = [layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.5)]
    network = keras.Sequential([*hidden, layers.Dense(2)])
    density = ibnn.FlowDensity([ibnn.flows.AffineCoupling(network=network)])
    x = draws((64, 2), dtype="float32") + 3
    density.compile("adam")
    density.fit(x, epochs=1, verbose=0)
    moving = {v.path.split("/")[-1]: v for v in density.non_trainable_variables}
    np.testing.assert_array_equal(moving["moving_mean"], np.zeros(8))
    first, second = (density.evaluate(x, verbose=0) for _ in range(2))
    assert first == second
