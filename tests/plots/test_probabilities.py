import keras
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.colors import to_rgb
from scipy.special import entr

import tfp_ibnn as ibnn
from tfp_ibnn import plots
from tfp_ibnn.plots.probabilities import _offsets

pytestmark = pytest.mark.once

SAMPLES = np.random.default_rng(0).dirichlet([4, 2, 1], size=(2, 50))
IMAGES = np.random.default_rng(1).normal(size=(2, 4, 5))


def clouds(ax):
    """The dots of each class, (classes, draws, 2)."""
    return np.stack([x.get_offsets() for x in ax.collections if isinstance(x, PathCollection)])


def means(ax):
    lines = [x.get_segments()[0] for x in ax.collections if isinstance(x, LineCollection)]
    return np.array(lines)[:, 0, 1]


def panels(figure):
    return [ax for ax in figure.axes if not ax.images]


def test_each_draw_is_a_dot_and_the_mean_a_line():
    for number, ax in enumerate(panels(plots.draws(SAMPLES))):
        dots = clouds(ax)
        np.testing.assert_allclose(dots[..., 1].T, SAMPLES[number])
        assert np.all(np.abs(dots[..., 0] - np.arange(3)[:, None]) <= 0.38)
        np.testing.assert_allclose(means(ax), SAMPLES[number].mean(axis=0))


def test_dots_stand_apart_where_there_are_many():
    values = np.concatenate([np.full(60, 0.2), np.linspace(0.6, 0.9, 15)])
    found = _offsets(values)
    crowd, others = np.sort(found[:60]), found[60:]
    assert crowd[-1] - crowd[0] > 1.9
    assert np.diff(crowd).max() < 0.1  # evenly spread
    assert 0.1 < np.abs(others).max() < 0.6
    np.testing.assert_array_equal(_offsets(np.array([0.3])), [0.0])


@pytest.mark.parametrize(
    "labels", [[2, None], np.array([[2], [1]]), np.eye(3)[[2, 1]], np.array([2.0, 1.0])]
)
def test_every_form_of_labels_marks_the_same_class(labels):
    first, _ = panels(plots.draws(SAMPLES, labels=labels))
    assert first.patches[0].get_x() == 1.5


def test_certain_draws_may_be_rounded_beyond_one():
    (ax,) = plots.draws(np.full((1, 5, 1), 1 + 1e-6)).axes
    np.testing.assert_array_equal(clouds(ax)[..., 1], [[0] * 5, [1] * 5])


def test_the_true_class_has_a_color_and_a_shaded_column():
    first, second = panels(plots.draws(SAMPLES, labels=[2, None]))
    blue, orange = map(to_rgb, plots.COLORS[:2])
    colors = [tuple(part.get_facecolor()[0, :3]) for part in first.collections[::2]]
    assert colors == [blue, blue, orange]
    (column,) = first.patches
    assert (column.get_x(), column.get_width()) == (1.5, 1.0)
    assert not second.patches
    assert {tuple(part.get_facecolor()[0, :3]) for part in second.collections[::2]} == {blue}


@pytest.mark.parametrize(("labels", "names"), [(None, 2), ([None, None], 2), ([0, None], 3)])
def test_the_legend_names_what_is_there(labels, names):
    (legend,) = plots.draws(SAMPLES, labels=labels).legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["a draw", "mean of the draws", "true class"][:names]


def test_the_entropy_and_its_epistemic_part_are_those_of_a_prediction():
    for number, ax in enumerate(panels(plots.draws(SAMPLES, images=IMAGES))):
        entropy = entr(SAMPLES[number].mean(axis=0)).sum()
        epistemic = entropy - entr(SAMPLES[number]).sum(axis=1).mean()
        assert ax.get_title(loc="right") == f"entropy {entropy:.2f}, epistemic {epistemic:.2f}"


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 1), (4, 5, 3)])
def test_images_are_drawn_on_one_scale(shape):
    images = np.random.default_rng(0).normal(size=(2, *shape))
    for options in ({"x": images}, {"x": np.zeros((2, 7)), "images": images.tolist()}):
        figure = plots.draws(SAMPLES, **options)
        shown = np.stack([ax.images[0].get_array() for ax in figure.axes if ax.images])
        expected = (images - images.min()) / np.ptp(images)
        np.testing.assert_allclose(shown, expected.reshape(shown.shape))


@pytest.mark.parametrize(
    "options", [{}, {"x": np.zeros((2, 9))}, {"x": np.zeros((2, 4, 5, 2))}, {"images": False}]
)
def test_what_is_no_image_has_a_number(options):
    figure = plots.draws(SAMPLES, **{"x": {"a": IMAGES}, **options})
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["input 0", "input 1"]
    assert not any(ax.images for ax in figure.axes)


def test_models_stand_side_by_side():
    other = SAMPLES[:, :7, ::-1]
    figure = plots.draws({"plain": SAMPLES, "other": {"samples": other}}, IMAGES)
    found = panels(figure)
    assert [ax.get_title() for ax in found] == ["plain\n", "other\n", "", ""]
    for ax, expected in zip(found, (SAMPLES[0], other[0], SAMPLES[1], other[1]), strict=True):
        np.testing.assert_allclose(clouds(ax)[..., 1].T, expected)


def classifier(classes=3):
    layers = [keras.layers.Flatten(), ibnn.StochasticDense(classes, train_size=10)]
    model = keras.Sequential([keras.Input((4, 5)), *layers])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.parametrize("return_samples", [False, True])
def test_a_monte_carlo_predicts_the_inputs(return_samples):
    mc = ibnn.MonteCarlo(classifier(), 16, seed=0, return_samples=return_samples)
    first, second = panels(plots.draws(mc, IMAGES))
    every = [np.asarray(mc.draw(IMAGES, number)["mean"]) for number in range(16)]
    np.testing.assert_allclose(clouds(first)[..., 1].T, np.stack(every)[:, 0], atol=1e-5)
    np.testing.assert_allclose(clouds(second)[..., 1].T, np.stack(every)[:, 1], atol=1e-5)
    assert mc.return_samples == return_samples
    prediction = ibnn.MonteCarlo(mc.inner, 16, seed=0, return_samples=True).predict(
        IMAGES, verbose=0
    )
    again = panels(plots.draws({"a": mc, "b": prediction}, IMAGES))
    np.testing.assert_allclose(clouds(again[0]), clouds(again[1]), atol=1e-5)


def test_one_output_is_class_one_of_two():
    samples = np.random.default_rng(0).beta(2, 3, size=(1, 40, 1))
    (ax,) = plots.draws(samples, class_names=["no", "yes"]).axes
    no, yes = clouds(ax)[..., 1]
    np.testing.assert_allclose(yes, samples[0, :, 0])
    np.testing.assert_allclose(no, 1 - yes)
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["no", "yes"]


def test_of_many_classes_the_most_probable_and_the_true_ones_are_drawn():
    rng = np.random.default_rng(0)
    weights = rng.random(100)
    samples = rng.dirichlet(100 * weights, size=(1, 30))
    least = weights.argmin()
    (ax,) = plots.draws(samples, labels=[least]).axes
    expected = np.sort([*np.argsort(-samples[0].mean(axis=0))[:15], least])
    assert [int(tick.get_text()) for tick in ax.get_xticklabels()] == expected.tolist()
    np.testing.assert_allclose(clouds(ax)[..., 1].T, samples[0][:, expected])
    assert ax.get_xlabel() == "16 of 100 classes"
    entropy = entr(samples[0].mean(axis=0)).sum()
    assert ax.get_title(loc="right").startswith(f"entropy {entropy:.2f},")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"predictions": SAMPLES[0]}, r"`predictions` must be .* \(inputs, draws, classes\)"),
        ({"predictions": 3 * SAMPLES}, "sum to 1"),
        ({"predictions": SAMPLES * np.nan}, "sum to 1"),
        ({"predictions": SAMPLES[:, :0]}, "sum to 1"),
        ({"predictions": "a model"}, "got 'a model'"),
        ({"predictions": None}, "got None"),
        ({"predictions": {"mean": SAMPLES[:, 0]}}, "'samples', .*return_samples=True.*'mean'"),
        ({"predictions": {}}, "of one model or more"),
        ({"predictions": {"a": SAMPLES, "b": SAMPLES[:1]}}, r"got .*\[\(1, 3\), \(2, 3\)\]"),
        ({"predictions": np.tile(SAMPLES, (7, 1, 1))}, "at most 12 inputs; got 14"),
        ({"labels": [0]}, "`labels` must be 2 whole numbers from 0 to 2"),
        ({"labels": [0, 3]}, "`labels`"),
        ({"labels": [0, 0.5]}, "`labels`"),
        ({"labels": 1}, "`labels`"),
        ({"labels": np.zeros((2, 2))}, "`labels`"),
        ({"images": IMAGES[:1]}, r"`images` must have the shape \(2, height, width\)"),
        ({"images": np.zeros((2, 4, 5, 2))}, r"`images` .* got \(2, 4, 5, 2\)"),
        ({"class_names": ["a", "b"]}, "`class_names` must have 3 names; got 2"),
    ],
)
def test_bad_input_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        plots.draws(**{"predictions": SAMPLES, **arguments})
    assert plt.get_fignums() == []


def test_a_monte_carlo_needs_some_inputs_of_a_classifier():
    mc = ibnn.MonteCarlo(classifier(), 4)
    with pytest.raises(ValueError, match="`x` is missing"):
        plots.draws(mc)
    with pytest.raises(ValueError, match="at most 12 inputs; got 13"):
        plots.draws(mc, np.zeros((13, 4, 5)))
    numbers = ibnn.MonteCarlo(mc.inner, 4, head="point")
    with pytest.raises(ValueError, match="a MonteCarlo of a classifier"):
        plots.draws(numbers, IMAGES)
