"""Any Keras model can be converted: layers inside of layers, and classes of the user's own."""

import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfp_ibnn as ibnn
from tests.layer_checklist import numpy
from tests.monte_carlo_tools import statistics
from tfp_ibnn._core import keras_internals
from tfp_ibnn.layers import inside

REGISTER = keras.saving.register_keras_serializable(package="tests")


@REGISTER
class Block(layers.Layer):
    """A transformer block; its layers are in attributes, a list, a tuple and a dict."""

    def __init__(self, size=4, **kwargs):
        super().__init__(**kwargs)
        self.size = size
        self.attention = layers.MultiHeadAttention(2, 2, name="attention")
        self.norms = (layers.LayerNormalization(), layers.LayerNormalization())
        self.mlp = [layers.Dense(6, "relu", name="up"), layers.Dense(size, name="down")]
        self.gates = {"out": layers.Dense(size, "sigmoid", name="gate")}
        self.again = self.mlp[1]  # another name for the same layer

    def call(self, x):
        y = self.norms[0](x)
        x = x + self.attention(y, y)
        y = self.again(self.mlp[0](self.norms[1](x)))
        return x + y * self.gates["out"](x)

    def get_config(self):
        return {**super().get_config(), "size": self.size}


@REGISTER
class Holder(layers.Layer):
    """Holds models, which it makes itself, and a block at one level more."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.mlp = keras.Sequential([layers.Dense(5, "relu"), layers.Dense(4)], name="mlp")
        self.block = Block(name="block")

    def call(self, x):
        return self.block(self.mlp(x))


@REGISTER
class Loop(layers.Layer):
    """Calls a layer in a loop of the backend, where nothing can be drawn."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.step = layers.Dense(4, "tanh", name="step")

    def build(self, input_shape):
        self.step.build(input_shape)

    def call(self, x):
        return ops.fori_loop(0, 3, lambda _, y: self.step(y), x)


@REGISTER
class Bare(layers.Layer):
    """Cannot be made from its config."""

    def __init__(self, how, **kwargs):
        super().__init__(**kwargs)
        self.how = how
        self.scale = self.add_weight(shape=(4,), initializer="ones", name="scale")
        self.inner = layers.Dense(4, name="inner")
        self.drop = layers.Dropout(0.1)

    def build(self, input_shape):
        self.inner.build(input_shape)

    def call(self, x):
        return self.drop(self.how(self.inner(x))) * self.scale


def around(*stack, shape=(3, 4), outputs=True):
    x = inputs = keras.Input(shape, name="features")
    for layer in stack:
        x = layer(x)
    x = layers.GlobalAveragePooling1D()(x) if len(x.shape) == 3 else x
    return keras.Model(inputs, layers.Dense(3, "softmax", name="head")(x) if outputs else x)


def attends(layer):
    def apply(x):
        return layer(x, x)

    return around(apply)


def masked():
    inputs = keras.Input((3,), dtype="int32", name="features")
    x = layers.Embedding(9, 4, mask_zero=True)(inputs)
    x = layers.MultiHeadAttention(2, 2)(x, x)
    x = layers.Bidirectional(layers.LSTM(2))(x)
    return keras.Model(inputs, layers.Dense(3, "softmax", name="head")(x))


def shared():
    inputs = keras.Input((3, 4), name="features")
    block = Block(name="block")
    x = layers.GlobalAveragePooling1D()(block(block(inputs)))
    return keras.Model(inputs, layers.Dense(3, "softmax", name="head")(x))


@REGISTER
class Classifier(keras.Model):
    """A subclassed model, with a loop over a list of layers, one of which is used twice."""

    def __init__(self, depth=2, **kwargs):
        super().__init__(**kwargs)
        self.depth = depth
        self.blocks = [layers.Dense(4, "relu") for _ in range(depth)]
        self.head = layers.Dense(3, "softmax", name="head")

    def call(self, x, training=None):
        for block in [*self.blocks, self.blocks[0]]:
            x = block(x)
        return self.head(ops.mean(x, axis=1))

    def get_config(self):
        return {**super().get_config(), "depth": self.depth}


@REGISTER
class TwoInputs(keras.Model):
    """A subclassed model of a dict, around a nested model and a recurrent layer."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.memory = layers.GRU(3, name="memory")
        inputs = keras.Input((2,))
        self.side = keras.Model(inputs, layers.Dense(3, name="inner")(inputs), name="side")
        self.head = layers.Dense(3, "softmax", name="head")

    def call(self, inputs):
        return self.head(self.memory(inputs["features"]) + self.side(inputs["side"]))


def built(model, *shapes):
    model(examples(model))
    return model


MODELS = {
    # name: (model, number of stochastic layers)
    "attention": (lambda: attends(layers.MultiHeadAttention(2, 2)), 5),
    "grouped query": (lambda: attends(layers.GroupQueryAttention(2, 2, 1)), 5),
    "block": (lambda: around(Block()), 8),
    "holder": (lambda: around(Holder()), 10),
    "shared": (shared, 8),
    "loop": (lambda: around(Loop()), 2),
    "masked": (masked, 7),
    "steps": (lambda: around(layers.TimeDistributed(layers.Dense(4))), 2),
    "lstm": (lambda: around(layers.LSTM(4)), 2),
    "gru": (lambda: around(layers.GRU(4, return_sequences=True)), 2),
    "simple": (lambda: around(layers.Bidirectional(layers.SimpleRNN(4))), 3),
    "stacked": (lambda: around(layers.RNN([layers.LSTMCell(3), layers.GRUCell(4)])), 3),
    "bare": (lambda: around(Bare(how=lambda x: 2 * x)), 2),
    "subclassed": (lambda: built(Classifier()), 3),
    "two inputs": (lambda: built(TwoInputs()), 3),
}
QUICK = ("block", "loop", "gru", "bare", "subclassed")
UNSAVED = ("bare",)  # Keras cannot make it from its config
CASES = [pytest.param(x, marks=[] if x in QUICK else pytest.mark.slow) for x in MODELS]


def examples(model, number=4):
    rng = np.random.default_rng(0)
    if isinstance(model, TwoInputs):
        shapes = {"features": (3, 4), "side": (2,)}
        return {key: rng.normal(size=(number, *x)).astype("float32") for key, x in shapes.items()}
    if keras_internals.is_functional(model) and model.inputs[0].dtype == "int32":
        return np.array([[1, 2, 3], [4, 5, 0], [6, 0, 0], [7, 8, 0]], "int32")[:number]
    return rng.normal(size=(number, 3, 4)).astype("float32")


def stir(model):
    rng = np.random.default_rng(1)
    for weight in model.trainable_weights:
        weight.assign(weight + 0.3 * rng.normal(size=weight.shape).astype("float32"))


@pytest.fixture(scope="module", params=CASES)
def case(request):
    """Return a model, its copy, an input, and the model's name."""
    make, count = MODELS[request.param]
    keras.utils.set_random_seed(0)
    model = make()
    stir(model)
    converted = ibnn.to_stochastic(model, ibnn.NormalAffine(seed=1), train_size=100)
    assert len(ibnn.stochastic_layers(converted)) == count
    return model, converted, examples(model), request.param


def close(a, b, tolerance=1e-5):
    np.testing.assert_allclose(numpy(a), numpy(b), rtol=0, atol=tolerance)


def test_without_noise_it_is_the_original(case):
    model, converted, x, _ = case
    before = [weight.copy() for weight in model.get_weights()]
    with ibnn.noise_off(converted):
        close(converted(x), model(x))
    own = {id(v) for v in model.variables}
    assert not own & {id(v) for v in converted.variables}
    assert all(np.array_equal(*pair) for pair in zip(before, model.get_weights(), strict=True))
    assert not np.allclose(numpy(converted(x)), numpy(model(x)), atol=1e-4)


def test_each_layer_counts_once_and_back_again(case):
    model, converted, x, _ = case
    converted(x)
    assert len(converted.losses) == len(ibnn.stochastic_layers(converted))
    plain = ibnn.to_deterministic(converted)
    close(plain(x), model(x))
    assert not any(type(x).__module__.startswith("tfp_ibnn") for x in plain._flatten_layers())
    for old, new in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_step_moves_every_posterior_and_steps_lower_the_loss(case):
    model, converted, x, _ = case
    original = model.get_weights()
    y = np.arange(len(keras.tree.flatten(x)[0])) % 3
    # XLA takes no gradient of TensorFlow's loops, of the plain model neither.
    jit = False if any(isinstance(part, Loop) for part in model._flatten_layers()) else "auto"
    optimizer = keras.optimizers.SGD(0.1)
    converted.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=jit)
    before = {id(v): numpy(v) for v in converted.trainable_variables}
    first = converted.train_on_batch(x, y, return_dict=True)["loss"]
    posteriors = [layer.posterior for layer in ibnn.stochastic_layers(converted)]
    for variable in (v for posterior in posteriors for v in posterior.trainable_variables):
        assert not np.array_equal(before[id(variable)], variable), variable.path
    for _ in range(15):
        last = converted.train_on_batch(x, y, return_dict=True)["loss"]
    assert last < first
    assert all(np.array_equal(*pair) for pair in zip(original, model.get_weights(), strict=True))


def test_draws_are_repeatable_and_those_of_a_loop(case):
    _, converted, x, _ = case
    mc = ibnn.MonteCarlo(converted, samples=3, seed=0, return_samples=True, head="softmax")
    found = {key: numpy(value) for key, value in mc(x).items()}
    half = keras.tree.map_structure(lambda part: part[:2], x)
    close(mc(half)["mean"], found["mean"][:2])
    for number in range(3):
        close(mc.draw(x, number)["mean"], found["samples"][..., number, :], 1e-5)
    apart = found["samples"][:, 0] - found["samples"][:, 1]
    assert np.abs(apart).max() > 1e-3
    with ibnn.noise_off(converted):
        close(mc.at_mean(x)["mean"], converted(x))
    # One draw is one z of each layer, for all examples: by hand, in a pass of its own.
    layer = ibnn.stochastic_layers(converted)[0]
    key = ops.cast(mc._key, "int32")
    with ibnn.noise.scope(groups=1, seed=key, losses=False) as forward_pass:
        for one in ibnn.stochastic_layers(converted):
            one.draw_for(forward_pass, 1, None, False)
        assert forward_pass.recall(layer).shape[0] == 1
        close(converted(x), found["samples"][:, 0])


def test_files(case, tmp_path):
    _, converted, x, name = case
    if name in UNSAVED:
        pytest.skip("Keras cannot make this layer from its config, in a plain model neither")
    converted.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    converted.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    kinds, others = ([type(x) for x in ibnn.stochastic_layers(y)] for y in (converted, loaded))
    assert kinds == others
    one, two = (ibnn.MonteCarlo(x, samples=2, seed=0, head="softmax") for x in (converted, loaded))
    close(statistics(two, x)["mean"], statistics(one, x)["mean"])
    pairs = zip(converted.trainable_variables, loaded.trainable_variables, strict=True)
    assert all(old.shape == new.shape and np.array_equal(old, new) for old, new in pairs)


@pytest.mark.slow
@pytest.mark.once
def test_a_file_loads_in_another_process(tmp_path):
    x = inputs = keras.Input((3, 4))
    x = layers.MultiHeadAttention(2, 2)(x, x)
    x = layers.TimeDistributed(layers.Dense(4))(layers.Bidirectional(layers.GRU(4))(x)[:, None])
    model = keras.Model(inputs, layers.Flatten()(x))
    converted = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=100)
    converted.save(tmp_path / "model.keras")
    x = examples(model)
    np.save(tmp_path / "x.npy", x)
    code = (
        "import keras, tfp_ibnn, numpy as np\n"
        "model = keras.models.load_model('model.keras')\n"
        "with tfp_ibnn.noise_off(model):\n"
        "    np.save('y.npy', model(np.load('x.npy')))\n"
        "assert len(tfp_ibnn.stochastic_layers(model)) == 7\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=240)
    close(np.load(tmp_path / "y.npy"), model(x))


@pytest.mark.slow
@pytest.mark.skipif(keras.backend.backend() == "jax", reason="exports are TensorFlow's")
def test_exports(tmp_path):
    import tensorflow as tf

    model = around(Block(), layers.LSTM(4))
    converted = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=100)
    mc = ibnn.MonteCarlo(converted, samples=3, seed=0)
    path = ibnn.export(mc, tmp_path / "1")
    x = examples(model)
    served = tf.saved_model.load(str(path)).signatures["serve"](features=tf.constant(x))
    close(served["mean"], mc(x)["mean"])


def test_patterns_are_names_or_paths():
    def steps(name):
        return layers.TimeDistributed(layers.Dense(4, name="inner"), name=name)

    model = around(steps("one"), steps("two"))

    def converted(pattern):
        copy = ibnn.to_stochastic(model, {pattern: ibnn.NormalAffine()}, train_size=9)
        found = inside.places(copy).values()
        return [x.path for x in found if isinstance(x.layer, ibnn.layers.StochasticLayer)]

    assert converted("inner|head") == ["one/inner", "two/inner", "head"]
    assert converted("t.*/inner") == ["two/inner"]
    with pytest.raises(ValueError, match="'one', which converts no layer.*: one/inner, two/inner"):
        converted("one")


@pytest.mark.parametrize("kind", [layers.LSTM, layers.GRU, layers.SimpleRNN])
def test_noise_of_a_recurrent_layer_is_on_what_its_kernels_multiply(kind):
    """Of one draw, the noise is the same as kernels whose rows are multiplied by z."""
    options = {"return_sequences": True, **({"reset_after": False} if kind is layers.GRU else {})}
    model = around(kind(4, **options), outputs=False)
    stir(model)
    converted = ibnn.to_stochastic(model, ibnn.NormalAffine(initial_scale=0.5), train_size=9)
    (cell,) = ibnn.stochastic_layers(converted)
    x = examples(model)
    with ibnn.noise.scope(groups=1) as forward_pass:
        found = converted(x)
        z = numpy(forward_pass.recall(cell))[0]
    kernel, recurrent, *bias = model.layers[1].get_weights()
    model.layers[1].set_weights([kernel * z[:4, None], recurrent * z[4:, None], *bias])
    close(found, model(x))


@pytest.mark.slow
def test_dropout_of_a_recurrent_layer_stays(policy):
    policy("mixed_bfloat16")
    for options in ({"dropout": 0.5}, {"recurrent_dropout": 0.5}):
        model = around(layers.GRU(4, **options), layers.Reshape((1, 4)), layers.LSTM(3, **options))
        converted = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=9)
        x = examples(model)
        with ibnn.noise_off(converted):
            one, two, three = (converted(x, training=y) for y in (True, True, False))
            assert np.array_equal(numpy(three), numpy(converted(x)))
        assert not np.array_equal(numpy(one), numpy(two))
        close(ops.cast(three, "float32"), ops.cast(model(x), "float32"), 1e-2)
        assert ibnn.to_deterministic(converted).layers[1].get_config()["dropout"] == (
            options.get("dropout", 0.0)
        )


@REGISTER
class Careless(keras.Model):
    """A typical subclass: it passes nothing on and has no config."""

    def __init__(self, activation="relu"):
        super().__init__()
        self.dense = layers.Dense(3, activation)

    def call(self, x):
        return self.dense(x)


def test_a_folded_subclass_is_built(int8):
    model = Careless()
    model(X)
    plain = ibnn.to_deterministic(ibnn.to_stochastic(model, ibnn.NormalAffine(), 50))
    assert plain.built
    plain.quantize("int8")  # which Keras refuses for what is not built
    np.testing.assert_allclose(plain(X), model(X), atol=0.1)


def test_a_subclass_without_a_config():
    model = Careless()
    x = examples(model)
    model(x)
    converted = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=9)
    with ibnn.noise_off(converted):
        close(converted(x), model(x))
    assert isinstance(ibnn.to_deterministic(converted), Careless)
    model = Careless("tanh")
    model(x)
    with pytest.raises(ValueError, match="Careless.*'dense.*other options in the copy"):
        ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=9)
    model = Careless()
    model.build((None, 4))
    with pytest.raises(ValueError, match=r"'dense\S*' in model 'careless\S*' is not built.*once"):
        ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=9)


@REGISTER
class Scaled(keras.Model):
    """Forgets its arguments in its config, and counts in an attribute."""

    def __init__(self, scale=1.0, shift=0.0):
        super().__init__()
        self.scale = scale
        self._shift = shift
        self.count = 0
        self.dense = layers.Dense(3)

    def call(self, x):
        return self.scale * getattr(self, "factor", 1.0) * self.dense(x) + self._shift

    def get_config(self):
        return {}


X, Y = np.linspace(-1, 1, 16, dtype="float32").reshape(4, 4), np.array([0, 1, 2, 0])
VERBS = {
    "fit": lambda model, folder: model.fit(X, Y, validation_data=(X, Y), verbose=0),
    "evaluate": lambda model, folder: model.evaluate(X, Y, verbose=0),
    "predict": lambda model, folder: model.predict(X, verbose=0),
    "train_on_batch": lambda model, folder: model.train_on_batch(X, Y),
    "test_on_batch": lambda model, folder: model.test_on_batch(X, Y),
    "predict_on_batch": lambda model, folder: model.predict_on_batch(X),
    "save": lambda model, folder: model.save(folder / "model.keras"),
    "save_weights": lambda model, folder: model.save_weights(folder / "model.weights.h5"),
    "compile": lambda model, folder: model.compile("sgd", steps_per_execution=4),
    "summary": lambda model, folder: model.summary(print_fn=lambda line: None),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_subclass_is_converted_after_any_verb(verb, tmp_path):
    model = Careless()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model(X)
    VERBS[verb](model, tmp_path)
    converted = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=9)
    with ibnn.noise_off(converted):
        close(converted(X), model(X))
    close(ibnn.to_deterministic(converted)(X), model(X))


def test_what_was_set_after_the_constructor_is_carried_over():
    model = Scaled()
    model(X)
    model.factor, model.count = 3.0, 5
    converted = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=9)
    assert converted.model.count == 5
    with ibnn.noise_off(converted):
        close(converted(X), model(X))
    close(ibnn.to_deterministic(converted)(X), model(X))


def test_containers_that_were_set_are_carried_over():
    model = Scaled()
    model(X)
    model.weights_of = {"a": [1.0, 2.0], "b": (3, None)}
    model.names = ["one", "two"]
    converted = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=9)
    for copy in (converted.model, ibnn.to_deterministic(converted)):
        assert copy.weights_of == {"a": [1.0, 2.0], "b": (3, None)}
        assert copy.names == ["one", "two"]
    converted.model.names.append("three")
    assert model.names == ["one", "two"]


class Limited(Scaled):
    """Has a setting that is NaN unless it is given."""

    def __init__(self, limit=float("nan")):
        super().__init__()
        self.limit = limit


def test_nan_is_the_same_setting_as_nan():
    model = Limited()
    model(X)
    converted = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=9)
    assert np.isnan(converted.model.limit)
    model.limit = 3.0
    with pytest.raises(ValueError, match=r"`limit` of 'limited.*' is 3.0, and nan in the copy"):
        ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=9)


@pytest.mark.parametrize(("argument", "attribute"), [("scale", "scale"), ("shift", "_shift")])
def test_what_the_constructor_got_must_be_in_the_config(argument, attribute):
    model = Scaled(**{argument: 2.0})
    model(X)
    with pytest.raises(
        ValueError, match=rf"`{attribute}` of 'scaled.*' is 2.0, and .* in the copy"
    ):
        ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=9)


@pytest.mark.once
def test_what_does_not_take_a_subclass_names_what_does():
    model = Careless()
    model(X)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    for refused in (ibnn.Laplace, ibnn.GaussianVI):
        with pytest.raises(ValueError, match="'careless.*' has a `call` of its own.*Temperature"):
            refused(model)
    with pytest.raises(ValueError, match="'careless.*' has a `call` of its own. Take score='max"):
        ibnn.OODDetector(model, "mahalanobis")
    scaled = ibnn.TemperatureScaling(model).fit(X, Y)  # knows by the loss that these are logits
    close(scaled(X), model(X) / scaled.temperature)
    assert ibnn.OODDetector(scaled).fit(X).score(X).shape == (4,)


@pytest.mark.once
def test_what_does_not_take_outputs_at_positions_names_what_does():
    x, y = np.ones((6, 4, 4, 1), "float32"), np.arange(96).reshape(6, 4, 4) % 2
    upsampled = layers.Conv2DTranspose(2, 3, padding="same")
    model = keras.Sequential([keras.Input((4, 4, 1)), upsampled])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    for refused in (
        ibnn.Laplace,
        lambda m: ibnn.Laplace(m, "all"),
        lambda m: ibnn.GaussianVI(m).fit(x, y, verbose=0),
    ):
        with pytest.raises(ValueError, match="got .*4, 4, 2.*take ibnn.TemperatureScaling"):
            refused(model)
    pooled = ibnn.OODDetector(model, "mahalanobis", reduction="pooled")
    with pytest.raises(ValueError, match=r"`y` has the shape \(6, 4, 4\), one at each position"):
        pooled.fit(x, y)
    with pytest.raises(
        ValueError, match="Dense layer at the end.*'mahalanobis' or 'knn'.*'entropy'"
    ):
        ibnn.OODDetector(model, "energy")
    ibnn.OODDetector(model, "knn", k=3).fit(x, y)


@REGISTER
class Named(keras.Model):
    """Its attributes have the names by which places are known."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = layers.Dense(4)
        self.hidden = layers.Dense(4, "relu")
        self.graph = [layers.Dense(4), layers.Dense(4)]
        self.last = layers.Dense(3)

    def call(self, x):
        x = self.hidden(self.first(x))
        for layer in self.graph:
            x = layer(x)
        return self.last(x)


def test_attributes_may_have_any_name(tmp_path):
    model = Named()
    x = examples(model)
    model(x)
    converted = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=9, seed=0)
    assert len(ibnn.stochastic_layers(converted)) == 5
    with ibnn.noise_off(converted):
        close(converted(x), model(x))
    converted.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert len(ibnn.stochastic_layers(loaded)) == 5
    close(ibnn.to_deterministic(loaded)(x), model(x))


def test_layers_that_are_frozen_stay_so():
    model = Careless()
    x = examples(model)
    model(x)
    frozen = keras_internals.nested_layers(model, include_self=False)[0]
    frozen.trainable = False
    converted = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=9)
    with ibnn.noise_off(converted):
        close(converted(x), model(x))
    plain = ibnn.to_deterministic(converted)
    kept = [x.trainable for x in keras_internals.nested_layers(plain, include_self=False)]
    assert kept == [x.trainable for x in keras_internals.nested_layers(model, include_self=False)]


@REGISTER
class Tied(layers.Layer):
    """Is given a layer, which others may have too."""

    def __init__(self, inner, **kwargs):
        super().__init__(**kwargs)
        self.inner = inner

    def build(self, shape):
        if not self.inner.built:
            self.inner.build(shape)

    def call(self, x):
        return self.inner(x)

    def get_config(self):
        inner = keras.saving.serialize_keras_object(self.inner)
        return {**super().get_config(), "inner": inner}

    @classmethod
    def from_config(cls, config):
        return cls(**{**config, "inner": keras.saving.deserialize_keras_object(config["inner"])})


def test_sharing_that_a_copy_would_lose_is_refused():
    dense = layers.Dense(4)
    model = around(Tied(dense, name="first"), Tied(dense, name="second"))
    with pytest.raises(ValueError, match="'second'.*cannot be copied.*shared"):
        ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ViT", "BERT", "Llama", "flat ViT"])
def test_keras_hub(name, tmp_path):
    models = pytest.importorskip("keras_hub").models
    sizes = {"num_layers": 1, "hidden_dim": 8}
    if "ViT" in name:
        options = {"image_shape": (16, 16, 3), "patch_size": 8, "num_heads": 2, "mlp_dim": 16}
        backbone = models.ViTBackbone(**options, **sizes)
        inputs = keras.Input((16, 16, 3))
        x = np.random.default_rng(0).normal(size=(2, 16, 16, 3)).astype("float32")
    else:
        heads = {"num_heads": 2} if name == "BERT" else {}
        if name == "Llama":
            heads = {"num_query_heads": 2, "num_key_value_heads": 1}
        kind = models.BertBackbone if name == "BERT" else models.LlamaBackbone
        backbone = kind(vocabulary_size=30, intermediate_dim=16, **heads, **sizes)
        inputs = {x.name: keras.Input((5,), dtype="int32", name=x.name) for x in backbone.inputs}
        x = {key: np.array([[1, 1, 1, 1, 0]] * 2, "int32") for key in inputs}
    outputs = backbone.outputs[0] if name == "flat ViT" else backbone(inputs)
    inputs = backbone.inputs if name == "flat ViT" else inputs
    outputs = outputs["sequence_output"] if name == "BERT" else outputs
    outputs = layers.Dense(3, "softmax", name="head")(layers.GlobalAveragePooling1D()(outputs))
    model = keras.Model(inputs, outputs)
    converted = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=9)
    paths = [place.path for place in inside.places(converted).values()]
    noisy = [path for path in paths if path.endswith(("query", "key", "value", "head"))]
    assert len(noisy) == 4
    assert len(ibnn.stochastic_layers(converted)) >= 7
    with ibnn.noise_off(converted):
        close(converted(x), model(x))
    close(ibnn.to_deterministic(converted)(x), model(x))
    mc = ibnn.MonteCarlo(converted, samples=2, seed=0, return_samples=True)
    close(mc(x)["samples"][:, 1], mc.draw(x, 1)["mean"])
    if name != "flat ViT":  # Keras cannot make its layers from their configs
        converted.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        close(ibnn.MonteCarlo(loaded, samples=2, seed=0)(x)["mean"], mc(x)["mean"])
