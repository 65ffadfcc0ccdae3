"""A model cut in two: each half runs as often as it must, and together they are the model."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfp_ibnn as ibnn
from tests.monte_carlo_tools import JAX, data, dense, numpy, set_weights, statistics
from tfp_ibnn import noise
from tfp_ibnn.conversion.graph import extended

pytestmark = pytest.mark.once

N, S = 6, 5


class Counter(layers.Layer):
    """Passes its input on and keeps the size of each batch it sees with values."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.rows = []

    def call(self, inputs):
        if isinstance(inputs.shape[0], int):
            self.rows.append(inputs.shape[0])
        return inputs

    def compute_output_shape(self, input_shape):
        return input_shape


def plain(units=4):
    return layers.Dense(units, activation="tanh")


def seen(model, x, samples=S, **options):
    """Return the rows that each counter of a model sees, by name, in one prediction."""
    options = {"head": "point", "seed": 0, "chunk_size": samples, **options}
    mc = ibnn.MonteCarlo(model, samples, **options)
    counters = [part for part in model._flatten_layers() if isinstance(part, Counter)]
    for counter in counters:
        counter.rows.clear()
    mc(x)
    return {counter.name: counter.rows for counter in counters}


# ------------------------------------------------------------------------------- how often it runs


def test_what_comes_before_the_noise_runs_once():
    model = keras.Sequential(
        [keras.Input((4,)), Counter(name="a"), plain(), Counter(name="b"), dense(3)]
        + [Counter(name="c"), plain()]
    )
    assert seen(model, data(N, 4)) == {"a": [N], "b": [N], "c": [N * S]}


def test_what_comes_before_the_noise_runs_once_for_all_chunks():
    model = keras.Sequential([keras.Input((4,)), Counter(name="a"), dense(3), Counter(name="b")])
    rows = seen(model, data(N, 4), chunk_size=2)
    assert rows["a"] == [N]
    assert set(rows["b"]) == {2 * N}
    rows = seen(model, data(N, 4), chunk_size=2, return_samples=True)
    assert rows["a"] == [N]


def test_nested_models_are_opened():
    deepest = keras.Sequential([keras.Input((4,)), Counter(name="a"), plain(), dense(4)])
    inner = keras.Sequential([keras.Input((4,)), Counter(name="b"), deepest, Counter(name="c")])
    inputs = keras.Input((4,))
    model = keras.Model(inputs, plain(2)(inner(plain()(inputs))))
    assert seen(model, data(N, 4)) == {"a": [N], "b": [N], "c": [N * S]}


def test_branches_without_noise_run_once():
    inputs = keras.Input((4,))
    noisy = Counter(name="noisy")(dense(4)(inputs))
    silent = Counter(name="silent")(plain()(inputs))
    model = keras.Model(inputs, plain(2)(noisy + silent))
    assert seen(model, data(N, 4)) == {"noisy": [N * S], "silent": [N]}


def test_a_nested_model_with_two_inputs_is_cut_between_them():
    first, second = keras.Input((4,)), keras.Input((4,))
    inner = keras.Model(
        [first, second], Counter(name="a")(plain()(first)) * Counter(name="b")(plain()(second))
    )
    inputs = keras.Input((4,))
    model = keras.Model(inputs, inner([dense(4)(inputs), inputs]))
    assert seen(model, data(N, 4)) == {"a": [N * S], "b": [N]}


def test_a_shared_layer_runs_as_often_as_each_call_needs():
    shared = Counter(name="a")
    model = keras.Sequential([keras.Input((4,)), shared, dense(4), shared])
    assert seen(model, data(N, 4)) == {"a": [N, N * S]}


def test_layers_that_the_output_does_not_need_do_not_run():
    inputs = keras.Input((4,))
    hidden = dense(4)(inputs)
    whole = keras.Model(inputs, [hidden, Counter(name="unused")(hidden)])
    part = keras.Model(inputs, whole.outputs[0])
    assert seen(part, data(N, 4)) == {}
    inner = whole(inputs)
    assert seen(keras.Model(inputs, inner[0]), data(N, 4)) == {"unused": []}


def test_dropout_is_where_the_noise_starts():
    model = keras.Sequential(
        [keras.Input((4,)), Counter(name="a"), layers.Dropout(0.5), Counter(name="b"), plain()]
    )
    assert seen(model, data(N, 4), dropout=True) == {"a": [N], "b": [N * S]}


def test_a_model_without_noise_runs_once():
    model = keras.Sequential([keras.Input((4,)), Counter(name="a"), plain(2)])
    with pytest.warns(UserWarning, match="no stochastic layer.*one is enough"):
        assert seen(model, data(N, 4)) == {"a": [N]}


def test_noise_behind_a_call_of_its_own_is_not_missed():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.count, self.noisy = Counter(name="a"), dense(2)

        def call(self, inputs):
            return self.noisy(self.count(inputs))

    inputs = keras.Input((4,))
    model = keras.Model(inputs, Own()(Counter(name="b")(inputs)))
    assert seen(model, data(N, 4)) == {"a": [N * S], "b": [N]}


@pytest.mark.slow
def test_chunks_of_a_call_of_its_own_do_not_grow_with_the_samples():
    """What such a model holds inside is not known; that is no reason to run all draws at once."""

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.count, self.noisy = Counter(name="a"), dense(2)

        def call(self, inputs):
            return self.noisy(self.count(inputs))

    model = Own()
    x = data(64, 2)
    model(x)
    few, many = (max(seen(model, x, samples, chunk_size=None)["a"]) for samples in (1024, 2048))
    assert many <= few


# ------------------------------------------------------------------------------- what it computes


def two_inputs_list():
    one, two = keras.Input((4,)), keras.Input((3,))
    return keras.Model([one, two], plain(2)(dense(4)(plain()(one)) * dense(4)(two))), [
        data(N, 4),
        data(N, 3, seed=1),
    ]


def two_inputs_dict():
    one, two = keras.Input((4,), name="one"), keras.Input((3,), name="two")
    hidden = layers.concatenate([dense(4)(one), plain()(two)])
    # In another order than that of the names.
    return keras.Model({"two": two, "one": one}, plain(2)(hidden)), {
        "two": data(N, 3, seed=1),
        "one": data(N, 4),
    }


def nested_dict():
    one, two = keras.Input((4,), name="one"), keras.Input((3,), name="two")
    inner = keras.Model({"b": two, "a": one}, plain(2)(layers.concatenate([dense(4)(one), two])))
    left, right = keras.Input((4,)), keras.Input((3,))
    return keras.Model([left, right], inner({"a": left, "b": plain(3)(right)})), [
        data(N, 4),
        data(N, 3, seed=1),
    ]


def siamese():
    inner = keras.Sequential([keras.Input((4,)), plain(), dense(4)])
    one, two = keras.Input((4,)), keras.Input((4,))
    return keras.Model([one, two], plain(2)(inner(one) - inner(plain()(two)))), [
        data(N, 4),
        data(N, 4, seed=1),
    ]


def residual():
    inputs = keras.Input((4,))
    layer = dense(4, "tanh")
    hidden = layer(inputs)
    hidden = layer(hidden) + inputs
    return keras.Model(inputs, plain(2)(hidden)), data(N, 4)


def operations():
    inputs = keras.Input((4,))
    hidden = ops.concatenate([dense(4)(inputs), ops.tanh(inputs)], axis=-1)
    return keras.Model(inputs, plain(2)(ops.reshape(hidden, (-1, 2, 4)))[:, 0]), data(N, 4)


def masked_lstm():
    inputs = keras.Input((5,), dtype="int32")
    hidden = layers.Embedding(9, 4, mask_zero=True)(inputs)
    hidden = ibnn.Stochastic(layers.LSTM(3), train_size=10)(hidden)
    return keras.Model(inputs, plain(2)(hidden)), words()


def mask_behind_the_cut():
    """The mask passes a stochastic layer before it is used."""
    inputs = keras.Input((5,), dtype="int32")
    hidden = layers.Embedding(9, 4, mask_zero=True)(inputs)
    hidden = layers.GlobalAveragePooling1D()(dense(4)(hidden))
    return keras.Model(inputs, plain(2)(hidden)), words()


def mask_into_a_nested_model():
    words_in = keras.Input((5, 4))
    inner = keras.Model(words_in, ibnn.Stochastic(layers.LSTM(3), train_size=10)(words_in))
    inputs = keras.Input((5,), dtype="int32")
    return keras.Model(inputs, inner(layers.Embedding(9, 4, mask_zero=True)(inputs))), words()


def attention():
    inputs = keras.Input((5,), dtype="int32")
    hidden = layers.Embedding(9, 4, mask_zero=True)(inputs)
    hidden = dense(4)(hidden)
    hidden = layers.MultiHeadAttention(2, 2)(hidden, hidden)
    return keras.Model(inputs, layers.GlobalAveragePooling1D()(hidden)), words()


def position():
    inputs = keras.Input((4, 4, 2))
    hidden = layers.Conv2D(3, 2)(inputs)
    hidden = ibnn.StochasticConv2D(3, 2, noise="position", train_size=10)(hidden)
    return keras.Model(inputs, plain(2)(layers.Flatten()(hidden))), data(N, 4, 4, 2)


def batch_normalization():
    posterior = ibnn.FlowPosterior([ibnn.flows.BatchNorm(), ibnn.flows.Planar()])
    inputs = keras.Input((4,))
    hidden = layers.BatchNormalization()(dense(4, posterior=posterior)(inputs))
    return keras.Model(inputs, plain(2)(hidden)), data(N, 4)


def stochastic_model():
    det = keras.Sequential([keras.Input((4,)), plain(), layers.Dense(2)])
    return ibnn.to_stochastic(det, ibnn.NormalAffine(), train_size=10), data(N, 4)


def nested_stochastic_model():
    inner, x = stochastic_model()
    inputs = keras.Input((4,))
    return keras.Model(inputs, plain(2)(inner(plain()(inputs)))), x


def nested_with_a_list():
    one = keras.Input((4,))
    inner = keras.Model([one], dense(4)(one))
    inputs = keras.Input((4,))
    return keras.Model(inputs, plain(2)(inner([inputs]))), data(N, 4)


def nested_in_training_mode():
    inner = keras.Sequential([keras.Input((4,)), plain(), dense(4)])
    inputs = keras.Input((4,))
    return keras.Model(inputs, plain(2)(inner(inputs, training=False))), data(N, 4)


def nested_that_adds_an_axis():
    """Keras gives the inner model's input the axis it lacks."""
    one = keras.Input((1,))
    inner = keras.Model(one, dense(2)(one))
    inputs = keras.Input(())
    return keras.Model(inputs, inner(inputs)), data(N)


class Table(layers.Layer):
    """Gives numbers that do not depend on the example, such as an embedding of positions."""

    def build(self, input_shape):
        self.table = self.add_weight(shape=(1, 4), name="table")

    def call(self, inputs):
        return ops.convert_to_tensor(self.table)

    def compute_output_shape(self, input_shape):
        return (1, 4)


def table():
    inputs = keras.Input((4,))
    return keras.Model(inputs, plain(2)(dense(4)(inputs) + Table()(inputs))), data(N, 4)


class OwnSequential(keras.Sequential):
    """Its call is its own."""

    def call(self, inputs, training=None, mask=None):
        return 10 + 2 * super().call(inputs, training=training, mask=mask)


class OwnFunctional(keras.Model):
    """Its call is its own."""

    def call(self, inputs, training=None, mask=None):
        return 10 + 2 * super().call(inputs, training=training, mask=mask)


def own_sequential():
    return OwnSequential([keras.Input((4,)), plain(), dense(2)]), data(N, 4)


def own_functional():
    inputs = keras.Input((4,))
    return OwnFunctional(inputs, dense(2)(plain()(inputs))), data(N, 4)


def words():
    ids = np.random.default_rng(0).integers(1, 9, size=(N, 5))
    return np.where(np.arange(5) < np.arange(1, N + 1)[:, None], ids, 0)


MODELS = [
    two_inputs_list,
    two_inputs_dict,
    nested_dict,
    siamese,
    residual,
    operations,
    masked_lstm,
    mask_behind_the_cut,
    mask_into_a_nested_model,
    attention,
    position,
    batch_normalization,
    stochastic_model,
    nested_stochastic_model,
    nested_with_a_list,
    nested_in_training_mode,
    nested_that_adds_an_axis,
    table,
    own_sequential,
    own_functional,
]


def plain_call(model, x, seed, draw):
    """What the model itself gives under one draw of the noise that MonteCarlo uses."""
    here = noise.Pass(groups=1, seed=seed, sample=ops.array([draw], dtype="int32"))
    ahead = [layer for layer in ibnn.stochastic_layers(model) if layer.noise == "channel"]
    draws = {layer: layer.draw(here, 1)[0] for layer in ahead}
    options = {"groups": 1, "seed": seed, "sample": here.source.sample, "skip": here.source.used}
    with noise.scope(**options, draws=draws, losses=False):
        return numpy(model(x, training=False))


@pytest.mark.filterwarnings("ignore:.*was passed an input with a mask attached to it")
@pytest.mark.parametrize("make", MODELS)
def test_cut_in_two_it_is_the_same_model(make):
    """Example by example and draw by draw: each draw is the model under one z for each layer."""
    model, x = make()
    set_weights(model)
    mc = ibnn.MonteCarlo(model, 3, head="point", seed=5, return_samples=True, chunk_size=2)
    samples = statistics(mc, x)["samples"]
    for draw in range(3):
        np.testing.assert_allclose(samples[:, draw], plain_call(model, x, 5, draw), atol=2e-5)
    assert np.median(samples.std(axis=1)) > 1e-3


def test_noise_that_is_switched_off_leaves_the_mean():
    model, x = residual()
    set_weights(model)
    mc = ibnn.MonteCarlo(model, 4, head="point", seed=0)
    assert np.all(mc.predict(x, verbose=0)["epistemic"] > 1e-6)
    with ibnn.noise_off(model):
        result = mc.predict(x, verbose=0)
        np.testing.assert_allclose(result["mean"], numpy(model(x)), atol=1e-6)
        np.testing.assert_allclose(result["epistemic"], 0, atol=1e-12)
    assert np.all(mc.predict(x, verbose=0)["epistemic"] > 1e-6)


def test_masked_steps_do_not_count():
    model, x = masked_lstm()
    set_weights(model)
    mc = ibnn.MonteCarlo(model, 4, head="point", seed=0, chunk_size=3)
    shorter = x[:1, :1]
    padded = np.pad(shorter, ((0, 0), (0, 4)))
    np.testing.assert_array_equal(padded, x[:1])
    other = padded.copy()
    other[0, 1] = 3  # one word more, so this one must differ
    one, two = (mc.predict(part, verbose=0)["mean"] for part in (padded, other))
    assert np.abs(one - two).max() > 1e-4


@pytest.mark.parametrize("shape", [(5, 7, 7, 2), (5, 8, 8, 3), (5, 8, 2)])
def test_inputs_that_the_model_refuses_are_refused(shape):
    inputs = keras.Input((8, 8, 2))
    model = keras.Model(inputs, dense(3, "softmax")(layers.GlobalAveragePooling2D()(inputs)))
    with pytest.raises(ValueError, match="(?i)shape|incompatible|rank|dim"):
        model(np.ones(shape, "float32"))
    with pytest.raises(ValueError, match="(?i)shape|incompatible|rank|dim"):
        ibnn.MonteCarlo(model, 2).predict(np.ones(shape, "float32"), verbose=0)


def test_inputs_of_one_channel_are_not_spread_over_all():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, dense(3, "softmax")(inputs))
    with pytest.raises((ValueError, TypeError), match="(?i)shape|incompatible|dim|channels"):
        ibnn.MonteCarlo(model, 1, seed=0).predict(np.ones((5, 1), "float32"), verbose=0)


@pytest.mark.skipif(JAX, reason="JAX knows all sizes when it compiles")
def test_images_of_unknown_size():
    inputs = keras.Input((None, None, 2))
    hidden = layers.GlobalAveragePooling2D()(ibnn.StochasticConv2D(3, 1, train_size=10)(inputs))
    model = set_weights(keras.Model(inputs, hidden))
    mc = ibnn.MonteCarlo(model, 3, head="point", seed=0)
    one = mc.predict(np.ones((2, 4, 4, 2), "float32"), verbose=0)["mean"]
    two = mc.predict(np.ones((2, 6, 3, 2), "float32"), verbose=0)["mean"]
    np.testing.assert_allclose(one, two, rtol=1e-5)


def test_what_is_added_gets_names_of_its_own():
    """Automatic names begin anew in each process, so those of a file's graph may come again."""
    inputs = keras.Input((3,))
    hidden = layers.Dense(4, name="dense")(inputs)
    graph = keras.Model({"x": inputs}, layers.Dense(2, name="twice")(hidden))
    head = layers.Dense(2, name="dense")
    added = layers.Add(name="twice")([graph.output, head(hidden)])
    found = extended(graph, layers.Softmax(name="twice")(added), "more")
    assert found.name == "more"
    assert [x.name for x in found.layers[1:]] == [
        *("dense", "twice", "dense_added_1"),
        *("twice_added_2", "twice_added_1"),
    ]
    x = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")
    inner = ops.matmul(x, graph.layers[1].kernel)
    logits = ops.matmul(inner, graph.layers[2].kernel + head.kernel)
    np.testing.assert_allclose(found({"x": x}), ops.softmax(logits), rtol=1e-5)
