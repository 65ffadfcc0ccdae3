"""Posteriors on adapters: layers on which `enable_lora` was called."""

import keras
import numpy as np
import pytest
from keras import layers

import tfp_ibnn as ibnn
from tests.layer_checklist import numpy, predict_without_noise, stir
from tests.precision import at_least
from tfp_ibnn.layers.adapter import StochasticAdapter

RNG = np.random.default_rng(0)
POSTERIORS = {
    "gaussian": lambda: ibnn.NormalAffine(initial_scale=0.3, seed=0),
    "planar": lambda: ibnn.NormalPlanar1d(initial_scale=0.3, seed=0),
}


def image(size):
    return RNG.normal(size=(8, *size)).astype("float32")


CASES = {
    "dense": ((6,), lambda: layers.Dense(5, "relu")),
    "no bias": ((3, 6), lambda: layers.Dense(5, use_bias=False)),
    "einsum": ((3, 6), lambda: layers.EinsumDense("abc,cde->abde", (None, 2, 5), bias_axes="de")),
    "convolution": ((7, 7, 6), lambda: layers.Conv2D(5, 3, strides=2, activation="tanh")),
}


def adapted(name, rank=2, alpha=3):
    """A model of one layer with LoRA that does something, and inputs for it."""
    keras.utils.set_random_seed(0)
    shape, make = CASES[name]
    model = keras.Sequential([keras.Input(shape), make()])
    (layer,) = model.layers
    layer.enable_lora(rank, lora_alpha=alpha)
    layer.lora_kernel_b.assign(RNG.normal(size=layer.lora_kernel_b.shape))
    return model, image(shape)


def stochastic(model, posterior="gaussian", **options):
    return ibnn.to_stochastic(model, POSTERIORS[posterior](), train_size=8, **options)


@pytest.mark.parametrize("posterior", POSTERIORS)
@pytest.mark.parametrize("name", CASES)
def test_without_noise_it_is_the_layer(name, posterior):
    model, x = adapted(name)
    sto = stochastic(model, posterior)
    (layer,) = ibnn.stochastic_layers(sto)
    assert isinstance(layer, StochasticAdapter)
    assert layer.posterior.channels == 2
    mean = numpy(layer.posterior.mean())
    if posterior == "gaussian":
        np.testing.assert_allclose(mean, 1)
    model.layers[0].lora_kernel_a.assign(model.layers[0].lora_kernel_a * mean)
    with ibnn.noise_off(sto):
        np.testing.assert_allclose(numpy(sto(x)), numpy(model(x)), atol=2 * at_least(5e-6))


def test_a_bias_as_long_as_the_sequence():
    """On TensorFlow Keras adds it along the sequence: so does the copy of a trained layer."""
    inputs = keras.Input((2, 3))
    outputs = layers.EinsumDense("abc,cde->abde", (None, 2, 1), bias_axes="de")(inputs)
    model = keras.Model(inputs, outputs)
    model.layers[1].bias.assign([[1.0], [-1.0]])
    model.layers[1].enable_lora(2)
    sto = stochastic(model)
    x = image((2, 3))
    with ibnn.noise_off(sto):
        np.testing.assert_allclose(numpy(sto(x)), numpy(model(x)), atol=at_least(5e-6))
    back = ibnn.to_deterministic(sto)
    assert back.layers[-1].lora_rank == 2
    np.testing.assert_allclose(numpy(back(x)), numpy(model(x)), atol=2 * at_least(5e-6))
    assert [w.trainable for w in back.weights] == [w.trainable for w in model.weights]


@pytest.mark.parametrize("name", CASES)
def test_a_draw_is_the_layer_with_z_between_its_kernels(name, full_precision):
    model, x = adapted(name)
    (layer,) = ibnn.stochastic_layers(stochastic(model))
    z = RNG.normal(size=(8, 2)).astype("float32")
    found = numpy(layer.apply(x, z))
    plain = model.layers[0]
    first = numpy(plain.lora_kernel_a)
    for number, row in enumerate(z):
        plain.lora_kernel_a.assign(first * row)
        right = numpy(plain(x[number : number + 1]))
        np.testing.assert_allclose(found[number : number + 1], right, atol=1e-4)


def test_what_is_trained_is_the_adapter_and_its_posterior():
    model, x = adapted("dense")
    sto = stochastic(model)
    names = sorted(weight.name for weight in sto.trainable_weights)
    assert names == ["bias", "lora_kernel_a", "lora_kernel_b", "raw_scale", "shift"]
    sto.compile("adam", "mse")
    before = {weight.path: numpy(weight) for weight in sto.weights}
    sto.fit(x, RNG.normal(size=(8, 5)), epochs=2, verbose=0)
    changed = {w.name for w in sto.weights if not np.array_equal(numpy(w), before[w.path])}
    assert changed >= set(names)
    assert "kernel" not in changed
    (layer,) = model.layers
    np.testing.assert_array_equal(numpy(layer._kernel), before[f"{layer.name}/kernel"])


@pytest.mark.slow
def test_files_and_averages(tmp_path):
    model, x = adapted("einsum")
    sto = stochastic(model, "planar")
    mc = ibnn.MonteCarlo(sto, samples=6, seed=0, head="point")
    found = mc.predict(x, verbose=0)
    assert found["epistemic"].min() > 0
    mc.save(tmp_path / "mc.keras")
    again = keras.saving.load_model(tmp_path / "mc.keras")
    np.testing.assert_allclose(again.predict(x, verbose=0)["mean"], found["mean"], atol=1e-5)
    trainable = [[w.trainable for w in m.inner.weights] for m in (mc, again)]
    assert trainable[0] == trainable[1]


def test_inside_of_attention(tmp_path):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3, 4))
    attention = layers.MultiHeadAttention(2, 3, name="attention")
    outputs = layers.Dense(2, "softmax")(layers.GlobalAveragePooling1D()(attention(inputs, inputs)))
    model = keras.Model(inputs, outputs)
    for layer in (attention.query_dense, attention.value_dense):
        layer.enable_lora(2)
        layer.lora_kernel_b.assign(RNG.normal(size=layer.lora_kernel_b.shape))
    posterior = {"attention/(query|value)": POSTERIORS["gaussian"]()}
    sto, x = ibnn.to_stochastic(model, posterior, train_size=8), image((3, 4))
    found = ibnn.stochastic_layers(sto)
    assert [type(layer) for layer in found] == [StochasticAdapter] * 2
    with ibnn.noise_off(sto):
        np.testing.assert_allclose(numpy(sto(x)), numpy(model(x)), atol=1e-5)
    sto.save(tmp_path / "sto.keras")
    again = keras.saving.load_model(tmp_path / "sto.keras")
    with ibnn.noise_off(sto), ibnn.noise_off(again):
        np.testing.assert_allclose(numpy(again(x)), numpy(sto(x)), atol=1e-6)
    back = ibnn.to_deterministic(sto)
    np.testing.assert_allclose(numpy(back(x)), numpy(model(x)), atol=1e-5)


@pytest.mark.parametrize("equation", ["ab,cb->ac", "abc,cd->adb"])
def test_other_equations_have_noise_on_their_input(equation):
    shape = (6,) if equation.startswith("ab,") else (3, 6)
    output = (5,) if equation.startswith("ab,") else (5, 3)
    model = keras.Sequential([keras.Input(shape), layers.EinsumDense(equation, output)])
    model.layers[0].enable_lora(2)
    sto = stochastic(model)
    assert type(ibnn.stochastic_layers(sto)[0]) is ibnn.Stochastic
    assert numpy(sto(image(shape))).shape == (8, *output)


NEITHER = {
    "groups": ((7, 7, 6), lambda: layers.Conv2D(4, 3, groups=2)),
    "other equation": ((3, 6), lambda: layers.EinsumDense("abc,cd->adb", (5, 3))),
    "other kernel": ((6,), lambda: layers.EinsumDense("ab,cb->ac", (5,))),
    "dense": ((6,), lambda: layers.Dense(5, "relu")),
}


# A Dense layer that has its adapter before becomes a `StochasticAdapter`; sides="both" needs the
# channels of the output on the last axis of the kernel.
@pytest.mark.parametrize(
    ("name", "when", "posterior"),
    [
        *((name, "before", "gaussian") for name in NEITHER if name != "dense"),
        *((name, "after", "gaussian") for name in NEITHER),
        *(("groups", when, "both") for when in ("before", "after")),
        *(("dense", "after", "both"), ("other kernel", "after", "both")),
    ],
)
def test_what_other_adapters_add_is_folded_too(name, when, posterior):
    keras.utils.set_random_seed(0)
    shape, make = NEITHER[name]
    model = keras.Sequential([keras.Input(shape), make()])
    both = ibnn.NormalAffine(initial_scale=0.3, sides="both")
    template = both if posterior == "both" else POSTERIORS[posterior]()

    def enable(layer):
        layer.enable_lora(2, lora_alpha=3)
        layer.lora_kernel_b.assign(RNG.normal(size=layer.lora_kernel_b.shape))

    if when == "before":
        enable(model.layers[0])
    sto = ibnn.to_stochastic(model, template, train_size=8)
    (layer,) = ibnn.stochastic_layers(sto)
    if when == "after":
        enable(layer.layer)
    stir(sto)
    x = image(shape)
    expected = predict_without_noise(sto, x)
    back = ibnn.to_deterministic(sto)
    np.testing.assert_allclose(numpy(back(x)), expected, atol=3 * at_least(1e-5))
    assert back.layers[-1].lora_alpha == 3
    np.testing.assert_array_equal(numpy(back.layers[-1].lora_kernel_b), 0)
    with ibnn.noise_off(sto):  # the original is as it was
        np.testing.assert_allclose(numpy(sto(x)), expected, atol=at_least(1e-6))


def test_regularizers_and_penalties_stay():
    keras.utils.set_random_seed(0)
    options = {"kernel_regularizer": "l2", "activity_regularizer": "l1"}
    model = keras.Sequential([keras.Input((6,)), layers.Dense(5, **options)])
    model.layers[0].enable_lora(2)
    model.layers[0].lora_kernel_b.assign(RNG.normal(size=(2, 5)))
    sto, x = stochastic(model), image((6,))
    model(x)
    expected = [float(loss) for loss in model.losses]
    with ibnn.noise_off(sto):
        sto(x)
    found = [float(loss) for loss in sto.losses if float(loss)]
    assert len(expected) == 3
    np.testing.assert_allclose(sorted(found), sorted(expected), rtol=1e-5)
    with ibnn.noise_off(sto):
        again = ibnn.to_deterministic(sto)
    again(x)
    np.testing.assert_allclose([float(loss) for loss in again.losses], expected, rtol=1e-5)


@pytest.mark.parametrize(("outer", "given"), [("mixed_float16", "float16"), ("float64", "float64")])
def test_the_type_of_the_output_is_that_of_the_layer_inside(outer, given):
    inner = "float32"
    rank_one = ibnn.NormalAffine(sides="both")
    made = {
        "adapter": StochasticAdapter(layers.Dense(3, dtype=inner), train_size=8, dtype=outer),
        "both": ibnn.Stochastic(layers.Dense(3, dtype=inner), rank_one, train_size=8, dtype=outer),
    }
    for layer in made.values():
        y = layer(image((6,)), training=True)
        assert keras.backend.standardize_dtype(y.dtype) == inner
        assert layer.compute_output_spec(keras.KerasTensor((8, 6), given)).dtype == inner


def test_adapters_that_do_not_fit_are_refused():
    grouped = layers.Conv2D(4, 3, groups=2, lora_rank=2)
    grouped.build((None, 7, 7, 6))
    with pytest.raises(ValueError, match="Use ibnn.Stochastic"):
        StochasticAdapter(grouped, train_size=8)
    model, _ = adapted("dense")
    with pytest.raises(ValueError, match="layers without LoRA.*Use sides='input'"):
        ibnn.to_stochastic(model, ibnn.NormalAffine(sides="both"), train_size=8)
    (layer,) = ibnn.stochastic_layers(stochastic(model))
    with pytest.raises(NotImplementedError, match="does not allow `enable_lora`"):
        layer.layer.enable_lora(2)


def test_posteriors_over_weights_leave_adapters_alone():
    model, _ = adapted("dense")
    with pytest.raises(ValueError, match="which needs a posterior over z"):
        ibnn.to_stochastic(model, ibnn.MeanField(), train_size=8)


@pytest.mark.parametrize("kind", ["adapter", "cell"])
def test_noise_at_positions_is_refused(kind):
    model, _ = adapted("no bias")
    if kind == "cell":
        model = keras.Sequential([keras.Input((3, 4)), layers.LSTM(2)])
    with pytest.raises(ValueError, match=r"`noise` must be 'channel' for \w+"):
        stochastic(model, noise="position")
