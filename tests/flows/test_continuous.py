"""Continuous flows against solved equations, and their log-determinants against exact traces."""

import keras
import numpy as np
import pytest
import scipy.integrate
import scipy.linalg
from keras import layers, ops

import tfp_ibnn as ibnn
from tests import autodiff
from tests.flows.tools import close, draws, numpy
from tests.registry import perturb
from tfp_ibnn._core.backend import compiled
from tfp_ibnn.flows import Continuous, Inverse


def made(channels=3, **options):
    flow = Continuous(**{"hidden": 6, "steps": 4, "dtype": "float64", **options})
    flow.build((None, channels))
    perturb(flow, 2)
    return flow


def linear(matrix, speed, **options):
    """The flow of dx/dt = x matrix + t speed."""
    size = len(matrix)
    network = layers.Dense(size, use_bias=False, dtype="float64")
    flow = Continuous(network=network, dtype="float64", **options)
    flow.build((None, size))
    flow.network.network.kernel.assign(np.concatenate([matrix, speed[None]]))
    flow.output_kernel.assign(size**0.5 * np.eye(size))
    return flow


def solve(flow, x, method="forward"):
    """Values and log-determinants; in a graph, since TensorFlow is slow at products otherwise."""
    function = compiled(getattr(flow, f"{method}_and_log_det"), flow.variables)
    return numpy(*function(ops.convert_to_tensor(x)))


@pytest.mark.parametrize("options", [{"steps": 24}, {"tolerance": 1e-9}], ids=str)
def test_linear_equation_has_the_solution_of_a_matrix_exponential(options):
    matrix, speed, x = draws((2, 2), seed=3), draws((2,), seed=4), draws((4, 2))
    flow = linear(matrix, speed, **options)
    # x, t and 1 together solve a linear equation without time.
    whole = np.zeros((4, 4))
    whole[:2, :2], whole[2, :2], whole[3, 2] = matrix, speed, 1
    start = np.concatenate([x, np.zeros((4, 1)), np.ones((4, 1))], axis=1)
    expected = (start @ scipy.linalg.expm(whole))[:, :2]
    y, log_det = solve(flow, x)
    close(y, expected, 1e-6)
    close(log_det, np.trace(matrix), 1e-7)
    back, inverse_log_det = solve(flow, expected, "inverse")
    close(back, x, 1e-6)
    close(inverse_log_det, -np.trace(matrix), 1e-7)


def test_error_falls_with_the_fourth_power_of_the_steps():
    flow, x = made(), draws((5, 3))
    found = {}
    for flow.steps in (2, 4, 64):
        found[flow.steps] = np.column_stack(solve(flow, x))
    few, many = (np.max(np.abs(found[steps] - found[64]), axis=0) for steps in (2, 4))
    assert np.all(few > 1e-7)
    assert np.all(few / many > 8)  # 16 in the limit


def test_closed_form_is_the_trace_of_the_velocity():
    flow, x, t = made(channels=5), draws((4, 5)), np.float64(0.3)
    velocity = flow.bijector().velocity
    jacobian = autodiff.jacobian(lambda v: velocity(v, t)[0], x)
    close(numpy(velocity(ops.convert_to_tensor(x), t)[1]), np.trace(jacobian.T), 1e-12)


def test_hutchinson_estimate_has_no_bias():
    exact, flow = made(), made(trace="hutchinson")
    assert exact.exact_log_det
    assert not flow.exact_log_det
    assert not Inverse(flow).exact_log_det
    rows = np.repeat(draws((1, 3)), 4000, axis=0)
    y, expected = solve(exact, rows[:1])
    for method, x, value in (("forward", rows, expected), ("inverse", rows * 0 + y, -expected)):
        found = solve(flow, x, method)[1]
        assert found.std() > 0.01
        assert abs(found.mean() - value[0]) < 3 * found.std() / len(rows) ** 0.5


def test_one_noise_for_a_bijector_and_another_for_the_next():
    flow, x = made(trace="hutchinson", steps=1), ops.convert_to_tensor(draws((4, 3)))
    bijector = flow.bijector()
    first, second = (numpy(bijector.forward_and_log_det(x)[1]) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    y, log_det = flow.bijector().forward_and_log_det(x)
    assert np.any(numpy(log_det) != first)


@pytest.mark.once
def test_random_state_is_saved_with_the_flow(tmp_path):
    inputs = keras.Input((3,))
    model = keras.Model(inputs, Continuous(trace="hutchinson", steps=1)(inputs))
    for _ in range(3):
        model.layers[1].key()
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(numpy(loaded.layers[1].key()), numpy(model.layers[1].key()))


@pytest.mark.parametrize("trace", ["exact", "hutchinson"])
def test_density_with_a_network_is_trained_and_saved(eagerly, trace, tmp_path):
    network = keras.Sequential([layers.Dense(4, "tanh"), layers.Dense(3)])
    flow = Continuous(network=network, trace=trace, steps=1)
    density = ibnn.FlowDensity([flow], condition=1)
    density.compile(keras.optimizers.SGD(0.1))
    x, condition = draws((16, 2), dtype="float32"), draws((16, 1), dtype="float32")
    density.adapt(x)
    perturb(density.flows[0], 2)
    before = density.get_weights()
    states = [numpy(g.state) for g in (density.flows[0].seed_generator,) if g is not None]
    density.fit((x, condition), epochs=1, verbose=0)
    assert [w.shape for w in density.flows[0].weights] == [(3, 2), (4, 4), (4,), (4, 3), (3,)]
    changed = [np.any(old != new) for old, new in zip(before, density.get_weights(), strict=True)]
    assert sum(changed) == 5
    for state in states:  # or each step would have the same noise
        assert np.any(numpy(density.flows[0].seed_generator.state) != state)
    density.save(tmp_path / "density.keras")
    loaded = keras.saving.load_model(tmp_path / "density.keras")
    again, expected = loaded.log_prob(x, condition), density.log_prob(x, condition)
    np.testing.assert_allclose(again, expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("network", [None, 2])
def test_density_is_trained_under_a_compiler(network):
    network = network and keras.Sequential([layers.Dense(4, "tanh"), layers.Dense(network)])
    density = ibnn.FlowDensity([Continuous(hidden=4, steps=2, network=network)])
    density.compile(keras.optimizers.Adam(0.05), jit_compile=True)
    x = draws((256, 2), dtype="float32") ** 3
    losses = density.fit(x, epochs=20, batch_size=64, verbose=0).history["loss"]
    assert losses[-1] < losses[0] - 0.1


def test_images_need_a_random_trace():
    with pytest.raises(ValueError, match="`trace` must be 'hutchinson'"):
        Continuous(network=layers.Conv2D(4, 3, padding="same"), event_ndims=3)


def test_estimate_for_images_has_no_bias():
    """The network sees 2 x 2 pixels at once."""
    network = layers.Conv2D(4, 3, padding="same", activation="tanh", dtype="float64")
    options = {"dtype": "float64", "steps": 2, "trace": "hutchinson"}
    flow = Continuous(network=network, event_ndims=3, **options)
    flow.build((None, 2, 2, 1))
    perturb(flow, 2)
    x = draws((1, 2, 2, 1))
    jacobian = autodiff.whole_jacobian(flow.bijector().forward, x)
    expected = np.linalg.slogdet(jacobian.reshape(4, 4))[1]
    found = solve(flow, np.repeat(x, 4000, axis=0))[1]
    assert found.std() > 0.01
    # The Runge-Kutta method errs by some 1e-4.
    assert abs(found.mean() - expected) < 3 * found.std() / len(found) ** 0.5 + 1e-3


def test_at_large_weights_the_error_is_that_of_the_tolerance(float64):
    flow, x = made(tolerance=1e-7), draws((3, 3))
    perturb(flow, 2, size=8.0)
    kernel, bias, last = (numpy(weight) for weight in (flow.kernel, flow.bias, flow.output_kernel))
    kernel, last = kernel / 2, last / 6**0.5  # by the square roots of their inputs

    def rate(t, state):
        points = np.column_stack([state.reshape(3, 4)[:, :3], np.full(3, t)])
        hidden = np.tanh(points @ kernel + bias)
        trace = np.einsum("nh,ch,hc->n", 1 - hidden**2, kernel[:3], last)
        return np.column_stack([hidden @ last, trace]).ravel()

    start = np.column_stack([x, np.zeros(3)]).ravel()
    solved = scipy.integrate.solve_ivp(rate, (0, 1), start, rtol=1e-10, atol=1e-10)
    expected = solved.y[:, -1].reshape(3, 4)
    assert np.abs(expected[:, 3]).max() > 3  # far from the identity
    y, log_det = solve(flow, x)
    close(y, expected[:, :3], 1e-5)
    close(log_det, expected[:, 3], 1e-5)
