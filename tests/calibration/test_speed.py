"""What each effort takes: its arithmetic, and that of a real call."""

import re
import time

import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn
from tests.calibration.tools import LOGITS, mlp
from tfp_ibnn.calibration import speed
from tfp_ibnn.calibration.speed import Sizes, Work, in_words, work_of

SIZES = Sizes(
    fit=10,
    score=20,
    draws=4,
    train=100,
    steps=5,
    epochs=3,
    model_epochs=30.0,
    width=2,
    weights=50,
)


@pytest.mark.once
def test_work_is_a_sum_over_candidates():
    work = work_of(SIZES)
    # As it is; noise of six scales on the examples to fit; Laplace: four priors, and a pass over
    # the training data.
    seconds = work["seconds"]
    assert seconds.predictions == 3
    assert seconds.rows == 20 + 4 * (6 * 10 + 20) + (4 * 10 + 20) + 100
    assert seconds.scored == 20 + 4 * (6 * 10 + 20) + 4 * (4 * 10 + 20)
    assert (seconds.trainings, seconds.epochs, seconds.steps) == (0, 0, 0)
    # The control, the posterior, and a pass back for each of two outputs.
    minutes = work["minutes"]
    assert minutes.trainings == 1 + speed.NOISE + 1
    assert minutes.epochs == 3 + speed.NOISE * 3
    assert minutes.steps == 5 * minutes.epochs + 2 * 5
    draws = (1 + 4) * (3 * 10 + 20) + 2 * 4 * (4 * 10 + 20)
    assert minutes.rows == seconds.rows + draws
    # Four networks and one with noise; 2 + 3 + 5 members, SWAG and the noise.
    trainings = work["trainings"]
    assert trainings.steps == minutes.steps + (4 + speed.NOISE) * 30 * 5
    assert trainings.rows == minutes.rows + (2 + 3 + 5 + 2 * 4) * 30


@pytest.mark.once
def test_what_is_not_there_takes_no_time():
    assert "trainings" not in work_of(SIZES._replace(model_epochs=0.0))
    large = work_of(SIZES._replace(weights=10**8))
    assert large["minutes"].steps == 5 * (3 + speed.NOISE * 3)
    more = work_of(SIZES._replace(noisy=1, given=7))["seconds"]
    assert more.rows - work_of(SIZES)["seconds"].rows == (4 + 7) * 30


@pytest.mark.once
def test_seconds_are_those_of_each_kind():
    work = Work(predictions=1, rows=2, scored=3, trainings=4, epochs=5, steps=6)
    of_one = Work(predictions=1e5, rows=1e4, scored=1e3, trainings=100, epochs=10, steps=1)
    assert work.seconds(of_one) == 123456
    words = [in_words(seconds) for seconds in (0.1, 19.6, 99, 170, 5900, 9000, 7.3e4)]
    assert words == ["1 s", "20 s", "99 s", "3 min", "98 min", "2 h", "20 h"]


def seconds_in(line, effort):
    """The time that a line says an effort takes."""
    count, unit = re.search(rf"{effort} about (\d+) (s|min|h)", line).groups()
    return int(count) * {"s": 1, "min": 60, "h": 3600}[unit]


@pytest.mark.slow
@pytest.mark.parametrize("effort", ["seconds", "minutes", "trainings"])
def test_the_printed_time_is_within_a_factor_of_two(effort, capsys):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6000, 64)).astype("float32")
    y = rng.integers(0, 10, 6000)
    model = mlp(512, dropout=0.1)
    model.compile("adam", LOGITS)
    model.fit(x[:4000], y[:4000], epochs=12, verbose=0)
    keras.utils.set_random_seed(0)
    start = time.monotonic()
    ibnn.calibrate(model, (x[:4000], y[:4000]), (x[4000:], y[4000:]), effort=effort)
    taken = time.monotonic() - start
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("On this machine")]
    assert taken / 2 < seconds_in(line, effort) < 2 * taken
