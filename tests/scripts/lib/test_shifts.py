"""Corrupted, turned and attacked images: against closed forms, other programs and misuse."""

import colorsys

import keras
import numpy as np
import pytest
from keras import layers, ops
from PIL import Image
from scipy import ndimage, special
from sklearn.datasets import load_sample_images

import tfp_ibnn as ibnn
from lib.shifts import CORRUPTIONS, adversarial, corrupt, corruptions, fgsm, rotate
from lib.shifts.adversarial import fgsm_direction
from tests.monte_carlo_tools import dense, set_weights

SEVERITIES = (1, 2, 3, 4, 5)
NOISY = ("gaussian_noise", "shot_noise", "impulse_noise", "motion_blur")


@pytest.fixture(scope="module")
def photographs():
    """(20, 32, 32, 3): pieces of two photographs, shrunk to a quarter."""
    pieces = []
    for photograph in load_sample_images().images:
        small = np.asarray(Image.fromarray(photograph).resize((160, 107), Image.Resampling.BOX))
        rows = small[10:74].reshape(2, 32, 5, 32, 3).swapaxes(1, 2)
        pieces.append(rows.reshape(-1, 32, 32, 3))
    return np.concatenate(pieces)


def noise_images(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape).astype("uint8")


def constant(value, channels=3):
    return np.full((2, 32, 32, channels), value, "uint8")


def by_severity(*values):
    return list(zip(SEVERITIES, values, strict=True))


def distance(one, other):
    return np.mean(np.abs(one.astype(float) - other))


# ----------------------------------------------------------------------------------- corruptions


@pytest.mark.once
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_each_severity_is_further_from_the_images(photographs, name, channels):
    images = photographs[..., :channels]
    before = images.copy()
    results = [corrupt(images, name, severity) for severity in SEVERITIES]
    for result in results:
        assert result.dtype == np.uint8
        assert result.shape == images.shape
    np.testing.assert_array_equal(images, before)
    grows = np.diff([0, *(distance(result, images) for result in results)])
    if name == "motion_blur":
        # Severities 3 and 4 have one standard deviation, and differ at 6 of them.
        assert abs(grows[3]) < 0.5
        grows = np.delete(grows, 3)
    assert np.all(grows > 0)


@pytest.mark.once
@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 5, 3), (40, 7, 1)])
def test_images_of_any_size(name, shape):
    images = noise_images(2, *shape)
    assert corrupt(images, name, 5).shape == images.shape


@pytest.mark.once
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_an_image_has_its_own_noise_wherever_it_is_corrupted(monkeypatch, photographs, name):
    whole = corrupt(photographs, name, 3, seed=5)
    np.testing.assert_array_equal(corrupt(photographs[:7], name, 3, seed=5), whole[:7])
    np.testing.assert_array_equal(corrupt(photographs[7:], name, 3, seed=5, first=7), whole[7:])
    backwards = photographs[::-1][::-1]  # a view that is not contiguous
    monkeypatch.setattr(corruptions, "_BLOCK", 3)
    np.testing.assert_array_equal(corrupt(backwards, name, np.int64(3), seed=5), whole)


@pytest.mark.once
@pytest.mark.parametrize("name", NOISY)
def test_the_noise_changes_with_seed_severity_position_and_name(name):
    image = noise_images(1, 16, 16, 3)
    twice = corrupt(np.repeat(image, 2, axis=0), name, 3)
    assert np.any(twice[0] != twice[1])
    assert np.any(corrupt(image, name, 3, seed=1) != twice[:1])
    streams = [
        np.random.default_rng((0, corruptions.zlib.crc32(other.encode()), severity, 0)).random()
        for other in NOISY
        for severity in SEVERITIES
    ]
    assert len(set(streams)) == len(streams)


@pytest.mark.once
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_no_image_is_none(name):
    assert corrupt(np.zeros((0, 8, 8, 3), "uint8"), name, 1).shape == (0, 8, 8, 3)


@pytest.mark.once
@pytest.mark.parametrize(("severity", "scale"), by_severity(0.04, 0.06, 0.08, 0.09, 0.1))
def test_gaussian_noise_has_its_standard_deviation(severity, scale):
    noise = corrupt(constant(128), "gaussian_noise", severity).astype(float) - 128
    # Rounding adds a variance of 1/12; 6144 values give the deviation to 1 %.
    assert np.std(noise) == pytest.approx(np.hypot(255 * scale, 12**-0.5), rel=0.04)
    assert abs(noise.mean()) < 255 * scale / 15


@pytest.mark.once
@pytest.mark.parametrize(("severity", "count"), by_severity(500, 250, 100, 75, 50))
def test_shot_noise_is_poisson(severity, count):
    result = corrupt(constant(100), "shot_noise", severity).astype(float)
    assert result.mean() == pytest.approx(100, rel=0.02)
    assert result.var() == pytest.approx(100 * 255 / count + 1 / 12, rel=0.08)
    assert np.all(corrupt(constant(0), "shot_noise", severity) == 0)


@pytest.mark.once
@pytest.mark.parametrize(("severity", "part"), by_severity(0.01, 0.02, 0.03, 0.05, 0.07))
def test_impulse_noise_leaves_the_others_alone(severity, part):
    images = np.full((20, 32, 32, 3), 90, "uint8")
    result = corrupt(images, "impulse_noise", severity)
    assert set(np.unique(result)) == {0, 90, 255}
    for value in (0, 255):
        assert np.mean(result == value) == pytest.approx(part / 2, rel=0.15)


@pytest.mark.once
@pytest.mark.parametrize("name", ["defocus_blur", "motion_blur", "contrast", "pixelate"])
@pytest.mark.parametrize("value", [0, 1, 77, 255])
def test_an_even_grey_stays(name, value):
    images = constant(value)
    for severity in SEVERITIES:
        np.testing.assert_array_equal(corrupt(images, name, severity), images)


@pytest.mark.once
def test_defocus_of_an_impulse_is_the_disk():
    image = np.zeros((1, 15, 15, 1), "uint8")
    image[0, 7, 7] = 255
    for severity, (radius, deviation) in zip(
        SEVERITIES, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)), strict=True
    ):
        offsets = np.arange(-7, 8)
        disk = np.add.outer(offsets**2, offsets**2) <= radius**2
        gaussian = np.exp(-0.5 * (np.arange(-1, 2) / deviation) ** 2)
        gaussian = np.outer(gaussian, gaussian) / gaussian.sum() ** 2
        kernel = ndimage.convolve(disk / disk.sum(), gaussian)
        assert kernel.sum() == pytest.approx(1)
        result = corrupt(image, "defocus_blur", severity)[0, :, :, 0]
        assert np.max(np.abs(result - 255 * kernel)) < 0.5 + 1e-3
    assert np.sum(result > 0) == 9  # a disk of radius 1.5 is a square of nine


@pytest.mark.once
def test_kernels_sum_to_one():
    _, disks = corruptions._CORRUPTIONS["defocus_blur"]
    _, lines = corruptions._CORRUPTIONS["motion_blur"]
    for disk in disks:
        assert corruptions._disk(*disk).sum() == pytest.approx(1, abs=1e-12)
    for radius, deviation in lines:
        weights, down, right = zip(*corruptions._half_line(radius, deviation, 30.0), strict=True)
        assert sum(weights) == pytest.approx(1, abs=1e-12)
        assert len(weights) == 2 * radius + 1
        assert (down[0], right[0]) == (0, 0)


@pytest.mark.once
@pytest.mark.parametrize("severity", SEVERITIES)
def test_motion_of_an_impulse_lies_on_a_line_to_its_left(severity):
    images = np.zeros((20, 41, 41, 1), "uint8")
    images[:, 20, 20] = 255
    results = corrupt(images, "motion_blur", severity)[..., 0]
    radius, deviation = ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))[severity - 1]
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-0.5 * (steps / deviation) ** 2)
    weights = 255 * weights / weights.sum()
    slopes = []
    for result in results:
        rows, columns = np.nonzero(result)
        along, across = 20 - columns, 20 - rows
        assert along.min() == 0
        assert np.all(np.abs(across) <= along)  # no steeper than 45 degrees
        end = np.argmax(along)
        slope = across[end] / along[end]
        assert np.all(np.abs(across - slope * along) <= 1.01)
        slopes.append(slope)
        assert result[20, 20] == round(weights[0])
        # All of the light is there, as far off as it should be: to rounding, of numbers and places.
        light = result[rows, columns].astype(float)
        assert light.sum() == pytest.approx(255, abs=3)
        far = np.sum(light * np.hypot(along, across))
        assert far == pytest.approx(np.sum(weights * steps), abs=0.5 * 255)
    assert min(slopes) < -0.3
    assert max(slopes) > 0.3


@pytest.mark.once
@pytest.mark.parametrize(("severity", "factor"), by_severity(0.75, 0.5, 0.4, 0.3, 0.15))
def test_contrast_shrinks_towards_the_mean_of_each_channel(photographs, severity, factor):
    mean = photographs.mean(axis=(1, 2), keepdims=True)
    expected = mean + factor * (photographs - mean)
    result = corrupt(photographs, "contrast", severity)
    assert np.max(np.abs(result - expected)) < 0.5 + 1e-3


@pytest.mark.once
@pytest.mark.parametrize(("severity", "step"), by_severity(0.05, 0.1, 0.15, 0.2, 0.3))
def test_brightness_raises_the_value_of_hsv(severity, step):
    images = noise_images(2, 8, 8, 3)
    images[0, :2] = 0, 0, 0
    images[0, 2:4] = 200, 0, 17
    expected = []
    for pixel in images.reshape(-1, 3) / 255:
        hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
        expected.append(colorsys.hsv_to_rgb(hue, saturation, min(value + step, 1)))
    result = corrupt(images, "brightness", severity)
    assert np.max(np.abs(result.reshape(-1, 3) - 255 * np.array(expected))) < 0.5 + 1e-3
    grey = corrupt(images[..., :1], "brightness", severity)
    expected = np.minimum(images[..., :1] + 255 * step, 255)
    assert np.max(np.abs(grey - expected)) < 0.5 + 1e-3


@pytest.mark.once
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("severity", "quality"), by_severity(80, 65, 58, 50, 40))
def test_jpeg_is_what_pillow_saves(tmp_path, photographs, severity, quality, channels):
    images = photographs[:3, ..., :channels]
    for image, result in zip(images, corrupt(images, "jpeg_compression", severity), strict=True):
        path = tmp_path / "image.jpg"
        Image.fromarray(np.squeeze(image)).save(path, quality=quality)
        np.testing.assert_array_equal(np.squeeze(result), np.asarray(Image.open(path)))


@pytest.mark.once
@pytest.mark.parametrize(("severity", "size"), by_severity(30, 28, 27, 24, 20))
def test_pixelate_has_so_many_different_pixels(severity, size):
    ramp = np.arange(0, 256, 8, dtype="uint8")
    image = np.broadcast_to(ramp[:, None, None], (1, 32, 32, 3))
    result = corrupt(image, "pixelate", severity)
    assert len(np.unique(result[0, :, 0, 0])) == size
    # A small pixel is the mean of those whose centres lie in it; back, each takes the nearest.
    inside = np.ceil((np.arange(32) + 0.5) * size / 32).astype(int) - 1
    means = np.bincount(inside, ramp) / np.bincount(inside)
    nearest = means[np.floor((np.arange(32) + 0.5) * size / 32).astype(int)]
    assert np.max(np.abs(result[0, :, 0, 0] - nearest)) <= 0.5
    across = corrupt(image.swapaxes(1, 2), "pixelate", severity)
    np.testing.assert_array_equal(across.swapaxes(1, 2), result)


@pytest.mark.once
def test_pixelate_keeps_the_aspect():
    image = noise_images(1, 20, 40, 1)
    box = Image.Resampling.BOX
    small = Image.fromarray(image[0, ..., 0]).resize((26, 13), box)
    expected = np.asarray(small.resize((40, 20), box))
    np.testing.assert_array_equal(corrupt(image, "pixelate", 5)[0, ..., 0], expected)


# -------------------------------------------------------------------------------------- rotation


@pytest.mark.once
@pytest.mark.parametrize("size", [1, 8, 9])
@pytest.mark.parametrize("turns", [-5, -1, 0, 1, 2, 3, 4, 1001])
def test_quarter_turns_are_exact(size, turns):
    images = noise_images(3, size, size, 3)
    before = images.copy()
    expected = np.rot90(images, turns, axes=(1, 2))
    np.testing.assert_array_equal(rotate(images, 90 * turns), expected)
    np.testing.assert_array_equal(images, before)


@pytest.mark.once
@pytest.mark.parametrize("shape", [(8, 8, 1), (7, 10, 3)])
@pytest.mark.parametrize("degrees", [30, -12.5, 180, 200])
def test_other_turns_are_bilinear_and_black_outside(shape, degrees):
    images = noise_images(2, *shape)
    height, width = shape[:2]
    y, x = np.mgrid[:height, :width]
    y, x = y - (height - 1) / 2, x - (width - 1) / 2
    angle = np.deg2rad(degrees)
    # Where each pixel came from, before a turn from the x axis towards the top.
    from_y = np.cos(angle) * y + np.sin(angle) * x + (height - 1) / 2
    from_x = np.cos(angle) * x - np.sin(angle) * y + (width - 1) / 2
    padded = np.pad(images.astype(float), ((0, 0), (20, 20), (20, 20), (0, 0)))
    low_y, low_x = np.floor(from_y).astype(int), np.floor(from_x).astype(int)
    part_y, part_x = (from_y - low_y)[..., None], (from_x - low_x)[..., None]
    expected = sum(
        padded[:, low_y + 20 + down, low_x + 20 + right]
        * (part_y if down else 1 - part_y)
        * (part_x if right else 1 - part_x)
        for down in (0, 1)
        for right in (0, 1)
    )
    result = rotate(images, degrees)
    assert result.dtype == np.uint8
    assert np.max(np.abs(result - expected)) < 0.5 + 1e-3
    np.testing.assert_array_equal(rotate(images[1:], degrees), result[1:])


@pytest.mark.once
def test_a_turn_of_no_image_is_none():
    assert rotate(np.zeros((0, 8, 8, 3), "uint8"), 30).shape == (0, 8, 8, 3)


# ---------------------------------------------------------------------------------------- misuse


IMAGES = noise_images(2, 8, 8, 3)


@pytest.mark.once
@pytest.mark.parametrize(
    ("images", "match"),
    [
        (IMAGES.astype("float32"), "uint8.*got float32"),
        (IMAGES.astype("int64"), "uint8.*got int64"),
        (IMAGES[0], r"\(images, height, width, channels\).*got \(8, 8, 3\)"),
        (IMAGES[..., :2], r"1 or 3 channels.*got \(2, 8, 8, 2\)"),
        (IMAGES[:, :0], r"got \(2, 0, 8, 3\)"),
        (None, "`images`"),
    ],
)
def test_other_images_are_refused(images, match):
    with pytest.raises(ValueError, match=match):
        corrupt(images, "contrast", 1)
    with pytest.raises(ValueError, match=match):
        rotate(images, 30)


@pytest.mark.once
@pytest.mark.parametrize("severity", [0, 6, -1, True, 2.5, "3", None, float("nan")])
def test_other_severities_are_refused(severity):
    with pytest.raises(ValueError, match=f"`severity`.*1 to 5.*got {severity!r}"):
        corrupt(IMAGES, "contrast", severity)


@pytest.mark.once
def test_other_options_are_refused():
    with pytest.raises(ValueError, match="`name`.*'gaussian_noise'.*'jpeg_compression'.*'fog'"):
        corrupt(IMAGES, "fog", 1)
    with pytest.raises(ValueError, match="`seed`.*-1"):
        corrupt(IMAGES, "contrast", 1, seed=-1)
    with pytest.raises(ValueError, match="`first`.*0.5"):
        corrupt(IMAGES, "contrast", 1, first=0.5)
    for degrees in (float("nan"), float("inf"), "30", None):
        with pytest.raises(ValueError, match="`degrees`"):
            rotate(IMAGES, degrees)


# ------------------------------------------------------------------------------------------ FGSM

SHAPE = (5, 5, 2)


def network(last=None, classes=3, noisy=False, size=0.5):
    """A small network of images, with weights that are the same on every backend."""
    make = dense if noisy else layers.Dense
    inputs = keras.Input(SHAPE)
    hidden = layers.Conv2D(4, 3, activation="sigmoid")(layers.Rescaling(1 / 255)(inputs))
    hidden = layers.Flatten()(layers.BatchNormalization()(hidden))
    hidden = layers.Dropout(0.5)(make(6, activation="sigmoid")(hidden))
    outputs = make(classes, activation=last)(hidden)
    kind = ibnn.StochasticModel if noisy else keras.Model
    return set_weights(kind(inputs, outputs), size=size)


def attacked(count=11, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    images = rng.uniform(20, 230, (count, *SHAPE)).astype("float32")
    return images, rng.integers(0, classes, count)


def state(model):
    return [np.array(ops.convert_to_numpy(variable)) for variable in model.variables]


def cross_entropy(outputs, labels, from_logits):
    """Return that of each example, in float64."""
    outputs = np.asarray(outputs, "float64")
    logs = special.log_softmax(outputs, axis=-1) if from_logits else np.log(outputs)
    return -np.take_along_axis(logs, labels[:, None], axis=-1)[:, 0]


def difference_quotients(loss, images, labels, step):
    """Return the central differences of a loss (N,) by each pixel of each of the images."""
    size = images[0].size
    steps = step * np.eye(size).reshape(size, 1, *SHAPE)
    sides = [(images + sign * steps).reshape(-1, *SHAPE) for sign in (1, -1)]
    above, below = np.split(loss(np.concatenate(sides), np.tile(labels, 2 * size)), 2)
    return ((above - below) / (2 * step)).reshape(size, -1).T.reshape(images.shape)


HEADS = {
    "logits": (None, 3),
    "softmax": ("softmax", 3),
    "yes": ("sigmoid", 1),
    "yes-logits": (None, 1),
}


@pytest.mark.parametrize("head", HEADS)
def test_the_gradient_is_that_of_finite_differences(eagerly, float64, head):
    last, classes = HEADS[head]
    model = network(last, classes, size=1.0)
    images, labels = attacked(4, max(classes, 2))
    from_logits = last is None

    def loss(x, labels):
        scores = model.predict_on_batch(x)
        if classes == 1:
            scores = np.concatenate([0 * scores if from_logits else 1 - scores, scores], axis=-1)
        return cross_entropy(scores, labels, from_logits)

    expected = difference_quotients(loss, images.astype("float64"), labels, 0.5)
    numbers = np.arange(4, dtype="int32")
    slope = adversarial._slope(model, from_logits, 0)
    found = slope(images.astype("float64"), labels.astype("int32"), numbers)
    # The cross-entropy is log(1 + exp(m)), which grows by 1 - p where m grows by 1.
    found = ops.convert_to_numpy(found) * -np.expm1(-loss(images, labels))[:, None, None, None]
    # Keras computes parts of it in float32 on JAX, which takes digits from the differences.
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)
    direction = fgsm_direction(model, images, labels, from_logits=from_logits)
    assert direction.dtype == np.int8
    clear = np.abs(expected) > 2e-6
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(direction[clear], np.sign(expected)[clear])


@pytest.mark.once
def test_the_averaged_prediction_is_attacked(eagerly):
    mc = ibnn.MonteCarlo(network("softmax", noisy=True), samples=6, seed=1, chunk_size=4)
    images, labels = attacked(4)

    def loss(x, labels):
        return cross_entropy(mc.predict_on_batch(x.astype("float32"))["mean"], labels, False)

    slopes = difference_quotients(loss, images, labels, 4.0)
    direction = fgsm_direction(mc, images, labels)
    # In float32, and by finite steps, the small ones may have either sign.
    clear = np.abs(slopes) > 0.1 * np.abs(slopes).max()
    assert clear.mean() > 0.2
    np.testing.assert_array_equal(direction[clear], np.sign(slopes)[clear])


KINDS = {
    "deterministic": lambda: network("softmax"),
    "stochastic": lambda: network("softmax", noisy=True),
    "averaged": lambda: ibnn.MonteCarlo(network("softmax", noisy=True), samples=4, seed=0),
    "independent": lambda: ibnn.MonteCarlo(
        network("softmax", noisy=True), samples=4, seed=0, independent=True
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    """A name, a model, its state, images, labels and their attack in two batches."""
    keras.utils.set_random_seed(0)
    model = KINDS[request.param]()
    images, labels = attacked()
    before = state(model), images.copy(), labels.copy()
    result = fgsm(model, images, labels, 6.5, batch_size=8)
    return request.param, model, before, images, labels, result


@pytest.mark.once
def test_the_step_is_epsilon_and_the_loss_goes_up(eagerly, kind):
    name, model, _, images, labels, result = kind
    assert result.dtype == np.float32
    steps = np.abs(result - images)
    np.testing.assert_allclose(steps, 6.5, atol=1e-4)
    if name in ("stochastic", "independent"):  # attacked with draws that no prediction has again
        inner = model.inner if name == "independent" else model
        model = ibnn.MonteCarlo(inner, samples=64, seed=5)

    def loss(x):
        predicted = model.predict_on_batch(x)
        predicted = predicted["mean"] if isinstance(predicted, dict) else predicted
        return cross_entropy(predicted, labels, False)

    risen = loss(result) - loss(images)
    assert risen.mean() > 0.001
    if name in ("deterministic", "averaged"):
        assert np.all(risen > 0)


def test_nothing_is_changed(kind):
    _, model, (variables, *arrays), images, labels, _ = kind
    for one, other in zip(state(model), variables, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(images, arrays[0])
    np.testing.assert_array_equal(labels, arrays[1])


@pytest.mark.once
def test_attacks_repeat_in_batches_of_any_size(eagerly, kind):
    name, model, _, images, labels, result = kind
    size = 8 if name == "independent" else 11
    again = fgsm(model, images, labels[:, None], 6.5, batch_size=size)
    assert np.mean(again == result) > 0.999  # a gradient of about 0 may have either sign


def test_the_noise_switch_is_obeyed_and_kept():
    model = network(noisy=True)
    plain = ibnn.to_deterministic(model)
    images, labels = attacked(4)
    ibnn.set_noise(model, on=False)
    direction = fgsm_direction(model, images, labels, from_logits=True)
    assert all(float(layer.noise_switch) == 0 for layer in ibnn.layers.stochastic_layers(model))
    expected = fgsm_direction(plain, images, labels, from_logits=True)
    assert np.mean(direction == expected) > 0.99


def test_another_seed_is_another_draw(eagerly):
    model = network(noisy=True)
    images, labels = attacked()
    one, other = (
        fgsm_direction(model, images, labels, from_logits=True, seed=seed) for seed in (0, 1)
    )
    assert np.any(one != other)


def test_new_weights_are_attacked():
    model = network()
    images, labels = attacked(4)
    one = fgsm_direction(model, images, labels, from_logits=True)
    set_weights(model, seed=1)
    assert np.any(fgsm_direction(model, images, labels, from_logits=True) != one)


def test_what_is_against_no_is_for_yes(eagerly):
    images, _ = attacked(4)
    binary = network(classes=1)
    no, yes = (
        fgsm_direction(binary, images, np.full(4, label), from_logits=True) for label in (0, 1)
    )
    np.testing.assert_array_equal(no, -yes)
    assert np.all(no != 0)


@pytest.mark.parametrize("last", [None, "softmax"])
def test_a_network_that_is_very_sure_is_attacked_no_worse(eagerly, last):
    """The gradient of the cross-entropy itself loses its digits, or is 0."""
    model = network(last, classes=2)
    images, _ = attacked()
    final = model.layers[-1]
    labels = np.argmax(model.predict_on_batch(images), axis=-1)
    expected = fgsm_direction(model, images, labels, from_logits=last is None)
    for weight in (final.kernel, final.bias):
        weight.assign((40 if last else 200) * weight)
    apart = np.ptp(model.predict_on_batch(images), axis=-1)
    assert apart.max() == 1 if last else apart.max() > 17  # p is 1 in float32
    direction = fgsm_direction(model, images, labels, from_logits=last is None)
    assert np.mean(direction == expected) > 0.99


@pytest.mark.once
def test_averages_of_very_sure_networks_have_a_gradient(eagerly):
    model = network("softmax", noisy=True)
    images, labels = attacked()
    kernel = model.layers[-1].layer.kernel
    kernel.assign(100 * kernel)
    mc = ibnn.MonteCarlo(model, samples=6, seed=0, chunk_size=2)
    assert mc.predict_on_batch(images)["aleatoric"].min() < 1e-4
    assert np.mean(fgsm_direction(mc, images, labels) != 0) > 0.5


def test_the_meaning_of_the_output_is_found_out(eagerly):
    model = network()
    images, labels = attacked(4)
    expected = fgsm_direction(model, images, labels, from_logits=True)
    with pytest.raises(ValueError, match="It is unknown what.*Say from_logits=True"):
        fgsm(model, images, labels, 1.0)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    np.testing.assert_array_equal(fgsm_direction(model, images, labels), expected)
    probabilities = keras.Model(model.inputs, layers.Softmax()(model.outputs[0]))
    same = fgsm_direction(probabilities, images, labels) == expected
    assert same.mean() > 0.99


def test_pixels_stay_in_range_and_uint8_is_taken(eagerly):
    model = network("softmax")
    images = noise_images(3, *SHAPE)
    images[0], images[1] = 0, 255
    labels = np.array([0, 1, 2], "uint8")
    result = fgsm(model, images, labels, 8)
    assert result.min() == 0
    assert result.max() == 255
    np.testing.assert_array_equal(result, result.astype("uint8"))
    np.testing.assert_array_equal(fgsm(model, images.astype("float64"), labels, 0), images)


def test_no_image_has_no_attack():
    result = fgsm(network("softmax"), np.zeros((0, *SHAPE)), np.zeros(0, int), 1.0)
    assert result.shape == (0, *SHAPE)
    assert result.dtype == np.float32


@pytest.mark.parametrize("epsilon", [-1, float("nan"), float("inf"), "8", None, True])
def test_other_epsilons_are_refused(epsilon):
    with pytest.raises(ValueError, match=f"`epsilon`.*got {epsilon!r}"):
        fgsm(None, None, None, epsilon)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"labels": [0, 1]}, r"`labels`.*each of the 3 images.*\(2,\)"),
        ({"labels": [[1, 0, 0], [0, 1, 0], [0, 0, 1]]}, r"`labels`.*\(3, 3\)"),
        ({"labels": [0.0, 1.0, 2.0]}, "`labels`.*float64"),
        ({"labels": [0, -1, 2]}, "`labels`.*-1"),
        ({"labels": [0, 3, 2]}, "image 1 is not finite.*not a class"),
        ({"images": np.full((3, *SHAPE), 256.0)}, "between 0 and 255.*256"),
        ({"images": np.full((3, *SHAPE), np.nan)}, "between 0 and 255.*nan"),
        ({"images": np.zeros(3)}, r"`images`.*\(3,\)"),
        ({"images": np.full((3, 2), "a")}, "`images` must be numbers"),
        ({"batch_size": 0}, "`batch_size`.*0"),
        ({"seed": -1}, "`seed`.*-1"),
        ({"from_logits": True}, "`from_logits` is True.*softmax"),
        ({"model": layers.Dense(3)}, "`model` must be a Keras model"),
        ({"model": keras.Sequential([layers.Dense(3)])}, "`model`.*built"),
    ],
)
def test_other_arguments_are_refused(change, match):
    arguments = {"images": np.zeros((3, *SHAPE)), "labels": [0, 1, 2], "epsilon": 1.0, **change}
    model = arguments.pop("model", None) or network("softmax")
    with pytest.raises(ValueError, match=match):
        fgsm(model, **arguments)


def test_models_of_other_outputs_are_refused():
    images, labels = attacked(3)
    inputs = keras.Input(SHAPE)
    cases = [
        (network("sigmoid"), "several answers of yes or no"),
        (keras.Model(inputs, layers.Conv2D(3, 2, activation="softmax")(inputs)), "one label"),
        (keras.Model(inputs, ibnn.layers.GaussianHead()(layers.Dense(2)(inputs))), "classify"),
    ]
    for model, match in cases:
        with pytest.raises(ValueError, match=match):
            fgsm(model, images, labels, 1.0)
    mc = ibnn.MonteCarlo(network("softmax", noisy=True), samples=2)
    with pytest.raises(ValueError, match="`from_logits` is True.*probabilities"):
        fgsm(mc, images, labels, 1.0, from_logits=True)
