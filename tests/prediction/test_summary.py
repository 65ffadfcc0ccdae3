"""What draws are summed up to: means, entropies, variances, intervals and standard errors."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers
from scipy import optimize, special, stats

import tfp_ibnn as ibnn
from tests.monte_carlo_tools import averaged, classifier, data, linear, numpy, statistics
from tests.prediction.tools import COMMON, N, close, evaluate, network, predict, same
from tfp_ibnn import noise
from tfp_ibnn.layers import GaussianHead

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
