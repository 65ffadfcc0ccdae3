"""From targets, weights and masks in the forms that users give to rows."""

import keras
import numpy as np
import pytest
from keras import layers

from tfp_ibnn.calibration import row_reader
from tfp_ibnn.calibration.row_reader import RowReader
from tfp_ibnn.calibration.rows import every_nth, strata_of
from tfp_ibnn.data.examples import Examples
from tfp_ibnn.likelihoods import Categorical, Labels, Point
from tfp_ibnn.likelihoods.infer import likelihood_for_calibration
from tfp_ibnn.likelihoods.several import Several

pytestmark = pytest.mark.once

MOST = 1000


def reader(shape, output):
    inputs = keras.Input(shape)
    return RowReader(keras.Model(inputs, layers.Identity()(inputs)), output)


def test_forms_of_targets_and_weights():
    random = np.random.default_rng(0)
    y = random.integers(0, 3, (4, 2, 5))
    x = np.zeros((4, 2, 5, 3))
    read = reader((2, None, 3), Categorical(True, 3))
    for form in (y, y[..., None], np.eye(3)[y]):
        found = read.rows(Examples(x, form), "train", MOST)
        np.testing.assert_array_equal(found.y, y.ravel())
        np.testing.assert_array_equal(found.x.groups, np.repeat(np.arange(4), 10))
        assert found.weight is None
    of_examples = np.array([1.0, 0.0, 2.0, 0.5])
    of_rows = random.integers(0, 2, (4, 2))
    for weight in (of_examples, of_rows, of_rows[..., None] * np.ones(5)):
        missing = (1,) * (3 - weight.ndim)
        spread = np.broadcast_to(weight.reshape(*weight.shape, *missing), y.shape)
        found = read.rows(Examples(x, y, weight), "train", MOST)
        np.testing.assert_array_equal(found.y, y[spread > 0])
        np.testing.assert_array_equal(found.weight, spread[spread > 0])


def test_numbers_and_answers_at_positions():
    random = np.random.default_rng(0)
    numbers = random.normal(size=(4, 5, 2))
    found = reader((5, 2), Point(2)).rows(Examples(numbers, numbers), "train", MOST)
    np.testing.assert_array_equal(found.y, numbers.reshape(-1, 2))
    answers = random.integers(0, 2, (4, 5, 2))
    found = reader((5, 2), Labels(True, 2)).rows(Examples(numbers, answers), "train", MOST)
    np.testing.assert_array_equal(found.y, answers.ravel())
    outputs = found.x.outputs(lambda inputs: {"": inputs[:, None]}, 1)
    np.testing.assert_array_equal(outputs[:, 0, 0], numbers.ravel())


def test_a_class_that_the_loss_ignores_is_left_out():
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=255)
    for shape in ((5, 3), (3,)):
        model = keras.Sequential([keras.Input(shape), layers.Softmax()])
        output, _ = likelihood_for_calibration(model, loss)
        y = np.random.default_rng(0).choice([0, 1, 2, 255], (40, *shape[:-1]))
        read = RowReader(model, output)
        assert read.is_needed
        for form in (y, y[..., None]):
            found = read.rows(Examples(np.zeros((40, *shape)), form), "train", MOST)
            np.testing.assert_array_equal(found.y, y[y < 255])


BAD = {
    r"targets of `train` must have the shape \(4, 2, positions\) or": {"y": np.zeros((4, 3, 5))},
    r"must have the shape .* got \(4,\)": {"y": np.zeros(4)},
    "labels of `train` must be whole numbers from 0 to 2; got 3": {"y": np.full((4, 2, 5), 3)},
    r"weights of `train` must be for each example, \(4,\), or": {"weight": np.ones((4, 5))},
    "weights of `train` must be finite, and 0 or above": {"weight": -np.ones(4)},
}


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_go_with_the_outputs(message):
    given = {"y": np.zeros((4, 2, 5)), "weight": None, **BAD[message]}
    with pytest.raises(ValueError, match=message):
        reader((2, None, 3), Categorical(True, 3, one_hot=False)).check(
            Examples(np.zeros((4, 2, 5, 3)), **given), "train"
        )


def test_examples_are_read_a_few_at_a_time(monkeypatch):
    random = np.random.default_rng(0)
    y = random.integers(0, 3, (40, 5))
    examples = Examples(random.normal(size=(40, 5, 3)), y, random.integers(0, 3, (40, 5)))
    read = reader((5, 3), Categorical(True, 3))
    total = np.sum(examples.weight > 0)
    at_once = [read.rows(examples, "train", most) for most in (MOST, 17)]
    monkeypatch.setattr(row_reader, "_BLOCK", 10)
    seen = []
    counted = row_reader._Labelled.counted_places

    def counted_places(labelled):
        seen.append(labelled.sizes)
        return counted(labelled)

    monkeypatch.setattr(row_reader._Labelled, "counted_places", counted_places)
    for whole, most in zip(at_once, (MOST, 17), strict=True):
        found = read.rows(examples, "train", most)
        np.testing.assert_array_equal(found.x._index, whole.x._index)
        np.testing.assert_array_equal(found.y, whole.y)
        np.testing.assert_array_equal(found.weight, whole.weight)
        assert found.size == min(most, total)
        assert found.x.share == pytest.approx(found.size / total)
    assert set(seen) == {(2, 5)}
    some = every_nth(at_once[0], 4, Categorical(True, 3), 0)
    taken = np.unique(some.x.groups)
    assert len(taken) == 10
    assert some.size == np.isin(at_once[0].x.groups, taken).sum()


def two_outputs():
    inputs = keras.Input((2,))
    outputs = {"kind": layers.Identity()(inputs), "size": layers.Identity()(inputs)}
    output = Several({"kind": Categorical(True, 2), "size": Point(2)})
    return RowReader(keras.Model(inputs, outputs), output), output


def test_rows_of_two_outputs_are_in_the_order_of_the_examples():
    read, output = two_outputs()
    x = np.arange(8.0).reshape(4, 2)
    y = {"kind": np.array([0, 1, 1, 0]), "size": -x}
    for targets in (y, [y["kind"], y["size"]]):
        found = read.rows(Examples(x, targets), "train", MOST)
        np.testing.assert_array_equal(found.x.groups, [0, 0, 1, 1, 2, 2, 3, 3])
        rows = output.split_rows(y=found.y)
        np.testing.assert_array_equal(rows["kind"]["y"], y["kind"])
        np.testing.assert_array_equal(rows["size"]["y"], y["size"])
    outputs = found.x.outputs(lambda a: {"kind": a[:, None], "size": 2 * a[:, None]}, 1)
    drawn = output.split_rows(outputs=outputs)
    np.testing.assert_array_equal(drawn["kind"]["outputs"][:, 0], x)
    np.testing.assert_array_equal(drawn["size"]["outputs"][:, 0], 2 * x)
    with pytest.raises(ValueError, match="`y` must be a dict with an entry for each of"):
        read.rows(Examples(x, {"kind": y["kind"]}), "train", MOST)


def test_weights_of_one_output_have_the_mean_of_the_other():
    read, output = two_outputs()
    x = np.zeros((4, 2))
    y = {"kind": np.array([0, 1, 1, 0]), "size": x}
    weight = {"kind": np.array([0, 1, 2, 3.0]), "size": np.ones(4)}
    found = read.rows(Examples(x, y, weight), "train", MOST)
    rows = output.split_rows(y=found.y, weight=found.weight)
    np.testing.assert_allclose(rows["kind"]["weight"] / rows["kind"]["weight"][0], [1, 2, 3])
    assert rows["kind"]["weight"].mean() == pytest.approx(rows["size"]["weight"].mean())
    # One weight for all outputs keeps its meaning: two count as two.
    found = read.rows(Examples(x, y, np.full(4, 2.0)), "train", MOST)
    np.testing.assert_allclose(found.weight, 2)


def test_images_are_of_the_stratum_of_their_rarest_class():
    y = np.zeros((6, 2, 2), int)
    y[:4, 0, 0] = 1
    y[3:5, 1, 1] = 2
    output = Categorical(True, 3)
    found = reader((2, 2, 3), output).rows(Examples(np.zeros((6, 2, 2, 3)), y), "train", MOST)
    strata = strata_of(found, output)
    assert len(set(strata)) == 3
    assert strata[0] == strata[1] == strata[2]
    assert strata[3] == strata[4]
