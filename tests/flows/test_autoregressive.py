import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn
from tests.flows.tools import close, draws, forward, inverse, jacobian, log_det
from tests.registry import make_flow
from tfp_ibnn.flows import InverseAutoregressive, MaskedAutoregressive, SplineAutoregressive

pytestmark = pytest.mark.once


@pytest.mark.parametrize("channels", [2, 3, 7])
@pytest.mark.parametrize(
    "name", ["autoregressive", "autoregressive-reverse", "autoregressive-spline"]
)
def test_jacobian_is_triangular(float64, name, channels):
    flow, x = make_flow(name, channels, seed=2), draws((20, channels))
    found = jacobian(flow, x)
    if name == "autoregressive-reverse":
        found = found.swapaxes(-1, -2)
    assert np.all(np.triu(found, 1) == 0)
    assert np.all(np.diagonal(found, axis1=-2, axis2=-1) > 0)
    below = np.tril(np.ones((channels, channels), bool), -1)
    assert np.all(np.any(found != 0, axis=0)[below]), "a channel ignores one before it"
    diagonal = np.diagonal(found, axis1=-2, axis2=-1)
    close(log_det(flow, x), np.sum(np.log(diagonal), axis=-1), 1e-10)


@pytest.mark.parametrize("hidden", [1, 2, 5])
def test_few_hidden_units_are_enough(float64, hidden):
    flow, x = InverseAutoregressive(hidden=hidden), draws((10, 7))
    flow.build((None, 7))
    for weight in flow.weights:
        weight.assign(draws(weight.shape, seed=3))
    found = jacobian(flow, x)
    assert np.all(np.triu(found, 1) == 0)
    close(inverse(flow, forward(flow, x)), x, 1e-8)


@pytest.mark.parametrize("hidden", [5, 6, 10, 40])
def test_fewer_hidden_units_than_channels_serve_all_of_them(hidden):
    flow = InverseAutoregressive(hidden=hidden)
    flow.build((None, 12))
    sees, serves = (mask.astype(int) for mask in flow.network.masks)
    paths = (sees @ serves).T > 0
    assert not np.any(np.triu(paths))
    seen, before = np.sum(paths, axis=-1), np.arange(12)
    assert seen[-1] == 11, "the last channel ignores one before it"
    assert np.all(before - seen < max(11 / hidden, 1) + 0.5)


KINDS = [InverseAutoregressive, MaskedAutoregressive, SplineAutoregressive]


@pytest.mark.parametrize("kind", KINDS)
def test_flows_of_earlier_files_keep_their_masks(kind):
    config = kind(hidden=4).get_config()
    assert config.pop("spread")
    last = []
    for flow in (kind(hidden=4), kind.from_config(config), kind.from_config(kind(4).get_config())):
        flow.build((None, 9))
        last.append(int(np.sum(flow.network.masks[0])))
    assert last == [1 + 3 + 6 + 8, 1 + 2 + 3 + 4, 1 + 3 + 6 + 8]
    old = kind.from_config(config)
    assert not kind.from_config(old.get_config()).spread


def test_one_channel_is_shifted_and_scaled(float64):
    flow, x = make_flow("autoregressive", 1, seed=2), draws((10, 1))
    slopes = jacobian(flow, x)
    close(np.ptp(slopes), 0.0, 1e-14)
    assert np.abs(slopes[0, 0, 0] - 1) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("flow", [InverseAutoregressive, SplineAutoregressive])
def test_gradient_of_the_inverse_compiles(flow):
    keras.utils.set_random_seed(0)
    density = ibnn.FlowDensity([flow(hidden=8)])
    density.compile(keras.optimizers.Adam(0.05), jit_compile=True)
    x = draws((256, 2), dtype="float32") ** 3
    losses = density.fit(x, epochs=20, batch_size=64, verbose=0).history["loss"]
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.parametrize("channels", [2, 400])
def test_hidden_biases_are_spread_within_the_root_of_the_fan_in(channels):
    """All at 0 the kinks of all units would be at 0; far from it no input would cross them."""
    flow = InverseAutoregressive(hidden=256)
    flow.build((None, channels))
    biases = np.asarray(flow.network.bias) * channels**0.5
    assert biases.min() < -0.9
    assert 0.9 < biases.max() <= 1.0
    assert abs(biases.std() - 3**-0.5) < 0.08
