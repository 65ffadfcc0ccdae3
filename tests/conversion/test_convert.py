import re
import subprocess
import sys
import time
import zipfile

import keras
import numpy as np
import pytest
from keras import layers, ops
from sklearn.datasets import load_digits

import tfp_ibnn as ibnn
from tests.conversion.tools import N, Scale, close, data, names, nested
from tests.layer_checklist import numpy, posterior_weights, predict_without_noise, stir

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore:These layers stay deterministic"),
]


def to_stochastic(model, posterior=None, **kwargs):
    return ibnn.to_stochastic(model, posterior or ibnn.NormalAffine(), train_size=N, **kwargs)


def fill(model, seed=0):
    """Give all weights, biases and moving statistics included, values that matter."""
    rng = np.random.default_rng(seed)
    for weight in model.weights:
        value = rng.normal(scale=0.5, size=weight.shape)
        if weight.name == "moving_variance":
            value = np.exp(value)
        weight.assign(value.astype("float32"))
    return model


# Models: each entry is a function that returns a model, an input, and the number of layers that
# become stochastic.


def sequential():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(5, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(2),
        ]
    )
    return model, data(3, 4), 2


def sequential_built_later():
    model = keras.Sequential([layers.Dense(5), layers.BatchNormalization(), layers.Dense(2)])
    model.build((None, 4))
    return model, data(3, 4), 2


def sequential_called_later():
    model = keras.Sequential([layers.Dense(5), layers.Dense(2)])
    model(data(3, 4))
    return model, data(3, 4), 2


def functional():
    inputs = keras.Input((6, 6, 3), name="image")
    x = layers.Rescaling(0.5, offset=-0.1)(inputs)
    x = layers.Conv2D(4, 3, padding="same", name="conv")(x)
    x = layers.BatchNormalization()(x)
    y = layers.Conv2D(4, 1, name="side")(x)
    x = x + y
    x = ops.relu(x) - ops.mean(x, axis=(1, 2), keepdims=True) / 2.0
    x = layers.MaxPooling2D()(x)
    x = layers.Flatten()(x)
    return keras.Model(inputs, layers.Dense(2, name="head")(x)), data(3, 6, 6, 3), 3


def nested_twice():
    a = keras.Input((4,))
    inner = keras.Model(a, layers.Dense(4, activation="tanh")(a), name="inner")
    b = keras.Input((4,))
    return keras.Model(b, inner(inner(b)) + inner(b)), data(3, 4), 1


def shared_between_inner_and_outer():
    shared = layers.Dense(4, activation="tanh", name="shared")
    a = keras.Input((4,))
    inner = keras.Model(a, shared(a), name="inner")
    b = keras.Input((4,))
    return keras.Model(b, shared(inner(b))), data(3, 4), 1


def shared_between_two_inner():
    shared = layers.Dense(4, activation="tanh", name="shared")
    a, b, c = keras.Input((4,)), keras.Input((4,)), keras.Input((4,))
    one = keras.Model(a, shared(a), name="one")
    two = keras.Model(b, 2.0 * shared(b), name="two")
    return keras.Model(c, two(one(c))), data(3, 4), 1


def used_twice():
    shared = layers.Dense(4, activation="tanh")
    a = keras.Input((4,))
    return keras.Model(a, shared(shared(a))), data(3, 4), 1


def several():
    a, b = keras.Input((4,), name="left"), keras.Input((3,), name="right")
    x, y = layers.Dense(5)(a), layers.Dense(5)(b)
    z = layers.Concatenate()([x, y])
    outputs = [layers.Dense(2)(z), layers.Dense(1)(layers.Add()([x, y]))]
    return keras.Model([a, b], outputs), [data(3, 4), data(3, 3, seed=1)], 4


def by_name():
    a, b = keras.Input((4,), name="left"), keras.Input((3,), name="right")
    z = layers.Concatenate()([layers.Dense(5)(a), layers.Dense(5)(b)])
    outputs = {"one": layers.Dense(2)(z), "two": layers.Dense(1)(z)}
    model = keras.Model({"l": a, "r": b}, outputs)
    return model, {"l": data(3, 4), "r": data(3, 3, seed=1)}, 4


def recurrent():
    tokens = keras.Input((5,), dtype="int32")
    x = layers.Embedding(7, 4, mask_zero=True)(tokens)
    x = layers.Dense(4, name="project")(x)
    model = keras.Model(tokens, layers.Dense(2, name="head")(layers.LSTM(3)(x)))
    return model, np.array([[1, 2, 3, 0, 0], [4, 5, 0, 0, 0]]), 3


MODELS = {
    make.__name__: make
    for make in (
        sequential,
        sequential_built_later,
        sequential_called_later,
        functional,
        nested,
        nested_twice,
        shared_between_inner_and_outer,
        shared_between_two_inner,
        used_twice,
        several,
        by_name,
        recurrent,
    )
}

# Class -> (a function that makes such a layer, shape of the input).
CLASSES = {
    "Dense": (lambda: layers.Dense(3), (4,)),
    "Dense-rank-3": (lambda: layers.Dense(3, activation="relu"), (5, 4)),
    "EinsumDense": (lambda: layers.EinsumDense("abc,cd->abd", (5, 3), bias_axes="d"), (5, 4)),
    "EinsumDense-heads": (lambda: layers.EinsumDense("abc,cde->abde", (5, 3, 2)), (5, 4)),
    "EinsumDense-ellipsis": (lambda: layers.EinsumDense("...x,xy->...y", (3,)), (5, 4)),
    "EinsumDense-in-kernel-and-output": (lambda: layers.EinsumDense("abc,bc->ac", (4,)), (5, 4)),
    "Conv1D": (lambda: layers.Conv1D(3, 2), (6, 4)),
    "Conv1D-causal": (lambda: layers.Conv1D(4, 2, padding="causal", groups=2), (6, 4)),
    "Conv2D": (lambda: layers.Conv2D(3, 2, use_bias=False), (5, 5, 4)),
    "Conv2D-grouped": (lambda: layers.Conv2D(6, 2, groups=2), (5, 5, 4)),
    "Conv2D-all-groups": (lambda: layers.Conv2D(8, 2, groups=4), (5, 5, 4)),
    "Conv3D": (lambda: layers.Conv3D(3, 2), (3, 3, 3, 4)),
    "Conv1DTranspose": (lambda: layers.Conv1DTranspose(3, 2, strides=2), (5, 4)),
    "Conv2DTranspose": (lambda: layers.Conv2DTranspose(3, 2), (5, 5, 4)),
    "Conv3DTranspose": (lambda: layers.Conv3DTranspose(3, 2), (3, 3, 3, 4)),
    "DepthwiseConv1D": (lambda: layers.DepthwiseConv1D(2, depth_multiplier=2), (5, 4)),
    "DepthwiseConv2D": (lambda: layers.DepthwiseConv2D(2, depth_multiplier=3), (5, 5, 4)),
    "SeparableConv1D": (lambda: layers.SeparableConv1D(3, 2), (5, 4)),
    "SeparableConv2D": (lambda: layers.SeparableConv2D(3, 2, depth_multiplier=2), (5, 5, 4)),
}

# Layers whose input's last axis is not an axis of the kernel.
UNFOLDABLE = {
    "EinsumDense-other-axis": (lambda: layers.EinsumDense("abc,bd->adc", (3, 4)), (5, 4)),
    "EinsumDense-ellipsis-last": (lambda: layers.EinsumDense("ab...,bc->ac...", (3, None)), (5, 4)),
    "EinsumDense-ellipsis-square": (
        lambda: layers.EinsumDense("ab...,bc->ac...", (3, None)),
        (4, 4),
    ),
}


def one_layer(name):
    make, shape = {**CLASSES, **UNFOLDABLE}[name]
    inputs = keras.Input(shape)
    return fill(keras.Model(inputs, make()(inputs))), data(3, *shape)


# Conversion.


@pytest.mark.once
@pytest.mark.parametrize("name", MODELS)
def test_copy_without_noise_computes_what_the_original_does(name):
    model, x, count = MODELS[name]()
    fill(model)
    expected = keras.tree.map_structure(numpy, model(x))
    before = [weight.copy() for weight in model.get_weights()]
    identity = [id(layer) for layer in model._flatten_layers()]
    nodes = [len(layer._inbound_nodes) for layer in model._flatten_layers()]

    copy = to_stochastic(model)

    assert isinstance(copy, ibnn.StochasticModel)
    assert copy.name == model.name
    assert not copy.compiled
    assert len(ibnn.stochastic_layers(copy)) == count
    assert len([w for w in posterior_weights(copy) if w.name == "shift"]) == count
    close(predict_without_noise(copy, x), expected)

    # The original is what it was.
    assert [id(layer) for layer in model._flatten_layers()] == identity
    assert [len(layer._inbound_nodes) for layer in model._flatten_layers()] == nodes
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    for a, b in zip(keras.tree.flatten(expected), keras.tree.flatten(model(x)), strict=True):
        np.testing.assert_array_equal(a, numpy(b))
    mine = {id(weight) for weight in model.weights}
    assert not any(id(weight) in mine for weight in copy.weights)


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_counts_its_kl_once(name):
    model, x, count = MODELS[name]()
    copy = to_stochastic(model, ibnn.NormalAffine(prior_scale=0.5, beta=1.0))
    copy(x)
    assert len(copy.losses) == count
    channels = sum(layer.posterior.channels for layer in ibnn.stochastic_layers(copy))
    ratio = 0.1 / 0.5
    one = -np.log(ratio) + (ratio**2 - 1) / 2
    np.testing.assert_allclose(sum(map(float, copy.losses)) * N, channels * one, rtol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        *("sequential", "functional", "several"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("nested", "by_name")),
        "nested_twice",
    ],
)
def test_copy_is_noisy_trains_and_is_saved(eagerly, name, tmp_path):
    model, x, _ = MODELS[name]()
    copy = to_stochastic(model)
    copy.compile("sgd", "mse")
    y = keras.tree.map_structure(np.zeros_like, keras.tree.map_structure(numpy, model(x)))
    copy.fit(x, y, verbose=0)
    stir(copy)
    copy.save(tmp_path / "copy.keras")
    loaded = keras.models.load_model(tmp_path / "copy.keras")
    close(predict_without_noise(loaded, x), predict_without_noise(copy, x), atol=1e-6)
    first, second = keras.tree.flatten(copy(x)), keras.tree.flatten(copy(x))
    assert all(np.any(numpy(a) != numpy(b)) for a, b in zip(first, second, strict=True))


def test_names_of_inputs_and_layers_are_kept():
    model, x, _ = by_name()
    copy = to_stochastic(model)
    assert {key: value.name for key, value in copy.input.items()} == {
        "l": model.input["l"].name,
        "r": model.input["r"].name,
    }
    assert sorted(copy(x)) == ["one", "two"]
    assert [layer.name for layer in copy.layers] == [layer.name for layer in model.layers]
    model, _, _ = nested()
    copy = to_stochastic(model)
    assert [layer.name for layer in copy.layers] == [layer.name for layer in model.layers]
    assert sorted(names(copy)) == sorted(
        layer.name for layer in model._flatten_layers() if isinstance(layer, layers.Dense)
    )


@pytest.mark.once
@pytest.mark.parametrize("name", [*CLASSES, *UNFOLDABLE])
def test_every_class_converts_and_folds(name):
    model, x = one_layer(name)
    copy = to_stochastic(model)
    assert names(copy) == [model.layers[-1].name]
    close(predict_without_noise(copy, x), numpy(model(x)))

    stir(copy, size=0.8)
    expected = predict_without_noise(copy, x)
    assert np.abs(expected - numpy(model(x))).max() > 0.05
    plain = ibnn.to_deterministic(copy)
    close(plain(x), expected, atol=1e-4)
    kinds = [type(layer) for layer in plain._flatten_layers()]
    assert_plain(plain)
    assert (layers.Rescaling in kinds) == (name in UNFOLDABLE)
    assert plain.layers[-1].name == model.layers[-1].name


@pytest.mark.parametrize("noise", ["channel", "position"])
def test_options_reach_every_layer(noise):
    model, _, _ = nested()
    copy = to_stochastic(model, noise=noise, kl_reduction="mean", train_samples=3, seed=4)
    assert copy.train_samples == 3
    found = ibnn.stochastic_layers(copy)
    assert {layer.noise for layer in found} == {noise}
    assert {layer.kl_reduction for layer in found} == {"mean"}
    assert {layer.train_size for layer in found} == {N}
    assert sorted(layer.posterior.seed for layer in found) == [4, 5, 6, 7, 8]


def test_seed_repeats_the_noise():
    model, x, _ = sequential()
    first, second = to_stochastic(model, seed=1), to_stochastic(model, seed=1)
    np.testing.assert_array_equal(numpy(first(x)), numpy(second(x)))
    other = to_stochastic(model, seed=2)
    assert np.any(numpy(first(x)) != numpy(other(x)))


def test_layers_of_templates_with_seeds_of_their_own_share_none():
    model = keras.Sequential([keras.Input((4,)), *(layers.Dense(4) for _ in range(3))])
    first, second, third = (layer.name for layer in model.layers)
    posterior = {
        first: ibnn.NormalAffine(seed=1),
        second: ibnn.NormalAffine(seed=0),
        third: ibnn.NormalAffine(seed=0),
    }
    copy = ibnn.to_stochastic(model, posterior, train_size=N)
    seeds = [layer.posterior.seed for layer in ibnn.stochastic_layers(copy)]
    assert len(set(seeds)) == 3
    assert seeds[0] == 1


@pytest.mark.once
def test_compiled_original(eagerly):
    model, x, _ = sequential()
    model.compile("adam", "mse", metrics=["mae"])
    y = data(3, 2)
    model.fit(x, y, verbose=0)
    copy = to_stochastic(model)
    assert not copy.compiled
    assert model.compiled
    close(predict_without_noise(copy, x), numpy(model(x)))
    before = model.get_weights()
    copy.compile("adam", "mse")
    copy.fit(x, y, verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    model.fit(x, y, verbose=0)


@pytest.mark.once
def test_frozen_layers_stay_frozen(eagerly):
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.BatchNormalization()])
    inner.trainable = False
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(4, name="a", trainable=False), inner, layers.Dense(2)]
    )
    assert len(model.trainable_weights) == 2
    for copy in (to_stochastic(model), ibnn.to_deterministic(to_stochastic(model))):
        mine = {id(weight) for weight in posterior_weights(copy)}
        trained = [w for w in copy.trainable_weights if id(w) not in mine]
        assert [w.shape for w in trained] == [(4, 2), (2,)]
    copy = to_stochastic(model)
    (norm,) = [v for v in copy._flatten_layers() if isinstance(v, layers.BatchNormalization)]
    before = norm.get_weights()
    copy.compile("sgd", "mse")
    copy.fit(data(8, 4), data(8, 2), verbose=0)
    for old, new in zip(before, norm.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_mixed_precision_is_kept(policy):
    policy("mixed_bfloat16")
    model, x, _ = sequential()
    policy("float32")
    copy = to_stochastic(model)
    assert keras.backend.standardize_dtype(copy(x).dtype) == "bfloat16"
    assert {w.dtype for w in posterior_weights(copy)} == {"float32"}
    close(ops.cast(predict_without_noise(copy, x), "float32"), ops.cast(model(x), "float32"), 1e-2)


@pytest.mark.once
@pytest.mark.slow
def test_small_noise_keeps_the_accuracy_of_a_trained_network():
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images = (images[order] / 16).astype("float32").reshape(-1, 8, 8, 1)
    labels = labels[order]
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(32, activation="relu"),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(5e-3), loss, metrics=["accuracy"])
    model.fit(images[:1300], labels[:1300], batch_size=50, epochs=6, verbose=0)
    x, y = images[1300:], labels[1300:]
    accuracy = np.mean(model.predict(x, verbose=0).argmax(axis=1) == y)
    assert accuracy > 0.9
    copy = to_stochastic(model, ibnn.NormalPlanar1d(initial_scale=0.1), seed=0)
    draws = [copy.predict(x, verbose=0, batch_size=500) for _ in range(8)]
    assert np.any(draws[0] != draws[1])
    noisy = np.mean([np.mean(draw.argmax(axis=1) == y) for draw in draws])
    assert noisy > accuracy - 0.01
    loud = to_stochastic(model, ibnn.NormalAffine(initial_scale=1.5), seed=0)
    assert np.mean(loud.predict(x, verbose=0).argmax(axis=1) == y) < accuracy - 0.02


# Errors.


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX has no strings")
def test_one_hot_lookup_before_a_dense_layer_trains():
    lookup = layers.StringLookup(vocabulary=["a", "b", "c"], output_mode="one_hot")
    inputs = keras.Input((1,), dtype="string")
    det = keras.Model(inputs, layers.Dense(2)(lookup(inputs)))
    copy = to_stochastic(det)
    x = ops.convert_to_tensor([["a"], ["b"], ["c"], ["d"]])
    assert keras.backend.is_int_dtype(lookup(x).dtype)  # which Keras learns only when it runs
    close(predict_without_noise(copy, x), numpy(det(x)))
    copy.compile("sgd", "mse")
    assert np.isfinite(copy.fit(x, data(4, 2), verbose=0).history["loss"]).all()


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX has no strings")
@pytest.mark.parametrize("mode", ["multi_hot", "tf_idf"])
def test_adapted_vocabularies_are_kept(mode):
    words = np.array([["a b"], ["b c"], ["c c"]], dtype=object)
    text = layers.TextVectorization(output_mode=mode)
    text.adapt(words[:, 0].tolist())
    inputs = keras.Input((1,), dtype="string")
    det = keras.Model(inputs, layers.Dense(2)(text(inputs)))
    x = ops.convert_to_tensor(words.tolist())
    assert np.ptp(numpy(det(x)), axis=0).min() > 0
    copy = to_stochastic(det)
    close(predict_without_noise(copy, x), numpy(det(x)))
    close(numpy(ibnn.to_deterministic(copy)(x)), predict_without_noise(copy, x))
    other = layers.StringLookup(vocabulary=["d", "e"], output_mode="one_hot")
    inputs = keras.Input((1,), dtype="string")
    det = keras.Model(inputs, layers.Dense(2)(other(inputs)))
    other.set_vocabulary(["e", "d"])  # whose order the config does not know
    x = ops.convert_to_tensor([["d"], ["e"]])
    close(predict_without_noise(to_stochastic(det), x), numpy(det(x)))


def test_subclassed_model_that_cannot_be_copied():
    class Mine(keras.Model):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def call(self, inputs):
            return self.inner(inputs)

    model = Mine(layers.Dense(2))
    with pytest.raises(ValueError, match=r"'mine\S*' is not built"):
        to_stochastic(model)
    model(data(3, 4))
    with pytest.raises(
        ValueError, match=r"\(Mine\) cannot be copied.*get_config.*Mine.from_config"
    ):
        to_stochastic(model)


@keras.saving.register_keras_serializable(package="tests")
class TwiceSequential(keras.Sequential):
    def call(self, *args, **kwargs):
        return 2 * super().call(*args, **kwargs)


@keras.saving.register_keras_serializable(package="tests")
class TwiceModel(keras.Model):
    def call(self, *args, **kwargs):
        return 2 * super().call(*args, **kwargs)


def test_a_call_of_its_own_is_kept():
    x, inputs = keras.Input((4,)), data(3, 4)
    models = [TwiceSequential([keras.Input((4,)), layers.Dense(3)])]
    models.append(TwiceModel(x, layers.Dense(3)(x)))
    for model in models:
        inside = keras.Model(x, layers.Dense(3)(model(x)))
        for original in (model, keras.Sequential([keras.Input((4,)), model]), inside):
            copy = to_stochastic(original)
            close(predict_without_noise(copy, inputs), numpy(original(inputs)))
            assert type(model) in map(type, copy._flatten_layers())
            plain = ibnn.to_deterministic(copy)
            close(plain(inputs), numpy(original(inputs)))
            assert_plain(plain)


def test_subclasses_that_keep_the_call_are_converted():
    class Named(keras.Model):
        def train_step(self, *args):
            raise NotImplementedError

    class NamedStochastic(ibnn.StochasticModel):
        pass

    x = keras.Input((4,))
    stochastic = to_stochastic(Named(x, layers.Dense(3)(x)))
    again = NamedStochastic(stochastic.inputs, stochastic.outputs)
    assert type(ibnn.to_deterministic(again).layers[-1]) is layers.Dense


def test_unbuilt_sequential():
    model = keras.Sequential([layers.Dense(2)], name="later")
    with pytest.raises(ValueError, match=r"'later' is not built.*keras.Input"):
        to_stochastic(model)


def test_stochastic_already():
    model, _, _ = sequential()
    copy = to_stochastic(model)
    with pytest.raises(ValueError, match=r"already stochastic.*to_deterministic"):
        to_stochastic(copy)


def test_not_a_model():
    with pytest.raises(ValueError, match="`model` must be a Keras model; got 3"):
        to_stochastic(3)


@pytest.mark.parametrize("value", [0, -5, 2.5, float("nan"), "x"])
def test_bad_train_size(value):
    model, _, _ = sequential()
    with pytest.raises(ValueError, match="`train_size`") as caught:
        ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=value)
    assert repr(value) in str(caught.value)


def test_missing_train_size():
    model, _, _ = sequential()
    with pytest.raises(ValueError, match="`train_size` is missing"):
        ibnn.to_stochastic(model, ibnn.NormalAffine())


@pytest.mark.parametrize(
    ("posterior", "message"),
    [
        (ibnn.NormalAffine, "`posterior` must be a posterior such as"),
        (None, "`posterior` must be a posterior such as"),
        ({}, "`posterior` must be a posterior such as"),
        ({".*": ibnn.NormalAffine}, r"`posterior\['.*'\]` must be a posterior"),
        ({".*": "planar"}, r"`posterior\['.*'\]`.*'planar'"),
        ({"(": ibnn.NormalAffine()}, r"'\(', which is not a regular expression"),
        ({3: ibnn.NormalAffine()}, "`posterior`.*3"),
    ],
)
def test_bad_posterior(posterior, message):
    model, _, _ = sequential()
    with pytest.raises(ValueError, match=message):
        ibnn.to_stochastic(model, posterior, train_size=N)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"noise": "pixel"}, "`noise`.*'pixel'"),
        ({"kl_reduction": "max"}, "`kl_reduction`.*'max'"),
        ({"train_samples": 0}, "`train_samples`.*0"),
    ],
)
def test_bad_options(kwargs, message):
    model, _, _ = sequential()
    with pytest.raises(ValueError, match=message):
        to_stochastic(model, **kwargs)


# Applications.


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("MobileNetV2", marks=pytest.mark.slow),
        pytest.param("ResNet50", marks=pytest.mark.slow),
        pytest.param("EfficientNetB0", marks=pytest.mark.slow),
    ],
)
def test_applications(name, record_property):
    # The smallest image that each of them takes.
    model = getattr(keras.applications, name)(weights=None, input_shape=(32, 32, 3), classes=5)
    start = time.perf_counter()
    copy = to_stochastic(model)
    seconds = time.perf_counter() - start
    record_property("seconds", seconds)
    print(f"{name}: converted in {seconds:.1f} s")
    convolutions = [v for v in model._flatten_layers() if re.search("Conv|Dense", type(v).__name__)]
    assert len(ibnn.stochastic_layers(copy)) == len(convolutions)
    x = np.random.default_rng(0).uniform(0, 255, (2, 32, 32, 3)).astype("float32")
    expected = model.predict(x, verbose=0)
    with ibnn.noise_off(copy):
        np.testing.assert_allclose(copy.predict(x, verbose=0), expected, atol=1e-5)


# Back to a deterministic model.


def assert_plain(model):
    for layer in model._flatten_layers():
        assert not type(layer).__module__.startswith("tfp_ibnn"), layer
    assert "tfp_ibnn" not in model.to_json()


@pytest.mark.once
@pytest.mark.parametrize("name", MODELS)
def test_to_deterministic_is_the_noise_free_model(name):
    model, x, _ = MODELS[name]()
    fill(model)
    copy = to_stochastic(model, ibnn.NormalPlanar1d(depth=1))
    stir(copy, size=0.5)
    expected = predict_without_noise(copy, x)
    before = copy.get_weights()
    plain = ibnn.to_deterministic(copy)
    close(plain(x), expected, atol=1e-4)
    assert_plain(plain)
    assert plain.name == model.name
    assert len(plain.weights) == len(model.weights)
    for old, new in zip(before, copy.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    again = to_stochastic(plain)
    close(predict_without_noise(again, x), expected, atol=1e-4)


def test_to_deterministic_of_mixtures():
    model, x, _ = sequential()
    copy = to_stochastic(model, ibnn.MixturePosterior(3))
    stir(copy)
    close(ibnn.to_deterministic(copy)(x), predict_without_noise(copy, x), atol=1e-4)


def test_to_deterministic_of_plain_layers():
    inputs = keras.Input((6, 6, 3))
    x = ibnn.StochasticConv2D(4, 3, strides=2, activation="relu", train_size=N)(inputs)
    x = layers.Flatten()(x)
    model = keras.Model(inputs, ibnn.StochasticDense(2, train_size=N, name="head")(x))
    stir(model)
    plain = ibnn.to_deterministic(model)
    x = data(3, 6, 6, 3)
    close(plain(x), predict_without_noise(model, x), atol=1e-4)
    assert_plain(plain)
    assert type(plain.get_layer("head")) is layers.Dense


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: Scale(name="scale"), (4,)),
        (lambda: layers.LSTM(3), (5, 4)),
        (lambda: layers.GlobalAveragePooling2D(), (5, 5, 4)),
        (lambda: layers.BatchNormalization(), (4,)),
    ],
    ids=["custom", "lstm", "pool", "batchnorm"],
)
def test_to_deterministic_of_wrapped_layers(make, shape):
    inputs = keras.Input(shape)
    outputs = ibnn.Stochastic(make(), train_size=N, name="wrapped")(inputs)
    model = keras.Model(inputs, outputs)
    stir(model, size=0.8)
    plain = ibnn.to_deterministic(model)
    x = data(3, *shape)
    close(plain(x), predict_without_noise(model, x), atol=1e-4)
    assert_plain(plain)
    assert np.abs(numpy(plain(x)) - numpy(ibnn.stochastic_layers(model)[0].layer(x))).max() > 1e-2


@pytest.mark.once
def test_a_mean_behind_the_input_keeps_its_precision(float64):
    inputs = keras.Input((3, 2))
    model = keras.Model(inputs, layers.EinsumDense("abc,bd->adc", (4, 2))(inputs))
    sto = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=9)
    stir(sto)
    x = np.random.default_rng(0).normal(size=(5, 3, 2))
    found = numpy(ibnn.to_deterministic(sto)(x))
    np.testing.assert_allclose(found, predict_without_noise(sto, x), rtol=1e-12)


def test_to_deterministic_of_a_nested_stochastic_model():
    inner, x, _ = sequential()
    inner = to_stochastic(inner)
    stir(inner)
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(2)(inner(inputs)))
    plain = ibnn.to_deterministic(model)
    close(plain(x), predict_without_noise(model, x), atol=1e-4)
    assert_plain(plain)


def test_to_deterministic_refuses_what_it_cannot_reach():
    inputs = keras.Input((5, 4))
    step = ibnn.StochasticDense(3, train_size=N)
    model = keras.Model(inputs, layers.TimeDistributed(step, name="steps")(inputs))
    try:
        plain = ibnn.to_deterministic(model)
    except ValueError as error:
        assert "steps" in str(error)  # noqa: PT017
    else:
        assert_plain(plain)


def test_to_deterministic_needs_a_stochastic_layer():
    model, _, _ = sequential()
    with pytest.raises(ValueError, match="has no stochastic layer"):
        ibnn.to_deterministic(model)


@pytest.mark.once
def test_the_file_of_a_deterministic_model_names_nothing_of_the_library(tmp_path):
    plain = ibnn.to_deterministic(to_stochastic(functional()[0], ibnn.NormalPlanar1d()))
    plain.save(tmp_path / "plain.keras")
    with zipfile.ZipFile(tmp_path / "plain.keras") as archive:
        for name in archive.namelist():
            assert b"tfp_ibnn" not in archive.read(name)


@pytest.mark.once
@pytest.mark.slow
def test_deterministic_model_loads_without_the_library(tmp_path):
    model, x, _ = functional()
    copy = to_stochastic(model, ibnn.NormalPlanar1d())
    stir(copy)
    plain = ibnn.to_deterministic(copy)
    plain.save(tmp_path / "plain.keras")
    np.save(tmp_path / "x.npy", x)
    code = (
        "import sys, keras, numpy as np\n"
        "model = keras.models.load_model('plain.keras')\n"
        "np.save('y.npy', model.predict(np.load('x.npy'), verbose=0))\n"
        "assert not any(name.startswith('tfp_ibnn') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)
    close(np.load(tmp_path / "y.npy"), predict_without_noise(copy, x), atol=1e-4)


def test_a_mask_given_by_hand_is_kept():
    inputs, keep = keras.Input((5, 3)), keras.Input((5,), dtype="bool")
    hidden = layers.Dense(4, name="hidden")(inputs)
    outputs = layers.GlobalAveragePooling1D()(hidden, mask=keep)
    model = keras.Model([inputs, keep], outputs)
    copy = to_stochastic(model)
    x = np.random.default_rng(0).normal(size=(2, 5, 3)).astype("float32")
    masks = [np.array([row] * 2) for row in ([1, 1, 0, 0, 0], [1, 1, 1, 1, 1])]
    with ibnn.noise_off(copy):
        for mask in masks:
            expected, found = (m([x, mask.astype(bool)]) for m in (model, copy))
            np.testing.assert_allclose(
                *map(keras.ops.convert_to_numpy, (found, expected)), atol=1e-5
            )


@pytest.mark.filterwarnings("ignore:The object being serialized includes a `lambda`")
def test_a_layer_that_cannot_be_copied_is_named():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, lambda x: x**2, name="odd")])
    with pytest.raises(ValueError, match="'odd'.*register_keras_serializable"):
        ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=1)


# ------------------------------------------------------------------------- defaults by the depth


def deep(depth):
    """Return a network of `depth` Dense layers: one, used twice, in a nested model."""
    inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name="inner")])
    x = inputs = keras.Input((4,))
    for layer in range(depth - 1):
        x = keras.layers.Dense(4, name=f"layer{layer}")(x)
    return keras.Model(inputs, inner(inner(x)))


@pytest.mark.parametrize(("depth", "scale"), [(3, 0.3), (15, 0.2)])
def test_the_prior_is_narrower_in_deep_networks(depth, scale, tmp_path):
    given = {"layer0": ibnn.NormalAffine(prior_scale=0.4), ".*": ibnn.NormalAffine()}
    model = to_stochastic(deep(depth), given)
    path = tmp_path / "model.keras"
    model.save(path)
    for copy in (model, keras.models.load_model(path)):
        first, *rest = ibnn.stochastic_layers(copy)
        assert first.posterior.prior_scale == 0.4
        assert [layer.posterior.prior_scale for layer in rest] == [scale] * (depth - 1)
    # A prior of one's own stays, and so does where z starts.
    own = ibnn.NormalAffine(prior=ibnn.priors.Normal(0.3, loc=1.0), initial_scale=None)
    layer = ibnn.stochastic_layers(to_stochastic(deep(depth), own))[0]
    assert float(layer.posterior.affine.bijector().scale[0]) == pytest.approx(0.3)
    # Only what is converted counts.
    part = to_stochastic(deep(depth), {"layer1": ibnn.NormalAffine()})
    assert ibnn.stochastic_layers(part)[0].posterior.prior_scale == 0.3


@pytest.mark.parametrize("option", ["noise", "kl_reduction"])
def test_options_are_checked_whatever_the_posterior(option):
    with pytest.raises(ValueError, match=f"`{option}` must be"):
        to_stochastic(deep(3), ibnn.MeanField(), **{option: "none"})
