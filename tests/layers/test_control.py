"""Noise that is switched off and on, and parts of a model that are not trained."""

import keras
import numpy as np
import pytest
from keras import layers

import tfp_ibnn as ibnn
from tests.layer_checklist import numpy, posterior_weights, stir
from tests.layers.tools import (
    POSTERIORS,
    N,
    data,
    distinct_rows,
    fit,
    identity,
    mlp,
    unchanged,
    values,
)

# The switch of the noise.


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.slow if x == "base-mixture" else []) for x in POSTERIORS],
)
def test_set_noise_reaches_compiled_functions(name):
    model = mlp(POSTERIORS[name](initial_scale=0.3))
    stir(model, size=0.2)
    x = np.tile(data(1, 4), (6, 1))

    def predict():
        return model.predict(x, verbose=0)

    assert distinct_rows(predict()) == 6
    ibnn.set_noise(model, on=False)
    off = predict()
    np.testing.assert_allclose(off, np.broadcast_to(off[:1], off.shape), rtol=1e-6)
    hidden = x
    for layer in model.layers:
        hidden = numpy(layer.layer(hidden * numpy(layer.posterior.mean())))
    np.testing.assert_allclose(off, hidden, rtol=1e-4, atol=1e-5)
    ibnn.set_noise(model, on=True)
    assert distinct_rows(predict()) == 6
    ibnn.set_noise(model, on=False)
    np.testing.assert_array_equal(predict(), off)


def test_noise_off_from_the_first_trace_can_be_switched_on():
    model = mlp(ibnn.NormalPlanar1d())
    x = np.tile(data(1, 4), (6, 1))
    with ibnn.noise_off(model):
        off = model.predict(x, verbose=0)
    assert distinct_rows(off) == 1
    assert distinct_rows(model.predict(x, verbose=0)) == 6


def test_no_kl_without_noise():
    model = mlp(ibnn.NormalAffine(initial_scale=0.1))
    model.compile(loss="mse")
    x, y = np.zeros((4, 4), "float32"), np.zeros((4, 2), "float32")
    with_noise = model.evaluate(x, y, verbose=0)
    assert with_noise > 0.05
    with ibnn.noise_off(model):
        assert model.evaluate(x, y, verbose=0) == 0
    np.testing.assert_allclose(model.evaluate(x, y, verbose=0), with_noise, rtol=1e-5)


def test_noise_off_restores_each_layer_also_after_an_error():
    model = mlp()
    first, second = model.layers
    ibnn.set_noise(first, on=False)

    def fail():
        with ibnn.noise_off(model):
            assert numpy(second.noise_switch.value) == 0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert numpy(first.noise_switch.value) == 0
    assert numpy(second.noise_switch.value) == 1


def test_set_noise_reaches_nested_models():
    inner = mlp()
    inputs = keras.Input((4,))
    model = keras.Model(inputs, identity()(inner(identity()(inputs))))
    assert len(ibnn.stochastic_layers(model)) == 4
    x = np.tile(data(1, 4), (6, 1))
    assert distinct_rows(model.predict(x, verbose=0)) == 6
    with ibnn.noise_off(model):
        assert distinct_rows(model.predict(x, verbose=0)) == 1
    with ibnn.noise_off(inner):
        assert distinct_rows(inner.predict(x, verbose=0)) == 1
        assert distinct_rows(model.predict(x, verbose=0)) == 6
    assert distinct_rows(inner.predict(x, verbose=0)) == 6


def test_shared_layer_is_listed_once():
    layer = identity()
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layer(layer(inputs)))
    assert ibnn.stochastic_layers(model) == [layer]


@pytest.mark.parametrize("on", [True, False])
def test_set_noise_needs_a_stochastic_layer(on):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)], name="plain")
    with pytest.raises(ValueError, match="'plain' has no stochastic layer"):
        ibnn.set_noise(model, on)


def test_set_noise_before_building_says_so():
    with pytest.raises(ValueError, match="build"):
        ibnn.set_noise(ibnn.StochasticDense(2, train_size=N), False)


# Freezing.


def frozen_model():
    return keras.Sequential(
        [
            keras.Input((4,)),
            ibnn.StochasticDense(5, train_size=N),
            layers.BatchNormalization(),
            keras.Sequential([ibnn.Stochastic(layers.Dense(4), train_size=N), layers.Dense(3)]),
            layers.Dense(2),
        ]
    )


def split(model):
    mine = posterior_weights(model)
    fixed = [layer.posterior.beta for layer in ibnn.stochastic_layers(model)]
    fixed += [layer.noise_switch for layer in ibnn.stochastic_layers(model)]
    ids, fixed_ids = {id(weight) for weight in mine}, {id(weight) for weight in fixed}
    return (
        [weight for weight in mine if id(weight) not in fixed_ids],
        [weight for weight in model.weights if id(weight) not in ids | fixed_ids],
    )


@pytest.mark.parametrize("part", ["deterministic", "stochastic"])
def test_freeze_stops_one_part_and_unfreeze_starts_it(eagerly, part):
    model = frozen_model()
    stochastic, deterministic = split(model)
    assert len(stochastic) == 4
    assert len(deterministic) == 2 * 4 + 4
    frozen, free = (
        (deterministic, stochastic) if part == "deterministic" else (stochastic, deterministic)
    )
    ibnn.freeze(model, part)
    before, before_free = values(frozen), values(free)
    fit(model)
    assert all(unchanged(before, values(frozen)))
    assert not any(unchanged(before_free, values(free)))

    ibnn.unfreeze(model, part)
    fit(model)
    assert not any(unchanged(before, values(frozen)))


def test_freeze_reaches_the_own_weights_of_layers_with_sublayers():
    class Scaled(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3)

        def build(self, input_shape):
            self.dense.build(input_shape)
            self.scale = self.add_weight(shape=(3,), initializer="ones", name="scale")

        def call(self, inputs):
            return self.scale * self.dense(inputs)

    model = keras.Sequential([keras.Input((4,)), Scaled(), ibnn.StochasticDense(2, train_size=N)])
    ibnn.freeze(model, "deterministic")
    assert [weight.name for weight in model.trainable_weights] == ["shift", "raw_scale"]


def test_freeze_keeps_the_statistics_of_batch_normalization(eagerly):
    model = keras.Sequential(
        [keras.Input((4,)), layers.BatchNormalization(), ibnn.StochasticDense(2, train_size=N)]
    )
    normalization = model.layers[0]
    for stops in (False, True):
        if stops:
            ibnn.freeze(model, "deterministic")
        before = values(normalization.weights)
        fit(model)
        assert all(unchanged(before, values(normalization.weights))) == stops
        assert len(before) == 4


def flags(model):
    return [weight.trainable for weight in model.weights] + [
        layer.trainable for layer in model._flatten_layers() if layer.weights
    ]


@pytest.mark.parametrize("part", ["deterministic", "stochastic"])
def test_unfreeze_restores_what_freeze_changed_and_nothing_else(part):
    model = frozen_model()
    flow = ibnn.StochasticDense(2, posterior=ibnn.NormalPlanar1d(), train_size=N)
    model.add(flow)
    first, normalization, nested, _, _ = model.layers
    first.trainable = False
    normalization.trainable = False
    nested.layers[0].layer.trainable = False
    nested.layers[0].posterior.trainable = False
    flow.posterior.flows[0].trainable = False
    flow.layer.bias.trainable = False
    before = flags(model)
    for _ in range(2):
        ibnn.freeze(model, part)
        ibnn.freeze(model, part)
        stochastic = [w.trainable for w in posterior_weights(model)]
        assert flags(model) != before
        assert any(stochastic) == (part == "deterministic")
        ibnn.unfreeze(model, part)
        assert flags(model) == before
        ibnn.unfreeze(model, part)
        assert flags(model) == before


@pytest.mark.parametrize("part", ["deterministic", "stochastic"])
def test_unfreeze_of_a_loaded_model_trains_the_whole_part(part, tmp_path):
    model = frozen_model()
    trainable = len(model.trainable_weights)
    ibnn.freeze(model, part)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert len(loaded.trainable_weights) < trainable
    ibnn.unfreeze(loaded, part)
    assert len(loaded.trainable_weights) == trainable


def test_freeze_names_the_parts():
    with pytest.raises(ValueError, match="`part` must be one of 'stochastic', 'deterministic'"):
        ibnn.freeze(mlp(), "posterior")
