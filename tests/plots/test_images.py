import matplotlib.pyplot as plt
import numpy as np
import pytest

from tfp_ibnn import plots

pytestmark = pytest.mark.once

RNG = np.random.default_rng(0)
IMAGES = RNG.random((12, 4, 5))
DOUBT = RNG.permutation(12) / 10


def captions(figure):
    return [ax.get_xlabel() for ax in figure.axes]


def test_rows_hold_the_surest_and_the_least_sure():
    figure = plots.extreme_images(IMAGES, DOUBT, count=3)
    order = np.argsort(DOUBT)
    expected = [*order[:3], *order[::-1][:3]]
    scaled = (IMAGES - IMAGES.min()) / np.ptp(IMAGES)
    for ax, i in zip(figure.axes, expected, strict=True):
        np.testing.assert_allclose(ax.images[0].get_array(), scaled[i])
        assert ax.get_title() == f"{DOUBT[i]:.2f}"
    assert [figure.axes[i].get_ylabel() for i in (0, 3)] == ["most certain", "least certain"]


def test_wrong_predictions_are_framed_and_named():
    labels = np.arange(12) % 3
    predictions = labels.copy()
    first = np.argmin(DOUBT)
    predictions[first] = (labels[first] + 1) % 3
    names = ["cat", "dog", "cow"]
    figure = plots.extreme_images(
        IMAGES, DOUBT, count=2, labels=labels, predictions=predictions, class_names=names
    )
    expected = f"{names[predictions[first]]}\nnot {names[labels[first]]}"
    assert captions(figure)[0] == expected
    assert captions(figure)[1] == names[labels[np.argsort(DOUBT)[1]]]
    assert [ax.spines["left"].get_visible() for ax in figure.axes] == [True, False, False, False]


def test_probabilities_are_predictions():
    probabilities = np.eye(4)[np.arange(12) % 4]
    figure = plots.extreme_images(IMAGES, DOUBT, count=2, predictions=probabilities)
    order = np.argsort(DOUBT)
    assert captions(figure) == [str(i % 4) for i in (*order[:2], *order[::-1][:2])]


@pytest.mark.parametrize(
    ("given", "below"),
    [({}, ""), ({"labels": DOUBT * 0}, "true class"), ({"predictions": DOUBT * 0}, "predicted")],
)
def test_the_foot_explains_the_captions(given, below):
    figure = plots.extreme_images(IMAGES, DOUBT, count=2, name="variance", **given)
    assert "above: variance" in figure.get_supxlabel()
    assert below in figure.get_supxlabel()


@pytest.mark.parametrize("shape", [(8, 4, 5, 1), (8, 4, 5, 3)])
def test_channels_come_last(shape):
    figure = plots.extreme_images(np.arange(np.prod(shape)).reshape(shape), np.arange(8), count=2)
    assert figure.axes[0].images[0].get_array().shape == ((4, 5) if shape[-1] == 1 else (4, 5, 3))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"images": np.zeros((12, 4))}, r"`images` must have the shape \(images, height, width\)"),
        ({"images": np.zeros((12, 4, 4, 2))}, r"got \(12, 4, 4, 2\)"),
        ({"images": np.zeros((0, 4, 4))}, "`images` .* not be empty"),
        ({"images": IMAGES * np.nan}, "`images` must be finite"),
        ({"uncertainty": DOUBT[:3]}, r"`uncertainty` must have the shape \(12,\).*got \(3,\)"),
        ({"uncertainty": DOUBT * np.nan}, "`uncertainty` must be finite"),
        ({"count": 7}, "`count` must be at most 6; got 7"),
        ({"count": 0}, "`count` must be a whole number"),
        ({"labels": [1, 2]}, r"`labels` must have the shape \(12,\)"),
        ({"labels": DOUBT - 5}, "`labels` must be whole numbers"),
        ({"predictions": np.zeros((3, 4))}, r"`predictions` must have the shape \(12, classes\)"),
        ({"labels": np.arange(12), "class_names": ["a"]}, "`class_names` must be a list of 12"),
    ],
)
def test_bad_input_is_refused(arguments, words):
    given = {"images": IMAGES, "uncertainty": DOUBT, "count": 2, **arguments}
    with pytest.raises(ValueError, match=words):
        plots.extreme_images(**given)
    assert plt.get_fignums() == []
