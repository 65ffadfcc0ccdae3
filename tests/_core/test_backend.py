import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import scipy.stats
from keras import ops

from lib.shifts import adversarial
from tfp_ibnn._core import backend

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["numpy", "torch", "openvino"])
def test_another_backend_is_refused(monkeypatch, name):
    monkeypatch.setattr(keras.backend, "backend", lambda: name)
    with pytest.raises(ImportError, match=f"'tensorflow' and 'jax'.*'{name}'.*KERAS_BACKEND"):
        runpy.run_path(backend.__file__)


@pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="Keras on NumPy needs JAX")
def test_import_on_another_backend_fails_with_that_error():
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "KERAS_BACKEND": "numpy", "PYTHONPATH": path}
    command = [sys.executable, "-c", "import tfp_ibnn"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1].startswith("ImportError: tfp_ibnn works with")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tanh_keeps_the_dtype(dtype):
    x = np.linspace(-3, 3, 7).astype(dtype)
    y = ops.convert_to_numpy(backend.tanh(ops.convert_to_tensor(x)))
    assert y.dtype == dtype
    np.testing.assert_allclose(y, np.tanh(x), rtol=1e-6 if dtype == "float32" else 1e-14)


def test_probability_library_speaks_the_backend():
    draw = backend.tfd.Normal(0.0, 1.0).log_prob(0.5)
    assert type(draw) is type(ops.ones(()))
    assert backend.tfb is backend.tfp.bijectors
    assert backend.tfd is backend.tfp.distributions


def test_an_elementwise_function_is_traced_once_for_tensors_of_all_shapes():
    calls = []

    @backend.traced_once
    def sum_and_product(x, y):
        calls.append(x)
        return x + y, x * y

    for shape in ((), (3,), (2, 3)):
        x, y = np.full(shape, 2, "uint32"), np.array([[3], [4]], "uint32")
        found = sum_and_product(*map(ops.convert_to_tensor, (x, y)))
        for one, other in zip(found, (x + y, x * y), strict=True):
            assert tuple(one.shape) == other.shape
            np.testing.assert_array_equal(ops.convert_to_numpy(one), other)
    assert len(calls) == (1 if backend.NAME == "tensorflow" else 3)


def test_one_replica_without_a_strategy():
    assert keras.backend.backend() in ("tensorflow", "jax")
    assert backend.replica_count() == 1


def shaped(*shape):
    return ops.convert_to_tensor(np.random.default_rng(len(shape)).normal(size=shape))


@pytest.mark.parametrize(
    ("x", "z"),
    [
        ((4, 5, 6, 3), (4, 1, 1, 3)),
        ((4, 5, 6, 3), (1, 1, 1, 3)),
        ((4, 5, 6, 3), (4, 5, 6, 3)),
        ((4, 3, 5, 6), (4, 3, 1, 1)),
        ((4, 6, 3), (4, 1, 3)),
        ((4, 5, 6, 40), (4, 1, 1, 40)),
        ((2, 4, 5, 6, 3), (2, 1, 1, 1, 3)),
        ((4, 3), (4, 3)),
    ],
)
def test_times_broadcasts(x, z):
    x, z = shaped(*x), shaped(*z)
    np.testing.assert_array_equal(backend.times(x, z), x * z)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_normal_noise_is_normal(dtype):
    seed = backend.SeedGenerator(1)
    x = ops.convert_to_numpy(backend.normal((333, 3001), dtype, seed))
    assert x.dtype == dtype
    assert scipy.stats.kstest(x.ravel(), "norm").pvalue > 1e-3
    # Neighbours, rows and the two halves of the array are independent.
    size = x.size
    for lag in (1, 3001, (size + 1) // 2):
        a, b = x.ravel()[:-lag], x.ravel()[lag:]
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / len(a) ** 0.5
        assert abs(np.corrcoef(a**2, b**2)[0, 1]) < 5 / len(a) ** 0.5
    beyond = np.mean(np.abs(x) > 3.5)
    expected = 2 * scipy.stats.norm.sf(3.5)
    assert abs(beyond - expected) < 5 * (expected / size) ** 0.5
    assert not np.array_equal(x, backend.normal((333, 3001), dtype, seed))
    again = backend.normal((333, 3001), dtype, backend.SeedGenerator(1), stddev=2.0)
    np.testing.assert_allclose(again, 2 * x, rtol=1e-6)
    assert backend.normal((0, 3), dtype, seed).shape == (0, 3)


@pytest.mark.parametrize("gradient", [backend.gradient, adversarial._gradient])
def test_gradient_of_a_function_with_state(gradient):
    scale = keras.Variable(3.0)
    calls = []

    def function(x, y):
        calls.append(1)
        return ops.sum(scale * x**2 * y)

    slope = gradient(function, [scale])
    x, y = np.array([1.0, 2.0], "float32"), np.array([1.0, -1.0], "float32")
    np.testing.assert_allclose(ops.convert_to_numpy(slope(x, y)), [6.0, -12.0])
    scale.assign(1.0)
    np.testing.assert_allclose(ops.convert_to_numpy(slope(x, y)), [2.0, -4.0])
    traces = len(calls)
    scale.assign(2.0)
    np.testing.assert_allclose(ops.convert_to_numpy(slope(x, y)), [4.0, -8.0])
    assert len(calls) == traces  # compiled
    nothing = gradient(lambda x: ops.sum(0 * x) + scale, [scale])
    np.testing.assert_array_equal(ops.convert_to_numpy(nothing(x)), [0.0, 0.0])
