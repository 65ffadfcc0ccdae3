"""Layers that are quantized before they become stochastic, or after, and those that refuse it."""

import keras
import numpy as np
import pytest
from keras import layers

import tfp_ibnn as ibnn
from tests.layer_checklist import numpy, predict_without_noise, stir

pytestmark = pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize`")

MODES = ("int8", "int4", "float8")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 5, 6)).astype("float32")


def network():
    keras.utils.set_random_seed(0)
    mix = layers.EinsumDense("abc,cd->abd", (None, 7), bias_axes="d", activation="tanh")
    model = keras.Sequential([keras.Input((5, 6)), layers.Dense(8, "relu"), mix, layers.Dense(4)])
    for weight in model.weights:
        weight.assign(0.5 * RNG.normal(size=weight.shape))
    return model


def stochastic(model, posterior=None, **options):
    posterior = posterior or ibnn.NormalAffine(initial_scale=0.3, seed=0)
    return ibnn.to_stochastic(model, posterior, train_size=10, **options)


def is_folded(model):
    expected = predict_without_noise(model, X)
    np.testing.assert_allclose(numpy(ibnn.to_deterministic(model)(X)), expected, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_quantized_network_becomes_stochastic(mode, tmp_path):
    model = network()
    model.quantize(mode)
    sto = stochastic(model)
    np.testing.assert_allclose(predict_without_noise(sto, X), numpy(model(X)), atol=1e-6)
    stir(sto)
    is_folded(sto)
    first = ibnn.stochastic_layers(sto)[0]
    z = RNG.normal(size=(2, 6)).astype("float32")
    with ibnn.noise.scope(groups=2, draws={first: z}):
        got = numpy(first(X))
    expected = numpy(model.layers[0](X * np.repeat(z, 3, axis=0)[:, None]))
    np.testing.assert_allclose(got, expected, atol=1e-5)
    if mode == "int8":
        sto.save(tmp_path / "sto.keras")
        again = keras.saving.load_model(tmp_path / "sto.keras")
        expected = predict_without_noise(sto, X)
        np.testing.assert_allclose(predict_without_noise(again, X), expected, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_a_stochastic_network_is_quantized(mode, int8):
    sto = stochastic(network())
    stir(sto)
    before = predict_without_noise(sto, X)
    sto.quantize(mode)
    assert {layer.layer.quantization_mode for layer in ibnn.stochastic_layers(sto)} == {mode}
    change = np.abs(predict_without_noise(sto, X) - before).max()
    assert 0 < change < 2
    is_folded(sto)


@pytest.mark.once
def test_a_network_with_stacked_flows_is_quantized():
    """A stack keeps a flow that it only copies."""
    flow = ibnn.flows.Stack(ibnn.flows.Planar(), 2)
    sto = stochastic(network(), ibnn.FlowPosterior([flow]))
    before = predict_without_noise(sto, X)
    sto.quantize("float8")
    assert 0 < np.abs(predict_without_noise(sto, X) - before).max() < 2


def test_other_layers_stay_quantized():
    model = network()
    model.quantize("int8")
    sto = stochastic(model, {model.layers[-1].name: ibnn.NormalAffine()})
    np.testing.assert_allclose(predict_without_noise(sto, X), numpy(model(X)), atol=1e-6)


def test_a_quantized_layer_with_an_adapter():
    model = network()
    model.quantize("int8")
    for layer in model.layers:
        layer.enable_lora(2, lora_alpha=3)
        layer.lora_kernel_b.assign(RNG.normal(size=layer.lora_kernel_b.shape))
    sto = stochastic(model)
    np.testing.assert_allclose(predict_without_noise(sto, X), numpy(model(X)), atol=1e-5)
    stir(sto)
    is_folded(sto)


@pytest.mark.parametrize(
    "posterior", [ibnn.MeanField(), ibnn.NormalAffine(sides="both")], ids=["mean-field", "both"]
)
def test_what_needs_the_kernel_itself_is_not_quantized(posterior, int8):
    sto = stochastic(network(), posterior)
    expected = predict_without_noise(sto, X)
    with pytest.warns(UserWarning, match=r"does not allow `quantize` on the layer inside"):
        sto.quantize("int8")
    np.testing.assert_array_equal(predict_without_noise(sto, X), expected)
    with pytest.raises(NotImplementedError, match=r"Call it on what ibnn.to_deterministic"):
        ibnn.stochastic_layers(sto)[0].layer.quantize("int4")
    plain = ibnn.to_deterministic(sto)
    plain.quantize("int8")
    np.testing.assert_allclose(numpy(plain(X)), expected, atol=0.5)


def test_a_quantized_kernel_is_refused():
    model = network()
    model.quantize("int8")
    with pytest.raises(ValueError, match="which needs a posterior over z"):
        stochastic(model, ibnn.MeanField())
    with pytest.raises(ValueError, match="without quantization or LoRA"):
        ibnn.MeanField().wrap(model.layers[0], 10).build((None, 5, 6))
    with pytest.raises(ValueError, match="not quantized.*Use sides='input'"):
        stochastic(model, ibnn.NormalAffine(sides="both"))


def test_gptq_needs_its_calibration():
    model = network()
    config = keras.quantizers.GPTQConfig(dataset=[X[:1]], tokenizer=None)
    model.layers[0].quantize("gptq", config=config)
    with pytest.raises(ValueError, match="quantized by 'gptq' and not calibrated yet"):
        stochastic(model)

    layer = model.layers[0]
    layer.quantized_kernel.assign(RNG.integers(0, 255, layer.quantized_kernel.shape))
    layer.kernel_scale.assign(RNG.uniform(0.01, 0.02, layer.kernel_scale.shape))
    layer.is_gptq_calibrated = True
    sto = stochastic(model)
    np.testing.assert_allclose(predict_without_noise(sto, X), numpy(model(X)), atol=1e-5)
    is_folded(sto)


def test_attention_is_quantized_after_the_conversion(int8):
    """Keras's own files lose what is quantized inside of attention."""
    inputs = keras.Input((5, 6))
    model = keras.Model(inputs, layers.MultiHeadAttention(2, 3)(inputs, inputs))
    sto = stochastic(model)
    before = predict_without_noise(sto, X)
    sto.quantize("int8")
    np.testing.assert_allclose(predict_without_noise(sto, X), before, atol=0.1)
    model.quantize("int8")
    with pytest.raises(ValueError, match="query' is quantized, but the config"):
        stochastic(model)


def test_a_policy_that_quantizes():
    layer = ibnn.StochasticDense(3, dtype="int8_from_mixed_bfloat16", train_size=10)
    assert layer.dtype_policy.name == "mixed_bfloat16"
    assert keras.backend.standardize_dtype(layer(X[0]).dtype) == "bfloat16"
