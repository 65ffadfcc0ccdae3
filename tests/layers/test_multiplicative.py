import inspect

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfp_ibnn as ibnn
from tests.layer_checklist import (
    check_layer,
    numpy,
    predict_without_noise,
    z_of,
)
from tests.layers.tools import POSTERIORS, N, data, fit, identity, unchanged, values

JAX = keras.backend.backend() == "jax"


@keras.saving.register_keras_serializable(package="tests")
class MaskedMean(layers.Layer):
    """A dense layer and the mean over the time steps that are not masked."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(input_shape[-1], 2), name="kernel")

    def call(self, inputs, mask=None):
        y = inputs @ ops.cast(self.kernel, inputs.dtype)
        if mask is None:
            return ops.mean(y, axis=1)
        mask = ops.cast(mask, y.dtype)[..., None]
        return ops.sum(y * mask, axis=1) / ops.sum(mask, axis=1)

    def compute_mask(self, inputs, previous_mask):
        return None

    def compute_output_shape(self, input_shape):
        return (input_shape[0], 2)


# Name -> (a function that makes a layer, shape of the input, shape of the output). All have as many
# channels, which spares JAX some compilation.
LAYERS = {
    "dense": (lambda: layers.Dense(3), (4,), (3,)),
    "dense-rank-3": (lambda: layers.Dense(3, use_bias=False), (5, 4), (5, 3)),
    "conv1d": (lambda: layers.Conv1D(3, 2), (5, 4), (4, 3)),
    "conv2d": (lambda: layers.Conv2D(3, 2), (5, 3, 4), (4, 2, 3)),
    "conv3d": (lambda: layers.Conv3D(3, 2), (3, 3, 3, 4), (2, 2, 2, 3)),
    "depthwise": (lambda: layers.DepthwiseConv2D(2, depth_multiplier=2), (5, 3, 4), (4, 2, 8)),
    "separable": (lambda: layers.SeparableConv2D(3, 2), (5, 3, 4), (4, 2, 3)),
    "transpose": (lambda: layers.Conv2DTranspose(3, 2), (5, 3, 4), (6, 4, 3)),
    "einsum": (lambda: layers.EinsumDense("abc,cd->abd", (5, 3), bias_axes="d"), (5, 4), (5, 3)),
    "masked": (MaskedMean, (5, 4), (2,)),
}


# The checklist.


@pytest.mark.parametrize("name", LAYERS)
def test_checklist_of_wrapped_layers(eagerly, name, tmp_path):
    make, input_shape, output_shape = LAYERS[name]
    plain = make()
    plain.build((None, *input_shape))
    check_layer(
        lambda: ibnn.Stochastic(make(), train_size=N),
        input_shape,
        output_shape=output_shape,
        trainable=len(plain.trainable_weights) + 2,
        non_trainable=len(plain.non_trainable_weights) + 2,
        folder=tmp_path,
    )


@pytest.mark.parametrize(
    "name", ["planar", "mixture", pytest.param("base-mixture", marks=pytest.mark.slow)]
)
def test_checklist_of_posteriors(name, tmp_path):
    posterior = POSTERIORS[name](initial_scale=0.3)
    posterior.build((None, 4))
    check_layer(
        lambda: ibnn.StochasticDense(
            3, posterior=POSTERIORS[name](initial_scale=0.3), train_size=N
        ),
        (4,),
        output_shape=(3,),
        trainable=2 + len(posterior.trainable_weights),
        non_trainable=1 + len(posterior.non_trainable_weights),
        folder=tmp_path,
    )


def test_checklist_of_stochastic_conv2d_with_position_noise(tmp_path):
    check_layer(
        lambda: ibnn.StochasticConv2D(
            3, 2, noise="position", kl_reduction="mean", train_size=N, seed=3
        ),
        (4, 4, 2),
        output_shape=(3, 3, 3),
        trainable=4,
        non_trainable=2,
        folder=tmp_path,
    )


# What the layer computes.


@pytest.mark.parametrize("name", LAYERS)
def test_output_is_the_layer_of_z_times_x(name):
    make, input_shape, _ = LAYERS[name]
    layer = ibnn.Stochastic(make(), train_size=N)
    x = data(6, *input_shape)
    y, z = z_of(layer, x)
    assert z.shape == (6, input_shape[-1])
    spread = z.reshape(6, *(1,) * (len(input_shape) - 1), -1)
    np.testing.assert_allclose(y, numpy(layer.layer(x * spread)), rtol=1e-5, atol=1e-5)


def test_channel_noise_is_constant_over_positions():
    z = numpy(identity()(np.ones((3, 4, 5, 2), "float32")))
    np.testing.assert_array_equal(z, np.broadcast_to(z[:, :1, :1], z.shape))
    assert np.unique(z).size == 3 * 2


def test_position_noise_differs_between_positions():
    z = numpy(identity(noise="position")(np.ones((3, 4, 5, 2), "float32")))
    assert np.unique(z).size == z.size


@pytest.mark.parametrize("noise", ["channel", "position"])
def test_noise_of_one_group_is_shared_by_the_batch(noise):
    layer = identity(noise=noise)
    y, _ = z_of(layer, np.ones((4, 3, 2), "float32"), groups=1)
    np.testing.assert_array_equal(y, np.broadcast_to(y[:1], y.shape))
    y, _ = z_of(layer, np.ones((4, 3, 2), "float32"), groups=2)
    np.testing.assert_array_equal(y[0], y[1])
    np.testing.assert_array_equal(y[2], y[3])
    assert np.all(y[0] != y[2])


def test_examples_have_their_own_noise():
    z = numpy(identity()(np.ones((8, 3), "float32")))
    assert np.unique(z).size == z.size


@pytest.mark.parametrize("noise", ["channel", "position"])
def test_noise_has_the_distribution_of_the_posterior(noise):
    layer = identity(ibnn.NormalAffine(prior_loc=0.5, initial_scale=0.2), noise=noise)
    z = numpy(layer(np.ones((2000, 3, 2), "float32")))[:, 0]
    np.testing.assert_allclose(z.mean(axis=0), 0.5, atol=0.03)
    np.testing.assert_allclose(z.std(axis=0), 0.2, atol=0.02)


def kl_of(layer, x):
    layer(x)
    (loss,) = layer.losses
    return float(loss) * N


@pytest.mark.parametrize(
    ("noise", "reduction", "times"),
    [
        ("channel", "sum", 1),
        ("channel", "mean", 1),
        ("position", "sum", 20),
        ("position", "mean", 1),
    ],
)
def test_kl_over_positions(noise, reduction, times):
    posterior = ibnn.NormalAffine(initial_scale=0.2, prior_scale=0.5, beta=1.0)
    layer = identity(posterior, noise=noise, kl_reduction=reduction)
    ratio = 0.2 / 0.5
    one = 2 * (-np.log(ratio) + (ratio**2 - 1) / 2)
    np.testing.assert_allclose(kl_of(layer, data(3, 4, 5, 2)), times * one, rtol=1e-4)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_both_noises_are_one_on_rank_2(reduction):
    x = np.ones((4, 3), "float32")
    found = []
    for noise in ("channel", "position"):
        layer = identity(
            ibnn.NormalPlanar1d(initial_scale=0.2), noise=noise, kl_reduction=reduction, seed=1
        )
        y = numpy(layer(x))
        found.append((y, float(layer.losses[0])))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] != 0


def test_loss_has_beta_and_gamma():
    layer = identity(ibnn.NormalAffine(initial_scale=0.2, beta=0.5, gamma=0.25))
    kl = float(numpy(identity_summary(layer).kl))
    entropy = float(numpy(layer.posterior.entropy()))
    np.testing.assert_allclose(kl_of(layer, data(3, 2)), 0.5 * kl - 0.25 * entropy, rtol=1e-5)
    layer.posterior.beta.assign(0.0)
    np.testing.assert_allclose(kl_of(layer, data(3, 2)), -0.25 * entropy, rtol=1e-5)


def identity_summary(layer):
    layer.build((None, 2))
    return layer.posterior.summary()


def test_channels_first_is_refused():
    layer = layers.Conv2D(2, 3, data_format="channels_first", name="mine")
    with pytest.raises(ValueError, match="channels last; 'mine' has them first"):
        ibnn.Stochastic(layer, train_size=N)


def test_unknown_positions():
    layer = ibnn.StochasticConv2D(2, 3, noise="position", train_size=N)
    inputs = keras.Input((None, None, 3))
    model = keras.Model(inputs, layer(inputs))
    assert model.predict(data(2, 6, 7, 3), verbose=0).shape == (2, 4, 5, 2)
    assert model.predict(data(2, 4, 4, 3), verbose=0).shape == (2, 2, 2, 2)


@pytest.mark.parametrize(
    ("first", "second"), [((4,), (2,)), ((4,), (1,)), ((1,), (4,)), ((4,), ()), ((2, 2), (4,))]
)
def test_positions_of_two_calls_must_agree(first, second):
    layer = identity(noise="position", name="twice")
    with ibnn.noise.scope():
        layer(np.ones((3, *first, 5)))
        with pytest.raises(ValueError, match=r"'twice'.*has noise='position'.*noise='channel'"):
            layer(np.ones((3, *second, 5)))
    with ibnn.noise.scope():  # another pass may have others
        assert layer(np.ones((3, *second, 5))).shape == (3, *second, 5)


@pytest.mark.filterwarnings("ignore:.*retracing")
def test_an_unknown_number_of_positions_is_not_taken_for_one():
    inputs = keras.Input((None, 2))
    layer = identity(noise="position")
    pooled = layers.GlobalAveragePooling1D(keepdims=True)(layer(inputs))
    model = keras.Model(inputs, layer(pooled))
    assert model.predict(data(1, 1, 2), verbose=0).shape == (1, 1, 2)
    with pytest.raises(Exception, match=r"Input to reshape|noise='position'"):
        model.predict(data(1, 4, 2), verbose=0)


def test_layer_called_twice_has_one_z_and_one_kl():
    layer = identity(ibnn.NormalAffine(initial_scale=0.2))
    inputs = keras.Input((3,))
    model = keras.Model(inputs, [layer(inputs), layer(2 * inputs)])
    x = np.ones((4, 3), "float32")
    first, second = map(numpy, model(x))
    np.testing.assert_allclose(second, 2 * first, rtol=1e-6)
    assert len(model.losses) == 1
    first, second = model.predict(x, verbose=0)
    np.testing.assert_allclose(second, 2 * first, rtol=1e-6)
    again, _ = model.predict(x, verbose=0)
    assert np.all(again != first)


def test_wrapped_layer_keeps_its_training_behaviour():
    layer = ibnn.Stochastic(layers.Dropout(0.5), ibnn.NormalAffine(initial_scale=0.1), train_size=N)
    x = np.ones((50, 4), "float32")
    assert np.any(numpy(layer(x, training=True)) == 0)
    assert not np.any(numpy(layer(x, training=False)) == 0)


def test_regularizer_of_the_wrapped_layer_stays_in_the_loss():
    posterior = ibnn.NormalAffine(initial_scale=None)
    layer = ibnn.StochasticDense(3, posterior=posterior, kernel_regularizer="l2", train_size=N)
    layer(data(2, 4))
    kernel = numpy(layer.layer.kernel.value)
    np.testing.assert_allclose(
        sum(float(loss) for loss in layer.losses), 0.01 * np.sum(kernel**2), rtol=1e-4
    )


# Plain arguments.


def test_stochastic_dense_takes_plain_arguments():
    layer = ibnn.StochasticDense(
        3,
        "relu",
        use_bias=False,
        kernel_initializer="ones",
        kernel_regularizer=keras.regularizers.L2(0.1),
        posterior=ibnn.NormalPlanar1d(prior_scale=0.3),
        train_size=7,
        noise="position",
        kl_reduction="mean",
        seed=5,
        name="first",
        dtype="float64",
    )
    again = type(layer).from_config(layer.get_config())
    for one in (layer, again):
        inner = one.layer
        assert type(one) is ibnn.StochasticDense
        assert isinstance(inner, layers.Dense)
        assert (inner.units, inner.use_bias) == (3, False)
        assert inner.activation is keras.activations.relu
        assert isinstance(inner.kernel_initializer, keras.initializers.Ones)
        assert float(inner.kernel_regularizer.l2) == pytest.approx(0.1)
        assert len(one.posterior.flows) == 2
        assert one.posterior.prior_scale == 0.3
        assert one.posterior.seed == 5
        assert (one.train_size, one.noise, one.kl_reduction) == (7, "position", "mean")
        assert one.name == "first"
        assert one.dtype == inner.dtype == one.posterior.dtype == "float64"
    assert again.get_config() == layer.get_config()


def test_stochastic_conv2d_takes_plain_arguments():
    layer = ibnn.StochasticConv2D(
        4, (3, 1), strides=2, padding="same", groups=2, train_size=7, trainable=False
    )
    again = type(layer).from_config(layer.get_config())
    for one in (layer, again):
        inner = one.layer
        assert (inner.filters, inner.kernel_size, inner.strides) == (4, (3, 1), (2, 2))
        assert (inner.padding, inner.groups) == ("same", 2)
        assert not one.trainable
        one(data(2, 6, 6, 4))
        assert not one.trainable_weights
    assert again.get_config() == layer.get_config()


@pytest.mark.parametrize("part", ["deterministic", "stochastic"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: ibnn.StochasticDense(3, train_size=N),
        lambda: ibnn.Stochastic(layers.Dense(3), train_size=N),
    ],
    ids=["StochasticDense", "Stochastic"],
)
def test_frozen_part_stays_frozen_after_loading(make, part, tmp_path):
    model = keras.Sequential([keras.Input((4,)), make()])
    ibnn.freeze(model, part)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    expected = [weight.name for weight in model.trainable_weights]
    assert len(expected) == 2
    assert [weight.name for weight in loaded.trainable_weights] == expected


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"foo": 1}, r"StochasticDense does not take `foo`\. It takes: units, .*posterior"),
        ({"kernel_prior_fn": 1}, r"StochasticDense does not .*docs/from_tfp\.md.*It takes: units"),
    ],
    ids=["unknown", "tfp"],
)
def test_unknown_keywords_of_plain_layers(keywords, message):
    with pytest.raises(TypeError, match=message):
        ibnn.StochasticDense(2, train_size=N, **keywords)


@pytest.mark.once
@pytest.mark.parametrize("name", ["Dense", "Conv2D"])
def test_plain_layers_show_the_arguments_of_keras(name):
    plain = inspect.signature(getattr(layers, name).__init__).parameters
    shown = inspect.signature(getattr(ibnn, f"Stochastic{name}").__init__).parameters
    common = [p for p in plain if p in shown and p != "kwargs"]
    assert [p for p in plain if not p.startswith(("lora_", "quantization_", "kwargs"))] == common
    assert list(shown)[: len(common)] == common
    assert [shown[p].default for p in common] == [plain[p].default for p in common]
    own = inspect.signature(ibnn.Stochastic.__init__).parameters
    given = ("posterior", "train_size", "noise", "kl_reduction", "seed")
    assert [shown[p].default for p in given] == [own[p].default for p in given]


def test_a_layer_without_a_posterior_has_a_gaussian():
    layer = ibnn.Stochastic(layers.Dense(2), train_size=N)
    other = ibnn.Stochastic(layers.Dense(2), ibnn.NormalAffine(), train_size=N)
    assert type(layer.posterior) is ibnn.FlowPosterior
    assert layer.posterior.get_config() == other.posterior.get_config()


def test_a_posterior_over_weights_is_refused():
    message = r"must be one over z; MeanField is over weights: write `MeanField\(...\).wrap"
    with pytest.raises(ValueError, match=message):
        ibnn.Stochastic(layers.Dense(2), ibnn.MeanField(), train_size=N)


# Seeds.


def trained(seed):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((4,)), ibnn.StochasticDense(2, train_size=N)])
    fit(model, epochs=2)
    return values(model.weights)


def test_random_seed_repeats_a_training_run(eagerly):
    first = trained(3)
    assert all(unchanged(first, trained(3)))
    assert not all(unchanged(first, trained(4)))


def test_layers_draw_different_noise():
    x = np.ones((4, 3), "float32")
    assert not np.any(numpy(identity()(x)) == numpy(identity()(x)))


def test_calls_draw_different_noise():
    x = np.ones((4, 3), "float32")
    layer = identity(seed=1)
    assert not np.any(numpy(layer(x)) == numpy(layer(x)))


def test_seed_of_a_layer_fixes_its_noise():
    x = np.ones((4, 3), "float32")
    np.testing.assert_array_equal(numpy(identity(seed=1)(x)), numpy(identity(seed=1)(x)))
    assert not np.any(numpy(identity(seed=1)(x)) == numpy(identity(seed=2)(x)))
    by_template = identity(ibnn.NormalAffine(seed=2))(x)
    np.testing.assert_array_equal(numpy(by_template), numpy(identity(seed=2)(x)))


def test_layers_of_one_seeded_template_draw_different_noise_that_repeats(tmp_path):
    def built():
        template = ibnn.NormalAffine(seed=0)
        inputs = keras.Input((3,))
        own = identity(template, seed=7)
        shared = [identity(template) for _ in range(3)]
        after = identity(shared[1].posterior)
        return keras.Model(inputs, [layer(inputs) for layer in (own, *shared, after)])

    def noise(model):
        return [numpy(z) for z in model(np.ones((4, 3), "float32"))]

    def seeds(model):
        return [layer.posterior.seed for layer in ibnn.stochastic_layers(model)]

    model = built()
    assert seeds(model)[:2] == [7, 0]
    assert len(set(seeds(model))) == 5
    model.save(tmp_path / "model.keras")
    first = noise(model)
    assert not any(np.any(a == b) for i, a in enumerate(first) for b in first[:i])
    for again in (built(), keras.models.load_model(tmp_path / "model.keras")):
        assert seeds(again) == seeds(model)
        np.testing.assert_array_equal(noise(again), first)
    config = keras.models.clone_model(model).get_config()
    assert seeds(keras.Model.from_config(config)) == seeds(model)


def test_template_is_not_shared():
    template = ibnn.NormalAffine()
    first, second = identity(template), identity(template)
    first.build((None, 3))
    second.build((None, 5))
    assert not template.built
    assert (first.posterior.channels, second.posterior.channels) == (3, 5)
    assert first.posterior is not second.posterior


# Masks.


@pytest.mark.parametrize(
    "head", [lambda: layers.LSTM(3), layers.GlobalAveragePooling1D], ids=["lstm", "average"]
)
def test_masks_pass_through(eagerly, head):
    tokens = np.array([[1, 2, 3, 0, 0], [4, 5, 0, 0, 0], [1, 1, 1, 1, 1]])
    embedding, dense, last = layers.Embedding(7, 4, mask_zero=True), layers.Dense(4), head()
    noisy = ibnn.Stochastic(dense, train_size=N)
    inputs = keras.Input((5,), dtype="int32")
    plain = keras.Model(inputs, last(dense(embedding(inputs))))
    model = keras.Model(inputs, last(noisy(embedding(inputs))))
    expected = plain.predict(tokens, verbose=0)
    with ibnn.noise_off(model):
        np.testing.assert_allclose(model.predict(tokens, verbose=0), expected, atol=1e-6)
    unmasked = keras.Model(inputs, last(dense(layers.Dropout(0)(embedding(inputs)) * 1.0)))
    assert np.abs(unmasked.predict(tokens, verbose=0) - expected).max() > 1e-4


def test_mask_reaches_a_layer_that_takes_it():
    tokens = np.array([[1, 2, 3, 0, 0], [4, 5, 0, 0, 0]])
    embedding, mean = layers.Embedding(7, 4, mask_zero=True), MaskedMean()
    inputs = keras.Input((5,), dtype="int32")
    model = keras.Model(inputs, ibnn.Stochastic(mean, train_size=N)(embedding(inputs)))
    embedded = numpy(embedding(tokens))
    expected = numpy(mean(embedded, mask=tokens != 0))
    with ibnn.noise_off(model):
        np.testing.assert_allclose(model.predict(tokens, verbose=0), expected, atol=1e-6)
    assert np.abs(numpy(mean(embedded)) - expected).max() > 1e-4


def test_layer_without_mask_support_ends_the_mask():
    layer = ibnn.Stochastic(layers.Conv1D(2, 2), train_size=N)
    assert not layer.layer.supports_masking
    embedded = layers.Embedding(7, 4, mask_zero=True)(np.array([[1, 2, 0]]))
    assert getattr(layer(embedded), "_keras_mask", None) is None


# Bad arguments.


@pytest.mark.parametrize("make", [ibnn.StochasticDense, ibnn.StochasticConv2D])
def test_missing_train_size_is_explained(make):
    with pytest.raises(ValueError, match="`train_size` is missing.*number of training examples"):
        make(3, *([3] if make is ibnn.StochasticConv2D else []))
    with pytest.raises(ValueError, match="`train_size` is missing.*number of training examples"):
        ibnn.Stochastic(layers.Dense(3))


@pytest.mark.parametrize("value", [0, -1, 2.5, float("nan"), "x", True])
def test_bad_train_size(value):
    with pytest.raises(ValueError, match="`train_size`") as caught:
        ibnn.StochasticDense(3, train_size=value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("kwargs", "argument", "value"),
    [
        ({"noise": "pixel"}, "`noise`", "'pixel'"),
        ({"kl_reduction": "max"}, "`kl_reduction`", "'max'"),
        ({"posterior": ibnn.NormalAffine}, "`posterior`", "must be called"),
        ({"posterior": "planar"}, "`posterior`", "'planar'"),
        ({"posterior": ibnn.flows.Planar()}, "`posterior`", "Planar"),
    ],
)
def test_bad_arguments(kwargs, argument, value):
    with pytest.raises(ValueError, match=argument) as caught:
        ibnn.StochasticDense(3, train_size=N, **kwargs)
    assert value in str(caught.value)


def test_stochastic_layers_are_not_wrapped_again():
    with pytest.raises(ValueError, match="`layer` is already stochastic: 'mine'"):
        ibnn.Stochastic(ibnn.StochasticDense(3, train_size=N, name="mine"), train_size=N)


@pytest.mark.parametrize("value", ["dense", layers.Dense, None])
def test_layer_must_be_a_layer(value):
    with pytest.raises(ValueError, match="layer"):
        ibnn.Stochastic(value, train_size=N)


@pytest.mark.parametrize("symbolic", [False, True])
def test_integer_input_of_other_layers_is_refused(symbolic):
    x = keras.Input((3,), dtype="int32") if symbolic else np.ones((2, 3), "int32")
    with pytest.raises(ValueError, match="floating-point input; got int32.*leave Embedding"):
        ibnn.Stochastic(layers.Embedding(5, 2), train_size=N)(x)


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool"])
def test_numbers_are_cast_as_keras_does(dtype, policy):
    policy("mixed_bfloat16")
    x = np.random.default_rng(0).integers(0, 2, size=(6, 4)).astype(dtype)
    plain = layers.Dense(2)
    expected = numpy(plain(x))
    layer = ibnn.Stochastic(plain, train_size=N)
    assert layer(keras.Input((4,), dtype=dtype)).dtype == "bfloat16"
    y, z = z_of(layer, x)
    np.testing.assert_allclose(y, numpy(plain(x * z)), rtol=0.1, atol=0.05)
    np.testing.assert_array_equal(predict_without_noise(layer, x), expected)


@pytest.mark.parametrize("built", [False, True])
def test_several_inputs_are_refused(built):
    layer = ibnn.Stochastic(layers.Add(), train_size=N, name="sum")
    x = data(2, 3)
    if built:
        layer.built = True
    with pytest.raises(ValueError, match="'sum'.*one"):
        layer([x, x])


def test_rank_1_is_refused():
    with pytest.raises(ValueError, match=r"'first'.*\(batch, ..., channels\); got \(3,\)"):
        ibnn.StochasticDense(2, train_size=N, name="first")(np.ones(3, "float32"))


def test_unknown_channels_are_refused():
    with pytest.raises(ValueError, match="known size") as caught:
        ibnn.Stochastic(layers.Dense(2), train_size=N, name="first")(keras.Input((None,)))
    assert "'first'" in str(caught.value)


def test_draws_that_do_not_fit_the_batch():
    layer = identity(name="mine")
    with pytest.raises(ValueError, match="'mine' has 2 draws.*batch of 5"):
        z_of(layer, np.ones((5, 3), "float32"), groups=2)
