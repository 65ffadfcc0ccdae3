"""Fine-tuning in a calibration: which trials are trained on, and what ends them."""

import math
import os
import signal
import types

import keras
import numpy as np
import pytest

from tests.calibration.tools import Batches, classes, mlp
from tfp_ibnn.calibration import examples, fine_tuning, run, trials
from tfp_ibnn.calibration.examples import Training


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


def fine_tune(all_trials, epochs=None, end=math.inf):
    parts = dict.fromkeys(trials.Setting._fields)
    setting = trials.Setting(**{**parts, "end": end, "say": lambda line: None})
    fine_tuning.fine_tune(all_trials, setting, epochs)


def test_worse_half_of_the_posteriors_is_dropped_after_each_epoch():
    control = scripted("control", [9, 8, 7, 6], samples=1)
    six = [scripted(str(i), [i + 1, i + 0.9, i + 0.8, i + 0.7]) for i in range(6)]
    fine_tune([control, *six], epochs=4)
    assert [trial.seen for trial in six] == [4, 4, 2, 1, 1, 1]
    assert [bool(trial.fate) for trial in six] == [False, False, True, True, True, True]
    assert six[2].fate == "NLL 2.9000 after epoch 2"
    # The control is the worst, and stays.
    assert control.seen == 4
    assert not control.fate


def test_training_stops_when_nothing_gets_better():
    trial = scripted("a", [3, 2, 2.5, 2.1, 1])
    fine_tune([trial])
    assert (trial.seen, trial.epochs, trial.nll) == (4, 2, 2)


def test_nan_ends_a_training_but_not_what_came_before():
    early, late, fine = (
        scripted(x, y) for x, y in [("a", [None]), ("b", [1, None]), ("c", [2, 1])]
    )
    fine_tune([early, late, fine], epochs=2)
    assert early.fate == "not finite"
    assert (late.fate, late.epochs, late.seen) == ("", 1, 2)
    assert fine.seen == 2


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
    fine_tune([trial], end=180.0)
    assert 1 <= trial.seen < 6


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
    assert [x.name for x in report.candidates][2] == "fine-tuned"
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
    assert rate(model) == pytest.approx(0.02)
    model.compile(keras.optimizers.SGD(schedules.CosineDecay(1.0, 20)), "mse")
    model.optimizer.iterations.assign(20)
    assert rate(model) == pytest.approx(0.001)  # not a tenth of 0


def test_number_of_epochs_follows_from_the_training_so_far(small, monkeypatch):
    wanted = []
    monkeypatch.setattr(run, "fine_tune", lambda *args: wanted.append(args[2]))
    small(epochs=None)
    small.model.optimizer.iterations.assign(2 * 200)  # 60 examples: 2 batches
    small(epochs=None)
    small(epochs=None, minutes=1)
    assert wanted == [3, 20, None]


def test_laplace_uses_a_part_of_many_examples(small, monkeypatch):
    monkeypatch.setattr(trials, "EXAMPLES", 25)
    x, y, output = small.x[:60], small.y[:60], classes(3, from_logits=False)
    for data in ((x, y), Batches(x, y)):
        training = Training(data, 60, 2, None, 0)
        some = examples.read(data, small.model, output, "train", every=3)
        np.testing.assert_array_equal(some.x, x[::3])
        np.testing.assert_array_equal(some.y, y[::3])
    setting = trials.Setting(small.model, output, *2 * [None], training, None, 2, 0)
    posterior = next(trials.laplace(setting)).engine.network
    config = posterior.get_config()
    assert config["fit"]["examples"] == 20
    assert config["temperature"] == pytest.approx(1 / 3)
