"""Snapshots are taken when they should, in memory or on disk, and none is lost."""

import errno
import warnings

import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn

X = np.ones((8, 3), "float32")
Y = np.ones((8, 1), "float32")


def network(optimizer="sgd"):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model


def fit(model, callback, **options):
    options = {"epochs": 5, "batch_size": 4, "verbose": 0, "shuffle": False, **options}
    model.fit(X, Y, callbacks=[callback], **options)


def taken(options, **fit_options):
    snapshots = ibnn.Snapshots(**options)
    fit(network(), snapshots, **fit_options)
    return snapshots.steps


@pytest.mark.once
@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [2, 4, 6, 8, 10]),
        ({"every": 2, "start": 1}, [6, 10]),
        ({"every": 3, "unit": "step"}, [3, 6, 9]),
        ({"every": 2, "start": 5, "unit": "step"}, [7, 9]),
        ({"start": 5}, []),
    ],
)
def test_when(eagerly, options, steps):
    assert taken(options) == steps


@pytest.mark.once
@pytest.mark.parametrize("options", [{"start": 3, "every": 2}, {"start": 6, "unit": "step"}])
def test_a_further_fit_repeats_no_burn_in(eagerly, options):
    """In epochs as in steps; a training that begins anew has its own."""
    whole = taken(options, epochs=9)
    model, snapshots = network(), ibnn.Snapshots(**options)
    for epochs in (4, 1, 4):
        fit(model, snapshots, epochs=epochs)
    assert snapshots.steps == whole
    resumed, model = ibnn.Snapshots(**options), network()
    fit(model, resumed, epochs=4)
    fit(model, resumed, initial_epoch=4, epochs=9)
    assert resumed.steps == whole
    model.compile("sgd", "mse")
    fit(model, snapshots, epochs=9)
    assert snapshots.steps == whole


@pytest.mark.once
def test_several_steps_at_once():
    model, snapshots = network(), ibnn.Snapshots(every=3, unit="step")
    model.compile("sgd", "mse", steps_per_execution=2)
    fit(model, snapshots)
    assert snapshots.steps == [4, 6, 10]


def test_they_are_the_weights_and_further_training_adds(eagerly):
    model, snapshots, seen = network(), ibnn.Snapshots(), []
    watch = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(model.get_weights())
    )
    options = {"verbose": 0, "callbacks": [watch, snapshots]}
    for _ in range(2):
        model.fit(X, Y, epochs=2, **options)
    posterior = snapshots.posterior()
    assert posterior.count == 4
    for number, weights in enumerate(seen):
        for a, b in zip(posterior.sample(None, number), weights, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.once
def test_exploration_is_left_out(eagerly):
    cycles = ibnn.CosineCycles(0.01, cycle=5, exploration=0.6)
    model, snapshots = network(ibnn.SGLD(cycles, 8, 1.0)), ibnn.Snapshots(unit="step")
    fit(model, snapshots)
    assert snapshots.steps == [4, 5, 9, 10]


@pytest.mark.once
def test_a_full_disk_loses_nothing(eagerly, tmp_path, monkeypatch):
    model, snapshots = network(), ibnn.Snapshots(folder=tmp_path / "runs")
    save, calls = np.savez, []

    def full(path, *values):
        calls.append(path)
        if len(calls) in (2, 3):
            path.write_bytes(b"a part")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(path, *values)

    monkeypatch.setattr(np, "savez", full)
    with pytest.warns(UserWarning, match="No space left on device.*stays in memory"):
        fit(model, snapshots)
    written = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert written == [f"step_{step:010d}.npz" for step in (2, 4, 6, 8, 10)]
    assert snapshots._kept == {}
    assert snapshots.posterior().count == 5


@pytest.mark.once
def test_while_the_disk_stays_full(eagerly, tmp_path):
    model, snapshots = network(), ibnn.Snapshots(folder=tmp_path / "runs")
    (tmp_path / "runs").write_text("a file, so nothing can be written in there")
    with pytest.warns(UserWarning, match="could not be written"):
        fit(model, snapshots, epochs=3)
    assert snapshots.posterior().count == 3


@pytest.mark.once
def test_damaged_files_and_other_networks(eagerly, tmp_path):
    snapshots = ibnn.Snapshots(folder=tmp_path)
    fit(network(), snapshots, epochs=2)
    other = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="other shapes"):
        snapshots.posterior(other)
    with pytest.raises(ValueError, match="`model` is missing"):
        ibnn.Snapshots(folder=tmp_path).posterior()
    path = next(tmp_path.glob("*.npz"))
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match="is not a whole snapshot"):
        snapshots.posterior()
    with pytest.raises(ValueError, match="there are 0; 1 are needed"):
        ibnn.Snapshots().posterior(other)


@pytest.mark.once
def test_an_interrupt_keeps_what_was_collected(eagerly):
    snapshots, swag = ibnn.Snapshots(), ibnn.SWAG()

    def stop(epoch, logs):
        if epoch == 2:
            raise KeyboardInterrupt

    interrupt = keras.callbacks.LambdaCallback(on_epoch_end=stop)
    with pytest.raises(KeyboardInterrupt):
        network().fit(X, Y, epochs=5, verbose=0, callbacks=[snapshots, swag, interrupt])
    assert snapshots.posterior().count == 3
    assert swag.posterior().rank == 3


@pytest.mark.once
def test_weights_that_are_not_finite(eagerly):
    snapshots = ibnn.Snapshots()
    fit(network(keras.optimizers.SGD(1e38)), snapshots)
    with pytest.raises(ArithmeticError, match="is not finite: the training diverged"):
        snapshots.posterior()


@pytest.mark.once
def test_an_interrupt_while_the_disk_is_full(eagerly, tmp_path, monkeypatch):
    """What was written, and what could not be, make a posterior; so do the files alone."""
    swag, model, save = ibnn.SWAG(folder=tmp_path), network(), np.savez

    def full(path, *values):
        if len(swag.steps) >= 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(path, *values)

    def stop(epoch, logs):
        if epoch == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", full)
    interrupt = keras.callbacks.LambdaCallback(on_epoch_end=stop)
    with pytest.warns(UserWarning, match="No space left"), pytest.raises(KeyboardInterrupt):
        model.fit(X, Y, epochs=5, verbose=0, callbacks=[swag, interrupt])
    assert swag.posterior().rank == 4
    assert len(list(tmp_path.iterdir())) == 2
    assert ibnn.SWAG(folder=tmp_path).posterior(model).rank == 2


def per_step(train_size):
    """A sampler on 8 examples of 5 steps, and what `fit` warns of."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5, 3)), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(ibnn.SGLD(1e-3, train_size, prior_scale=1.0), loss, run_eagerly=True)
    x, y = np.ones((8, 5, 3), "float32"), np.zeros((8, 5), "int64")
    options = {"validation_data": (x, y), "epochs": 2, "verbose": 0}
    model.fit(x, y, callbacks=[ibnn.Snapshots()], **options)


@pytest.mark.once
def test_samplers_are_told_of_the_answers_that_a_loss_averages_over():
    with pytest.warns(UserWarning, match=r"train_size=8 \* 5\.") as caught:
        per_step(train_size=8)
    assert sum("train_size" in str(warning.message) for warning in caught) == 1
    with warnings.catch_warnings(action="error", category=UserWarning):
        per_step(train_size=40)
