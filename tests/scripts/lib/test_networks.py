import re

import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn
from lib import networks as models
from tests.layer_checklist import numpy

pytestmark = pytest.mark.once

# Builders with small arguments.
SMALL = {
    "mlp": lambda **options: models.mlp((8, 8, 1), hidden=(5, 4), **options),
    "lenet": lambda **options: models.lenet((16, 16, 1), **options),
    "vgg16": lambda **options: models.vgg16((32, 32, 1), **options),
    "wide_resnet": lambda **options: models.wide_resnet((8, 8, 1), depth=10, width=1, **options),
}
QUICK = [name for name in SMALL if name != "vgg16"]
# One of them shows on JAX too what depends on the backend.
ONE_ON_JAX = ["mlp", *(pytest.param(name, marks=pytest.mark.once) for name in QUICK[1:])]


def convolution(size, channels):
    """Weights of a chain of convolutions without biases."""
    return sum(size * size * a * b for a, b in zip(channels, channels[1:], strict=False))


def dense(*units):
    return sum((a + 1) * b for a, b in zip(units, units[1:], strict=False))


@pytest.mark.once
@pytest.mark.parametrize(
    ("shape", "expected"), [((32, 32, 3), 44_726), ((28, 28, 1), 44_426), ((16, 40, 2), 44_576)]
)
def test_lenet_has_as_many_weights_as_by_hand(shape, expected):
    by_hand = (25 * shape[2] + 1) * 6 + (25 * 6 + 1) * 16 + dense(16 * 16, 120, 84, 10)
    assert by_hand == expected
    assert models.lenet(shape).count_params() == expected


@pytest.mark.parametrize(
    ("shape", "is_plain"),
    [((28, 28, 1), True), ((28, 44, 2), True), ((32, 32, 3), False), ((28, 32, 1), False)],
)
def test_lenet_pools_as_the_adaptive_layer_does(eagerly, shape, is_plain):
    model = models.lenet(shape)
    assert isinstance(model.get_layer("pool2"), keras.layers.AveragePooling2D) == is_plain

    def adaptive(layer):
        if layer.name == "pool2":
            return keras.layers.AdaptiveAveragePooling2D(4, name="pool2")
        return layer.__class__.from_config(layer.get_config())

    other = keras.models.clone_model(model, clone_function=adaptive)
    other.set_weights(model.get_weights())
    x = np.random.default_rng(0).normal(size=(3, *shape)).astype("float32")
    y = np.array([1, 2, 3])
    for each in (model, other):
        each.compile(keras.optimizers.SGD(0.1), "mse")
        each.fit(x, np.eye(10)[y], epochs=2, batch_size=3, verbose=0)
    np.testing.assert_allclose(numpy(model(x)), numpy(other(x)), rtol=1e-4, atol=1e-5)
    # What was saved before holds the adaptive layer, and keeps it.
    again = keras.Model.from_config(other.get_config())
    assert isinstance(again.get_layer("pool2"), keras.layers.AdaptiveAveragePooling2D)


@pytest.mark.once
def test_vgg16_has_as_many_weights_as_by_hand():
    channels = [3, 64, 64, 128, 128, *[256] * 3, *[512] * 6]
    trainable = convolution(3, channels) + 2 * sum(channels[1:]) + dense(512, 1024, 512, 10)
    model = models.vgg16()
    # The paper's 14.7 million of 3x3 convolutions, here with normalisation for biases.
    assert convolution(3, channels) == 14_710_464
    assert sum(int(np.prod(w.shape)) for w in model.trainable_weights) == trainable
    assert model.count_params() == trainable + 2 * sum(channels[1:])
    convs = [layer for layer in model.layers if isinstance(layer, keras.layers.Conv2D)]
    assert [layer.name for layer in convs] == [f"conv{i}" for i in range(1, 14)]
    assert [layer.name for layer in model.layers if isinstance(layer, keras.layers.Dense)] == [
        "fc1",
        "fc2",
        "fc3",
    ]
    assert model.get_layer("pool5").output.shape == (None, 1, 1, 512)


def residual_weights(depth, width, classes, channels=3):
    """Trainable weights of a wide residual network."""
    total, last = 9 * channels * 16, 16
    for group in (16 * width, 32 * width, 64 * width):
        for _ in range((depth - 4) // 6):
            total += 2 * last + 9 * last * group + 2 * group + 9 * group * group
            total += last * group if last != group else 0
            last = group
    return total + 2 * last + dense(last, classes)


@pytest.mark.once
@pytest.mark.parametrize(
    ("depth", "width", "millions"),
    [pytest.param(28, 10, 36.5, marks=pytest.mark.slow), (16, 8, 11.0)],
)
def test_wide_resnet_has_the_papers_size(depth, width, millions):
    model = models.wide_resnet(depth=depth, width=width)
    trainable = sum(int(np.prod(w.shape)) for w in model.trainable_weights)
    assert trainable == residual_weights(depth, width, 10)
    assert trainable / 1e6 == pytest.approx(millions, abs=0.05)
    convs = [layer.name for layer in model.layers if isinstance(layer, keras.layers.Conv2D)]
    # The paper counts the 1x1 convolutions of the shortcuts, and not the last layer.
    assert len(convs) == depth
    assert sum("shortcut" in name for name in convs) == 3
    assert model.get_layer("final_relu").output.shape == (None, 8, 8, 64 * width)


@pytest.mark.once
@pytest.mark.parametrize("depth", [10, 16])
def test_a_wide_resnet_of_width_one_needs_fewer_shortcuts(depth):
    model = models.wide_resnet((8, 8, 1), depth=depth, width=1)
    trainable = sum(int(np.prod(w.shape)) for w in model.trainable_weights)
    assert trainable == residual_weights(depth, 1, 10, channels=1)
    names = [layer.name for layer in model.layers if "shortcut" in layer.name]
    assert names == ["group2_block1_shortcut", "group3_block1_shortcut"]


@pytest.mark.parametrize("name", ONE_ON_JAX)
def test_outputs_are_logits_of_the_right_shape(name):
    model = SMALL[name](num_classes=3)
    x = np.random.default_rng(0).normal(size=(4, *model.input_shape[1:])).astype("float32")
    logits = numpy(model(x))
    assert logits.shape == (4, 3)
    assert np.all(np.isfinite(logits))
    assert np.ptp(logits, axis=0).min() > 0
    assert not np.allclose(logits.sum(axis=1), 1)
    assert not getattr(model, "compiled", False)
    assert model.name == name


@pytest.mark.once
@pytest.mark.parametrize("name", QUICK)
def test_preprocessing_stands_in_front(name):
    plain = SMALL[name]()
    images = np.random.default_rng(0).integers(0, 256, (9, *plain.input_shape[1:]), "uint8")
    model = SMALL[name](preprocessing=ibnn.data.preprocessing(images, augment=True, seed=0))
    assert [layer.name for layer in model.layers][:4] == ["image", "shift", "mirror", "normal"]
    plain.set_weights(model.get_weights())
    expected = plain((images.astype("float32") - images.mean()) / images.std())
    found = model(images, training=False)
    np.testing.assert_allclose(numpy(found), numpy(expected), rtol=1e-3, atol=1e-3)


@pytest.mark.once
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mlp", ["fc2_dropout", "fc3_dropout"]),
        ("lenet", ["conv2_dropout", "fc1_dropout", "fc2_dropout", "fc3_dropout"]),
        ("vgg16", ["fc2_dropout", "fc3_dropout"]),
        ("wide_resnet", [f"group{g}_block1_dropout" for g in (1, 2, 3)]),
    ],
)
def test_dropout_is_where_it_is_said(name, expected):
    model = SMALL[name](dropout=0.25)
    drops = [layer for layer in model.layers if isinstance(layer, keras.layers.Dropout)]
    assert [layer.name for layer in drops] == expected
    assert {layer.rate for layer in drops} == {0.25}
    # Behind what is dropped stands the layer that has the name.
    if name != "wide_resnet":
        for layer in drops:
            (behind,) = {node.operation.name for node in layer._outbound_nodes}
            assert f"{behind}_dropout" == layer.name


def converted(name, kind, **options):
    model = SMALL[name]()
    mapping = models.posterior_map(name, kind, **options)
    sto = ibnn.to_stochastic(model, mapping, 100, seed=0)  # raises for a pattern without a match
    return model, mapping, sto


@pytest.mark.once
@pytest.mark.parametrize("kind", models.POSTERIORS)
@pytest.mark.parametrize("name", ONE_ON_JAX)
def test_every_map_converts_every_layer(name, kind):
    model, mapping, sto = converted(name, kind, prior_scale=0.3, gamma=0.1)
    convertible = [
        layer.name
        for layer in model.layers
        if isinstance(layer, (keras.layers.Dense, keras.layers.Conv2D))
    ]
    found = ibnn.stochastic_layers(sto)
    assert [layer.name for layer in found] == convertible
    for layer in found:
        pattern = next(p for p in mapping if re.fullmatch(p, layer.name))
        assert type(layer.posterior) is type(mapping[pattern])
        assert layer.posterior.prior_scale == pytest.approx(0.3)
        assert layer.posterior.gamma == pytest.approx(0.1)
    x = np.random.default_rng(0).normal(size=(2, *model.input_shape[1:])).astype("float32")
    assert np.all(np.isfinite(numpy(sto(x))))


@pytest.mark.once
@pytest.mark.slow
def test_vgg16_converts_with_flows_where_the_report_has_them():
    _, _, sto = converted("vgg16", "flow")
    found = {layer.name: layer.posterior for layer in ibnn.stochastic_layers(sto)}
    assert len(found) == 16
    kinds = {
        name: {type(flow).__name__ for flow in posterior.flows} - {"Affine"}
        for name, posterior in found.items()
    }
    flowing = {name: kind for name, kind in kinds.items() if kind}
    assert set(flowing) == {"conv4", "conv8", "conv11", "fc2"}
    assert flowing.pop("fc2") == {"Planar"}
    assert all("InvertibleConv1x1" in kind for kind in flowing.values())


@pytest.mark.once
@pytest.mark.parametrize("kind", models.POSTERIORS)
@pytest.mark.parametrize("name", ["mlp", "lenet"])
def test_some_layers_stay_deterministic(name, kind):
    _, _, sto = converted(name, kind, deterministic="fc1|conv1")
    found = {layer.name for layer in ibnn.stochastic_layers(sto)}
    # Where the map has a flow it has one.
    has_flow = name == "lenet" and kind == "flow"
    assert ("fc1" in found) == has_flow
    assert "conv1" not in found
    assert "fc2" in found


@pytest.mark.once
def test_a_mixture_has_its_components():
    _, _, sto = converted("mlp", "mixture", components=3)
    assert {layer.posterior.components for layer in ibnn.stochastic_layers(sto)} == {3}


@pytest.mark.once
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: models.lenet((15, 16, 3)), "input_shape.*15"),
        (lambda: models.lenet((16, 16)), "input_shape"),
        (lambda: models.lenet((16, 16, 0)), "input_shape"),
        (lambda: models.vgg16((28, 28, 1)), "input_shape.*32"),
        (lambda: models.wide_resnet((7, 8, 1)), "input_shape.*8"),
        (lambda: models.wide_resnet((None, 8, 1)), "input_shape"),
        (lambda: models.resnet20((7, 8, 1)), "input_shape.*8"),
        (lambda: models.wide_resnet(depth=11), "depth"),
        (lambda: models.wide_resnet(depth=4), "depth"),
        (lambda: models.wide_resnet(width=0), "width"),
        (lambda: models.posterior_map("resnet", "flow"), "model.*resnet"),
        (lambda: models.posterior_map("lenet", "normal"), "kind.*normal"),
        (lambda: models.posterior_map("lenet", "gaussian", prior_scale=-1), "prior_scale"),
        (lambda: models.posterior_map("lenet", "gaussian", layers="fc1"), "layers.*gaussian"),
        (lambda: models.posterior_map("lenet", "mixture", depth=2), "depth.*mixture"),
        (lambda: models.posterior_map("lenet", "flow", depth=0), "depth"),
        (lambda: models.posterior_map("lenet", "mixture", components=0), "components"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
