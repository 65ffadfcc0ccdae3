"""Classes of voxels, whose draws have six axes: one more than a softmax of TensorFlow takes."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from scipy.special import log_softmax, softmax

import tfp_ibnn as ibnn
from tests.layer_checklist import numpy

RNG = np.random.default_rng(0)
X = RNG.normal(size=(50, 3, 2, 3, 2)).astype("float32")
Y = RNG.integers(0, 2, size=X.shape[:-1])


@pytest.fixture(autouse=True)
def fast(eagerly):
    """Nothing said here is about compiled graphs."""


@pytest.fixture(params=[None, "softmax"], ids=["logits", "probabilities"])
def network(request):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input(X.shape[1:]), layers.Dense(2, request.param)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=request.param is None)
    model.compile("sgd", loss)
    return model


def probabilities(model, x=X):
    outputs = numpy(model(x))
    return outputs if model.layers[-1].activation.__name__ == "softmax" else softmax(outputs, -1)


def test_draws_are_averaged(network):
    mc = ibnn.MonteCarlo(ibnn.DeepEnsemble([network, network]))
    np.testing.assert_allclose(mc.predict(X, verbose=0)["mean"], probabilities(network), atol=1e-5)
    log_p = np.log(probabilities(network))
    expected = -np.take_along_axis(log_p, Y[..., None], axis=-1).mean()
    assert mc.evaluate(X, Y, verbose=0, return_dict=True)["nll"] == pytest.approx(
        expected, rel=1e-5
    )


def test_draws_of_a_student_are_averaged(network):
    mc = ibnn.MonteCarlo(ibnn.DeepEnsemble([network, network]))
    student = ibnn.distill(mc, X, epochs=1, verbose=0)
    found = student.predict(X, verbose=0)
    assert found["mean"].shape == (*Y.shape, 2)
    assert found["epistemic"].shape == Y.shape
    np.testing.assert_allclose(found["mean"].sum(axis=-1), 1, atol=1e-5)


@pytest.mark.once
def test_a_last_layer_has_a_posterior(network):
    la = ibnn.Laplace(network, prior_precision=1e8).fit(X, Y, verbose=0)
    mean = ibnn.MonteCarlo(la, samples=3).predict(X, verbose=0)["mean"]
    np.testing.assert_allclose(mean, probabilities(network), atol=1e-2)


@pytest.mark.once
def test_they_are_calibrated(network):
    report = ibnn.calibrate(network, (X, Y), (X, Y), verbose=False)
    mean = report.model.predict(X, verbose=0)["mean"]
    assert mean.shape == (*Y.shape, 2)
    scaled = ibnn.TemperatureScaling(network).fit(X, Y)
    logits = log_softmax(np.log(probabilities(network)) / float(scaled.temperature), axis=-1)
    found = ops.convert_to_numpy(scaled(X))
    if network.layers[-1].activation.__name__ != "softmax":
        found = softmax(found, axis=-1)
    np.testing.assert_allclose(found, np.exp(logits), atol=1e-5)
