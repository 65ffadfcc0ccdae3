"""Channels that a layer ignores are removed: the smaller model computes the same."""

import keras
import numpy as np
import pytest
from keras import layers

from tests.conversion.tools import close, data
from tests.layer_checklist import numpy
from tfp_ibnn.conversion.channels import OF_MODEL, Link, link_to, without_channels

pytestmark = pytest.mark.once  # tests/distillation/test_prune.py runs on both backends

IMAGE = (6, 6, 2)


def dense():
    stack = [layers.Dense(6, "tanh"), layers.Dropout(0.3), layers.Dense(5, "relu", name="taker")]
    return keras.Sequential([keras.Input((3,)), *stack, layers.Dense(2)])


def convolutions():
    return keras.Sequential(
        [
            keras.Input(IMAGE),
            layers.Conv2D(5, 3, use_bias=False, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(4, 2, strides=2, dilation_rate=1, name="taker"),
        ]
    )


def flattened():
    return keras.Sequential(
        [
            keras.Input(IMAGE),
            layers.Conv2D(5, 3, activation="silu"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.BatchNormalization(center=False),
            layers.Activation("elu"),
            layers.Dense(4, name="taker"),
        ]
    )


def pooled():
    inputs = keras.Input(IMAGE)
    x = layers.Conv2D(5, 3, activation=layers.LeakyReLU(0.2))(inputs)
    x = layers.BatchNormalization(scale=False, axis=3)(x)
    x = layers.Flatten()(layers.GlobalMaxPooling2D(keepdims=True)(x))
    x = layers.Dense(4, "softmax", name="taker")(x)
    return keras.Model(inputs, [layers.Dense(2)(x), layers.Dense(3)(x)])


def steps():
    stack = [layers.Conv1D(6, 3), layers.SpatialDropout1D(0.2), layers.Dense(4, name="taker")]
    return keras.Sequential([keras.Input((7, 3)), *stack])


def volumes():
    stack = [layers.Conv3D(4, 2), layers.MaxPooling3D(), layers.Conv3D(3, 1, name="taker")]
    return keras.Sequential([keras.Input((4, 4, 4, 2)), *stack])


def positions():
    """Dense layers at each of several positions, before a Flatten."""
    stack = [layers.Dense(4, "tanh"), layers.Flatten(), layers.Dense(3, name="taker")]
    return keras.Sequential([keras.Input((5, 3)), *stack])


def chain():
    return keras.Sequential(
        [
            keras.Input(IMAGE),
            layers.Conv2D(4, 3, padding="same", name="first"),
            layers.BatchNormalization(),
            layers.Conv2D(5, 3, activation="relu", name="second"),
            layers.Flatten(),
            layers.Dense(6, "gelu", name="third"),
            layers.Dense(2, name="fourth"),
        ]
    )


WAYS = {
    # name: (model, positions of a channel)
    "dense": (dense, 1),
    "convolutions": (convolutions, 1),
    "flattened": (flattened, 4),
    "pooled": (pooled, 1),
    "steps": (steps, 1),
    "volumes": (volumes, 1),
    "positions": (positions, 5),
}


def stirred(make):
    """Return a model all of whose weights are random, with positive variances."""
    keras.utils.set_random_seed(0)
    model = make()
    rng = np.random.default_rng(1)
    for weight in model.weights:
        value = 0.4 * rng.normal(size=weight.shape)
        weight.assign(np.exp(value) if "variance" in weight.name else value)
    return model


def zeroed(model, link, kept):
    """Return a copy whose taker multiplies all other channels by 0, found by their way."""
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    taker = copy.get_layer(link.taker.name)
    kernel = numpy(taker.kernel).copy()
    is_kept = np.isin(np.arange(link.channels), kept)
    rows = np.tile(is_kept, link.positions)  # channels are the last axis before a Flatten
    taker.kernel.assign(kernel * rows[:, None])
    return copy


@pytest.mark.parametrize("name", WAYS)
def test_the_smaller_model_computes_what_the_one_with_zeros_does(name):
    make, positions_of_channel = WAYS[name]
    model = stirred(make)
    before = model.get_weights()
    link = link_to(model.get_layer("taker"), model)
    assert isinstance(link, Link)
    assert link.positions == positions_of_channel
    kept = np.array([0, 2, 3])
    smaller = without_channels(model, [(link, kept)])
    x = data(4, *model.input_shape[1:])
    close(smaller(x), zeroed(model, link, kept)(x), 1e-6)
    first, other = (numpy(keras.tree.flatten(each(x))[0]) for each in (smaller, model))
    assert np.abs(first - other).max() > 0.01
    maker = smaller.get_layer(link.maker.name)
    assert maker.kernel.shape[-1] == 3
    assert smaller.get_layer("taker").kernel.shape[-2] == 3 * positions_of_channel
    assert all(np.array_equal(*pair) for pair in zip(before, model.get_weights(), strict=True))


def test_several_ways_at_once_and_a_file(tmp_path):
    """A layer that makes channels of one way may take those of another."""
    model, x = stirred(chain), data(3, *IMAGE)
    expected, ways = model, []
    for name, kept in (("second", [1, 3]), ("third", [0, 4]), ("fourth", [2])):
        link = link_to(model.get_layer(name), model)
        expected = zeroed(expected, link, kept)
        ways.append((link, np.array(kept)))
    smaller = without_channels(model, ways)
    close(smaller(x), expected(x), 1e-6)
    kernels = [layer.kernel.shape for layer in smaller.layers if hasattr(layer, "kernel")]
    assert kernels == [(3, 3, 2, 2), (3, 3, 2, 2), (2 * 16, 1), (1, 2)]
    smaller.save(tmp_path / "smaller.keras")
    close(keras.models.load_model(tmp_path / "smaller.keras")(x), smaller(x), 1e-6)


def test_frozen_layers_stay_frozen():
    model = stirred(dense)
    model.layers[0].trainable = False
    smaller = without_channels(model, [(link_to(model.get_layer("taker"), model), np.array([1]))])
    assert [layer.trainable for layer in smaller.layers if layer.weights] == [False, True, True]


def before_taker(*stack, shape=(4, 4, 3), taker=None):
    taker = taker or layers.Dense(2, name="taker")
    return keras.Sequential([keras.Input(shape), *stack, taker])


def with_branch(use):
    inputs = keras.Input((3,))
    x = layers.Dense(4, name="maker")(inputs)
    return keras.Model(inputs, use(x, layers.Dense(4, name="taker")(x)))


def with_output(x, y):
    return [x, y]


def called_twice():
    inputs = keras.Input((4,))
    taker = layers.Dense(4, name="taker")
    return keras.Model(inputs, taker(taker(layers.Dense(4)(inputs))))


def with_lora():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4, name="maker")])
    model.add(layers.Dense(2, name="taker"))
    model.layers[0].enable_lora(1)
    return model


class Subclass(layers.Dense):
    """May do anything."""


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: before_taker(), OF_MODEL),
        (lambda: before_taker(layers.ReLU()), OF_MODEL),
        (lambda: with_branch(lambda x, y: x + y), "output of 'maker' is used elsewhere"),
        (lambda: with_branch(with_output), "output of 'maker' is used elsewhere"),
        (called_twice, "'taker' is called more than once"),
        (with_lora, "'maker' .Dense. is quantized, or has LoRA or groups"),
        (lambda: before_taker(layers.Conv2D(3, 2, groups=3)), "has LoRA or groups"),
        (lambda: before_taker(layers.Dense(3, "softmax", name="a")), "activation of 'a'"),
        (lambda: before_taker(layers.Dense(3), layers.Softmax()), "Softmax. may mix"),
        (lambda: before_taker(layers.Dense(3), layers.LayerNormalization()), "Normalization. may"),
        (lambda: before_taker(layers.Dense(3), layers.Permute((2, 1, 3))), "Permute. may mix"),
        (lambda: before_taker(layers.Dense(3), layers.DepthwiseConv2D(2)), "Depthwise.* may mix"),
        (lambda: before_taker(Subclass(3)), "Subclass. may mix"),
        (lambda: before_taker(layers.Dense(3), layers.BatchNormalization(axis=1)), "another axis"),
        (
            lambda: before_taker(
                layers.Dense(3), layers.MaxPooling2D(data_format="channels_first")
            ),
            "has its channels first",
        ),
        (
            lambda: before_taker(layers.Dense(3), taker=layers.Conv2DTranspose(2, 2, name="taker")),
            "neither Dense nor a convolution",
        ),
        (
            lambda: before_taker(
                layers.Conv1D(3, 1),
                layers.GlobalMaxPooling1D(),
                layers.Activation(lambda x: -x),
                shape=(None, 2),
            ),
            "not known to be elementwise",
        ),
    ],
)
def test_other_ways_are_described(model, reason):
    model = model()
    link = link_to(model.get_layer("taker"), model)
    assert isinstance(link, str)
    with pytest.raises(ValueError, match=reason):
        raise ValueError(link)


def test_a_layer_inside_of_another_model_is_described():
    inner = before_taker(layers.Dense(3))
    model = keras.Sequential([keras.Input((4, 4, 3)), inner])
    assert "inside of another layer" in link_to(inner.layers[-1], model)
