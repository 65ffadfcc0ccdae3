"""Networks trained anew: their weights, their steps, and what becomes of those that fail."""

import itertools
import random

import keras
import numpy as np
import pytest
from keras import layers

import tfp_ibnn as ibnn
from tests.calibration.tools import classes, compiled
from tfp_ibnn.calibration import fresh, fresh_networks
from tfp_ibnn.calibration.engine import copy_of_optimizer
from tfp_ibnn.calibration.examples import Examples, Training, Validation
from tfp_ibnn.calibration.fresh_networks import FreshNetworks
from tfp_ibnn.calibration.trials import OutOfTime, Setting, deadline
from tfp_ibnn.conversion.copying import copy_of

LOSS = "sparse_categorical_crossentropy"


@pytest.fixture(autouse=True)
def fast(eagerly):
    """Nothing said here is about compiled graphs."""


def setting_of(model, epochs=4.0, **options):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 2)).astype("float32")
    y = (x[:, 0] > 0).astype(int) + (x[:, 1] > 0)
    examples = Examples(x, y)
    setting = Setting(
        model=model,
        output=classes(3, from_logits=False),
        optimizer=None,
        loss=LOSS,
        training=Training((x, y), 60, 2, 30, 0),
        data=Validation(examples, examples),
        samples=3,
        seed=0,
        model_epochs=epochs,
    )
    setting = setting._replace(**options)
    return setting._replace(fresh=FreshNetworks(setting, None))


def classifier():
    return compiled(LOSS, activation="softmax")


def test_layers_that_were_trained_get_new_weights_and_others_keep_theirs():
    normalization = layers.Normalization()
    normalization.adapt(np.array([[1.0, 2.0], [3.0, 9.0]]))
    frozen = layers.Dense(4, trainable=False)
    statistics = layers.BatchNormalization()
    outputs = layers.Dense(3, "softmax")
    model = keras.Sequential([keras.Input((2,)), normalization, frozen, statistics, outputs])
    model.compile("sgd", LOSS)
    statistics.moving_mean.assign(np.full(4, 7.0))
    network = FreshNetworks(setting_of(model), None).untrained()
    new_normalization, new_frozen, new_statistics, new_outputs = network.layers[-4:]
    np.testing.assert_array_equal(new_frozen.get_weights()[0], frozen.get_weights()[0])
    assert not np.allclose(new_outputs.get_weights()[0], outputs.get_weights()[0])
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(new_statistics.moving_mean), 0)
    x = np.array([[2.0, 3.0]], "float32")
    np.testing.assert_allclose(new_normalization(x), normalization(x), rtol=1e-6)


def test_networks_differ_where_initializers_have_seeds():
    seeded = keras.initializers.HeNormal(seed=1)
    hidden = layers.Dense(4, kernel_initializer=seeded)
    parts = [keras.Sequential([keras.Input((2,)), hidden]), layers.Dense(3, "softmax")]
    model = keras.Sequential([keras.Input((2,)), *parts])
    model.compile("sgd", LOSS)
    new = setting_of(model).fresh
    networks = [model, new.untrained(), new.untrained()]
    for one, other in itertools.combinations(networks, 2):
        for place in (0, 2):  # the kernels
            assert not np.allclose(one.get_weights()[place], other.get_weights()[place])


def test_a_training_takes_the_steps_and_the_schedule_of_the_model():
    model = classifier()
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([3], [0.5, 0.0])
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), LOSS)
    model.optimizer.iterations.assign(8)
    setting = setting_of(model)
    network = setting.fresh.untrained()
    assert float(keras.ops.convert_to_numpy(network.optimizer.learning_rate)) == 0.5
    before = network.get_weights()
    setting.fresh.train(network)
    assert int(keras.ops.convert_to_numpy(network.optimizer.iterations)) == 8
    assert not np.allclose(network.get_weights()[0], before[0])
    first, second = setting.fresh.first(2)
    assert not np.allclose(first.get_weights()[0], second.get_weights()[0])
    assert setting.fresh.first(1) == [first]
    assert setting.fresh.seconds_of(2) > setting.fresh.seconds_of(1) > 0


def test_averages_of_an_optimizer_count_at_the_end_alone():
    model = classifier()
    model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9), LOSS)
    setting = setting_of(model)
    network = setting.fresh.untrained()
    at_once = copy_of(network)
    at_once.compile(copy_of_optimizer(network.optimizer), LOSS)
    setting.fresh.train(network)
    x, y = setting.training.data
    orders = [np.random.default_rng((1, epoch)).permutation(60) for epoch in (1, 2, 3, 4)]
    order = np.concatenate(orders)
    at_once.fit(x[order], y[order], batch_size=30, shuffle=False, verbose=0)
    for one, other in zip(network.get_weights(), at_once.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_rows_of_a_training(monkeypatch):
    """Each size is a row, SWAG is for free, and each says what it cost."""
    monkeypatch.setattr(fresh, "SIZES", (2, 3))
    setting = setting_of(classifier(), epochs=10.0)
    made = [*fresh.ensembles(setting), *fresh.swag_on_the_way(setting)]
    made += fresh.trained_with_noise(setting)
    assert [trial.fate for trial in made] == 4 * [""]
    assert [trial.name for trial in made] == [
        *("ensemble of 2", "ensemble of 3", "SWAG", "trained with noise")
    ]
    assert [trial.trainings for trial in made] == [1, 2, 1, 2]
    assert [trial.engine.samples for trial in made] == [2, 3, 3, 3]
    for trial in made:
        assert np.isfinite(trial.watch(setting.data, setting.output))
    # Twenty weight sets along the last steps, of which the mean is near the network they end in.
    swag, noisy = made[2].engine.network, made[3].engine.network
    assert swag.rank == fresh_networks.SNAPSHOTS
    (network,) = setting.fresh.first(1)
    mean = np.concatenate([np.ravel(keras.ops.convert_to_numpy(part)) for part in swag.mean()])
    end = np.concatenate([np.ravel(weight) for weight in network.get_weights()])
    assert 0 < np.abs(mean - end).max() < 0.1
    (layer, _) = ibnn.stochastic_layers(noisy)
    assert not np.allclose(keras.ops.convert_to_numpy(layer.posterior.affine.shift), 0)


def test_noise_from_scratch_repeats_with_dropout():
    model = compiled(LOSS, activation="softmax", dropout=0.5)
    ends = []
    for other in (1, 2):
        random.seed(other)  # Keras seeds layers by it
        (trial,) = fresh.trained_with_noise(setting_of(model))
        assert trial.fate == ""
        ends.append(trial.engine.network.get_weights())
    for first, second in zip(*ends, strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-7)


def test_swag_counts_steps_of_accumulated_gradients():
    model = classifier()
    model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), LOSS)
    (trial,) = fresh.swag_on_the_way(setting_of(model, epochs=10.0))
    assert trial.fate == ""
    assert trial.engine.network.rank == 10


def test_swag_takes_statistics_of_batch_normalization_along():
    parts = [keras.Input((2,)), layers.BatchNormalization(), layers.Dense(3, "softmax")]
    model = keras.Sequential(parts)
    model.compile("sgd", LOSS)
    (trial,) = fresh.swag_on_the_way(setting_of(model, epochs=10.0))
    assert trial.fate == ""
    assert trial.engine.network.count == 3


def test_what_cannot_be_trained_is_left_out(monkeypatch):
    monkeypatch.setattr(fresh, "SIZES", (2,))
    setting = setting_of(classifier())

    def diverging():
        model = classifier()
        model.compile(keras.optimizers.SGD(1e30), LOSS)
        return model

    trained = classifier()
    trained.optimizer.iterations.assign(8)
    for build, reason in [
        (diverging, "its training diverged: its weights are not finite."),
        (lambda: "network", "`build()` must return a compiled Keras model; got 'network'."),
        (lambda: compiled(LOSS, outputs=4, activation="softmax"), "differs from `models[0]`"),
        (lambda: trained, "a new network with a new optimizer; this one's has taken 8 steps."),
    ]:
        (trial,) = fresh.ensembles(setting._replace(fresh=FreshNetworks(setting, build)))
        assert reason in trial.fate


def test_a_network_without_time_is_not_begun_or_not_finished():
    setting = setting_of(classifier(), end=deadline(60.0))
    fresh_of = FreshNetworks(setting, None, seconds=4000.0)
    with pytest.raises(OutOfTime):
        fresh_of.first(1)
    late = setting._replace(end=deadline(1e-9))
    with pytest.raises(OutOfTime):
        FreshNetworks(late, None).first(1)
    (trial, *_) = fresh.ensembles(setting._replace(fresh=fresh_of))
    assert (trial.fate, trial.engine) == ("", None)
