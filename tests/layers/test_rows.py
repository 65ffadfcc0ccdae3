"""Examples that a network moves off the first axis of its tensors, or cuts into rows there."""

import itertools

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfp_ibnn as ibnn
from tests.layer_checklist import numpy
from tfp_ibnn.layers.rows import may_move_examples

STEPS, CHANNELS, UNITS = 6, 3, 4
X = np.random.default_rng(0).normal(size=(5, STEPS, CHANNELS)).astype("float32")
AFFINE = ibnn.NormalAffine(initial_scale=0.5)


def swapped(x):
    return ops.transpose(x, (1, 0, 2))


def time_first(x, dense):
    return swapped(dense(swapped(x)))


def merged_time_first(x, dense):
    rows = ops.reshape(swapped(x), (-1, CHANNELS))
    return swapped(ops.reshape(dense(rows), (STEPS, -1, UNITS)))


def tiled(x, dense):
    outputs = dense(ops.tile(x, (2, 1, 1)))
    return ops.reshape(outputs, (-1, 2 * STEPS, UNITS))


def on_a_table(x, dense):
    table = ops.transpose(ops.mean(x, axis=0))  # of all examples together
    return x[..., :1] + dense(ops.transpose(table))


def merged(x, dense):
    rows = ops.reshape(x, (-1, CHANNELS))
    return ops.reshape(dense(rows), (-1, STEPS, UNITS))


def repeated(x, dense):
    return ops.reshape(dense(ops.repeat(x, 2, axis=0)), (-1, 2 * STEPS, UNITS))


def back_in_time(x, dense):
    return dense(swapped(ops.flip(swapped(x), axis=0)))


REFUSED = [time_first, merged_time_first, tiled, on_a_table]
WORKING = [merged, repeated, back_in_time]


def graph(through, layer):
    x = keras.Input((STEPS, CHANNELS))
    outputs = layers.Dense(2, name="last")(ops.tanh(through(x, layer)))
    return keras.Model(x, layers.GlobalAveragePooling1D()(outputs))


def opened(through):
    return graph(through, layers.Dense(UNITS, name="moved"))


@keras.saving.register_keras_serializable(package="tests.rows")
class Closed(keras.Model):
    def __init__(self, through, **kwargs):
        super().__init__(**kwargs)
        self.through = through
        self.dense = layers.Dense(UNITS, name="moved")
        self.last = layers.Dense(2)

    def call(self, x):
        return self.last(ops.mean(globals()[self.through](x, self.dense), axis=1))

    def get_config(self):
        return {**super().get_config(), "through": self.through}


def closed(through):
    model = Closed(through.__name__)
    model(X)
    return model


@pytest.mark.parametrize("through", REFUSED)
@pytest.mark.parametrize("make", [lambda f: graph(f, layers.Dense(UNITS, name="moved")), closed])
def test_moved_examples_are_refused(make, through):
    with pytest.raises(ValueError, match=r"'moved' does not have the examples on the first axis"):
        ibnn.to_stochastic(make(through), {"moved": AFFINE}, train_size=10)


def test_what_is_not_stochastic_may_move_the_examples():
    model = opened(time_first)
    stochastic = ibnn.to_stochastic(model, {"last": AFFINE}, train_size=10)
    assert may_move_examples(stochastic)
    assert not may_move_examples(graph(lambda x, dense: dense(x) + 1.0, layers.Dense(UNITS)))


def test_models_made_by_hand_are_refused():
    layer = ibnn.StochasticDense(UNITS, posterior=AFFINE, train_size=10, name="moved")
    model = graph(time_first, layer)
    with pytest.raises(ValueError, match="'moved' does not have the examples"):
        ibnn.MonteCarlo(model, head="point")
    model = ibnn.StochasticModel(model.input, model.output)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="'moved' does not have the examples"):
        model.fit(X, np.zeros((len(X), 2)), verbose=0)


def test_dropout_on_moved_examples_is_refused():
    x = keras.Input((STEPS, CHANNELS))
    dropped = layers.Dropout(0.5, name="moved")(swapped(x))
    model = keras.Model(x, layers.Dense(2)(layers.Flatten()(swapped(dropped))))
    with pytest.raises(ValueError, match="'moved' does not have the examples"):
        ibnn.MonteCarlo(model, head="point", dropout=True)


def centered(x):
    return x - ops.mean(x, axis=0)  # of the batch


SEEDS = keras.random.SeedGenerator(0)
CALLS = itertools.count()


def noisy_by_seed(x):
    return x + keras.random.normal(ops.shape(x), seed=SEEDS)


def noisy(x):
    """Add other numbers in each call. Three calls later, they differ by less than a thousandth."""
    number = next(CALLS)
    return x + 3 + number % 3 + 1e-3 * number


@keras.saving.register_keras_serializable(package="tests.rows")
class Changed(keras.layers.Layer):
    def __init__(self, how, **kwargs):
        super().__init__(**kwargs)
        self.how = how

    def call(self, x):
        return globals()[self.how](x)

    def get_config(self):
        return {**super().get_config(), "how": self.how}


@pytest.mark.parametrize("how", [centered, noisy_by_seed, noisy], ids=lambda f: f.__name__)
def test_layers_that_use_the_batch_or_draw_noise_keep_the_rows(how):
    def changed(then):
        return opened(lambda x, dense: then(Changed(how.__name__)(x), dense))

    ibnn.to_stochastic(changed(lambda x, dense: dense(x)), AFFINE, train_size=10)
    with pytest.raises(ValueError, match="'moved' does not have the examples"):
        ibnn.to_stochastic(changed(time_first), {"moved": AFFINE}, train_size=10)


@pytest.mark.parametrize(("make", "through"), [*((opened, f) for f in WORKING), (closed, merged)])
def test_draws_are_those_of_a_loop_over_draws_and_examples(make, through):
    stochastic = ibnn.to_stochastic(make(through), {"moved": AFFINE}, train_size=10)
    averaged = ibnn.MonteCarlo(stochastic, samples=3, seed=0, head="point", chunk_size=2)
    found = averaged.predict(X[:2], verbose=0)
    draws = [
        [numpy(averaged.draw(X[n : n + 1], number)["mean"])[0] for n in range(2)]
        for number in range(averaged.samples)
    ]
    np.testing.assert_allclose(found["mean"], np.mean(draws, axis=0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["epistemic"], np.var(draws, axis=0), rtol=1e-3, atol=1e-5)
    assert len(np.unique(np.round(draws, 5)[:, 0, 0])) == 3


@pytest.mark.parametrize(
    "posterior",
    [AFFINE, ibnn.MeanField(), ibnn.MNF(), ibnn.MeanField(estimator="local")],
    ids=["affine", "flipout", "mnf", "local"],
)
def test_the_rows_of_an_example_share_its_draw(posterior):
    x = keras.Input((STEPS, CHANNELS))
    dense = layers.Dense(UNITS, use_bias=False, name="moved")
    model = keras.Model(x, merged(x, dense))
    stochastic = ibnn.to_stochastic(model, {"moved": posterior}, train_size=10)
    outputs = numpy(stochastic(np.ones_like(X), training=True))
    np.testing.assert_allclose(outputs, np.tile(outputs[:, :1], (1, STEPS, 1)), rtol=1e-5)
    assert len(np.unique(outputs[:, 0], axis=0)) > 1


def test_the_rows_of_an_example_share_its_draw_in_compiled_functions():
    x = keras.Input((STEPS, CHANNELS))
    dense = layers.Dense(UNITS, use_bias=False, name="moved")
    model = keras.Model(x, merged(x, dense))
    stochastic = ibnn.to_stochastic(model, AFFINE, train_size=10)
    averaged = ibnn.MonteCarlo(stochastic, samples=1, head="point", independent=True)
    for outputs in (
        stochastic.predict(np.ones_like(X), batch_size=3, verbose=0),
        averaged.predict(np.ones_like(X), batch_size=3, verbose=0)["mean"],
    ):
        np.testing.assert_allclose(outputs, np.tile(outputs[:, :1], (1, STEPS, 1)), rtol=1e-5)
        assert len(np.unique(outputs[:, 0, 0])) == len(X)
