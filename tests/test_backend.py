import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import ops

from tfp_ibnn import backend

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", ["numpy", "torch", "openvino"])
def test_another_backend_is_refused(monkeypatch, name):
    monkeypatch.setattr(keras.backend, "backend", lambda: name)
    with pytest.raises(ImportError, match=f"'tensorflow' and 'jax'.*'{name}'.*KERAS_BACKEND"):
        runpy.run_path(backend.__file__)


@pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="Keras on NumPy needs JAX")
def test_import_on_another_backend_fails_with_that_error():
    env = {**os.environ, "KERAS_BACKEND": "numpy", "PYTHONPATH": str(ROOT)}
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


def test_one_replica_without_a_strategy():
    assert keras.backend.backend() in ("tensorflow", "jax")
    assert backend.replica_count() == 1
