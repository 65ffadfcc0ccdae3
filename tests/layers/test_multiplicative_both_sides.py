"""z on the inputs and the outputs of a layer: `sides="both"`."""

import keras
import numpy as np
import pytest
from keras import layers

import tfp_ibnn as ibnn
from tests.layer_checklist import check_layer, numpy, predict_without_noise, stir
from tests.layers.test_mean_field import LAYERS
from tests.whole.test_stranger import X, Y, compiled, network, use

RNG = np.random.default_rng(0)


def made(kind, posterior=None, **options):
    make, shape = LAYERS[kind]
    keras.utils.set_random_seed(0)
    posterior = posterior or ibnn.NormalAffine(sides="both")
    layer = ibnn.Stochastic(make(), posterior, train_size=10, **options)
    layer.build((None, *shape))
    layer.layer.bias.assign(RNG.normal(size=layer.layer.bias.shape).astype("float32"))
    return layer, shape


@pytest.mark.parametrize("kind", LAYERS)
def test_factors_are_on_both_sides_of_the_kernel(kind):
    """The output is z_out * (layer(z_in * x) - bias) + bias, by Keras's own layer."""
    layer, shape = made(kind)
    sizes = shape[-1], layer.layer.compute_output_shape((4, *shape))[-1]
    assert layer.posterior.channels == sum(sizes)
    x = RNG.normal(size=(4, *shape)).astype("float32")
    z = RNG.normal(size=(4, sum(sizes))).astype("float32")
    with ibnn.noise.scope(groups=4, draws={layer: z}):
        got = numpy(layer(x))

    def spread(factors, rank):
        return factors.reshape((4, *(1,) * (rank - 2), factors.shape[1]))

    plain = numpy(layer.layer(x * spread(z[:, : sizes[0]], x.ndim)))
    bias = numpy(layer.layer.bias)
    expected = (plain - bias) * spread(z[:, sizes[0] :], got.ndim) + bias
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_the_means_fold_into_the_kernel(kind):
    make, shape = LAYERS[kind]
    det = keras.Sequential([keras.Input(shape), make()])
    template = ibnn.MixturePosterior(2, sides="both")
    model = ibnn.to_stochastic(det, template, train_size=10)
    stir(model)
    x = RNG.normal(size=(3, *shape)).astype("float32")
    plain = ibnn.to_deterministic(model)
    assert type(plain.layers[-1]) is type(det.layers[-1])
    np.testing.assert_allclose(numpy(plain(x)), predict_without_noise(model, x), atol=2e-5)


@pytest.mark.slow
def test_a_mixture_of_rank_one_noise_trains_and_predicts(tmp_path):
    template = ibnn.MixturePosterior(2, sides="both", beta=1.0)
    model = compiled(ibnn.to_stochastic(network(), template, train_size=64))
    model.optimizer.build(model.trainable_variables)
    before = [numpy(layer.posterior.loc).copy() for layer in ibnn.stochastic_layers(model)]
    model.fit(X, Y, epochs=1, verbose=0)
    for layer, loc in zip(ibnn.stochastic_layers(model), before, strict=True):
        assert np.all(numpy(layer.posterior.loc) != loc)
    use(model, tmp_path)


def test_checklist(tmp_path):
    check_layer(
        lambda: ibnn.Stochastic(layers.Dense(2), ibnn.NormalAffine(sides="both", beta=1.0), 10),
        (3,),
        output_shape=(2,),
        trainable=4,
        non_trainable=2,
        folder=tmp_path,
    )


def test_errors():
    both = ibnn.NormalAffine(sides="both")
    with pytest.raises(ValueError, match=r"noise='position'.*sides='input'"):
        ibnn.Stochastic(layers.Conv1D(2, 2), both, train_size=10, noise="position")
    with pytest.raises(ValueError, match=r"LSTM.*sides='input'"):
        ibnn.Stochastic(layers.LSTM(2), both, train_size=10)
    with pytest.raises(ValueError, match="'input', 'both'"):
        ibnn.NormalAffine(sides="output")
    layer = ibnn.Stochastic(layers.EinsumDense("abc,cd->adb", (3, 2)), both, train_size=10)
    with pytest.raises(ValueError, match="Use sides='input'"):
        layer.build((None, 2, 4))
