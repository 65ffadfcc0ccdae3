"""Subclasses of the layers that can be converted: nothing is known of how they use a kernel."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfp_ibnn as ibnn
from tests.layer_checklist import numpy, predict_without_noise, stir
from tfp_ibnn.layers.mean_field import Explicit

RNG = np.random.default_rng(0)


@keras.saving.register_keras_serializable(package="tests")
class StandardizedConv2D(layers.Conv2D):
    """A convolution by its kernel less the mean, over the standard deviation."""

    def convolution_op(self, inputs, kernel):
        kernel = ops.cast(kernel, inputs.dtype)
        mean, variance = ops.moments(kernel, axes=(0, 1, 2), keepdims=True)
        return super().convolution_op(inputs, (kernel - mean) / ops.sqrt(variance + 1e-6))


@keras.saving.register_keras_serializable(package="tests")
class NormalizedDense(layers.Dense):
    """A Dense layer with columns of length 1, a gain, and something behind its activation."""

    def build(self, input_shape):
        self.gain = self.add_weight((self.units,), "ones", name="gain")  # before the kernel
        super().build(input_shape)

    def call(self, inputs, training=False, mask=None):
        length = ops.sqrt(ops.sum(ops.square(self.kernel), axis=0))
        outputs = self.gain * ops.matmul(inputs, self.kernel / length) + self.bias
        outputs = 1 + self.activation(outputs)
        outputs = 2 * outputs if training else outputs
        return outputs if mask is None else outputs * ops.cast(mask, outputs.dtype)[..., None]


@keras.saving.register_keras_serializable(package="tests")
class SubclassedCell(layers.GRUCell):
    """A cell that may do anything with its state."""


KINDS = {
    "convolution": (lambda **options: StandardizedConv2D(4, 3, **options), (6, 6, 3)),
    "dense": (lambda **options: NormalizedDense(4, "relu", **options), (5, 3)),
}


def network(kind, **options):
    keras.utils.set_random_seed(0)
    make, shape = KINDS[kind]
    model = keras.Sequential([keras.Input(shape), make(**options)])
    for weight in model.weights:
        weight.assign(weight + 0.3 * RNG.normal(size=weight.shape))
    return model, RNG.normal(size=(6, *shape)).astype("float32")


def outputs_at(layer, x, weights, **options):
    """Return what the layer itself gives with other kernels and biases."""
    before = [(getattr(layer, name), numpy(getattr(layer, name))) for name in weights]
    for variable, _ in before:
        variable.assign(weights[variable.name])
    outputs = numpy(ops.cast(layer(x, **options), "float32"))
    for variable, value in before:
        variable.assign(value)
    return outputs


@pytest.mark.parametrize("kind", KINDS)
def test_a_mean_of_z_is_applied_by_a_rescaling(kind):
    model, x = network(kind)
    sto = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=10)
    stir(sto)
    expected = predict_without_noise(sto, x)
    assert np.abs(expected - numpy(model(x))).max() > 0.05
    np.testing.assert_allclose(numpy(ibnn.to_deterministic(sto)(x)), expected, atol=1e-5)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_mean_field_gives_the_layer_a_draw_of_its_weights(kind, policy, training):
    model, x = network(kind, dtype=policy)
    posterior = ibnn.MeanField(initial_scale=0.3, bias="stochastic", seed=0)
    sto = ibnn.to_stochastic(model, posterior, train_size=10)
    (layer,) = ibnn.stochastic_layers(sto)
    options = {"training": training} if kind == "dense" else {}
    plain = KINDS[kind][0]()  # in float32
    plain.build(x.shape)
    plain.set_weights(layer.layer.get_weights())
    for groups in (1, 3):
        with ibnn.noise.scope(groups=None if training else groups) as opened:
            got = numpy(ops.cast(sto(x, training=training), "float32"))
        latent = opened.recall(layer)
        assert type(latent) is Explicit
        moved = [numpy(x) for x in layer._deviations(latent)]
        for number, (rows, *own) in enumerate(zip(np.split(x, len(moved[0])), *moved, strict=True)):
            names = zip(layer._random, own, strict=True)
            weights = {name: numpy(getattr(plain, name)) + x for name, x in names}
            part = slice(number * len(rows), (number + 1) * len(rows))
            expected = outputs_at(plain, rows, weights, **options)
            tolerance = 2e-5 if policy == "float32" else 0.01 * np.abs(expected).max()
            np.testing.assert_allclose(got[part], expected, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_mean_field_is_folded_by_the_names_of_weights(kind):
    model, x = network(kind)
    sto = ibnn.to_stochastic(model, ibnn.MeanField(), train_size=10)
    back = ibnn.to_deterministic(sto)
    assert type(back.layers[-1]) is type(model.layers[-1])
    np.testing.assert_allclose(numpy(back(x)), numpy(model(x)), atol=1e-6)


def test_masks_go_with_their_examples():
    layer = ibnn.MeanField(seed=0).wrap(NormalizedDense(4, "relu"), train_size=10)
    x, mask = RNG.normal(size=(6, 5, 3)).astype("float32"), RNG.random((6, 5)) < 0.5
    layer.build(x.shape)
    with ibnn.noise.scope(groups=3):
        np.testing.assert_array_equal(np.any(numpy(layer(x, mask=mask)) != 0, axis=-1), mask)


def test_what_needs_more_knowledge_is_refused():
    with pytest.raises(ValueError, match=r"for Keras's own Dense .* Use sides='input'"):
        ibnn.Stochastic(NormalizedDense(4), ibnn.NormalAffine(sides="both"), train_size=10)
    with pytest.raises(ValueError, match="it is NormalizedDense"):
        ibnn.MeanField(estimator="local").wrap(NormalizedDense(4), 10)
    with pytest.raises(ValueError, match="MNF needs one of"):
        ibnn.MNF().wrap(NormalizedDense(4), 10)
    with pytest.raises(ValueError, match="not of a subclass"):
        ibnn.NormalAffine().wrap(SubclassedCell(2), 10)
    model = keras.Sequential([keras.Input((4, 3)), layers.RNN(SubclassedCell(2)), layers.Dense(1)])
    with pytest.warns(UserWarning, match=r"SubclassedCell"):
        sto = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=10)
    assert [type(layer.layer) for layer in ibnn.stochastic_layers(sto)] == [layers.Dense]


def test_an_adapter_of_a_subclass_has_noise_on_its_input():
    model, x = network("convolution")
    model.layers[0].enable_lora(2, lora_alpha=3)
    model.layers[0].lora_kernel_b.assign(RNG.normal(size=(2, 4)))
    sto = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=10)
    assert type(ibnn.stochastic_layers(sto)[0]) is ibnn.Stochastic
    np.testing.assert_allclose(predict_without_noise(sto, x), numpy(model(x)), atol=1e-5)
    stir(sto)
    expected = predict_without_noise(sto, x)
    np.testing.assert_allclose(numpy(ibnn.to_deterministic(sto)(x)), expected, atol=1e-5)
