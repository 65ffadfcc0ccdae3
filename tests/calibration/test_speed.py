"""What each effort takes: its arithmetic, and that of a real call."""

import re
import time

import keras
import numpy as np
import pytest
from keras import layers

import tfp_ibnn as ibnn
from tests.calibration.tools import LOGITS, mlp
from tfp_ibnn.calibration import rows, speed
from tfp_ibnn.calibration.examples import Examples, prepare
from tfp_ibnn.calibration.speed import Part, Sizes, Work, in_words, work_of
from tfp_ibnn.likelihoods.infer import likelihood_for_calibration

SIZES = Sizes(
    fit=Part(10, 10),
    score=Part(20, 20),
    draws=16,
    train=100,
    steps=5,
    epochs=3,
    model_epochs=30.0,
    width=2,
)


@pytest.mark.once
def test_work_is_a_sum_over_candidates():
    work = work_of(SIZES)
    # As it is; noise of six scales by 8 draws on the examples to fit, then of one; Laplace: four
    # priors, and a pass over the training data.
    seconds = work["seconds"]
    assert seconds.predictions == 4
    assert seconds.passes == 20 + 6 * 8 * 10 + 16 * (10 + 20) + (4 * 10 + 20) + 100
    # A temperature once for each state, and once for the candidate.
    assert seconds.fitted == 10 + 6 * 8 * 10 + 16 * 2 * 10 + 16 * 5 * 10
    assert seconds.scored == 2 * 20 * (1 + 16 + 16)
    assert (seconds.trainings, seconds.epochs, seconds.steps) == (0, 0, 0)
    # The control, the posterior, and a pass back for each of two outputs.
    minutes = work["minutes"]
    assert minutes.trainings == 1 + speed.NOISE + 1
    assert minutes.epochs == 3 + speed.NOISE * 3
    assert minutes.steps == 5 * minutes.epochs + 2 * 5
    draws = (1 + 16) * (3 * 10 + 20) + 2 * 16 * (4 * 10 + 20)
    assert minutes.passes == seconds.passes + draws
    # Four networks and one with noise; 2 + 3 + 5 members, SWAG and the noise.
    trainings = work["trainings"]
    assert trainings.steps == minutes.steps + (4 + speed.NOISE) * 30 * 5
    assert trainings.passes == minutes.passes + (2 + 3 + 5 + 2 * 16) * 30


@pytest.mark.once
def test_what_is_not_there_takes_no_time():
    assert "trainings" not in work_of(SIZES._replace(model_epochs=0.0))
    without = work_of(SIZES._replace(has_laplace=False))
    assert without["minutes"].steps == 5 * (3 + speed.NOISE * 3)
    more = work_of(SIZES._replace(noisy=1, given=7))["seconds"]
    assert more.passes - work_of(SIZES)["seconds"].passes == (16 + 7) * 30
    few = SIZES._replace(score=Part(0, 10))  # which are those to fit
    assert few.predicted(4) == Work(1, 1, 4 * 10, 2 * 4 * 10, 2 * 4 * 10)


@pytest.mark.once
def test_pixels_are_fitted_and_scored_but_images_are_predicted():
    """A call predicts at most 256 images, and as many draws as the memory is meant for."""
    x = np.zeros((400, 4, 4, 3), "float32")
    y = np.tile(np.arange(16).reshape(4, 4) % 3, (400, 1, 1))
    model = keras.Sequential([keras.Input((4, 4, 3)), layers.Conv2D(3, 1)])
    model.compile("sgd", LOGITS)
    output, _ = likelihood_for_calibration(model, None)
    _, data = prepare((x, y), (x, y), model, output, None, 0)
    part = Part.of(data.fit)
    assert part == Part(400, 400 * 16, rows._BLOCK // (1 + 16 * 3))
    assert part.calls(1) == 2
    assert part._replace(at_once=1000).calls(8) == 4  # 125 images at once
    assert Part.of(Examples(x)) == Part(400, 400)
    assert Part.of(Examples(x)).calls(8) == 1


@pytest.mark.once
def test_seconds_are_those_of_each_kind():
    work = Work(1, 2, 3, 4, 5, 6, 7, 8)
    of_one = Work(*10.0 ** np.arange(7, -1, -1))
    assert work.seconds(of_one) == 12345678
    words = [in_words(seconds) for seconds in (0.1, 19.6, 99, 170, 5900, 9000, 7.3e4)]
    assert words == ["1 s", "20 s", "99 s", "3 min", "98 min", "2 h", "20 h"]


def seconds_in(line, effort):
    """The time that a line says an effort takes."""
    count, unit = re.search(rf"{effort} about (\d+) (s|min|h)", line).groups()
    return int(count) * {"s": 1, "min": 60, "h": 3600}[unit]


def perceptron(count):
    model = mlp(512, dropout=0.1)
    return model, (count, 64), (count,)


def convolutional(count):
    parts = [
        layers.Conv2D(16, 3, activation="relu"),
        layers.BatchNormalization(),
        layers.MaxPooling2D(),
        layers.GlobalAveragePooling2D(),
        layers.Dense(10),
    ]
    return keras.Sequential([keras.Input((16, 16, 3)), *parts]), (count, 16, 16, 3), (count,)


def dense(count):
    """A class at each pixel."""
    parts = [layers.Conv2D(8, 3, padding="same", activation="relu"), layers.Conv2D(10, 1)]
    model = keras.Sequential([keras.Input((8, 8, 3)), *parts])
    return model, (count, 8, 8, 3), (count, 8, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "effort", "count"),
    [
        (perceptron, "seconds", 6000),
        (perceptron, "minutes", 6000),
        (perceptron, "trainings", 6000),
        (convolutional, "seconds", 3000),
        (convolutional, "minutes", 3000),
        (dense, "seconds", 900),
        (dense, "minutes", 900),
    ],
)
def test_the_printed_time_is_within_a_factor_of_two(kind, effort, count, capsys):
    rng = np.random.default_rng(0)
    model, inputs, targets = kind(count)
    x = rng.normal(size=inputs).astype("float32")
    y = rng.integers(0, 10, targets)
    model.compile("adam", LOGITS)
    part = 2 * count // 3
    model.fit(x[:part], y[:part], epochs=12, verbose=0)
    keras.utils.set_random_seed(0)
    start = time.monotonic()
    ibnn.calibrate(model, (x[:part], y[:part]), (x[part:], y[part:]), effort=effort)
    taken = time.monotonic() - start
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("On this machine")]
    assert taken / 2 < seconds_in(line, effort) < 2 * taken
