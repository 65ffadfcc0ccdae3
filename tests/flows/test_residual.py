"""Residual flows: their norms, inverses and log-determinants."""

import numpy as np
import pytest
from keras import ops, optimizers

import tfp_ibnn as ibnn
from tests import autodiff
from tests.flows.tools import close, draws, jacobian, numpy
from tests.registry import perturb
from tfp_ibnn._core.backend import compiled
from tfp_ibnn.flows import Inverse, Residual


def made(channels, hidden, size=1.0, **options):
    flow = Residual(hidden, dtype="float64", **options)
    flow.build((None, channels))
    perturb(flow, 2, size)
    return flow


@pytest.mark.parametrize(("channels", "hidden"), [(1, 1), (3, 5), (6, 2)])
def test_log_det_and_inverse(channels, hidden):
    flow, x = made(channels, hidden, lipschitz=0.5), draws((4, channels))
    y, log_det = numpy(*flow.forward_and_log_det(x))
    found = jacobian(flow, x)
    close(log_det, np.linalg.slogdet(found)[1], 1e-9)
    assert np.max(np.abs(log_det)) > 0.01
    assert np.linalg.norm(found - np.eye(channels), 2, axis=(1, 2)).max() <= 0.5
    back, inverse_log_det = numpy(*flow.inverse_and_log_det(y))
    close(back, x, 1e-7)
    close(inverse_log_det, -log_det, 1e-7)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e1, 1e3])
@pytest.mark.parametrize("shape", [(2, 7), (40, 40), (64, 8)])
def test_norms_are_bounded_and_the_bound_is_tight(shape, size):
    flow = made(*shape, size, lipschitz=0.7)
    bijector = flow.bijector()
    a, c = (np.linalg.norm(numpy(matrix), 2) for matrix in (bijector.a, bijector.c))
    largest = 1 if size >= 1 else 0
    least = min(shape) ** (-1 / 64) * largest * (1 - 1e-12)
    assert least <= a <= max(largest, 1e-29) * (1 + 1e-12)
    assert 0.7 * least <= c <= 0.7 * max(largest, 1e-29) * (1 + 1e-12)


def test_small_weights_stay_as_they_are():
    flow = made(3, 5, size=0.05)
    close(numpy(flow.bijector().a), numpy(flow.kernel.value) / 3**0.5, 1e-15)


def estimates(channels, hidden):
    """An exact flow, one with estimates, and a point, many times over."""
    flows = [made(channels, hidden, 3.0, log_det=way) for way in ("exact", "unbiased")]
    assert [flow.exact_log_det for flow in flows] == [True, False]
    return *flows, ops.convert_to_tensor(np.repeat(draws((1, channels)), 200, axis=0))


def errors_of(found, expected):
    """In standard errors: all draws of a call have a series of the same length."""
    found = np.stack(found)
    assert np.all(found.std(axis=0) > 0)
    return (found.mean(axis=0) - expected) / (found.std(axis=0, ddof=1) / len(found) ** 0.5)


@pytest.mark.parametrize(("channels", "hidden"), [(3, 5), (6, 2)])
def test_estimate_has_no_bias(channels, hidden):
    exact, flow, rows = estimates(channels, hidden)
    expected = numpy(exact.forward_and_log_det(rows[:1])[1])
    assert np.abs(expected) > 0.05
    log_det = compiled(lambda x: flow.forward_and_log_det(x)[1], flow.variables)
    found = []
    for _ in range(50):
        flow.key()  # on JAX, the compiled function leaves the generator as it was
        found.append(numpy(log_det(rows)).mean(keepdims=True))
    assert np.abs(errors_of(found, expected)) < 3


@pytest.mark.once
def test_estimates_of_one_point_under_several_conditions():
    flow = made(3, 5, condition_size=2, log_det="unbiased")
    y, log_det = flow.forward_and_log_det(draws((3,)), draws((4, 2)))
    assert y.shape == (4, 3)
    assert log_det.shape == (4,)


@pytest.mark.slow
@pytest.mark.once
@pytest.mark.parametrize(("channels", "hidden"), [(3, 5), (6, 2)])
def test_gradient_of_the_estimate_has_no_bias(channels, hidden):
    exact, flow, rows = estimates(channels, hidden)

    def gradient(flow):
        weights = flow.trainable_weights
        found = autodiff.weight_gradients(
            lambda: ops.mean(flow.forward_and_log_det(rows)[1]), weights
        )
        return np.concatenate([part.ravel() for part in found])

    errors = np.abs(errors_of([gradient(flow) for _ in range(40)], gradient(exact)))
    # Of t with 39 degrees of freedom one in 400,000 is above 5.5, and one in 20 above 2.
    assert np.max(errors) < 5.5
    assert np.mean(errors < 2) > 0.8


def test_gradients_are_finite_at_the_start():
    flow, x = Residual(4, dtype="float32"), ops.convert_to_tensor(draws((5, 3), dtype="float32"))
    flow.build((None, 3))

    def loss():
        y, log_det = flow.forward_and_log_det(x)
        return ops.sum(y * y) + ops.sum(log_det)

    gradients = autodiff.weight_gradients(loss, flow.trainable_weights)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)
    assert np.any(gradients[-1] != 0)


@pytest.mark.slow
@pytest.mark.parametrize("log_det", ["exact", "unbiased"])
@pytest.mark.parametrize("wrapped", [Inverse, lambda flow: flow], ids=["inverse", "plain"])
def test_density_is_trained_under_a_compiler(wrapped, log_det):
    density = ibnn.FlowDensity([wrapped(Residual(8, lipschitz=0.5, log_det=log_det))])
    density.compile(optimizers.Adam(0.05), jit_compile=True)
    x = draws((256, 2), dtype="float32") ** 3
    losses = density.fit(x, epochs=20, batch_size=64, verbose=0).history["loss"]
    assert losses[-1] < losses[0] - 0.1
