"""What densities and autoencoders take, and how they refuse the rest before Keras starts."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers

import tfp_ibnn as ibnn
from tests.generative.test_density import COUPLINGS, C, X
from tests.generative.test_density import made as density
from tests.generative.test_vae import BITS, coders
from tests.generative.test_vae import made as autoencoder


def conditional():
    return density(COUPLINGS, condition=3)


def batches(*batch):
    return (batch for _ in range(3))


@pytest.fixture(scope="module")
def models():
    keras.utils.set_random_seed(0)
    return density(COUPLINGS), conditional(), autoencoder()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d, c, v: c.predict(X), r"needs a `condition`: `\(x, condition\)`; got 1"),
        (lambda d, c, v: c.predict((X, C[:5])), r"`condition` must have the shape \(60, 3\)"),
        (lambda d, c, v: d.predict((X, C)), "takes `x` alone"),
        (lambda d, c, v: d.predict(X * np.nan), "values of `x` hold NaN"),
        (lambda d, c, v: v.predict(BITS[:, :3]), r"examples of shape \(4,\); got \(16, 3\)"),
        (lambda d, c, v: v.predict(3 * BITS), r"in \[0, 1\]; got values from 0 to 3"),
        (lambda d, c, v: c.fit((X, C, X)), r"needs a `condition`: .* got 3 array\(s\)"),
        (lambda d, c, v: c.fit((X, C), validation_data=(X, None, X)), "needs a `condition`"),
        (lambda d, c, v: d.fit(X, validation_data=(X, C)), "takes `x` alone"),
        (lambda d, c, v: d.fit(X.astype("float64") + 1e9), "too large for .* float32: center or"),
        (lambda d, c, v: d.fit(X * np.float32(1e30)), "too large for .* float32: center or scale"),
        (lambda d, c, v: ibnn.FlowDensity([]).fit(X[:, :0]), r"size\); got \(60, 0\)\."),
        (lambda d, c, v: d.fit(None), "takes `x` alone, .* got 0"),
        (lambda d, c, v: c.evaluate(None), "needs a `condition`: .* got 0"),
        (lambda d, c, v: v.fit((BITS, BITS)), "takes `x` alone, .* got 2"),
        (lambda d, c, v: d.evaluate(X, X), "There are no targets"),
        (lambda d, c, v: v.evaluate(BITS, BITS), "There are no targets"),
        (lambda d, c, v: v.interpolate(BITS[:3], BITS[:5]), "has 3 examples, `last` 5"),
        (lambda d, c, v: v.interpolate(BITS[:1], BITS[:5]), "has 1 examples, `last` 5"),
    ],
)
def test_bad_arrays_are_named_and_leave_the_model_as_it_was(models, call, message):
    before = [model.get_weights() for model in models]
    with pytest.raises(ValueError, match=message):
        call(*models)
    for model, weights in zip(models, before, strict=True):
        for now, then in zip(model.get_weights(), weights, strict=True):
            np.testing.assert_array_equal(now, then)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict"])
def test_batches_without_pairs_are_refused(eagerly, verb, adapted):
    model = conditional() if adapted else ibnn.FlowDensity(COUPLINGS, condition=3)
    model.compile("sgd")
    with pytest.raises(ValueError, match=r"must yield `\(\(x, c\),\)`"):
        getattr(model, verb)(batches(X[:20], C[:20]), verbose=0)
    if adapted:  # it has its weights, and trains
        assert np.isfinite(model.log_prob(X, C)).all()
        assert np.isfinite(model.fit((X, C), verbose=0).history["loss"]).all()


def test_batches_of_pairs_are_taken(eagerly):
    history = conditional().fit(batches((X[:20], C[:20])), verbose=0).history
    assert np.isfinite(history["loss"]).all()


def test_nested_lists_are_taken_as_arrays(eagerly):
    model, x, c = conditional(), X.tolist(), C.tolist()
    expected = model.log_prob(X, C)
    np.testing.assert_allclose(model.log_prob(x, c), expected, rtol=1e-5)
    np.testing.assert_allclose(model.predict((x, c), verbose=0), expected, rtol=1e-5)
    np.testing.assert_array_equal(model.sample(60, condition=c), model.sample(60, condition=C))
    model.optimizer.learning_rate = 0.0
    history = model.fit((x, c), validation_data=(x, c), verbose=0).history
    assert history["val_loss"][0] == pytest.approx(-expected.mean(), rel=1e-4)
    history = density().fit(x, validation_data=x, verbose=0).history
    assert np.isfinite(history["val_loss"]).all()


def test_validation_weights_count_with_a_condition(eagerly):
    model, weights = conditional(), np.arange(60) / 60
    model.optimizer.learning_rate = 0.0
    expected = -np.mean(weights * model.log_prob(X, C))
    for held_out in ((X, C, weights), ((X, C), None, weights)):
        history = model.fit((X, C), validation_data=held_out, batch_size=60, verbose=0).history
        assert history["val_loss"][0] == pytest.approx(expected, rel=1e-4)
    options = {"sample_weight": weights, "validation_split": 0.5, "batch_size": 60, "verbose": 0}
    found = model.fit((X, C), **options).history["val_loss"][0]
    expected = -np.mean((weights * model.log_prob(X, C))[30:])
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_sigmoid_before_the_likelihood_of_bits_is_reported():
    encoder, decoder = coders()
    ends = ([layers.Activation("sigmoid")], [layers.Dense(4, "sigmoid"), layers.Reshape((4,))])
    for end in ends:
        ending = keras.Sequential([keras.Input((2,)), layers.Dense(4), *end])
        with pytest.warns(UserWarning, match="ends in a sigmoid, but 'bernoulli' takes logits"):
            ibnn.VAE(encoder, ending, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ibnn.VAE(encoder, decoder, 2)
        ibnn.VAE(encoder, ending, 2, likelihood="gaussian")
