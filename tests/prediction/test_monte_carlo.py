"""Prediction by many sampled networks: against closed forms, against itself, and against misuse."""

import functools
import json
import os
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
from keras import layers
from scipy import optimize, special, stats

import tfp_ibnn as ibnn
from tests.monte_carlo_tools import (
    JAX,
    averaged,
    classifier,
    data,
    dense,
    linear,
    numpy,
    set_weights,
    shallow,
    statistics,
)
from tfp_ibnn import noise
from tfp_ibnn.layers import GaussianHead, GaussianNLL
from tfp_ibnn.likelihoods import Point

N, S = 5, 8
COMMON = {"samples": S, "seed": 3}


def close(actual, desired, tolerance=1e-5):
    np.testing.assert_allclose(actual, desired, rtol=tolerance, atol=tolerance)


def predict(mc, x, **kwargs):
    return mc.predict(x, verbose=0, **kwargs)


def evaluate(mc, *args, **kwargs):
    return mc.evaluate(*args, verbose=0, return_dict=True, **kwargs)


def same(one, other, tolerance=1e-5):
    assert one.keys() == other.keys()
    for key in one:
        np.testing.assert_allclose(
            one[key], other[key], rtol=tolerance, atol=tolerance, err_msg=key
        )


# ------------------------------------------------------------------- the entries of the prediction


def categorical(p):
    """The entries for draws (draws, N, ..., K) of probabilities, in float64."""
    mean = p.mean(axis=0)
    return {
        "mean": mean,
        "variance": p.var(axis=0),
        "entropy": special.entr(mean).sum(axis=-1),
        "aleatoric": special.entr(p).sum(axis=-1).mean(axis=0),
        "epistemic": special.rel_entr(p, mean).sum(axis=-1).mean(axis=0),
        "total_variance": p.var(axis=0).sum(axis=-1),
    }


def labels(p):
    """The entries for draws (draws, N, ..., L) of probabilities of yes."""
    both = categorical(np.stack([1 - p, p], axis=-1))
    single = {"mean": p.mean(axis=0), "variance": p.var(axis=0), "total_variance": p.var(axis=0)}
    return {**both, **single}


def point(y):
    zero = np.zeros(y.shape[1:])
    total = y.var(axis=0)
    return {"mean": y.mean(axis=0), "aleatoric": zero, "epistemic": total, "total_variance": total}


def gaussian(y):
    loc, raw = np.split(y, 2, axis=-1)
    aleatoric = ((np.logaddexp(0, raw) + 1e-3) ** 2).mean(axis=0)
    epistemic = loc.var(axis=0)
    return {
        "mean": loc.mean(axis=0),
        "aleatoric": aleatoric,
        "epistemic": epistemic,
        "total_variance": aleatoric + epistemic,
    }


def softmax(y):
    return categorical(special.softmax(y, axis=-1))


def sigmoid(y):
    return labels(special.expit(y))


# Name -> (shape of an example, outputs, last layers, options, entries for draws of the outputs
# before the last layers, what makes public draws of them).
HEADS = {
    "softmax": ((4,), 3, [layers.Softmax], {}, softmax, special.softmax),
    "logits": ((4,), 3, [], {"from_logits": True}, softmax, special.softmax),
    "binary": ((4,), 1, [lambda: layers.Activation("sigmoid")], {}, sigmoid, special.expit),
    "binary-logits": ((4,), 1, [], {"from_logits": True}, sigmoid, special.expit),
    "labels": ((4,), 3, [lambda: layers.Activation("sigmoid")], {}, sigmoid, special.expit),
    "pixels": ((2, 3, 4), 3, [layers.Softmax], {}, softmax, special.softmax),
    "pixel-labels": (
        (2, 4),
        2,
        [],
        {"head": "sigmoid", "from_logits": True},
        sigmoid,
        special.expit,
    ),
    "point": ((4,), 2, [], {"head": "point"}, point, lambda y: y),
    "gaussian": ((4,), 4, [GaussianHead], {}, gaussian, lambda y: y[..., :2]),
}


def network(shape, units, *last):
    """A noisy network; those of the same shape and units have the same weights before the last."""
    inputs = keras.Input(shape)
    hidden = dense(units)(dense(4, "tanh")(inputs))
    for make in last:
        hidden = make()(hidden)
    return set_weights(keras.Model(inputs, hidden), size=1.0)


# On JAX every third is enough: what is computed from the draws is the same code.
SOME_ON_JAX = [
    name if place % 3 == 0 else pytest.param(name, marks=pytest.mark.once)
    for place, name in enumerate(HEADS)
]


@pytest.fixture(scope="module", params=SOME_ON_JAX)
def head(request):
    """A name, a model, options, inputs, raw draws (S, N, ..., units)."""
    shape, units, last, options, *_ = HEADS[request.param]
    x = data(N, *shape)
    raw = averaged(network(shape, units), head="point", return_samples=True, **COMMON)
    draws = np.moveaxis(statistics(raw, x)["samples"], 1, 0).astype("float64")
    return request.param, network(shape, units, *last), {**COMMON, **options}, x, draws


def test_entries_are_those_of_the_draws(head):
    name, model, options, x, draws = head
    expected = HEADS[name][4](draws)
    streamed = statistics(averaged(model, chunk_size=3, **options), x)
    same(streamed, expected)
    kept = statistics(averaged(model, chunk_size=3, return_samples=True, **options), x)
    public = HEADS[name][5]
    public = public(draws, axis=-1) if public is special.softmax else public(draws)
    same(kept, {**expected, "samples": np.moveaxis(public, 0, 1)})
    assert expected["total_variance"].max() > 1e-3


SCORED = ("softmax", "binary", "labels", "pixels", "gaussian", "point")


def targets(name, mean):
    """Random targets that go with a prediction."""
    rng = np.random.default_rng(1)
    if name in ("point", "gaussian"):
        return mean + rng.normal(size=mean.shape)
    if HEADS[name][4] is sigmoid:
        return rng.integers(0, 2, size=mean.shape)
    return rng.integers(0, 3, size=mean.shape[:-1])


@pytest.mark.once
@pytest.mark.parametrize("head", SCORED, indirect=True)
def test_evaluation_scores_the_averaged_prediction(head):
    name, model, options, x, draws = head
    expected = HEADS[name][4](draws)
    mean = expected["mean"]
    y = targets(name, mean)
    scores = evaluate(averaged(model, **options), x, y, batch_size=3)
    if name in ("point", "gaussian"):
        close(scores["rmse"], np.sqrt(np.mean((y - mean) ** 2)))
        assert scores.keys() == {"loss", "rmse"} | ({"nll"} if name == "gaussian" else set())
        if name == "gaussian":
            scale = np.sqrt(expected["total_variance"])
            nll = -stats.norm.logpdf(y, mean, scale).sum(axis=-1).mean()
            close([scores["nll"], scores["loss"]], nll)
        return
    probabilities = mean
    if HEADS[name][4] is sigmoid:
        probabilities = np.stack([1 - mean, mean], axis=-1)
    truth = np.eye(probabilities.shape[-1])[y]
    nll = -np.log((truth * probabilities).sum(axis=-1)).mean()
    close(scores["accuracy"], np.mean(probabilities.argmax(axis=-1) == y))
    close(scores["nll"], nll)
    close(scores["loss"], nll)
    close(scores["brier"], ((probabilities - truth) ** 2).sum(axis=-1).mean())
    close(scores["ece"], ibnn.metrics.expected_calibration_error(probabilities, y))
    assert scores.keys() == {"loss", "accuracy", "nll", "brier", "ece"}


@pytest.mark.once
@pytest.mark.parametrize("head", ["softmax", "labels", "pixels", "gaussian"], indirect=True)
def test_evaluation_with_weights(head):
    """A weight for each example, in the two shapes Keras knows; weight 0 leaves an example out."""
    name, model, options, x, draws = head
    mc = averaged(model, **options)
    y = targets(name, HEADS[name][4](draws)["mean"])
    weight = np.array([0, 2, 0, 1, 0.5], "float32")
    scores = evaluate(mc, x, y, sample_weight=weight)
    column = evaluate(mc, x, y, sample_weight=weight[:, None])
    times = [1, 1, 1, 1, 3, 3, 4]  # each counted as often as its weight says, times two
    repeated = evaluate(mc, x[times], y[times])
    keys = scores.keys() - {"loss"}
    same({k: scores[k] for k in keys}, {k: repeated[k] for k in keys})
    same({k: column[k] for k in keys}, {k: scores[k] for k in keys})
    # Keras divides the weighted sum by the number of examples.
    close([scores["loss"], column["loss"]], repeated["loss"] * weight.sum() / N)


def test_probabilities_are_averaged_and_not_logits():
    """Half of the networks are sure of yes, the other half of no."""
    model = linear([[1.0]], [0.0], [100.0])
    mc = averaged(model, 64, from_logits=True, seed=0, sampling="antithetic")
    result = statistics(mc, np.array([[1.0], [5.0]], "float32"))
    close(result["mean"], 0.5)
    close(result["entropy"], np.log(2))
    assert np.all(result["epistemic"] > 0.6)
    assert np.all(result["aleatoric"] < 0.09)


@pytest.mark.once
def test_a_model_of_its_own_makes_the_same_dict_as_predict():
    mc = averaged(classifier(), 4, seed=0)
    assert isinstance(mc, ibnn.MonteCarlo)
    assert mc.compiled
    x = data(3, 4)
    called = {key: numpy(value) for key, value in mc(x).items()}
    same(called, predict(mc, x))
    same(mc.predict_on_batch(x), called)
    assert all(isinstance(value, np.ndarray) for value in predict(mc, x).values())


# ------------------------------------------------------------------------------- confident networks


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("size", "chunk_size"), [(30.0, 3), (1e4, None), (1e4, 3)])
def test_entropy_splits_also_for_confident_networks(kind, size, chunk_size):
    kernel = size * np.random.default_rng(0).normal(size=(4, 3))
    model = linear(kernel, np.ones(4), np.full(4, 0.5), kind)
    mc = averaged(model, chunk_size=chunk_size, return_samples=chunk_size is None, **COMMON)
    result = statistics(mc, data(20, 4))
    assert all(np.all(np.isfinite(value)) for value in result.values())
    np.testing.assert_allclose(
        result["entropy"], result["aleatoric"] + result["epistemic"], atol=1e-5
    )
    assert all(np.all(result[key] > -1e-6) for key in ("entropy", "aleatoric", "epistemic"))
    if size == 1e4:
        assert result["aleatoric"].max() < 0.1 < result["epistemic"].max()
        if chunk_size is None:
            p = result["samples"]
            assert np.mean(np.minimum(p, 1 - p) < 1e-6) > 0.9  # a softmax may end at 1 - 6e-8


def test_draws_that_agree_have_a_small_epistemic_part_with_digits():
    """As a difference of entropies it would be lost in rounding."""
    classes = 300
    kernel = np.random.default_rng(0).normal(size=(1, classes))
    model = linear(kernel, [1.0], [0.003])
    samples, x = 8, np.ones((1, 1), "float32")
    options = {"samples": samples, "seed": 1}
    z = statistics(
        averaged(linear([[1.0]], [0.0], [1.0]), head="point", return_samples=True, **options),
        x,
    )["samples"].ravel()
    exact = softmax((1 + 0.003 * z.astype("float64"))[:, None, None] * kernel)["epistemic"]
    result = statistics(averaged(model, from_logits=True, chunk_size=3, **options), x)
    assert exact < 1e-5
    np.testing.assert_allclose(result["epistemic"], exact, rtol=5e-3)


# ------------------------------------------------------------------------------------- closed forms


@pytest.mark.parametrize("sampling", noise.SAMPLINGS)
def test_linear_regression_has_a_known_mean_and_variance(sampling):
    rng = np.random.default_rng(0)
    kernel, loc, scale = rng.normal(size=(3, 2)), rng.normal(size=3), rng.uniform(0.2, 1, size=3)
    x = data(4, 3)
    model = linear(kernel, loc, scale)
    mc = averaged(model, 4096, head="point", seed=0, sampling=sampling, chunk_size=1000)
    result = statistics(mc, x)
    mean = (x * loc) @ kernel
    variance = (x * scale) ** 2 @ kernel**2
    error = 5 * np.sqrt(variance / 4096)
    if sampling != "iid":
        error = error / 20
    assert np.all(np.abs(result["mean"] - mean) < error)
    relative = 0.02 if sampling == "qmc" else 5 * (2 / 4096) ** 0.5
    np.testing.assert_allclose(result["epistemic"], variance, rtol=relative)
    np.testing.assert_allclose(result["total_variance"], result["epistemic"], rtol=1e-6)
    np.testing.assert_array_equal(result["aleatoric"], 0)


@pytest.fixture(scope="module")
def known_gaussian():
    """Regression with the mean z * x, z from N(1, 0.5^2), and the standard deviation 0.7."""
    wide = ibnn.NormalAffine(initial_scale=0.5)
    model = keras.Sequential([keras.Input((1,)), dense(2, posterior=wide), GaussianHead()])
    layer = model.layers[0]
    layer.layer.kernel.assign([[1.0, 0.0]])
    layer.layer.bias.assign([0.0, np.log(np.expm1(0.699))])
    return model


def test_a_gaussian_head_adds_its_own_variance(known_gaussian):
    x = np.array([[1.0], [2.0], [-3.0]], "float32")
    result = statistics(averaged(known_gaussian, 2048, seed=0, sampling="qmc"), x)
    np.testing.assert_allclose(result["mean"], x, rtol=0.01)
    np.testing.assert_allclose(result["aleatoric"], 0.49, rtol=5e-5)
    np.testing.assert_allclose(result["epistemic"], 0.25 * x**2, rtol=0.02)
    close(result["total_variance"], result["aleatoric"] + result["epistemic"])


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_the_interval_of_new_observations_is_the_mixtures(known_gaussian, level):
    x = np.array([[1.0], [2.0]], "float32")
    options = {"samples": 7, "seed": 1, "chunk_size": 3}
    mc = averaged(known_gaussian, interval=level, return_samples=True, **options)
    result = statistics(mc, x)
    for example in range(2):
        locs = result["samples"][example, :, 0].astype("float64")

        def beyond(y, probability, locs=locs):
            return stats.norm.cdf(y, locs, 0.7).mean() - probability

        ends = [optimize.brentq(beyond, -20, 20, ((1 + s * level) / 2,)) for s in (-1, 1)]
        np.testing.assert_allclose(
            [result["lower"][example, 0], result["upper"][example, 0]], ends, atol=1e-4
        )


@pytest.mark.once
def test_an_interval_of_draws_warns_where_it_is_taken_for_one_of_observations(known_gaussian):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 1)).astype("float32")
    y = x + rng.normal(size=x.shape)
    keras.utils.set_random_seed(0)
    inputs = keras.Input((1,))
    posterior = ibnn.NormalAffine(initial_scale=0.1)
    layer = ibnn.StochasticDense(1, kernel_initializer="ones", posterior=posterior, train_size=9)
    point = keras.Model(inputs, layer(inputs))
    point.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="far fewer of new.*GaussianHead.*Conformal") as caught:
        mc = ibnn.MonteCarlo(point, 64, interval=0.9, seed=0)
    assert caught[0].filename == __file__
    found = mc.predict(x, verbose=0)
    assert np.mean((found["lower"] <= y) & (y <= found["upper"])) < 0.3
    with warnings.catch_warnings(action="error", category=UserWarning):
        ibnn.MonteCarlo(known_gaussian, 2, interval=0.9)
        ibnn.MonteCarlo(point, 2)
        conformal = ibnn.Conformal(ibnn.MonteCarlo(point, 64, seed=0), "cqr", 0.9)
    conformal.fit(x[:1000], y[:1000])
    assert conformal.evaluate(x[1000:], y[1000:])["coverage"] > 0.87


@pytest.mark.once
def test_the_outputs_without_a_noise_are_named():
    inputs = keras.Input((2,))
    layer = ibnn.StochasticDense(3, train_size=9)
    one, other = layer(inputs), keras.layers.Dense(3, "softmax", name="kind")(inputs)
    model = keras.Model(inputs, {"size": one, "kind": other})
    with pytest.warns(UserWarning, match=r"the outputs \['size'\]"):
        ibnn.MonteCarlo(model, 2, head={"size": "point", "kind": "softmax"}, interval=0.9)


@pytest.mark.parametrize("name", ["softmax", "labels", "pixels", "point"])
def test_the_interval_of_a_probability_is_the_draws(name):
    shape, units, last, options, *_ = HEADS[name]
    model = network(shape, units, *last)
    mc = averaged(model, 9, seed=0, interval=0.8, return_samples=True, chunk_size=4, **options)
    result = statistics(mc, data(N, *shape))
    lower, upper = np.quantile(result["samples"], [0.1, 0.9], axis=1)
    close(result["lower"], lower)
    close(result["upper"], upper)
    assert result["lower"].shape == result["mean"].shape


@pytest.mark.once
@pytest.mark.parametrize("kind", ["softmax", "sigmoid", None])
def test_the_standard_error_is_the_spread_over_repetitions(kind):
    """Each example has draws of its own, so many of the same are as many repetitions."""
    kernel = np.random.default_rng(1).normal(size=(3, 3))
    model = linear(kernel, np.ones(3), np.full(3, 0.5), kind)
    options = {} if kind else {"head": "point"}
    mc = averaged(model, 16, seed=0, independent=True, standard_error=True, **options)
    result = statistics(mc, np.ones((500, 3), "float32"))
    assert result["standard_error"].shape == (500, 3)
    spread = result["mean"].std(axis=0)
    typical = np.sqrt(np.mean(result["standard_error"].astype("float64") ** 2, axis=0))
    np.testing.assert_allclose(typical, spread, rtol=0.2)


@pytest.mark.once
def test_the_standard_error_comes_with_chunks_and_with_kept_draws():
    model = classifier()
    results = [
        statistics(averaged(model, 10, seed=0, standard_error=True, **options), data(N, 4))
        for options in ({"chunk_size": 3}, {"return_samples": True})
    ]
    samples = results[1]["samples"]
    expected = samples.std(axis=1, ddof=1) / np.sqrt(10)
    close(results[0]["standard_error"], expected)
    close(results[1]["standard_error"], expected)


def test_every_sampling_is_unbiased_and_qmc_is_the_most_exact():
    """The mean of exp(sum_i z_i) for Gaussian z is known; each example is a repetition."""
    model = linear(np.ones((3, 1)), np.zeros(3), np.full(3, 0.4), "exponential")
    truth, repetitions = np.exp(3 * 0.4**2 / 2), 300
    x = np.ones((repetitions, 3), "float32")
    error = {}
    for sampling in noise.SAMPLINGS:
        mc = averaged(model, 128, head="point", seed=0, independent=True, sampling=sampling)
        means = statistics(mc, x)["mean"][:, 0].astype("float64")
        error[sampling] = np.sqrt(np.mean((means - truth) ** 2))
        assert abs(means.mean() - truth) < 4 * means.std() / np.sqrt(repetitions)
    assert error["qmc"] < error["iid"] / 3
    assert error["antithetic"] < error["iid"] / 1.4


# --------------------------------------------------------------------------------- sampled networks


def test_a_draw_is_one_function_of_all_inputs():
    """Each draw of a linear network is linear, over the borders of batches and chunks."""
    rng = np.random.default_rng(0)
    model = linear(rng.normal(size=(4, 2)), np.ones(4), np.full(4, 0.5))
    x = np.concatenate([np.eye(4), data(9, 4), data(9, 4)]).astype("float32")
    mc = averaged(model, 5, head="point", return_samples=True, chunk_size=2)
    samples = predict(mc, x, batch_size=4)["samples"]
    np.testing.assert_allclose(samples, np.einsum("ni,isk->nsk", x, samples[:4]), atol=1e-5)
    np.testing.assert_array_equal(samples[4:13].round(5), samples[13:].round(5))
    assert len(np.unique(samples[0], axis=0)) == 5


@functools.cache
def kinds():
    conv = {"activation": "tanh", "train_size": 10}
    position = keras.Sequential(
        [
            keras.Input((3, 3, 2)),
            layers.Conv2D(2, 1),
            ibnn.StochasticConv2D(3, 2, noise="position", **conv),
            layers.Flatten(),
            dense(3, "softmax"),
        ]
    )
    drop = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(6, activation="tanh"),
            layers.Dropout(0.4),
            dense(4, "tanh"),
            layers.GaussianDropout(0.2),
            layers.Dense(3, activation="softmax"),
        ]
    )
    return {
        "channel": (classifier(), data(10, 4), {}),
        "position": (set_weights(position), data(10, 3, 3, 2), {"sampling": "antithetic"}),
        "mixture": (
            classifier(posterior=ibnn.MixturePosterior(3)),
            data(10, 4),
            {"sampling": "qmc"},
        ),
        "components": (
            shallow(posterior=ibnn.FlowPosterior([ibnn.flows.Planar()], components=3)),
            data(10, 4),
            {"return_samples": True, "interval": 0.5},
        ),
        "dropout": (set_weights(drop), data(10, 4), {"dropout": True}),
    }


KINDS = ("channel", "position", "mixture", "components", "dropout")

SCALARS = ("entropy", "aleatoric", "epistemic", "total_variance")

# The mean and these of the first example, with 12 samples and the seed 3, on every backend.
FOR_EVER = {
    "channel": [0.530866, 0.302095, 0.167039, 0.996702, 0.914687, 0.082015, 0.05735],
    "position": [0.241275, 0.59919, 0.159535, 0.942765, 0.904873, 0.037893, 0.024205],
    "mixture": [0.603205, 0.219915, 0.17688, 0.94439, 0.889616, 0.054773, 0.033765],
    "components": [0.205316, 0.538706, 0.255978, 1.007105, 1.004676, 0.00243, 0.001351],
    "dropout": [0.480109, 0.295194, 0.224698, 1.047923, 0.962608, 0.085315, 0.052712],
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    """A name, a model, inputs, options, the prediction in one batch."""
    keras.utils.set_random_seed(0)
    model, x, options = kinds()[request.param]
    options = {"samples": 12, "seed": 3, **options}
    # Compiled on every backend, with a loop over chunks of which the last is not full.
    mc = ibnn.MonteCarlo(model, chunk_size=5, **options)
    reference = predict(mc, x, batch_size=256)
    assert reference["total_variance"].min() > 1e-6
    return request.param, model, x, options, reference


def test_a_seed_gives_one_answer_in_batches_and_chunks_of_any_size(kind):
    """Not compiled on TensorFlow, unlike the reference."""
    name, model, x, options, reference = kind
    sizes = {"channel": (1, 256), "mixture": (256, 1)}
    batch_size, chunk_size = sizes.get(name, (7, 7))
    mc = averaged(model, chunk_size=chunk_size, **options)
    same(predict(mc, x, batch_size=batch_size), reference)


@pytest.mark.once
def test_a_seed_gives_one_answer_compiled_or_not():
    mc = ibnn.MonteCarlo(shallow(), 6, seed=3, chunk_size=4)
    x, y = data(5, 4), np.arange(5) % 3
    expected = predict(mc, x, batch_size=3), evaluate(mc, x, y, batch_size=3)
    mc.compile(run_eagerly=True)
    same(predict(mc, x, batch_size=5), expected[0])
    same(evaluate(mc, x, y, batch_size=5), expected[1])


def test_a_seed_gives_one_answer_for_ever(kind):
    name, _, _, _, reference = kind
    found = np.concatenate([reference["mean"][0], [reference[key][0] for key in SCALARS]])
    np.testing.assert_allclose(found, FOR_EVER[name], atol=1e-5)


def test_another_seed_gives_another_answer(kind):
    _, model, x, options, reference = kind
    mc = averaged(model, **{**options, "seed": 4})
    other = predict(mc, x)
    assert np.abs(other["mean"] - reference["mean"]).max() > 1e-3
    mc.seed = 3
    same(predict(mc, x), reference)


@pytest.mark.once
def test_two_examples_that_are_alike_get_one_answer(kind):
    _, model, x, options, _ = kind
    twice = np.concatenate([x[:1], x, x[:1]])
    mean = predict(averaged(model, **{**options, "seed": None}), twice, batch_size=5)["mean"]
    close(mean[[1, -1]], mean[[0, 0]])
    assert np.abs(mean[1:-1] - mean[:1]).max() > 1e-3


def test_independent_draws_belong_to_an_example():
    model = shallow()
    x = np.tile(data(1, 4), (8, 1))
    mc = averaged(model, 6, seed=3, independent=True, return_samples=True, chunk_size=4)
    first = predict(mc, x, batch_size=4)
    assert len(np.unique(first["samples"].reshape(48, 3).round(6), axis=0)) == 48
    same(predict(mc, x, batch_size=4), first, 0)
    other = averaged(model, 6, seed=3, independent=True, chunk_size=6)
    close(predict(other, x, batch_size=4)["mean"], first["mean"])
    assert np.abs(evaluate(mc, x, np.zeros(8, int), batch_size=4)["nll"]) > 0
    same(predict(mc, x, batch_size=4), first, 0)


def test_without_a_seed_each_prediction_has_its_own_networks():
    mc = averaged(shallow(), 4)
    x, y = data(6, 4), np.zeros(6, int)

    def runs():
        keras.utils.set_random_seed(5)
        return [predict(mc, x)["mean"], predict(mc, x)["mean"], evaluate(mc, x, y)["nll"]]

    first, again = runs(), runs()
    assert np.abs(first[0] - first[1]).max() > 1e-3
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)
    # One prediction is of one set of networks, in all its batches.
    mean = predict(mc, np.concatenate([x, x]), batch_size=5)["mean"]
    close(mean[:6], mean[6:])


@pytest.mark.once
def test_each_mixture_component_has_its_share():
    """Its means lie far apart, so a draw tells its component, in all layers the same one."""
    posterior = ibnn.MixturePosterior(3)
    shared = [ibnn.Stochastic(layers.Identity(), posterior, train_size=10) for _ in range(2)]
    inputs = keras.Input((1,))
    model = keras.Model(inputs, layers.concatenate([layer(inputs) for layer in shared]))
    for layer in shared:
        layer.posterior.loc.assign([[0.0], [100.0], [200.0]])
    for sampling, samples in (("iid", 9), ("qmc", 9), ("antithetic", 12)):
        mc = averaged(
            model, samples, head="point", sampling=sampling, return_samples=True, chunk_size=4
        )
        draws = statistics(mc, np.ones((1, 1), "float32"))["samples"][0].round(-2)
        np.testing.assert_array_equal(draws[:, 0], draws[:, 1])
        assert np.all(np.unique(draws[:, 0], return_counts=True)[1] == samples // 3)
        if sampling == "antithetic":  # a mirrored pair is of one component
            np.testing.assert_array_equal(draws[::2], draws[1::2])


# --------------------------------------------------------------------------------- life with Keras


def test_training_the_model_is_followed():
    model = shallow()
    model.compile(keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy")
    x, y = data(16, 4), np.arange(16) % 3
    mc = ibnn.MonteCarlo(model, 4, seed=0)  # compiled before the weights change
    before = predict(mc, x)["mean"]
    model.fit(x, y, epochs=3, verbose=0)
    after = predict(mc, x)["mean"]
    assert np.abs(after - before).max() > 1e-2
    close(after, predict(averaged(model, 4, seed=0), x)["mean"])


def test_prediction_leaves_the_model_as_it_was():
    model = shallow()
    before = [numpy(weight.value).copy() for weight in model.weights]
    mc = averaged(model, 4)
    predict(mc, data(4, 4))
    evaluate(mc, data(4, 4), np.zeros(4, int))
    for one, other in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(one, numpy(other.value))
    assert model.losses == [] or all(np.isfinite(numpy(loss)) for loss in model.losses)


def test_it_is_not_trained():
    model = shallow()
    mc = averaged(model, 2)
    before = [numpy(weight.value).copy() for weight in model.weights]
    with pytest.raises(NotImplementedError, match="only predicts"):
        mc.fit(data(4, 4), np.zeros(4, int))
    with pytest.raises(NotImplementedError, match="only predicts"):
        mc.train_on_batch(data(4, 4), np.zeros(4, int))
    for one, other in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(one, numpy(other.value))


def test_it_is_no_part_of_a_functional_model():
    mc = averaged(shallow(), 2)
    with pytest.raises(NotImplementedError, match="called on data"):
        mc(keras.Input((4,)))


@pytest.mark.slow
def test_steps_per_execution_change_nothing():
    x, y = data(5, 4), np.arange(5) % 3
    mc = averaged(shallow(), 4, seed=0, independent=True)
    one = predict(mc, x, batch_size=2), evaluate(mc, x, y, batch_size=2)
    mc.compile(steps_per_execution=2)
    same(predict(mc, x, batch_size=2), one[0])
    same(evaluate(mc, x, y, batch_size=2), one[1])


@pytest.mark.once
def test_more_metrics_come_on_top(eagerly):
    mc = averaged(shallow(), 4, seed=0)
    x, y = data(6, 4), np.eye(3)[np.arange(6) % 3]
    mc.compile(metrics=["mae"], weighted_metrics=[keras.metrics.MeanSquaredError(name="mse")])
    mean = predict(mc, x)["mean"]
    scores = evaluate(mc, x, y)
    close(scores["mae"], np.abs(mean - y).mean())
    close(scores["mse"], np.square(mean - y).mean())
    close(scores["brier"], np.square(mean - y).sum(axis=-1).mean())


@pytest.mark.once
def test_evaluation_counts_every_batch_by_its_size(eagerly):
    mc = averaged(shallow(), 4, seed=0)
    x, y = data(7, 4), np.arange(7) % 3
    same(evaluate(mc, x, y, batch_size=3), evaluate(mc, x, y, batch_size=7))
    names = ["loss", "accuracy", "nll", "brier", "ece"]
    listed = mc.evaluate(x, y, verbose=0)
    close(listed, [evaluate(mc, x, y)[name] for name in names])


class Batches(keras.utils.PyDataset):
    def __init__(self, *parts, size=4):
        super().__init__()
        self.parts, self.size = parts, size

    def __len__(self):
        return -(-len(self.parts[0]) // self.size)

    def __getitem__(self, number):
        here = slice(number * self.size, (number + 1) * self.size)
        return tuple(part[here] for part in self.parts)


@pytest.mark.once
@pytest.mark.slow
def test_datasets_give_what_arrays_give(eagerly):
    mc = averaged(shallow(), 4, seed=0)
    x, y, weight = data(10, 4), np.arange(10) % 3, np.arange(10.0).astype("float32")
    same(predict(mc, Batches(x)), predict(mc, x))
    same(
        evaluate(mc, Batches(x, y, weight)), evaluate(mc, x, y, sample_weight=weight, batch_size=4)
    )
    if not JAX:
        import tensorflow as tf

        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
        same(evaluate(mc, dataset), evaluate(mc, x, y))
        same(predict(mc, dataset.map(lambda x, y: x)), predict(mc, x))


@keras.saving.register_keras_serializable(package="tests")
class Own(keras.Model):
    """A model whose call is its own."""

    def __init__(self, outputs=1, **kwargs):
        super().__init__(**kwargs)
        self.outputs_wanted = outputs
        self.first, self.last = layers.Dense(4, activation="tanh"), dense(3)

    def build(self, input_shape):
        self.first.build(input_shape)
        self.last.build((None, 4))
        self.built = True

    def call(self, inputs):
        y = self.last(self.first(inputs))
        return (y, y) if self.outputs_wanted == 2 else y

    def get_config(self):
        return {**super().get_config(), "outputs": self.outputs_wanted}


def own(**kwargs):
    model = Own(**kwargs)
    model.build((None, 4))
    return set_weights(model)


SAVED = {
    "softmax": (shallow, {"sampling": "qmc"}),
    "own": (own, {"head": "softmax", "from_logits": True}),
    "converted": (
        lambda: ibnn.to_stochastic(
            keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.Dense(2), GaussianHead()]),
            ibnn.NormalPlanar1d(),
            train_size=10,
        ),
        {"standard_error": True, "chunk_size": 2},
    ),
    "nested": (
        lambda: keras.Sequential([keras.Input((4,)), shallow(None)]),
        {"from_logits": True, "interval": 0.5, "return_samples": True},
    ),
    "dropout": (
        lambda: keras.Sequential(
            [keras.Input((4,)), layers.Dropout(0.5), layers.Dense(3, activation="softmax")]
        ),
        {"dropout": True, "independent": True},
    ),
}


@pytest.mark.parametrize("name", SAVED)
def test_saved_and_loaded_it_predicts_the_same(name, tmp_path):
    make, options = SAVED[name]
    mc = averaged(set_weights(make()), 5, seed=3, name="mine", **options)
    mc.compile(steps_per_execution=2)
    x = data(6, 4)
    expected = statistics(mc, x)
    mc.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    same(statistics(loaded, x), expected)
    assert loaded.get_config().keys() == mc.get_config().keys()
    for key, value in mc.get_config().items():
        if key not in ("model", "dtype"):
            assert loaded.get_config()[key] == value, key
    assert loaded.name == "mine"
    assert loaded.steps_per_execution == 2
    again = ibnn.MonteCarlo.from_config(mc.get_config())
    again.inner.set_weights(mc.inner.get_weights())
    same(statistics(again, x), expected)


def test_a_loss_that_told_of_logits_tells_after_loading(tmp_path):
    model = shallow(None)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    mc = averaged(model, 3, seed=0)
    mc.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    same(statistics(loaded, data(3, 4)), statistics(mc, data(3, 4)))


def test_a_file_does_not_hold_what_suits_one_backend_only():
    """Whether to compile with XLA was left open, and stays so."""
    assert ibnn.MonteCarlo(shallow(), 2).get_compile_config()["jit_compile"] is None


def test_float64_has_its_precision(float64):
    model = linear(np.ones((2, 1)), np.ones(2), np.full(2, 0.5))
    x = np.ones((1, 2)) + np.array([[0.0, 0.0], [1e-10, 0.0]])
    result = statistics(averaged(model, 16, head="point", seed=0), x)
    assert all(value.dtype == "float64" for value in result.values())
    step = (result["mean"][1] - result["mean"][0]) / 1e-10
    assert 0.3 < step < 1.7


def test_a_model_keeps_its_precision_whatever_the_policy_is_by_then(policy):
    policy("float64")
    model = linear(np.ones((2, 1)), np.ones(2), np.full(2, 0.5))
    policy("float32")
    x = np.ones((1, 2)) + np.array([[0.0, 0.0], [1e-10, 0.0]])
    result = statistics(averaged(model, 16, head="point", seed=0), x)
    assert 0.3 < (result["mean"][1] - result["mean"][0]) / 1e-10 < 1.7


def test_mixed_precision_gives_full_precision_statistics(policy):
    policy("mixed_bfloat16")
    model = shallow()
    result = predict(averaged(model, 64, seed=3), data(N, 4))
    policy("float32")
    exact = statistics(averaged(shallow(), 64, seed=3), data(N, 4))
    assert all(value.dtype == "float32" for value in result.values())
    same(result, exact, 0.03)
    close(result["entropy"], result["aleatoric"] + result["epistemic"])


def test_mixed_precision_does_not_round_the_input(policy):
    """Words numbered by floats: bfloat16 has no 513."""
    policy("mixed_bfloat16")
    inputs = keras.Input((1,))
    hidden = layers.Flatten()(layers.Embedding(600, 2, dtype="float32")(inputs))
    model = keras.Model(inputs, dense(1, dtype="float32")(hidden))
    set_weights(model)
    x = np.array([[513.0], [515.0], [599.0]], "float32")
    mc = averaged(model, 1, head="point")
    with ibnn.noise_off(model):
        close(predict(mc, x)["mean"], model.predict(x, verbose=0))


def test_a_model_without_noise_needs_one_sample():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, activation="softmax")])
    with pytest.warns(UserWarning, match="no stochastic layer.*one is enough"):
        mc = averaged(model, 100, return_samples=True)
    assert mc.samples == 1
    result = statistics(mc, data(N, 4))
    close(result["mean"], numpy(model(data(N, 4))))
    assert result["samples"].shape == (N, 1, 3)
    np.testing.assert_array_equal(result["variance"], 0)


@pytest.mark.filterwarnings("ignore:Model .* has no stochastic layer")
def test_a_model_without_noise_has_no_standard_error():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, activation="softmax")])
    mc = averaged(model, 100, standard_error=True)
    result = predict(mc, data(N, 4))
    np.testing.assert_array_equal(result["standard_error"], np.zeros((N, 3)))
    assert ibnn.MonteCarlo.from_config(mc.get_config()).standard_error


def test_a_single_sample_and_a_single_example():
    mc = averaged(shallow(), 1, seed=0)
    result = predict(mc, data(1, 4))
    assert result["mean"].shape == (1, 3)
    np.testing.assert_array_equal(result["variance"], 0)
    np.testing.assert_allclose(result["epistemic"], 0, atol=1e-7)
    close(result["entropy"], result["aleatoric"])


# ---------------------------------------------------------------------------------- a temperature


def scaled(model, temperature=2.0, **kwargs):
    scaling = ibnn.TemperatureScaling(model, **kwargs)
    scaling.temperature.assign(temperature)
    return scaling


def without_noise(classes=3, activation=None):
    return set_weights(keras.Sequential([keras.Input((4,)), layers.Dense(classes, activation)]))


def test_a_scaled_classifier_is_scored_as_it_is_averaged(eagerly, tmp_path):
    """Without noise, from the fit to a loaded file."""
    model = without_noise()
    x, y = data(30, 4), np.arange(30) % 3
    scaling = ibnn.TemperatureScaling(model).fit(x, y)
    p = special.softmax(numpy(model(x)) / float(scaling.temperature), axis=-1)
    assert abs(float(scaling.temperature) - 1) > 0.1
    nll = -np.log(p[np.arange(30), y]).mean()
    scores = evaluate(scaling, x, y)
    close([scores["nll"], scores["loss"]], nll)
    close(scores["brier"], np.square(p - np.eye(3)[y]).sum(axis=-1).mean())
    close(scores["ece"], ibnn.metrics.expected_calibration_error(p, y))
    close(scores["accuracy"], np.mean(p.argmax(axis=-1) == y))
    assert not scaling.compiled
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of noise that nobody asked for
        mc = averaged(scaling, seed=0)
    assert mc.samples == 1
    same(evaluate(mc, x, y), scores)
    mc.save(tmp_path / "mc.keras")
    scaling.save(tmp_path / "scaling.keras")
    loaded, again = (keras.models.load_model(tmp_path / f"{n}.keras") for n in ("mc", "scaling"))
    close(predict(loaded, x)["mean"], p)
    close(numpy(again(x)), numpy(scaling(x)))


@pytest.mark.once
@pytest.mark.parametrize(
    ("classes", "activation", "inverse", "forward"),
    [
        (3, None, lambda y: y, lambda y: special.softmax(y, axis=-1)),
        (3, "softmax", np.log, lambda y: special.softmax(y, axis=-1)),
        (1, None, lambda y: y, special.expit),
        (1, "sigmoid", special.logit, special.expit),
    ],
)
def test_each_draw_of_a_scaled_classifier_is_scaled(classes, activation, inverse, forward):
    model, x = classifier(activation, classes), data(N, 4)
    last = {None: {"from_logits": True}}.get(activation, {})
    options = {"return_samples": True, **COMMON}
    raw = averaged(model, **options, **({"head": "point"} if activation is None else last))
    draws = statistics(raw, x)["samples"].astype("float64")
    found = statistics(averaged(scaled(model, 3.0), **options), x)
    close(found["samples"], forward(inverse(draws) / 3))
    close(found["mean"], forward(inverse(draws) / 3).mean(axis=1))
    assert found["epistemic"].min() > 1e-4


@pytest.mark.once
@pytest.mark.slow
def test_an_average_can_be_scaled_and_scored(eagerly):
    model, x, y = shallow(), data(N, 4), np.arange(N) % 3
    inner = averaged(model, S, seed=3)
    scaling = scaled(inner)
    p = special.softmax(np.log(predict(inner, x)["mean"]) / 2, axis=-1)
    close(numpy(scaling(x)), p)
    close(evaluate(scaling, x, y)["nll"], -np.log(p[np.arange(N), y]).mean())
    outer = averaged(scaling, S, seed=4)
    assert outer.samples == 1  # the draws are those of the inner one
    close(predict(outer, x)["mean"], p)


@pytest.mark.once
def test_a_scaled_classifier_keeps_the_options():
    model = keras.Sequential([keras.Input((4,)), layers.Dropout(0.5), layers.Dense(3)])
    mc = averaged(scaled(set_weights(model)), S, seed=0, dropout=True)
    assert predict(mc, data(N, 4))["epistemic"].min() > 1e-4
    with pytest.warns(UserWarning, match="no stochastic layer and no dropout"):
        averaged(scaled(without_noise()), S, dropout=True)
    with pytest.raises(ValueError, match="`from_logits` is False, but .* returns logits"):
        averaged(scaled(without_noise()), from_logits=False)
    mc = averaged(scaled(own(), from_logits=True), S, seed=3)
    raw = averaged(own(), S, seed=3, head="point", return_samples=True)
    draws = statistics(raw, data(N, 4))["samples"]
    close(predict(mc, data(N, 4))["mean"], special.softmax(draws / 2, axis=-1).mean(axis=1))


@pytest.mark.once
def test_a_compiled_scaled_classifier_is_scored_as_it_was_compiled():
    scaling = scaled(without_noise())
    scaling.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    assert evaluate(scaling, data(N, 4), np.arange(N) % 3).keys() == {"loss"}


# ------------------------------------------------------------------------------------- the callback


def task():
    x = data(24, 4)
    return x, (x[:, 0] > 0).astype(int) + (x[:, 1] > 1)


def compiled():
    model = shallow()
    model.compile(keras.optimizers.Adam(0.05), "sparse_categorical_crossentropy")
    return model


def logged(callback, model, epochs=1):
    """Return what a callback adds to the logs of each epoch."""
    callback.set_model(model)
    callback.on_train_begin()
    logs = [{} for _ in range(epochs)]
    for epoch, entries in enumerate(logs):
        callback.on_epoch_end(epoch, entries)
    return logs


@pytest.mark.once
@pytest.mark.slow
def test_the_callback_logs_what_the_others_read(eagerly, tmp_path):
    x, y = task()
    path = tmp_path / "best.keras"
    weights = []

    class Recorder(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            weights.append(self.model.get_weights())

    model = compiled()
    callbacks = [
        ibnn.MonteCarloEvaluation((x, y), samples=6, seed=2, batch_size=10),
        keras.callbacks.EarlyStopping("val_mc_nll", min_delta=100.0, patience=2, mode="min"),
        keras.callbacks.ModelCheckpoint(
            path, monitor="val_mc_accuracy", save_best_only=True, mode="max"
        ),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        Recorder(),
    ]
    history = model.fit(x, y, batch_size=8, epochs=8, verbose=0, callbacks=callbacks).history
    assert len(history["loss"]) == 3  # no epoch is better by so much
    entries = {"val_mc_accuracy", "val_mc_nll", "val_mc_ece", "val_mc_brier"}
    assert {key for key in history if key.startswith("val_mc")} == entries
    assert "val_mc_nll" in (tmp_path / "log.csv").read_text()
    mc = averaged(model, 6, seed=2)
    for epoch, values in enumerate(weights):
        model.set_weights(values)
        scores = evaluate(mc, x, y)
        for key in ("accuracy", "nll", "brier", "ece"):
            close(history[f"val_mc_{key}"][epoch], scores[key])
    best = keras.models.load_model(path)
    accuracy = evaluate(averaged(best, 6, seed=2), x, y)["accuracy"]
    close(accuracy, max(history["val_mc_accuracy"]))


@pytest.mark.once
def test_the_callback_runs_every_so_many_epochs(eagerly):
    callback = ibnn.MonteCarloEvaluation(task(), 2, every=2)
    entries = [bool(logs) for logs in logged(callback, compiled(), epochs=5)]
    assert entries == [True, False, True, False, True]


@pytest.mark.once
def test_the_callback_takes_arrays_and_datasets(eagerly):
    x, y = task()
    weight = np.ones(24, "float32")
    given = [(x, y), [x, y, weight], Batches(x, y, weight)]
    if not JAX:
        import tensorflow as tf

        given.append(tf.data.Dataset.from_tensor_slices((x, y)).batch(5))
    model = compiled()
    found = [logged(ibnn.MonteCarloEvaluation(part, 2, seed=0), model)[0] for part in given]
    assert len(found[0]) == 4
    for logs in found[1:]:
        same(logs, found[0])


@pytest.mark.once
def test_the_callback_weighs_the_examples(eagerly):
    x, y = task()
    weight = (np.arange(24) < 10).astype("float32")
    model = compiled()
    parts = (x, y, weight), (x[:10], y[:10])
    one, other = (logged(ibnn.MonteCarloEvaluation(p, 2, seed=0), model)[0] for p in parts)
    same(one, other)


@pytest.mark.parametrize(
    ("shuffled_by", "options"),
    [("arrays", {}), pytest.param("dataset", {"seed": None}, marks=pytest.mark.slow)],
)
def test_training_is_the_same_with_and_without_the_callback(eagerly, shuffled_by, options):
    x, y = task()

    def train(callbacks):
        keras.utils.set_random_seed(1)
        model = compiled()
        arguments, size = (((x, y), 8), ((Batches(x, y, size=8),), None))[shuffled_by == "dataset"]
        history = model.fit(
            *arguments, batch_size=size, epochs=3, verbose=0, callbacks=callbacks, shuffle=True
        )
        return model.get_weights(), history.history

    weights, logs = train([ibnn.MonteCarloEvaluation((x, y), 2, **options)])
    plain_weights, plain_logs = train([])
    for one, other in zip(weights, plain_weights, strict=True):
        np.testing.assert_array_equal(one, other)
    assert {key: value for key, value in logs.items() if "_mc_" not in key} == plain_logs
    assert "val_mc_nll" in logs


@pytest.mark.once
def test_the_callback_for_regression(eagerly):
    model = keras.Sequential([keras.Input((4,)), dense(2), GaussianHead()])
    model.compile("sgd", GaussianNLL())
    x = data(8, 4)
    callback = ibnn.MonteCarloEvaluation((x, x[:, :1]), 3)
    history = model.fit(x, x[:, :1], verbose=0, callbacks=[callback]).history
    assert {"val_mc_rmse", "val_mc_nll"} < history.keys()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"samples": 0}, "`samples`.*0"),
        ({"every": 0}, "`every`.*0"),
        ({"every": 1.5}, "`every`.*1.5"),
        ({"data": (1,)}, r"`data` must be \(x, y\)"),
        ({"data": (1, 2, 3, 4)}, "tuple of 4"),
    ],
)
def test_the_callback_refuses_what_it_cannot_use(options, match):
    with pytest.raises(ValueError, match=match):
        ibnn.MonteCarloEvaluation(**{"data": (1, 2), **options})


# ------------------------------------------------------------------------------------------- misuse


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"samples": 0}, "`samples`.*at least 1.*0"),
        ({"samples": -3}, "`samples`.*-3"),
        ({"samples": 1.5}, "`samples`.*1.5"),
        ({"samples": "8"}, "`samples`.*'8'"),
        ({"samples": None}, "`samples`.*None"),
        ({"chunk_size": 0}, "`chunk_size`.*at least 1.*0"),
        ({"chunk_size": 2.5}, "`chunk_size`.*2.5"),
        ({"seed": -1}, "`seed`.*-1"),
        ({"seed": 1.5}, "`seed`.*1.5"),
        ({"seed": "a"}, "`seed`.*'a'"),
        ({"seed": 10**400}, "`seed`"),
        ({"interval": 0}, "`interval` must be between 0 and 1.*0"),
        ({"interval": 1}, "`interval`.*1"),
        ({"interval": 2}, "`interval`.*2"),
        ({"interval": float("nan")}, "`interval`.*nan"),
        ({"sampling": "sobol"}, "`sampling` must be one of 'iid'.*'sobol'"),
        ({"head": "logits"}, "`head` must be one of.*'logits'"),
        ({"from_logits": True}, "`from_logits` is True.*softmax"),
        ({"standard_error": True, "sampling": "qmc"}, "needs .* independent `samples`; .*'qmc'"),
        ({"standard_error": True, "sampling": "antithetic"}, "independent.*'antithetic'"),
        ({"standard_error": True, "samples": 1}, "`standard_error` needs 2 or more.*got 1"),
    ],
)
def test_bad_options_are_refused_by_name_and_value(options, match):
    with pytest.raises(ValueError, match=match):
        averaged(shallow(), **{"samples": 4, **options})


def test_models_that_cannot_be_averaged_are_refused():
    cases = [
        (keras.Sequential([dense(3, "softmax")]), "not built"),
        (Own(), "not built"),
        (dense(3), "must be a Keras model"),
        (None, "must be a Keras model"),
        (averaged(shallow(), 2), "already a MonteCarlo"),
        (shallow(None), "It is unknown what"),
        (own(), "It is unknown what"),
    ]
    for model, match in cases:
        with pytest.raises(ValueError, match=match):
            averaged(model, 2)


def test_a_stateful_layer_is_refused():
    """Its states are of the rows of one batch, which draws multiply."""
    sizes = {"batch_shape": (2, 3, 4)}
    plain = keras.Sequential([keras.Input(**sizes), layers.GRU(2, stateful=True), layers.Dense(2)])
    noisy = ibnn.to_stochastic(plain, ibnn.NormalAffine(), train_size=2)
    for model in (noisy, ibnn.DeepEnsemble([plain])):
        with pytest.raises(ValueError, match="`stateful=True`"):
            ibnn.MonteCarlo(model, head="softmax", from_logits=True)


def test_a_model_of_its_own_call_with_two_outputs_is_refused():
    with pytest.raises(ValueError, match="(?i)outputs"):
        predict(averaged(own(outputs=2), 2, head="softmax", from_logits=True), data(3, 4))


def test_logits_of_a_model_with_a_call_of_its_own():
    """What the error for an unknown head says to do is enough."""
    mc = averaged(own(), 2, from_logits=True)
    close(predict(mc, data(3, 4))["mean"].sum(axis=-1), 1)


@pytest.fixture(scope="module")
def logits_taken_for_probabilities():
    return averaged(shallow(None), 4, from_logits=False)


@pytest.mark.once
def test_outputs_that_are_no_probabilities_are_refused(logits_taken_for_probabilities):
    mc = logits_taken_for_probabilities
    with pytest.raises(ValueError, match="4 of 4 examples.*sum to 1.*from_logits=True"):
        predict(mc, data(4, 4))
    with pytest.raises(ValueError, match="sum to 1.*from_logits=True"):
        evaluate(mc, data(4, 4), np.zeros(4, int))
    with pytest.raises(ValueError, match="sum to 1.*from_logits=True"):
        mc.predict_on_batch(data(4, 4))
    sigmoid = averaged(shallow("sigmoid"), 4, head="softmax")
    with pytest.raises(ValueError, match="sum to 1"):
        predict(sigmoid, data(4, 4))
    tanh = averaged(shallow("tanh"), 4, head="sigmoid")
    with pytest.raises(ValueError, match="not probabilities"):
        predict(tanh, data(4, 4))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_inputs_that_are_not_finite_are_refused(value):
    """A ReLU may hide them on the way."""
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(4, activation="relu"), dense(3, "softmax")]
    )
    mc = averaged(set_weights(model), 2)
    x, y = data(6, 4), np.zeros(6, int)
    x[2, 1] = value
    for attempt in (
        lambda: predict(mc, x),
        lambda: mc.predict_on_batch(x),
        lambda: evaluate(mc, x, y),
    ):
        with pytest.raises(ValueError, match="NaN or infinity.*number 2"):
            attempt()


def test_weights_that_are_not_finite_are_refused():
    model = shallow()
    model.layers[-1].layer.bias.assign([0.0, np.nan, 0.0])
    with pytest.raises(ValueError, match="3 of 3 examples.*not finite"):
        predict(averaged(model, 2), data(3, 4))


def test_a_spread_that_is_not_finite_is_refused(known_gaussian):
    """The mean alone is; the answer as a whole is not."""
    model = keras.models.clone_model(known_gaussian)
    model.set_weights(known_gaussian.get_weights())
    model.layers[0].layer.bias.assign([0.0, np.nan])
    mc = averaged(model, 2)
    with pytest.raises(ValueError, match="not finite"):
        predict(mc, np.ones((3, 1), "float32"))


@pytest.fixture(scope="module")
def of_three_classes():
    return averaged(shallow(), 2, seed=0)


@pytest.mark.parametrize(
    "y",
    [
        np.array([0, 1, 3]),
        np.array([0, 1, -1]),
        np.array([0.0, 1.0, np.nan]),
        np.array([0.0, 1.0, 0.5]),
        np.zeros((3, 3)),
        np.full((3, 3), 1 / 3),
    ],
)
def test_labels_outside_of_the_classes_are_refused(of_three_classes, y):
    with pytest.raises(ValueError, match="labels outside its classes"):
        evaluate(of_three_classes, data(3, 4), y)


def test_a_single_batch_is_checked_likewise(of_three_classes):
    with pytest.raises(ValueError, match="labels outside its classes"):
        of_three_classes.test_on_batch(data(3, 4), np.array([0, 1, 3]))


@pytest.mark.parametrize("shape", [(3, 4), (3, 2), (3, 1, 1), (3, 3, 1)])
def test_labels_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match="shape"):
        evaluate(averaged(shallow(), 2), data(3, 4), np.zeros(shape, int))


@pytest.mark.once
def test_an_error_leaves_the_models_usable():
    model = shallow()
    mc = averaged(model, 2, seed=0)
    x, y = data(3, 4), np.array([0, 1, 2])
    expected = evaluate(mc, x, y), predict(mc, x)
    with pytest.raises(ValueError, match="shape"):
        evaluate(mc, x, np.zeros((3, 2), int))
    same(predict(mc, x), expected[1])
    same(evaluate(mc, x, y), expected[0])
    assert model.predict(x, verbose=0).shape == (3, 3)


def test_labels_are_needed(of_three_classes):
    with pytest.raises(ValueError, match="`y`|labels|targets"):
        evaluate(of_three_classes, data(3, 4))


@pytest.mark.parametrize("shape", [(3, 3), (3, 2, 2), (2,)])
def test_targets_of_another_shape_are_refused(shape):
    model = network((4,), 2)
    mc = averaged(model, 2, head="point")
    with pytest.raises(ValueError, match="(?i)shape|cardinality"):
        evaluate(mc, data(3, 4), np.zeros(shape, "float32"))


@pytest.mark.once
def test_an_empty_batch_can_be_called(of_three_classes):
    """As by a replica that has no example."""
    empty = of_three_classes(np.zeros((0, 4), "float32"))
    assert numpy(empty["mean"]).shape == (0, 3)
    assert numpy(empty["entropy"]).shape == (0,)


def test_no_example_has_no_prediction_and_no_score(of_three_classes):
    with pytest.raises(ValueError, match="`x` holds no example"):
        evaluate(of_three_classes, data(0, 4), np.zeros(0, int))
    for predict in (of_three_classes.predict, of_three_classes.predict_on_batch):
        with pytest.raises(ValueError, match="`x` holds no example"):
            predict(data(0, 4))


# -------------------------------------------------------------------------- in a process of its own


def start(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )


def result_of(process):
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]
    return json.loads(output.splitlines()[-1])


MEMORY = """
import json, sys
import keras, numpy as np
import tfp_ibnn as ibnn

def peak():
    with open("/proc/self/status") as status:
        (line,) = [line for line in status if line.startswith("VmHWM")]
    return int(line.split()[1])

inputs = keras.Input((4,))
hidden = ibnn.StochasticDense(16384, activation="tanh", train_size=10)(inputs)
model = keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(hidden))
x = np.ones((16, 4), "float32")
peaks = []
for samples in (1, int(sys.argv[1])):
    ibnn.MonteCarlo(model, samples).predict(x, verbose=0)
    peaks.append(peak())
print(json.dumps(peaks))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's books")
@pytest.mark.once
def test_memory_does_not_grow_with_the_samples():
    processes = [start(MEMORY, samples) for samples in (64, 1024)]
    few, many = (after - before for before, after in map(result_of, processes))
    assert few > 20_000  # kilobytes; else the test shows nothing
    assert many < 1.5 * few


MIRRORED = """
import json
import keras, numpy as np, tensorflow as tf
from keras import layers
import tfp_ibnn as ibnn

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
x = np.random.default_rng(0).normal(size=(9, 4)).astype("float32")
y = np.arange(9) % 3

def results():
    model = keras.Sequential(
        [keras.Input((4,)), ibnn.StochasticDense(3, activation="softmax", train_size=10)]
    )
    model.layers[0].layer.kernel.assign(np.arange(12.0).reshape(4, 3) / 10)
    mc = ibnn.MonteCarlo(model, 4, seed=0)
    mean = mc.predict(x, batch_size=4, verbose=0)["mean"]
    scores = mc.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)
    return [mean.tolist(), scores]

plain = results()
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    mirrored = results()
print(json.dumps([strategy.num_replicas_in_sync, plain, mirrored]))
"""


@pytest.mark.slow
@pytest.mark.skipif(JAX, reason="a strategy of TensorFlow's")
def test_replicas_give_the_same_answer():
    """The last batch has one example, so that one replica has none."""
    replicas, (mean, scores), (mirrored_mean, mirrored_scores) = result_of(start(MIRRORED))
    assert replicas == 2
    close(mirrored_mean, mean)
    for key in ("accuracy", "nll", "brier", "ece"):
        close(mirrored_scores[key], scores[key])


@pytest.mark.once
@pytest.mark.parametrize("sampling", ["iid", "qmc"])
def test_numbered_draws_are_those_of_the_average_and_do_not_come_back(sampling):
    mc = averaged(shallow(), 4, seed=0, sampling=sampling)
    x = data(3, 4)
    draws = [numpy(mc.draw(x, number)["mean"]) for number in (0, 1, 2, 3)]
    np.testing.assert_allclose(np.mean(draws, axis=0), numpy(mc.average(x)["mean"]), atol=1e-6)
    for later in (4, 2**16, 2**16 + 1, 2**31 - 1):
        other = numpy(mc.draw(x, later)["mean"])
        assert min(np.abs(other - draw).max() for draw in draws) > 1e-6


@pytest.mark.once
def test_the_bounds_of_an_interval_are_as_precise_as_the_draws():
    draws = np.random.default_rng(0).normal(size=(50, 3, 2))
    found = Point().interval(keras.ops.convert_to_tensor(draws), None, 0.8)
    wanted = np.quantile(draws, [0.1, 0.9], axis=0)
    np.testing.assert_allclose(np.stack(list(map(numpy, found))), wanted, rtol=1e-14)
