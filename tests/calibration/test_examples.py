"""The examples that a calibration reads, splits and refuses."""

import types

import keras
import numpy as np
import pytest
from keras import layers

import tfp_ibnn as ibnn
from tests.calibration.tools import Batches, classes, compiled, mlp
from tfp_ibnn.calibration import examples
from tfp_ibnn.calibration.examples import (
    Examples,
    Training,
    batch_size_of,
    folds_of,
    prepare,
)
from tfp_ibnn.calibration.fine_tuning import epochs_of
from tfp_ibnn.calibration.rows import every_nth
from tfp_ibnn.likelihoods.infer import likelihood_for_calibration


def test_folds_are_stratified_and_seeded():
    y = np.random.default_rng(0).choice(3, size=331, p=[0.1, 0.3, 0.6])
    folds = folds_of(y, 5, 0)
    counts = np.array([np.bincount(y[folds == fold], minlength=3) for fold in range(5)])
    assert (np.ptp(counts, axis=0) <= 1).all()
    assert np.ptp(counts.sum(axis=1)) <= 1
    np.testing.assert_array_equal(folds, folds_of(y, 5, 0))
    assert (folds != folds_of(y, 5, 1)).any()


@pytest.mark.parametrize("count", [999, 1000])
def test_cross_fit_below_a_thousand(count):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(count, 1)), rng.integers(0, 3, count)
    model = mlp(outputs=3, features=1)
    training, validation = prepare((x, y), (x, y), model, classes(3, from_logits=False), None, 0)
    assert training.size == count
    if count < 1000:
        assert len(validation.fit.y) == len(validation.score.y) == 999
        assert set(validation.folds) == {0, 1, 2, 3, 4}
    else:
        assert validation.folds is None
        both = np.concatenate([validation.fit.x, validation.score.x])
        np.testing.assert_array_equal(np.sort(both, axis=0), np.sort(x, axis=0))


def test_large_samples_are_thinned_evenly(monkeypatch):
    monkeypatch.setattr(examples, "WATCHED", 300)
    y = np.repeat([0, 1], [1500, 500])
    both = np.arange(2000.0)[:, None], y
    fit = prepare(both, both, mlp(outputs=2, features=1), classes(2, from_logits=True), None, 0)[
        1
    ].fit
    assert len(fit.y) == 250
    assert 187 <= np.sum(fit.y == 0) <= 188


def test_rare_classes_keep_their_share_of_a_large_sample(monkeypatch):
    monkeypatch.setattr(examples, "WATCHED", 300)
    y = np.tile(np.arange(100), 24)  # of each class 12 are in the first half, and 3 are watched
    both = np.arange(2400.0)[:, None], y
    model, output = mlp(outputs=100, features=1), classes(100, from_logits=True)
    _, validation = prepare(both, both, model, output, None, 0)
    np.testing.assert_array_equal(np.bincount(validation.fit.y), np.full(100, 3))
    assert not np.intersect1d(validation.fit.x, validation.score.x).size
    some = every_nth(Examples(*both), 8, output, 0)
    np.testing.assert_array_equal(np.bincount(some.y), np.full(100, 3))


@pytest.mark.parametrize(("given", "expected"), [(64, 64), (20, 20), (30, 32), (500, 128)])
def test_batches_are_those_of_the_last_training(eagerly, given, expected):
    """At least as many to the epoch; after three epochs of 100 examples, three are counted."""
    model = compiled("mse", outputs=1)
    x = np.zeros((100, 2))
    y = np.arange(100.0)[:, None]
    output, _ = likelihood_for_calibration(model, None)
    unknown, _ = prepare((x, y), (x, y), model, output, None, 0)
    assert unknown.is_assumed
    model.fit(x, y, batch_size=given, epochs=3, verbose=0)
    training, _ = prepare((x, y), (x, y), model, output, None, 0)
    assert (training.batch_size, training.is_assumed) == (expected, False)
    assert epochs_of(model, training) == 3
    own, _ = prepare((x, y), (x, y), model, output, 10, 0)
    assert (own.batch_size, own.steps) == (10, 10)


def test_batches_of_other_data_are_not_taken():
    history = types.SimpleNamespace(params={"steps": 101})
    assert batch_size_of(types.SimpleNamespace(history=history), 100) is None
    assert batch_size_of(types.SimpleNamespace(history=history), 101) == 1


def test_an_assumed_batch_size_is_printed(small, capsys):
    small(verbose=True)
    assert "Batches of 32 are assumed: give `batch_size`" in capsys.readouterr().out
    small(verbose=True, batch_size=16)
    assert "assumed" not in capsys.readouterr().out


def test_sizes_are_the_same_in_every_batch():
    # Or JAX would compile once more.
    seen = []
    network = types.SimpleNamespace(fit=lambda x, y, **options: seen.append((x[:, 0], options)))
    x = np.arange(70.0)[:, None]
    training = Training((x, x), 70, 3, 32, 0)
    training.epoch(network, 1, None)
    ((epoch, options),) = seen
    assert (len(epoch), options["batch_size"]) == (96, 32)
    assert set(epoch) == set(range(70))
    assert np.unique(epoch, return_counts=True)[1].max() == 2
    Training((x, x), 70, 1, 100, 0).epoch(network, 1, None)
    assert len(seen[-1][0]) == seen[-1][1]["batch_size"] == 70


def test_validation_is_split_off_and_said(small):
    x, y = np.tile(small.x, (2, 1)), np.tile(small.y, 2)
    with pytest.warns(UserWarning, match="64 of the 320 training examples are taken"):
        report = small(train=(x, y), validation=None)
    assert report.notes["training examples"] == 256


BAD_DATA = {
    "`validation` must hold at least 50 examples; got 20": lambda x, y: {
        "validation": (x[:20], y[:20])
    },
    "`validation` is missing, and `train` is 160 examples, too few": lambda x, y: {
        "train": (x, y),
        "validation": None,
    },
    "`validation` is missing, and `train` is a dataset": lambda x, y: {
        "train": Batches(x, y),
        "validation": None,
    },
    "inputs of `train` hold NaN or infinity in 1 of 160 rows; the first is number 0": lambda x, y: {
        "train": (np.where(np.arange(320).reshape(160, 2) == 0, np.nan, x), y)
    },
    "labels of `validation` must be whole numbers from 0 to 2; got 7 at example 9": (
        lambda x, y: {"validation": (x, np.where(np.arange(160) == 9, 7, y))}
    ),
    "labels of `train` must be whole numbers": lambda x, y: {"train": (x, y - 1)},
    "labels of `train` must be whole numbers .* got nan at example 3": lambda x, y: {
        "train": (x, np.where(np.arange(160) == 3, np.nan, y))
    },
    "labels of `train` must be whole numbers .* got 'cat' at example 0": lambda x, y: {
        "train": (x, np.where(y == 0, "dog", "cat"))
    },
    r"of `train` .* the shape \(N,\); got \(160, 3\): give y.argmax\(axis=1\)": lambda x, y: {
        "train": (x, np.eye(3)[y.astype(int)])
    },
    r"labels of `train` must have the shape \(N,\); got \(160, 2\)\.": lambda x, y: {
        "train": (x, x)
    },
    r"labels of `validation` must .* \(N,\); got \(160, 3\): give": lambda x, y: {
        "validation": (x, np.eye(3)[y.astype(int)])
    },
    r"cannot take the inputs of `train`: .*shape=\(None, 2\).*shape=\(1, 4\)": lambda x, y: {
        "train": (np.tile(x, 2), y)
    },
    r"`model` .*inputs of `validation`.*\(1,": lambda x, y: {"validation": (x[:, 0], y)},
    "cannot take the inputs of `train`: .*expects 1 .*input.*received 2": lambda x, y: {
        "train": ((x, x), y)
    },
    r"inputs of `train` are objects: give x.astype\('float32'\)": lambda x, y: {
        "train": (x.astype(object), y)
    },
    "All labels of `validation` are 1": lambda x, y: {"validation": (x, 0 * y + 1)},
    r"`train` has inputs \(160, 2\) for 100 targets": lambda x, y: {"train": (x, y[:100])},
    r"`train` must give \(x, y\)": lambda x, y: {"train": (x,)},
    "Give arrays x and y, .*; `train` is a dict": lambda x, y: {"train": {"x": x}},
    "Give arrays x and y, .*; `train` is a ndarray": lambda x, y: {"train": x},
    "`train` holds no examples": lambda x, y: {"train": (x[:0], y[:0])},
    "`samples` must be a whole number of at least 2": lambda x, y: {"samples": 1},
    "`epochs` must be a whole number": lambda x, y: {"epochs": 0},
    "`minutes` must be above 0": lambda x, y: {"minutes": 0},
    "`seed` must be": lambda x, y: {"seed": -1},
}


@pytest.mark.parametrize("message", BAD_DATA)
def test_bad_data(small, message):
    with pytest.raises(ValueError, match=message) as caught:
        small(**BAD_DATA[message](small.x, small.y))
    assert "\n" not in str(caught.value)


def test_labels_that_do_not_suit_the_loss():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 2)), rng.integers(0, 2, 60)
    one_hot, binary, two = (
        compiled("categorical_crossentropy", activation="softmax"),
        compiled("binary_crossentropy", 1, activation="sigmoid"),
        compiled("mse", 2),
    )
    cases = [
        (one_hot, y, r"labels of `train` must have the shape \(N, 3\); got \(60,\): give keras"),
        (
            one_hot,
            np.full((60, 3), 1 / 3),
            r"of `train` must be one-hot; got \[0.33.* at example 0",
        ),
        (binary, np.eye(2)[y], r"of `train` .* got \(60, 2\): give y.argmax\(axis=1\)"),
        (two, np.where(x > 2, np.nan, x), r"targets of `train` must be finite numbers; got \["),
        (two, x.astype(str), "targets of `train` must be finite numbers; got"),
        (two, x[:, 0], r"must have the shape \(N, 2\); got \(60,\)"),
    ]
    for model, labels, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            ibnn.calibrate(model, (x, labels), (x, labels), verbose=False)
        assert "\n" not in str(caught.value)
        assert "np." not in str(caught.value)


def test_last_axis_of_one_may_be_left_out():
    inputs = keras.Input((2, 2, 1))
    model = keras.Model(inputs, layers.Flatten()(inputs))
    output, rng = classes(4, from_logits=True), np.random.default_rng(0)
    x, y = rng.normal(size=(60, 2, 2)), rng.integers(0, 4, 60)
    for one in (x, x[..., None], x[..., None, None]):
        assert prepare((one, y), (one, y), model, output, None, 0)[0].size == 60
    # Other sizes are refused, also where Keras's own check of a graph would let them pass.
    for one in (x[:, :1], np.tile(x[..., None], 3), x[..., None, None, None]):
        with pytest.raises(ValueError, match=r"inputs of `train`.*\(None, 2, 2, 1\)"):
            prepare((one, y), (one, y), model, output, None, 0)
