"""The callback that scores the averaged prediction after each epoch."""

import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn
from tests.monte_carlo_tools import JAX, averaged, data, dense, shallow
from tests.prediction.tools import Batches, close, evaluate, same
from tfp_ibnn.layers import GaussianHead, GaussianNLL


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
