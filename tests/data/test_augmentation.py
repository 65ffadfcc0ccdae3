import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn
from tests.layer_checklist import numpy

pytestmark = pytest.mark.once

SHAPE = (7, 5, 2)


def images(count=6, shape=SHAPE, seed=0):
    """Float images without zeros, so that what a shift brings in can be seen."""
    return np.random.default_rng(seed).uniform(1, 255, (count, *shape)).astype("float32")


def shifted(image, rows, columns, padding):
    """Pad and crop, pixel by pixel."""
    out = np.zeros_like(image)
    for i in range(image.shape[0]):
        for j in range(image.shape[1]):
            a, b = i + rows - padding, j + columns - padding
            if 0 <= a < image.shape[0] and 0 <= b < image.shape[1]:
                out[i, j] = image[a, b]
    return out


def find_shift(image, result, padding):
    """Return the only shift that makes `result` of `image`."""
    places = range(2 * padding + 1)
    found = [
        (rows, columns)
        for rows in places
        for columns in places
        if np.array_equal(shifted(image, rows, columns, padding), result)
    ]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("padding", [1, 2, 4])
def test_shifts_are_those_drawn(padding):
    x = images()
    layer = ibnn.data.RandomShift(padding, seed=3)
    result = numpy(layer(x, training=True))
    drawn = numpy(
        keras.random.randint((len(x), 2), 0, 2 * padding + 1, seed=keras.random.SeedGenerator(3))
    )
    expected = [shifted(image, *pair, padding) for image, pair in zip(x, drawn, strict=True)]
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 9, 3), (3, 3, 1)])
def test_padding_may_be_larger_than_the_image(shape):
    x = images(40, shape)
    result = numpy(ibnn.data.RandomShift(4, seed=0)(x, training=True))
    assert result.shape == x.shape
    assert (result == 0).all(axis=(1, 2, 3)).any()  # some are shifted out of sight
    kept = result[result != 0]
    assert np.isin(kept, x).all()


def test_every_shift_is_as_frequent_and_each_image_has_its_own():
    x = np.broadcast_to(images(1, (5, 5, 1)), (3000, 5, 5, 1))
    result = numpy(ibnn.data.RandomShift(1, seed=0)(x, training=True))
    kinds, counts = np.unique(result, axis=0, return_counts=True)
    assert len(kinds) == 9
    assert {find_shift(x[0], kind, 1) for kind in kinds} == {
        (i, j) for i in range(3) for j in range(3)
    }
    # Each count is binomial with mean 333 and deviation 17.
    assert np.all(abs(counts - 3000 / 9) < 5 * 17.2)


def test_outside_training_nothing_moves():
    x = images()
    layer = ibnn.data.RandomShift(2, seed=0)
    for result in (layer(x), layer(x, training=False)):
        np.testing.assert_array_equal(numpy(result), x)
    model = keras.Sequential([keras.Input(SHAPE), layer])
    np.testing.assert_array_equal(model.predict(x, verbose=0), x)


def test_a_plain_call_of_a_model_does_not_augment():
    x = images(20)
    model = keras.Sequential([keras.Input(SHAPE), *ibnn.data.preprocessing(x, augment=True)])
    expected = model.predict(x, verbose=0)
    for _ in range(3):
        np.testing.assert_allclose(numpy(model(x)), expected, rtol=1e-5, atol=1e-5)


def test_seeds_decide():
    x = images(20)
    first, again, other = (ibnn.data.RandomShift(2, seed=seed) for seed in (1, 1, 2))
    one, two = numpy(first(x, training=True)), numpy(first(x, training=True))
    np.testing.assert_array_equal(one, numpy(again(x, training=True)))
    np.testing.assert_array_equal(two, numpy(again(x, training=True)))
    assert np.any(one != two)
    assert np.any(one != numpy(other(x, training=True)))


@pytest.mark.parametrize("dtype", ["uint8", "int32", "float32"])
def test_raw_pixels_survive(dtype):
    x = np.random.default_rng(0).integers(1, 256, (4, *SHAPE)).astype(dtype)
    result = numpy(ibnn.data.RandomShift(1, seed=0)(x, training=True)).astype("float64")
    for image, moved in zip(x.astype("float64"), result, strict=True):
        find_shift(image, moved, 1)


def test_config_and_file_round_trip(tmp_path):
    layer = ibnn.data.RandomShift(3, seed=5, name="move")
    again = ibnn.data.RandomShift.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    assert (again.padding, again.seed, again.name) == (3, 5, "move")
    x = images()
    front = ibnn.data.preprocessing(x, augment=True, padding=3, seed=5)
    model = keras.Sequential([keras.Input(SHAPE), *front])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(numpy(loaded(x)), numpy(model(x)))
    np.testing.assert_array_equal(numpy(loaded(x, training=True)), numpy(model(x, training=True)))


def test_in_a_compiled_fit_every_batch_size_works():
    model = keras.Sequential(
        [
            keras.Input(SHAPE),
            ibnn.data.RandomShift(2, seed=0),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    model.compile("sgd", "mse")
    x = images(7) / 255
    history = model.fit(x, np.zeros((7, 1)), batch_size=4, epochs=2, verbose=0).history
    assert np.all(np.isfinite(history["loss"]))


@pytest.mark.once
def test_statistics_are_numpys():
    x = np.random.default_rng(0).integers(0, 256, (1203, 4, 3, 3)).astype("uint8")
    x[..., 1] //= 7
    (normalise,) = ibnn.data.preprocessing(x)
    mean, deviation = x.mean(axis=(0, 1, 2)), x.std(axis=(0, 1, 2))
    np.testing.assert_allclose(numpy(normalise(x)), (x - mean) / deviation, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.ravel(normalise.input_mean), mean, rtol=1e-12)
    np.testing.assert_allclose(np.ravel(normalise.input_variance), deviation**2, rtol=1e-10)


def test_what_a_shift_brings_in_is_black():
    x = np.full((30, 4, 4, 1), 200, "uint8")
    x[0] = 100
    front = ibnn.data.preprocessing(x, augment=True, padding=4, seed=0)
    assert [layer.name for layer in front] == ["shift", "mirror", "normal"]
    out = x.astype("float32")
    for layer in front:
        out = layer(out, training=True)
    black = (0 - x.mean()) / x.std()
    assert np.isclose(numpy(out), black, rtol=1e-4).any()
    bright = numpy(front[-1](x.astype("float32")))
    assert (
        np.isclose(numpy(out)[..., None], [black, bright.min(), bright.max()], 1e-4).any(-1).all()
    )


@pytest.mark.once
@pytest.mark.parametrize("seed", [None, 4])
def test_shift_and_flip_have_seeds_of_their_own(seed):
    front = ibnn.data.preprocessing(images(), augment=True, seed=seed)
    assert [layer.seed for layer in front[:2]] == ([None, None] if seed is None else [4, 5])


@pytest.mark.once
@pytest.mark.parametrize("value", [0, -1, 1.5, "4", None, True])
def test_bad_padding_is_named(value):
    with pytest.raises(ValueError, match="padding"):
        ibnn.data.RandomShift(value)
    if value is not True:
        with pytest.raises(ValueError, match="padding"):
            ibnn.data.preprocessing(images(), augment=True, padding=value)


@pytest.mark.once
@pytest.mark.parametrize(
    "bad",
    [
        np.zeros((3, 8, 8)),
        np.zeros((0, 8, 8, 1)),
        np.full((3, 8, 8, 1), 7, "uint8"),
        np.full((3, 8, 8, 1), 255, "uint8"),
        np.full((3, 8, 8, 1), 0.1),
        np.full((3, 8, 8, 1), 0.7, "float32"),
        np.where(np.arange(192).reshape(3, 8, 8, 1) > 5, np.nan, 1.0),
    ],
    ids=["rank", "empty", "constant", "white", "0.1", "0.7", "nan"],
)
def test_bad_images_are_refused(bad):
    with pytest.raises(ValueError, match="images"):
        ibnn.data.preprocessing(bad)
