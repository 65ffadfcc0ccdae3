"""Fine-tuning in a calibration: which trials are trained on, and what ends them."""

import math
import os
import signal
import types

import keras
import numpy as np
import pytest

from tests.calibration.tools import Batches, classes, compiled, mlp
from tfp_ibnn.calibration import fine_tuned, fine_tuning, stages, trials, untrained
from tfp_ibnn.calibration.examples import Examples, Training, Validation


def scripted(name, nlls, samples=4):
    """A trial that reaches given NLLs, epoch by epoch."""
    engine = types.SimpleNamespace(samples=samples, read=list)
    trial = trials.Trial(name, engine, trained=True)
    trial.script, trial.seen = list(nlls), 0

    def train(state, fit):
        trial.seen += 1
        return []

    def watch(data, output):
        nll = trial.script[trial.seen - 1]
        if nll is None:
            raise ValueError("not finite")
        trial._scores = [min([(nll, None), *trial._scores], key=lambda x: x[0])]
        return nll

    engine.train, trial.watch = train, watch
    return trial


def fine_tune(all_trials, epochs, end=math.inf, model_epochs=0.0):
    parts = dict.fromkeys(trials.Setting._fields)
    parts |= {"epochs": epochs, "model_epochs": model_epochs, "end": end}
    fine_tuning.fine_tune(all_trials, trials.Setting(**parts | {"say": lambda line: None}))


def test_every_epoch_is_trained_and_the_best_one_counts():
    control = scripted("control", [3, 2, 2.5, 2.1, 2.2], samples=1)
    other = scripted("other", [9, 8, 7, 6, 5])
    fine_tune([control, other], epochs=5, model_epochs=20.0)
    assert (control.seen, control.epochs, control.nll) == (5, 2, 2)
    assert (other.seen, other.epochs, other.nll) == (5, 5, 5)
    # In trainings of the model: all epochs are paid for.
    assert control.trainings == other.trainings == 5 / 20
    unknown = scripted("unknown", [1, 2])
    fine_tune([unknown], epochs=2)
    assert unknown.trainings == 1


def test_nan_ends_a_training_but_not_what_came_before():
    early, late, fine = (
        scripted(x, y) for x, y in [("a", [None]), ("b", [1, None]), ("c", [2, 1])]
    )
    with pytest.warns(UserWarning, match=r"^b: its training ended in epoch 2, since not finite"):
        fine_tune([early, late, fine], epochs=2)
    assert early.fate == "not finite"
    assert (late.fate, late.epochs, late.seen) == ("", 1, 2)
    assert fine.seen == 2


def test_any_failure_costs_one_candidate():
    def fail(state, fit):
        raise MemoryError("too large")

    broken, fine = scripted("a", [1]), scripted("b", [1])
    broken.engine.train = fail
    fine_tune([broken, fine], epochs=1)
    assert (broken.fate, fine.fate, fine.seen) == ("too large", "", 1)


def test_divergence_costs_one_candidate_only(small, monkeypatch, capsys):
    def diverge(training, network, *args):
        network.set_weights([np.full_like(x, np.nan) for x in network.get_weights()])

    monkeypatch.setattr(Training, "epoch", diverge)
    report = small(verbose=True)
    assert all(x.name.startswith("as it is") for x in report.candidates)
    assert "not finite" in report.dropped["fine-tuned"]
    assert "at the temperature or scale that suits it best" in capsys.readouterr().out


def test_time_runs_out(monkeypatch):
    clock = iter(np.arange(1000) * 10.0)
    monkeypatch.setattr(trials.time, "monotonic", lambda: next(clock))
    trial = scripted("a", -np.arange(100.0))
    fine_tune([trial], 100, end=180.0)
    assert 1 <= trial.seen < 6


def test_time_ends_an_epoch_in_the_middle(small, monkeypatch):
    """The state before it counts."""
    clock = iter([*np.zeros(6), *np.full(100, 99.0)])
    # In that file alone, since backends ask for the time, too.
    own = types.SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr(fine_tuning, "time", own)
    model = compiled("mse", outputs=1)
    limits = fine_tuning.Limits(50.0)
    data = Training((small.x, small.y), 160, 16, 10, 0)
    data.epoch(model, 1, limits)
    assert limits.is_late
    assert float(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 7


def test_interruption_keeps_what_is_there(small, monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Training, "epoch", stop)
    report = small()
    names = [x.name for x in report.candidates]
    assert names[:2] == ["as it is", "as it is + temperature"]
    assert all(name.startswith("as it is") for name in names)
    assert report.dropped == {"fine-tuned": "there was no time for it"}
    assert report.notes["interrupted"] == "yes"


class Interrupting(Batches):
    """Somebody presses Ctrl-C while a batch is read."""

    armed = False

    def __getitem__(self, index):
        if self.armed and index == 1:
            self.armed = False
            os.kill(os.getpid(), signal.SIGINT)
        return super().__getitem__(index)


@pytest.mark.skipif(
    signal.getsignal(signal.SIGINT) is not signal.default_int_handler,
    reason="somebody else handles this signal",
)
def test_ctrl_c_keeps_what_was_trained(small, monkeypatch):
    data, epoch = Interrupting(small.x[:60], small.y[:60]), Training.epoch

    def second_is_interrupted(training, network, number, callback):
        data.armed = number == 2
        epoch(training, network, number, callback)

    monkeypatch.setattr(Training, "epoch", second_is_interrupted)
    report = small(train=data, epochs=5)
    assert "fine-tuned" in [x.name for x in report.candidates]
    assert report.notes["best epochs"] == "fine-tuned: 1"
    assert report.notes["interrupted"] == "yes"
    assert np.isfinite(report.model.predict(small.x, verbose=0)["mean"]).all()


def rate(model, given=None):
    return float(
        keras.ops.convert_to_numpy(fine_tuning.fine_tuning_optimizer(model, given).learning_rate)
    )


def test_learning_rate_is_a_tenth():
    model = mlp()
    assert rate(model) == pytest.approx(1e-4)  # not compiled
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9, weight_decay=1e-3), "mse")
    optimizer = fine_tuning.fine_tuning_optimizer(model, None)
    assert rate(model) == pytest.approx(0.002)
    assert (optimizer.momentum, optimizer.weight_decay) == (0.9, 1e-3)
    assert optimizer is not model.optimizer
    model.optimizer.learning_rate = 0.01  # by a callback
    assert rate(model) == pytest.approx(0.001)
    assert rate(model, keras.optimizers.SGD(0.5)) == 0.5
    schedules = keras.optimizers.schedules
    model.compile(keras.optimizers.SGD(schedules.PiecewiseConstantDecay([10], [1.0, 0.2])), "mse")
    model.optimizer.iterations.assign(20)
    assert rate(model) == pytest.approx(0.1)  # of the largest
    model.compile(keras.optimizers.SGD(schedules.CosineDecay(1.0, 20)), "mse")
    model.optimizer.iterations.assign(20)
    assert rate(model) == pytest.approx(0.1)  # not a tenth of 0


def test_rate_decays_to_0_by_a_cosine():
    optimizer = fine_tuning.decaying(keras.optimizers.SGD(0.5, momentum=0.9), 10)
    assert optimizer.momentum == 0.9
    rates = []
    for step in (0, 5, 10):
        optimizer.iterations.assign(step)
        rates.append(float(keras.ops.convert_to_numpy(optimizer.learning_rate)))
    np.testing.assert_allclose(rates, [0.5, 0.25, 0], atol=1e-6)
    given = keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.1)
    kept = fine_tuning.decaying(keras.optimizers.SGD(given), 10)
    kept.iterations.assign(10)
    assert float(keras.ops.convert_to_numpy(kept.learning_rate)) == pytest.approx(0.05)


def test_the_rate_of_an_optimizer_that_scales_the_loss_decays():
    scaling = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=64.0)
    optimizer = fine_tuning.decaying(scaling, 10)
    assert optimizer.initial_scale == 64
    optimizer.inner_optimizer.iterations.assign(5)
    assert float(keras.ops.convert_to_numpy(optimizer.learning_rate)) == pytest.approx(0.25)


def test_number_of_epochs_follows_from_the_training_so_far(small, monkeypatch):
    wanted = []
    monkeypatch.setattr(stages, "fine_tune", lambda trials, setting: wanted.append(setting.epochs))
    for epochs in (0, 200, 8, 1):  # 60 examples: 2 batches
        small.model.optimizer.iterations.assign(2 * epochs)
        small(epochs=None, effort="minutes")
    assert wanted[::2] == wanted[1::2]  # that of the efforts before has nothing to train
    assert wanted[1::2] == [3, 20, 1, pytest.approx(1 / 6)]


def of_epochs(small, model_epochs, **options):
    """The setting of `effort="minutes"`, for a model of so many epochs of 60 examples."""
    x, y = small.x[:60], small.y[:60].astype(int)
    examples = Examples(x, y)
    return trials.Setting(
        model=small.model,
        output=classes(3, from_logits=False),
        optimizer=keras.optimizers.SGD(0.1),
        loss="sparse_categorical_crossentropy",
        training=Training((x, y), 60, 12, 5, 0),
        data=Validation(examples, examples),
        samples=2,
        seed=0,
        epochs=fine_tuning.epochs_of_fine_tuning(model_epochs),
        model_epochs=model_epochs,
        most=fine_tuning.HALF,
        **options,
    )


@pytest.mark.parametrize("model_epochs", [1.0, 7.0, 60.0])
def test_all_training_together_takes_at_most_half_a_training(small, model_epochs):
    setting = of_epochs(small, model_epochs)
    trained = [*fine_tuned.fine_tuned(setting), *fine_tuned.gaussian(setting)]
    for trial in trained:
        trial.engine.train = lambda state, fit: state  # whose length is tested below
    fine_tuning.fine_tune(trained, setting)
    control, posterior = (trial.trainings for trial in trained)
    assert posterior == fine_tuning.NOISE * control
    # A pass back for each of three outputs takes three epochs.
    (laplace,) = untrained.laplace_of_all_weights(setting)
    total = control + posterior + (0 if laplace.fate else 3 / model_epochs)
    assert 0.2 < total <= 0.5
    assert bool(laplace.fate) == (model_epochs < 60)
    # With more time it is tried, but does not belong to what "minutes" tries.
    (laplace,) = untrained.laplace_of_all_weights(setting._replace(effort="trainings"))
    assert not laplace.fate
    assert laplace.effort == ("trainings" if model_epochs < 60 else "")


@pytest.mark.parametrize("is_dataset", [False, True])
def test_a_part_of_an_epoch_takes_a_part_of_the_steps(small, eagerly, is_dataset):
    setting = of_epochs(small, 1.0)
    x, y = setting.training.data
    if is_dataset:
        training = setting.training._replace(data=Batches(x, y, 5))
        setting = setting._replace(training=training)
    (trial,) = fine_tuned.fine_tuned(setting)
    fine_tuning.fine_tune([trial], setting)
    optimizer = trial.engine.network.optimizer
    assert float(keras.ops.convert_to_numpy(optimizer.iterations)) == 12 / 6
    assert float(keras.ops.convert_to_numpy(optimizer.learning_rate)) == pytest.approx(0)
    assert trial.trainings == pytest.approx(1 / 6)


def test_batches_of_accumulated_gradients_are_counted(small):
    model = compiled("mse", outputs=1)
    model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=4), "mse")
    training = Training((small.x, small.y), 160, 16, 10, 0)
    assert fine_tuning.epochs_of(model, training) == 0
    training.epoch(model, 1)
    training.epoch(model, 2)
    assert fine_tuning.epochs_of(model, training) == 2
    assert fine_tuning.epochs_of(mlp(), training) == 0
