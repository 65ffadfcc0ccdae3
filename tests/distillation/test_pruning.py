"""Pruning by signal-to-noise ratios: which weights and channels go, and what is left."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfp_ibnn as ibnn
from tests.conversion.test_convert_any_model import Classifier, built
from tests.conversion.tools import close, data
from tests.layer_checklist import numpy

N = 50
IMAGE = (6, 6, 2)


def mlp():
    hidden = [layers.Dense(8, "relu", name="first"), layers.Dense(6, "tanh", name="second")]
    return keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(3, name="logits")])


def cnn():
    return keras.Sequential(
        [
            keras.Input(IMAGE),
            layers.Conv2D(6, 3, padding="same", name="conv1"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(8, 2, activation="relu", name="conv2"),
            layers.Flatten(),
            layers.Dense(10, "relu", name="dense"),
            layers.Dense(3, name="logits"),
        ]
    )


def residual():
    """A chain of two convolutions inside of a block whose sum keeps its channels."""
    inputs = keras.Input(IMAGE)
    x = layers.Conv2D(6, 3, padding="same", name="stem")(inputs)
    y = layers.Conv2D(5, 3, padding="same", activation="relu", name="inner")(x)
    y = layers.Conv2D(6, 3, padding="same", name="outer")(y)
    x = layers.GlobalAveragePooling2D()(layers.ReLU()(x + y))
    return keras.Model(inputs, layers.Dense(3, name="logits")(x))


def learned(model, posterior, seed=0):
    """Return a stochastic copy with random means and scales, and random weights."""
    rng = np.random.default_rng(seed)
    for weight in model.weights:
        value = 0.4 * rng.normal(size=weight.shape)
        weight.assign(np.exp(value) if "variance" in weight.name else value)
    sto = ibnn.to_stochastic(model, posterior, train_size=N)
    for layer in ibnn.stochastic_layers(sto):
        for weight in layer.posterior.trainable_weights:
            value = numpy(weight.value)
            weight.assign(value + rng.normal(size=value.shape))
    return sto


def snr(layer):
    """Return the signal-to-noise ratios of a Gaussian z, by its own density."""
    distribution = layer.posterior.distribution()
    return np.abs(numpy(distribution.mean())) / numpy(distribution.stddev())


def set_z_to_zero(sto, kept):
    """Return the plain model with the mean of z at 0 for channels that are not kept."""
    for layer in ibnn.stochastic_layers(sto):
        if layer.name not in kept:
            continue
        loc = layer.posterior.affine.shift
        channels = np.arange(loc.shape[0]) % kept[layer.name][1]
        loc.assign(numpy(loc) * np.isin(channels, kept[layer.name][0]))
    return ibnn.to_deterministic(sto)


# Of each network: the layers whose inputs may lose channels, and how many channels these have.
CHAINS = {
    "mlp": (mlp, {"second": 8, "logits": 6}),
    "cnn": (cnn, {"conv2": 6, "dense": 8, "logits": 10}),
    "residual": (residual, {"outer": 5}),
}


@pytest.mark.filterwarnings("ignore:.* keeps all channels")
@pytest.mark.parametrize("keep", [0.4, pytest.param(0.01, marks=pytest.mark.once)])
@pytest.mark.parametrize("name", CHAINS)
def test_channels_are_gone_and_nothing_else_has_changed(name, keep):
    make, chains = CHAINS[name]
    sto = learned(make(), ibnn.NormalAffine(sides="input"))
    by_name = {layer.name: layer for layer in ibnn.stochastic_layers(sto)}
    scores = {}
    for taker, count in chains.items():
        squares = snr(by_name[taker]).reshape(-1, count) ** 2  # positions come first
        scores[taker] = np.sqrt(squares.mean(axis=0))
    every = np.sort(np.concatenate(list(scores.values())))[::-1]
    least = every[max(1, round(keep * len(every))) - 1]
    kept = {
        taker: (np.flatnonzero((score >= least) | (score == score.max())), chains[taker])
        for taker, score in scores.items()
    }
    pruned = ibnn.prune(sto, keep)
    x = data(5, *pruned.input_shape[1:])
    before = ibnn.to_deterministic(sto)
    close(pruned(x), set_z_to_zero(sto, kept)(x), 1e-6)
    assert pruned.count_params() < before.count_params()
    for taker, (channels, count) in kept.items():
        positions = before.get_layer(taker).kernel.shape[-2] // count
        assert pruned.get_layer(taker).kernel.shape[-2] == positions * len(channels)
    assert not any(type(x).__module__.startswith("tfp_ibnn") for x in pruned._flatten_layers())


def test_all_channels_are_those_of_the_mean():
    sto = learned(mlp(), ibnn.NormalFull())
    x = data(5, 4)
    pruned = ibnn.prune(sto, keep=1.0)
    close(pruned(x), ibnn.to_deterministic(sto)(x), 1e-6)
    assert pruned.count_params() == mlp().count_params()


@pytest.mark.parametrize("posterior", [ibnn.NormalFull, ibnn.NormalPlanar1d, ibnn.MixturePosterior])
def test_any_posterior_over_z_ranks_channels(posterior):
    """From draws, so only channels far apart have a rank that is certain."""
    sto = ibnn.to_stochastic(mlp(), {"second": posterior(initial_scale=0.1)}, train_size=N)
    (layer,) = ibnn.stochastic_layers(sto)
    loc = layer.posterior.loc if hasattr(layer.posterior, "loc") else layer.posterior.affine.shift
    loc.assign(numpy(loc) * [0, 1, 0, 1, 1, 0, 0, 0] + [0, 2, 0, 2, 2, 0, 0, 0])
    ratios = layer.signal_to_noise()["z"]
    draws = numpy(layer.posterior.sample_and_kl((2000,))[0])
    expected = np.abs(draws.mean(axis=0)) / draws.std(axis=0)
    np.testing.assert_allclose(ratios[[1, 3, 4]], expected[[1, 3, 4]], rtol=0.3)
    pruned = ibnn.prune(sto, keep=3 / 8)
    kernel = numpy(ibnn.to_deterministic(sto).get_layer("first").kernel)
    np.testing.assert_array_equal(numpy(pruned.get_layer("first").kernel), kernel[:, [1, 3, 4]])


def test_factors_of_outputs_are_folded_and_not_ranked():
    sto = learned(mlp(), ibnn.NormalAffine(sides="both"))
    assert [x.signal_to_noise()["z"].shape for x in ibnn.stochastic_layers(sto)] == [
        (4,),
        (8,),
        (6,),
    ]
    x = data(5, 4)
    close(ibnn.prune(sto, keep=1.0)(x), ibnn.to_deterministic(sto)(x), 1e-6)


@pytest.mark.parametrize("keep", [0.25, pytest.param(0.05, marks=pytest.mark.once)])
@pytest.mark.parametrize("bias", ["deterministic", "stochastic"])
def test_weights_of_least_signal_to_noise_are_0(bias, keep):
    sto = learned(cnn(), ibnn.MeanField(bias=bias))
    means, ratios = [], []
    for layer in ibnn.stochastic_layers(sto):
        raw_scales = layer.posterior.raw_scales
        for weight, raw_scale in zip(layer.layer.weights, raw_scales, strict=False):
            scale = np.log1p(np.exp(numpy(raw_scale).astype("float64")))
            means.append(numpy(weight))
            ratios.append(np.abs(means[-1]) / scale)
    every = np.concatenate([ratio.ravel() for ratio in ratios])
    least = np.sort(every)[::-1][round(keep * len(every)) - 1]
    pruned = ibnn.prune(sto, keep)
    found = [
        numpy(weight)
        for layer in ibnn.stochastic_layers(sto)
        for weight in pruned.get_layer(layer.name).weights[: len(layer.posterior.raw_scales)]
    ]
    for value, mean, ratio in zip(found, means, ratios, strict=True):
        np.testing.assert_array_equal(value, mean * (ratio >= least))
    assert sum(np.count_nonzero(value) for value in found) == round(keep * len(every))
    if bias == "deterministic":
        for layer in ibnn.stochastic_layers(sto):
            np.testing.assert_array_equal(pruned.get_layer(layer.name).bias, layer.layer.bias)
    assert pruned.count_params() == cnn().count_params()


def test_multiplicative_flows_rank_weights_by_all_their_noise():
    sto = learned(mlp(), {"second": ibnn.MNF()})
    (layer,) = ibnn.stochastic_layers(sto)
    ratio = layer.signal_to_noise()["kernel"]
    kernel = numpy(ibnn.prune(sto, keep=0.5).get_layer("second").kernel)
    assert np.count_nonzero(kernel) == 24
    assert ratio[kernel != 0].min() >= ratio[kernel == 0].max()


def test_layers_of_both_kinds():
    templates = {"second": ibnn.NormalAffine(), ".*": ibnn.MeanField()}
    sto = learned(mlp(), templates)
    pruned = ibnn.prune(sto, keep=0.5)
    assert pruned.get_layer("first").kernel.shape == (4, 4)
    assert pruned.get_layer("second").kernel.shape == (4, 6)
    zeros = [np.mean(numpy(pruned.get_layer(x).kernel) == 0) for x in ("second", "logits")]
    assert zeros[0] == 0
    assert 0 < zeros[1] < 1


def test_data_gives_batch_normalization_its_statistics():
    sto, x = learned(cnn(), ibnn.NormalAffine()), data(300, *IMAGE)
    pruned = ibnn.prune(sto, keep=0.5, data=(x, np.zeros(300)))
    (norm,) = [layer for layer in pruned.layers if hasattr(layer, "moving_mean")]
    features = numpy(keras.Model(pruned.input, pruned.get_layer("conv1").output)(x))
    close(norm.moving_mean, features.mean(axis=(0, 1, 2)), 1e-4)
    close(norm.moving_variance, features.var(axis=(0, 1, 2)), 1e-4)


def test_what_keeps_its_channels_is_told():
    sto = learned(residual(), ibnn.NormalAffine())
    with pytest.warns(UserWarning, match="keeps all channels") as caught:
        ibnn.prune(sto, keep=0.5)
    (message,) = [str(one.message) for one in caught if "keeps all" in str(one.message)]
    assert "'inner' keeps all channels of its input: the output of 'stem' is used" in message
    assert "'logits' keeps all channels of its input: 'add" in message
    assert "stem' keeps" not in message  # its input is the image


@pytest.mark.once
def test_wrappers_and_files(tmp_path):
    sto = learned(mlp(), ibnn.NormalAffine())
    mc = ibnn.MonteCarlo(sto, samples=2, head="softmax", from_logits=True)
    pruned = ibnn.prune(mc, keep=0.5)
    pruned.save(tmp_path / "pruned.keras")
    loaded = keras.models.load_model(tmp_path / "pruned.keras")
    close(loaded(data(3, 4)), ibnn.prune(sto, keep=0.5)(data(3, 4)), 1e-6)


class Tripled(keras.Model):
    """Trains by a loss of its own."""

    def compute_loss(self, *args, **kwargs):
        return 3 * super().compute_loss(*args, **kwargs)


@pytest.mark.once
def test_the_users_class_stays():
    plain = mlp()
    sto = learned(Tripled(plain.inputs, plain.outputs), ibnn.NormalAffine())
    pruned = ibnn.prune(sto, keep=0.5)
    assert type(pruned) is Tripled
    assert pruned.count_params() < plain.count_params()


def test_a_model_with_a_call_of_its_own_keeps_channels_but_not_weights():
    model = built(Classifier())
    sto = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=N)
    with pytest.raises(ValueError, match="no channel that can be removed.*`call` of its own"):
        ibnn.prune(sto)
    over_weights = ibnn.to_stochastic(model, ibnn.MeanField(), train_size=N)
    pruned = ibnn.prune(over_weights, keep=0.3)
    assert type(pruned) is Classifier
    kernels = np.concatenate([numpy(x).ravel() for x in pruned.weights if "kernel" in x.path])
    assert np.mean(kernels != 0) == pytest.approx(0.3, abs=0.01)


@pytest.mark.once
def test_other_arguments_are_refused():
    sto = learned(mlp(), ibnn.NormalAffine())
    for keep in (0, -0.1, 1.5):
        with pytest.raises(ValueError, match="`keep`"):
            ibnn.prune(sto, keep)
    with pytest.raises(ValueError, match="has no stochastic layer"):
        ibnn.prune(mlp())
    with pytest.raises(ValueError, match="`data` is for models with batch normalization"):
        ibnn.prune(sto, data=data(9, 4))
    first = ibnn.to_stochastic(mlp(), {"first": ibnn.NormalAffine()}, train_size=N)
    with pytest.raises(ValueError, match="'first' keeps all channels of its input: they are inp"):
        ibnn.prune(first)
    assert ops.shape(ibnn.prune(sto)(data(2, 4))) == (2, 3)
