"""The guarantee, by simulated calibrations: each is a group, so that all are fitted at once."""

import keras
import numpy as np
import pytest
from keras import layers
from scipy.stats import betabinom, binom

import tfp_ibnn as ibnn
from tfp_ibnn.decisions.hashing import uniform
from tfp_ibnn.layers import GaussianHead, QuantileHead

CLASSES, COVERAGE, CALIBRATION, NEW = 4, 0.9, 39, 25
SETS = [
    ("lac", {}),
    ("aps", {}),
    ("raps", {}),
    ("raps", {"k": 3}),
    ("aps", {"randomized": 0}),
    ("raps", {"k": 2, "randomized": 1}),
]


@pytest.fixture(autouse=True)
def fast(eagerly):
    """Nothing said here is about compiled graphs."""


def identity(size, **options):
    """A `MonteCarlo` whose prediction is its input, all examples in one batch."""
    model = keras.Sequential([keras.Input((size,)), layers.Activation("linear")])
    return at_once(model, **options)


def at_once(model, **options):
    made = ibnn.MonteCarlo(model, 1, seed=0, **options)
    made.predict = lambda x, **_: made.predict_on_batch(x)
    return made


def classifier():
    return identity(CLASSES, head="softmax", from_logits=True)


def overconfident(rng, classes, gap):
    """Logits of a network that is 80 % accurate, and whose largest logit is `gap` higher."""
    wrong = (classes + rng.integers(1, CLASSES, classes.shape)) % CLASSES
    top = np.where(rng.random(classes.shape) < 0.8, classes, wrong)
    logits = gap * np.eye(CLASSES)[top] + rng.normal(size=(*classes.shape, CLASSES))
    return logits.astype("float32")


def tied(rng, classes, gap):
    """The same with few different logits, so that most scores are equal to others."""
    return np.round(overconfident(rng, classes, gap) / 2) * 2


def assert_covered(counts, new, calibration, exact):
    """Check that the numbers covered are beta-binomial, or larger if not `exact`.

    One in a million of exchangeable data is outside for each number.
    """
    rank = int(np.ceil((calibration + 1) * COVERAGE - 1e-9))
    law = betabinom(new, rank, calibration + 1 - rank)
    values = np.arange(new)
    at_most = (counts[:, None] <= values).sum(axis=0)
    low, high = binom(len(counts), law.cdf(values)).interval(1 - 1e-6)
    assert (at_most <= high).all()
    assert not exact or (low <= at_most).all()
    error = law.std() / np.sqrt(len(counts))
    assert counts.mean() > law.mean() - 4 * error
    assert not exact or counts.mean() < law.mean() + 4 * error


def covered(model, x, y, groups=None):
    """Fit each row of x (rows, CALIBRATION + NEW, ...), and count what is covered, (rows,)."""
    rows = np.repeat(np.arange(len(x)), x.shape[1]).reshape(x.shape[:2])
    old, new = (np.s_[:, :CALIBRATION], np.s_[:, CALIBRATION:])
    flat = [[part[s].reshape(-1, *part.shape[2:]) for part in (x, y, rows)] for s in (old, new)]
    model.fit(*flat[0])
    answer = model.predict(flat[1][0], flat[1][2])
    if answer.dtype == bool:
        inside = answer[np.arange(len(answer)), flat[1][1]]
    else:
        inside = (answer[:, 0] <= flat[1][1]) & (flat[1][1] <= answer[:, 1])
    return inside.reshape(len(x), -1).sum(axis=1)


def is_exact(method, options, gap):
    """Whether scores are continuous, so that coverage is no more than asked for.

    What is far smaller than a penalty is rounded off beside it, and float32 ends at e^-87.
    """
    if method == "lac":
        return gap <= 60
    return "randomized" in options and gap <= (60 if method == "aps" else 3)


def check_sets(method, options, draw, gap, rows):
    rng = np.random.default_rng(1)
    y = rng.integers(0, CLASSES, (rows, CALIBRATION + NEW))
    model = ibnn.Conformal(classifier(), method, COVERAGE, **options)
    counts = covered(model, draw(rng, y, gap), y)
    exact = draw is overconfident and is_exact(method, options, gap)
    assert_covered(counts, NEW, CALIBRATION, exact)


@pytest.mark.once
@pytest.mark.parametrize("draw", [overconfident, tied])
@pytest.mark.parametrize("gap", [3, 60])
@pytest.mark.parametrize(("method", "options"), SETS)
def test_sets(method, options, draw, gap):
    check_sets(method, options, draw, gap, 200)


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize("draw", [overconfident, tied])
@pytest.mark.parametrize("gap", [0.5, 3, 10, 15, 20, 30, 45, 60, 80, 200])
@pytest.mark.parametrize(("method", "options"), SETS)
def test_sets_at_every_temperature(method, options, draw, gap):
    check_sets(method, options, draw, gap, 1000)


def check_each_class(method, options, gap, rows):
    """By class, in two groups of which one is harder: each class of each group is covered."""
    rng = np.random.default_rng(2)
    y = np.tile(np.arange(CLASSES), (2 * rows, CALIBRATION + NEW, 1))
    gaps = np.where(np.arange(2 * rows) % 2, gap, gap / 3)[:, None, None, None]
    x = overconfident(rng, y, gaps)
    model = ibnn.Conformal(classifier(), method, COVERAGE, by="class", **options)
    old, new = np.s_[:, :CALIBRATION], np.s_[:, CALIBRATION:]
    groups = np.broadcast_to(np.arange(2 * rows)[:, None, None], y.shape)
    model.fit(x[old].reshape(-1, CLASSES), y[old].ravel(), groups[old].ravel())
    sets = model.predict(x[new].reshape(-1, CLASSES), groups[new].ravel())
    inside = np.take_along_axis(sets, y[new].reshape(-1, 1), axis=1)
    counts = inside.reshape(2 * rows, NEW, CLASSES).sum(axis=1)
    for group in (0, 1):
        for c in range(CLASSES):
            assert_covered(counts[group::2, c], NEW, CALIBRATION, False)


@pytest.mark.once
@pytest.mark.parametrize(("method", "options"), [SETS[1], SETS[3]])
def test_by_class_and_group(method, options):
    check_each_class(method, options, 60, 50)


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize("gap", [3, 30, 60])
@pytest.mark.parametrize(("method", "options"), SETS)
def test_by_class_and_group_at_every_temperature(method, options, gap):
    check_each_class(method, options, gap, 1000)


@pytest.mark.once
def test_sets_of_an_overconfident_network_are_not_all_classes():
    """In float32 1 - p is 1 for all p below 6e-8, so that a threshold of 1 would let all in."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, 2000)
    x = overconfident(rng, y, 60)
    for method, options, size in (("lac", {}, 2.6), ("aps", SETS[4][1], 2.7), ("aps", {}, 3.7)):
        model = ibnn.Conformal(classifier(), method, COVERAGE, **options)
        assert model.fit(x[:1000], y[:1000]).evaluate(x[1000:], y[1000:])["size"] < size


def check_intervals(method, spacing, rows, location):
    """Targets on a grid; of two values for `spacing` None, with a constant prediction."""
    rng = np.random.default_rng(3)
    shape = (rows, CALIBRATION + NEW)
    mean = np.full(shape, location) + (0 if spacing is None else rng.normal(size=shape))
    y = mean + np.where(rng.random(shape) < 0.5, -0.8, 0.8)
    if spacing is not None:
        mean = np.round(mean / spacing) * spacing
        y = mean + np.round(rng.normal(size=shape) / spacing) * spacing
    if method == "cqr":
        model = identity(2, head="point", interval=COVERAGE)
        x = np.stack([mean - 0.3, mean + 0.3], axis=-1)
    elif method == "gaussian":
        model = at_once(keras.Sequential([keras.Input((2,)), GaussianHead()]))
        x = np.stack([mean, np.zeros(shape)], axis=-1)
    elif method == "quantiles":  # of a normal distribution whose scale is wrong
        head = keras.Sequential([keras.Input((3,)), QuantileHead()])
        model = at_once(head, interval=COVERAGE)
        x = np.stack([np.zeros(shape), mean, np.ones(shape)], axis=-1)
    else:
        model, x = identity(1, head="point"), mean[..., None]
    kind = "cqr" if method in ("cqr", "quantiles") else "split"
    made = ibnn.Conformal(model, kind, COVERAGE)
    exact = spacing is not None and spacing < 1e-3
    assert_covered(covered(made, x.astype("float32"), y), NEW, CALIBRATION, exact)


@pytest.mark.once
@pytest.mark.parametrize("method", ["split", "gaussian", "cqr", "quantiles"])
@pytest.mark.parametrize("spacing", [None, 0.1, 1e-6])
def test_intervals(method, spacing):
    check_intervals(method, spacing, 100, 0.3)


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize("method", ["split", "gaussian", "cqr", "quantiles"])
@pytest.mark.parametrize("spacing", [None, 0.5, 0.1, 0.01, 1e-6])
@pytest.mark.parametrize("location", [0, 0.1, -0.3, 3.7, -41.3, 1000.1])
def test_intervals_everywhere(method, spacing, location):
    check_intervals(method, spacing, 1000, location)


def test_two_targets_of_one_prediction():
    """The quantile is what all examples score: rounded down, no interval held its target."""
    point = identity(1, head="point")
    for value in (-0.7, -0.1, 0.3, 0.6):
        x, sign = np.full((60, 1), value, "float32"), np.where(np.arange(60) % 2, 1, -1)
        y = x[:, 0].astype("float64") + 0.7 * sign
        made = ibnn.Conformal(point, "split", COVERAGE).fit(x[:40], y[:40])
        assert made.evaluate(x[40:], y[40:])["coverage"] == 1
        interval = keras.ops.convert_to_numpy(made(x[40:])["interval"])
        assert (interval[:, 0] <= y[40:]).all()
        assert (y[40:] <= interval[:, 1]).all()


def test_scores_a_rounding_error_apart_are_ties():
    """The same example has another score in a batch of another size, compiled, or from a file."""
    x = np.tile(np.float32([[2, 1, 0.5, 0]]), (40, 1))
    y = np.ones(40, int)
    point = identity(1, head="point")
    for factor in (1 - 3e-7, 1 + 3e-7):
        for method, options in SETS[:4]:
            made = ibnn.Conformal(classifier(), method, COVERAGE, **options).fit(x, y)
            assert made.predict(x * np.float32(factor))[:, 1].all()
        one = np.full((40, 1), 0.3, "float32")
        split = ibnn.Conformal(point, "split", COVERAGE).fit(one, one[:, 0] + 0.7)
        moved = split.predict(one * np.float32(factor))
        assert (moved[:, 1] >= one[:, 0] + 0.7).all()


def test_randomized_sets_of_single_requests():
    """Each request has its own u, the same as in a batch, and identical ones share theirs."""
    rng = np.random.default_rng(4)
    y = rng.integers(0, CLASSES, 600)
    x = overconfident(rng, y, 2)
    made = ibnn.Conformal(classifier(), "aps", COVERAGE, randomized=5).fit(x[:400], y[:400])
    sets = made.predict(x)
    for i in range(400, 406):
        np.testing.assert_array_equal(made.predict(x[i : i + 1])[0], sets[i])
        single = made(x[i : i + 1])["set"]
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(single)[0], sets[i])
    same = made.predict(np.tile(x[:1], (20, 1)))
    np.testing.assert_array_equal(same, np.tile(same[:1], (20, 1)))


@pytest.mark.once
@pytest.mark.slow
def test_single_requests_are_covered_for_every_seed():
    """New examples one at a time, 1,000 calibrations for each seed of `randomized`."""
    for seed in range(4):
        check_sets("aps", {"randomized": seed}, overconfident, 3, 1000)
        rng = np.random.default_rng(seed)
        y = rng.integers(0, CLASSES, 2000)
        x = overconfident(rng, y, 3)
        made = ibnn.Conformal(classifier(), "aps", COVERAGE, randomized=seed).fit(
            x[:1000], y[:1000]
        )
        inside = [made.predict(x[i : i + 1])[0, y[i]] for i in range(1000, 1250)]
        assert_covered(np.sum(inside, keepdims=True), 250, 1000, exact=True)


def test_numbers_of_the_inputs():
    """Uniform and independent, the same on every backend, of any type and structure."""
    x = np.random.default_rng(0).normal(size=(4000, 3)).astype("float32")
    numbers = keras.ops.convert_to_numpy(uniform(x, 0))
    assert numbers.dtype == "float32"
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert np.sum((counts - 200) ** 2 / 200) < 45  # chi-squared, 19 degrees: one in 1,000
    near = np.nextafter(x, np.float32(np.inf))
    others = {
        "seed": uniform(x, 1),
        "last bit": uniform(near, 0),
        "order": uniform(x[:, ::-1], 0),
        "sign": uniform(-x, 0),
        "parts": uniform({"a": x[:, :2], "b": x[:, 2:]}, 0),
    }
    for name, other in others.items():
        correlation = np.corrcoef(numbers, keras.ops.convert_to_numpy(other))[0, 1]
        assert abs(correlation) < 0.07, name
    whole = np.arange(6).reshape(2, 3)
    known = keras.ops.convert_to_numpy(uniform(whole, 7))
    np.testing.assert_array_equal(known, np.float32([0.45303475856781006, 0.6627362966537476]))
    for same in (whole.astype("float64"), whole.astype("uint8"), -0.0 + whole):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(uniform(same, 7)), known)
    np.testing.assert_array_equal(uniform([whole[:, None]], 7), known)
    zeros = np.float32([[0.0], [-0.0]])
    assert np.ptp(keras.ops.convert_to_numpy(uniform(zeros, 0))) == 0
