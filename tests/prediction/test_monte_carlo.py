"""Prediction by many sampled networks: against itself, along with Keras, and against misuse."""

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
from scipy import special

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
from tests.prediction.tools import COMMON, Batches, N, S, close, evaluate, network, predict, same
from tfp_ibnn import noise
from tfp_ibnn.layers import GaussianHead
from tfp_ibnn.likelihoods import Point

# ------------------------------------------------------------------------------------- closed forms


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


def test_a_model_of_its_own_call_with_two_outputs_is_refused():
    with pytest.raises(ValueError, match="(?i)outputs"):
        predict(averaged(own(outputs=2), 2, head="softmax", from_logits=True), data(3, 4))


def test_logits_of_a_model_with_a_call_of_its_own():
    """What the error for an unknown head says to do is enough."""
    mc = averaged(own(), 2, from_logits=True)
    close(predict(mc, data(3, 4))["mean"].sum(axis=-1), 1)


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


@pytest.mark.parametrize("shape", [(3, 3), (3, 2, 2), (2,)])
def test_targets_of_another_shape_are_refused(shape):
    model = network((4,), 2)
    mc = averaged(model, 2, head="point")
    with pytest.raises(ValueError, match="(?i)shape|cardinality"):
        evaluate(mc, data(3, 4), np.zeros(shape, "float32"))


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
