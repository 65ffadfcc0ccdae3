"""The weight of the KL by the epoch, and the log of the posteriors."""

import csv

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfp_ibnn as ibnn
from tests.layer_checklist import numpy
from tests.training.tools import N, X, fit, network, plain_network
from tfp_ibnn.training.callbacks import posterior_statistics

# Annealing.


def test_annealing_sets_beta_in_every_layer_without_retracing():
    traces = []

    def loss(y, prediction):
        traces.append(1)
        return ops.mean(ops.square(y - prediction), axis=-1)

    inner = plain_network()
    inputs = keras.Input((4,))
    model = keras.Model(inputs, ibnn.StochasticDense(2, train_size=N)(inner(inputs)))
    model.compile("sgd", loss)
    betas, counts = [], []

    def record(epoch, logs):
        betas.append([float(numpy(v.posterior.beta.value)) for v in ibnn.stochastic_layers(model)])
        counts.append(len(traces))

    log = keras.callbacks.LambdaCallback(on_epoch_end=record)
    fit(model, 5, [ibnn.KLAnnealing(4, start=0.2, stop=1.0), log])
    np.testing.assert_allclose(betas, [[b, b] for b in (0.2, 0.4, 0.6, 0.8, 1.0)], rtol=1e-6)
    assert counts[0] == counts[-1] > 0


@pytest.mark.parametrize("make", [network, plain_network])
def test_annealing_reaches_the_loss(make):
    model = make()
    model.compile(keras.optimizers.SGD(0.0), loss=lambda y, prediction: 0.0 * prediction)
    history = fit(model, 4, [ibnn.KLAnnealing(2, stop=3.0)])["loss"]
    model(X)
    per_beta = sum(map(float, model.losses)) / 3.0
    np.testing.assert_allclose(
        history, [0.0, 1.5 * per_beta, 3 * per_beta, 3 * per_beta], rtol=1e-4
    )


def test_annealing_can_fall_and_resume(eagerly):
    annealing = ibnn.KLAnnealing(4, start=2.0, stop=0.0)
    assert [annealing.beta(e) for e in (0, 1, 4, 9)] == [2.0, 1.5, 0.0, 0.0]
    model = plain_network()
    model.compile("sgd", "mse")
    fit(model, 4, [ibnn.KLAnnealing(4)], initial_epoch=3)
    assert float(numpy(model.layers[-1].posterior.beta.value)) == 0.75


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [
        ({"epochs": 0}, "epochs"),
        ({"epochs": 2.5}, "epochs"),
        ({"epochs": 2, "start": -1.0}, "start"),
        ({"epochs": 2, "stop": float("nan")}, "stop"),
    ],
)
def test_bad_annealing(kwargs, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        ibnn.KLAnnealing(**kwargs)


@pytest.mark.parametrize("callback", [lambda: ibnn.KLAnnealing(2), ibnn.PosteriorLog])
def test_callbacks_need_a_stochastic_layer(callback):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)], name="plain")
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="'plain' has no stochastic layer"):
        fit(model, 1, [callback()])


# The log.

KEYS = ("kl", "z_mean", "z_std", "entropy")


def test_log_appears_in_history_and_csv(eagerly, tmp_path):
    model = network()
    model.compile("sgd", "mse")
    path = tmp_path / "log.csv"
    callbacks = [ibnn.KLAnnealing(2), ibnn.PosteriorLog(), keras.callbacks.CSVLogger(path)]
    history = fit(model, 2, callbacks)
    expected = {f"{name}/{key}" for name in ("one", "two") for key in KEYS} | {"beta"}
    assert expected <= set(history)
    assert history["beta"] == [0.0, 0.5]
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert expected <= set(rows[0])
    assert len(rows) == 2
    for row, value in zip(rows, history["two/kl"], strict=True):
        assert float(row["two/kl"]) == pytest.approx(value)
    statistics = posterior_statistics(model.get_layer("two"))
    for key in KEYS:
        assert history[f"two/{key}"][-1] == pytest.approx(statistics[key])


def test_statistics():
    layer = ibnn.StochasticDense(2, posterior=ibnn.NormalAffine(initial_scale=0.2), train_size=N)
    layer.build((None, 3))
    found = posterior_statistics(layer)
    ratio = 0.2 / 0.3
    assert found["kl"] == pytest.approx(3 * (-np.log(ratio) + (ratio**2 - 1) / 2), rel=1e-4)
    assert found["entropy"] == pytest.approx(3 * np.log(0.2 * np.sqrt(2 * np.pi * np.e)), rel=1e-4)
    assert found["z_mean"] == pytest.approx(1.0, abs=1e-5)
    assert found["z_std"] == pytest.approx(0.2, rel=0.2)


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="Keras's TensorBoard needs TensorFlow"
)
def test_log_appears_in_tensorboard(eagerly, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorflow.python.summary.summary_iterator import summary_iterator

    model = plain_network()
    model.compile("sgd", "mse")
    board = keras.callbacks.TensorBoard(tmp_path, write_graph=False)
    fit(model, 1, [ibnn.PosteriorLog(), board])
    tags = {
        value.tag
        for path in tmp_path.rglob("events*")
        for event in summary_iterator(str(path))
        for value in event.summary.value
    }
    assert {f"epoch_one/{key}" for key in KEYS} | {"epoch_beta"} <= tags


def test_layers_of_one_name_have_entries_of_their_own(eagerly):
    def block(scale, name):
        inputs = keras.Input((4,))
        posterior = ibnn.NormalAffine(initial_scale=scale)
        layer = ibnn.StochasticDense(4, posterior=posterior, train_size=N, name=name)
        return keras.Model(inputs, layer(inputs))

    x = inputs = keras.Input((4,))
    # The last has the name that the second would get for being the second.
    for scale, name in [(0.2, "same"), (0.4, "same"), (0.3, "same_2")]:
        x = block(scale, name)(x)
    model = keras.Model(inputs, layers.Dense(2)(x))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    history = fit(model, 1, [ibnn.PosteriorLog()])
    found = [history[key][0] for key in history if key.endswith("/kl")]
    expected = [posterior_statistics(v)["kl"] for v in ibnn.stochastic_layers(model)]
    assert len(set(expected)) == 3
    assert sorted(found) == pytest.approx(sorted(expected))
