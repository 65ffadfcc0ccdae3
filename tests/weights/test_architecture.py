"""Models that differ in more than weights are not run with the wiring and state of the first."""

import functools

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfp_ibnn as ibnn
from tfp_ibnn.weights.architecture import difference

JAX = keras.backend.backend() == "jax"
RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 6)).astype("float32")
STEPS = RNG.normal(size=(4, 7, 3)).astype("float32")


def graph(function, shape=(6,)):
    inputs = keras.Input(shape)
    return keras.Model(inputs, function(inputs))


def behind(layer, width=4):
    """Return a model in which a layer, or a function, stands between two others."""
    return graph(lambda x: layers.Dense(2)(layer(layers.Dense(width)(x))))


class Scaled(keras.Model):
    def __init__(self, scale, inner=None):
        super().__init__()
        self.dense, self._scale = inner or layers.Dense(2), scale

    def call(self, x):
        return self._scale * self.dense(x)


class Applied(layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


def scaled(scale, inner=None):
    model = Scaled(scale, inner)
    model(X)
    return model


def adapted(layer, number):
    layer.adapt(X * (1 + number))
    return graph(lambda x: layers.Dense(2)(ops.cast(layer(x), "float32")))


def skipping(number):
    def function(x):
        hidden = layers.Dense(6, "relu")(x)
        return layers.Dense(2)(hidden + x if number else hidden)

    return graph(function)


def joined(number):
    def function(x):
        first = layers.Dense(3)(x)
        parts = [first, layers.Dense(3)(first)]
        return layers.Dense(2)(layers.Concatenate()(parts[::-1] if number else parts))

    return graph(function)


def tied(number):
    def function(x):
        first, second = layers.Dense(6, "tanh"), layers.Dense(6, "tanh")
        return second(first(x)) + first(second(x)) if number else second(first(first(second(x))))

    return graph(function)


def with_class(number):
    class Own(layers.Layer):
        factor = 1 + number

        def call(self, x):
            return x * self.factor

    return behind(Own())


def with_activation(number):
    def activation(x):
        return x * (1.0 + number)

    return graph(layers.Dense(2, activation))


def recurrent(number, **options):
    return graph(lambda x: layers.Dense(2)(layers.LSTM(3, **options)(x)), (7, 3))


def masked(number):
    def function(x):
        mask = ops.greater(x[..., 0], 0) if number else None
        return layers.Dense(2)(layers.LSTM(3)(x, mask=mask))

    return graph(function, (7, 3))


def both_ways(number):
    way = layers.Bidirectional(layers.GRU(3), merge_mode="sum" if number else "mul")
    return graph(lambda x: layers.Dense(2)(way(x)), (7, 3))


MAKES = {
    "adapted numbers": lambda n: adapted(layers.Normalization(), n),
    "skip connection": skipping,
    "nested skip connection": lambda n: graph(lambda x: layers.Dense(2)(skipping(n)(x))),
    "skip connection in a subclass": lambda n: scaled(1.0, skipping(n)),
    "order of a merge": joined,
    "order of shared layers": tied,
    "function between layers": lambda n: behind(ops.sin if n else ops.cos),
    "number between layers": lambda n: behind(lambda x: x * (1.0 + n)),
    "array between layers": lambda n: behind(lambda x: x * np.array([1.0, 1 + n] * 2, "float32")),
    "option of a function": lambda n: behind(lambda x: ops.roll(x, 1 + n, axis=1)),
    "mask": masked,
    "attribute": lambda n: scaled(1.0 + n),
    "attribute that is an array": lambda n: scaled(np.array([1.0, 1.0 + n], "float32")),
    "attribute that is a function": lambda n: behind(Applied(ops.sin if n else ops.cos)),
    "partial function": lambda n: behind(Applied(functools.partial(ops.multiply, 1.0 + n))),
    "enclosed number": lambda n: behind(layers.Lambda(lambda x: x * (1.0 + n))),
    "function of one name": with_activation,
    "attribute of a class": with_class,
    "direction": lambda n: recurrent(n, go_backwards=bool(n)),
    "merge of two directions": both_ways,
    "precision": lambda n: behind(layers.Dense(4, dtype=f"mixed_{'b' * n}float16")),
}
if not JAX:

    def looked_up(number):
        lookup = layers.IntegerLookup(vocabulary=[number, 1 - number, 2])
        table = layers.Embedding(4, 2)
        return graph(lambda x: table(lookup(ops.cast(x * 2, "int64")))[:, 0])

    MAKES["vocabulary"] = looked_up
    MAKES["adapted bins"] = lambda n: adapted(layers.Discretization(num_bins=3), n)


def outputs(model, x):
    return ops.convert_to_numpy(ops.cast(model(x), "float32"))


SLOW = ("mask", "direction", "merge of two directions", "nested skip connection")


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=pytest.mark.slow if name in SLOW else ())
        for name, make in MAKES.items()
    ],
)
def test_what_differs_is_refused_and_mixed(make):
    """Models made alike are an ensemble; those that differ have to be run one by one."""
    keras.utils.set_random_seed(0)
    first, alike, other = make(0), make(0), make(1)
    x = STEPS if getattr(first, "input_shape", None) == (None, 7, 3) else X
    with pytest.raises(ValueError, match=r"`models\[1\]` differs from `models\[0\]` .*ibnn.Weight"):
        ibnn.DeepEnsemble([first, other])
    pairs = ((ibnn.DeepEnsemble, alike), (ibnn.WeightMixture, other))
    for kind, second in pairs:
        mc = ibnn.MonteCarlo(kind([first, second]), head="point")
        found = ops.convert_to_numpy(mc(x)["mean"])
        expected = (outputs(first, x) + outputs(second, x)) / 2
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    other.set_weights(first.get_weights())
    assert np.abs(outputs(first, x) - outputs(other, x)).max() > 1e-4


def alike(number):
    """Return models with what may differ, whatever it is made of."""
    keras.utils.set_random_seed(number)
    normalization = layers.Normalization()
    normalization.adapt(STEPS)
    inputs = keras.Input((7, 3), batch_size=(None, 4)[number])
    x = layers.Conv1D(4, 3, kernel_regularizer=keras.regularizers.L2(0.1 * number))(
        normalization(inputs)
    )
    x = layers.BatchNormalization(trainable=not number)(x)
    x = layers.MultiHeadAttention(2, 3, dropout=0.1, seed=number)(x, x)
    x = layers.Bidirectional(layers.LSTM(3, return_sequences=True))(x)
    x = layers.TimeDistributed(layers.Dense(3))(layers.SpectralNormalization(layers.Dense(3))(x))
    x = layers.Dropout(0.1, seed=number)(x * np.ones(3, "float32"))
    return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(x + ops.sin(x))))


def test_a_history_is_no_difference(eagerly, tmp_path):
    """Of calls, compilation, training, and files."""
    fresh, used = alike(0), alike(1)
    used.compile("sgd", "mse")
    used.fit(STEPS, np.zeros((4, 2)), verbose=0)
    used.evaluate(STEPS, np.zeros((4, 2)), verbose=0)
    used.predict(STEPS, verbose=0)
    used.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert [difference(fresh, used), difference(used, fresh), difference(fresh, loaded)] == [
        None
    ] * 3
    assert difference(fresh, used, training=True)


@pytest.mark.parametrize(
    "make",
    [
        ibnn.NormalAffine,
        *(pytest.param(x, marks=pytest.mark.slow) for x in (ibnn.MeanField, ibnn.MNF)),
    ],
)
def test_stochastic_models_with_a_history_are_alike(eagerly, make, tmp_path):
    plain = keras.Sequential([keras.Input((6,)), layers.Dense(3), layers.Dense(2)])
    fresh, used = (ibnn.to_stochastic(plain, make(), train_size=8, seed=i) for i in range(2))
    used.compile("sgd", "mse")
    used.fit(X, np.zeros((8, 2)), verbose=0)
    used.predict(X, verbose=0)
    used.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert difference(fresh, used) is None
    assert difference(used, loaded) is None


def heads(first, second):
    inputs = keras.Input((6,))
    return keras.Model(
        inputs, [layers.Dense(2, name=first)(inputs), layers.Dense(2, name=second)(inputs)]
    )


@pytest.mark.once
def test_outputs_that_change_places():
    assert difference(heads("a", "b"), heads("a", "b")) is None
    assert difference(heads(None, None), heads(None, None)) is None
    assert "connections" in difference(heads("a", "b"), heads("b", "a"))
