"""The Gaussian head and its loss."""

import keras
import numpy as np
import pytest
from keras import layers
from scipy.stats import norm

import tfp_ibnn as ibnn
from tests.monte_carlo_tools import data, numpy
from tfp_ibnn.layers import GaussianHead, GaussianNLL
from tfp_ibnn.likelihoods import Gaussian
from tfp_ibnn.likelihoods.infer import likelihood_of

pytestmark = pytest.mark.once


# ----------------------------------------------------------------------------------- Gaussian head


def test_head_gives_means_and_standard_deviations():
    x = data(5, 4)
    y = numpy(GaussianHead(min_scale=0.1)(x))
    np.testing.assert_array_equal(y[:, :2], x[:, :2])
    np.testing.assert_allclose(y[:, 2:], np.log1p(np.exp(x[:, 2:])) + 0.1, rtol=1e-6)


def test_head_stays_above_its_smallest_scale_and_is_finite():
    y = numpy(GaussianHead()(np.array([[0.0, -1e4], [0.0, 1e4]], "float32")))
    np.testing.assert_allclose(y[:, 1], [1e-3, 1e4 + 1e-3], rtol=1e-6)


@pytest.mark.parametrize("shape", [(5, 2), (5, 3, 4), (5, 2, 3, 6)])
def test_head_keeps_the_shape(shape):
    layer = GaussianHead()
    assert layer(data(*shape)).shape == shape
    assert layer.compute_output_shape(shape) == shape
    assert layer(keras.Input(shape[1:])).shape == (None, *shape[1:])


@pytest.mark.parametrize("channels", [1, 3])
def test_head_refuses_an_odd_number_of_channels(channels):
    with pytest.raises(ValueError, match=rf"mean and a spread.*{channels}\)"):
        GaussianHead()(data(5, channels))


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "0.1", None])
def test_head_refuses_a_smallest_scale_that_is_none(value):
    with pytest.raises(ValueError, match="`min_scale`"):
        GaussianHead(min_scale=value)


def test_configs_return():
    layer = GaussianHead(min_scale=0.25, name="head")
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert type(again) is GaussianHead
    assert again.get_config() == layer.get_config()
    assert again.min_scale == 0.25
    loss = GaussianNLL(name="mine", reduction="sum")
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(loss))
    assert type(again) is GaussianNLL
    assert (again.name, again.reduction) == ("mine", "sum")


# ------------------------------------------------------------------------------------ Gaussian NLL


@pytest.mark.parametrize("shape", [(6, 1), (6, 3), (4, 2, 3)])
def test_loss_is_minus_the_log_density(shape):
    rng = np.random.default_rng(0)
    loc, y = rng.normal(size=(2, *shape)).astype("float32")
    scale = rng.uniform(0.1, 3, size=shape).astype("float32")
    loss = GaussianNLL(reduction=None)(y, np.concatenate([loc, scale], axis=-1))
    expected = -norm.logpdf(y.astype("float64"), loc, scale).sum(axis=-1)
    np.testing.assert_allclose(numpy(loss), expected, rtol=1e-5)


def test_loss_takes_targets_with_and_without_an_axis():
    prediction, y = np.abs(data(6, 2)), data(6)
    one, other = (numpy(GaussianNLL(reduction=None)(t, prediction)) for t in (y, y[:, None]))
    assert one.shape == (6,)
    np.testing.assert_array_equal(one, other)


def test_loss_of_integer_targets():
    prediction = np.array([[0.5, 2.0]], "float32")
    np.testing.assert_allclose(
        float(GaussianNLL()(np.array([[3]]), prediction)), -norm.logpdf(3, 0.5, 2), rtol=1e-6
    )


@pytest.mark.parametrize("shape", [(6, 2), (6, 1, 1), (6, 4)])
def test_loss_refuses_targets_of_another_shape(shape):
    with pytest.raises(ValueError, match="shape"):
        GaussianNLL()(data(*shape), np.ones((6, 6), "float32"))


def test_loss_does_not_broadcast_targets():
    with pytest.raises(ValueError, match="shape"):
        GaussianNLL()(data(6), np.ones((6, 6), "float32"))
    with pytest.raises(ValueError, match="shape"):
        GaussianNLL()(data(6, 1), np.ones((6, 6), "float32"))


def test_regression_finds_mean_and_spread_and_can_be_saved(tmp_path):
    y = np.random.default_rng(0).normal(2.0, 0.5, size=64).astype("float32")
    x, many = np.ones((64, 1), "float32"), np.ones((64 * 200, 1), "float32")
    model = keras.Sequential([keras.Input((1,)), layers.Dense(2, use_bias=False), GaussianHead()])
    model.compile(keras.optimizers.Adam(0.1), GaussianNLL())
    # All examples in each of 200 steps.
    model.fit(many, np.tile(y, 200), batch_size=64, shuffle=False, verbose=0)
    np.testing.assert_allclose(numpy(model(x[:1]))[0], [y.mean(), y.std()], atol=0.02)
    loss = model.evaluate(x, y, batch_size=64, verbose=0)
    np.testing.assert_allclose(loss, -norm.logpdf(y, y.mean(), y.std()).mean(), atol=0.01)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(numpy(loaded(x[:1])), numpy(model(x[:1])))
    assert isinstance(loaded.loss, GaussianNLL)


def test_head_can_be_converted_with_what_is_before_it():
    det = keras.Sequential([keras.Input((3,)), layers.Dense(2), GaussianHead()])
    sto = ibnn.to_stochastic(det, ibnn.NormalAffine(), train_size=10)
    assert isinstance(likelihood_of(sto), Gaussian)
    with ibnn.noise_off(sto):
        np.testing.assert_allclose(numpy(sto(data(4, 3))), numpy(det(data(4, 3))), atol=1e-6)


@pytest.mark.parametrize("policy_name", ["float64", "mixed_bfloat16"])
def test_head_in_other_precisions(policy, policy_name):
    policy(policy_name)
    y = GaussianHead()(np.ones((3, 2), "float32"))
    dtype = keras.backend.standardize_dtype(y.dtype)
    assert dtype == ("float64" if policy_name == "float64" else "bfloat16")
    y_true = np.zeros((3,), "float32")
    loss = float(GaussianNLL()(y_true, y))
    tolerance = 1e-6 if policy_name == "float64" else 0.02
    np.testing.assert_allclose(loss, -norm.logpdf(0, 1, np.log1p(np.e) + 1e-3), rtol=tolerance)
