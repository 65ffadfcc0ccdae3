"""Numbers that become NaN or infinite: caught, explained, and nothing lost."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

import tfp_ibnn as ibnn
from tfp_ibnn._core import backend
from tfp_ibnn.training import NonFiniteError

X = np.random.default_rng(0).normal(size=(80, 6)).astype("float32")
Y = np.arange(80) % 3


def build(kind="stochastic"):
    det = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, "tanh", name="first"),
            keras.layers.Dense(8, "tanh", name="second"),
            keras.layers.Dense(3, name="third"),
        ]
    )
    posteriors = {"second": ibnn.NormalPlanar1d(depth=1), ".*": ibnn.NormalAffine()}
    model = ibnn.to_stochastic(det, posteriors, train_size=80)
    if kind == "plain":
        model = keras.Model(model.input, model.output)
    optimizer = keras.optimizers.SGD(1e-2, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        ibnn.two_speed(optimizer, stochastic_lr=1e-2), loss, jit_compile=backend.jit_pays()
    )
    model.optimizer.build(model.trainable_variables)
    return model


def variables(model):
    return [*model.variables, *model.optimizer.variables]


@functools.cache
def built(kind):
    model = build(kind)
    return model, [ops.convert_to_numpy(v.value) for v in variables(model)]


def make(rate=1e-2, kind="stochastic"):
    """One model, back at its start: to compile it takes longer than to train it."""
    model, start = built(kind)
    for variable, value in zip(variables(model), start, strict=True):
        variable.assign(value)
    model.optimizer.learning_rate = rate
    return model


class AtBatch(keras.callbacks.Callback):
    """Does something to the model after a batch, counted from 0."""

    def __init__(self, batch, action):
        super().__init__()
        self.batch, self.action = batch, action

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            self.action(self.model)


def fit(model, guard, *callbacks, x=X, epochs=2):
    return model.fit(
        x, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=[*callbacks, guard]
    )


def state(model):
    return [ops.convert_to_numpy(v) for v in (*model.weights, *model.optimizer.variables)]


def ruin(layer, weight):
    def action(model):
        variable = weight(model.get_layer(layer).posterior)
        variable.assign(ops.full(variable.shape, float("nan")))

    return action


@pytest.mark.parametrize(
    ("layer", "weight", "culprit"),
    [
        ("second", lambda posterior: posterior.flows[0].u, "z of layer 'second'"),
        ("third", lambda posterior: posterior.affine.weights[0], "z of layer 'third'"),
        ("first", lambda posterior: posterior.beta, "the loss, while every z and KL was finite"),
    ],
)
def test_names_the_first_to_leave_the_finite_range(layer, weight, culprit):
    model, guard = make(), ibnn.TerminateOnNonFinite(every=4)
    with pytest.warns(UserWarning, match="become NaN or infinite") as caught:
        history = fit(model, guard, AtBatch(4, ruin(layer, weight)))
    assert len(history.epoch) == 1
    assert f"The first to become NaN or infinite was {culprit}." in guard.message
    assert "After batch 8 of epoch 1" in guard.message
    assert guard.message in {str(warning.message) for warning in caught}
    assert all(np.isfinite(value).all() for value in state(model))


class InfiniteKL(ibnn.FlowPosterior):
    """A posterior whose KL fails, and z does not, as soon as `broken` is set."""

    def build(self, input_shape):
        super().build(input_shape)
        self.broken = self._add_parameter("broken", (), "zeros", trainable=False)

    def transform(self, noise, component=None, training=False):
        draw = super().transform(noise, component, training)
        return draw._replace(kl=draw.kl / (1 - self.broken))


def test_tells_a_kl_from_z(eagerly):
    det = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, name="only")])
    model = ibnn.to_stochastic(det, InfiniteKL(initial_scale=0.2), train_size=80)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, jit_compile=backend.jit_pays())
    guard = ibnn.TerminateOnNonFinite(every=1)
    with pytest.warns(UserWarning, match="the KL of layer 'only'"):
        fit(model, guard, AtBatch(2, lambda m: m.get_layer("only").posterior.broken.assign(1)))


def test_goes_back_to_the_last_good_weights_and_trains_on():
    model, guard = make(), ibnn.TerminateOnNonFinite(every=4)
    kept = {}
    keep = AtBatch(3, lambda model: kept.update(state=state(model)))
    with pytest.warns(UserWarning, match="After epoch 1 .*those of 6 batches before"):
        fit(model, guard, keep, AtBatch(8, ruin("first", lambda p: p.affine.weights[0])))
    for found, good in zip(state(model), kept["state"], strict=True):
        np.testing.assert_array_equal(found, good)
    again = ibnn.TerminateOnNonFinite(every=4)
    history = fit(model, again)
    assert again.message is None
    assert np.isfinite(history.history["loss"]).all()


@pytest.mark.once
def test_a_last_step_that_ruins_the_weights_is_found():
    """The loss of an epoch does not tell: it is that of the weights before."""
    model, guard = make(), ibnn.TerminateOnNonFinite()
    last = AtBatch(9, ruin("second", lambda posterior: posterior.affine.weights[1]))
    with pytest.warns(UserWarning, match="Weights that are not finite: second/posterior/affine"):
        history = fit(model, guard, last)
    assert np.isfinite(history.history["loss"]).all()
    assert len(history.epoch) == 1


@pytest.mark.once
def test_a_rate_far_too_large_leaves_finite_weights():
    model, guard = make(rate=1e20), ibnn.TerminateOnNonFinite(every=1)
    with pytest.warns(UserWarning, match="batches before"):
        fit(model, guard)
    assert all(np.isfinite(value).all() for value in state(model))


def test_raises_if_asked_to_and_keeps_later_callbacks_from_saving(tmp_path):
    model = make()
    guard = ibnn.TerminateOnNonFinite(every=100, raises=True)
    checkpoint = ibnn.Checkpoint(tmp_path / "run.npz")
    ruined = AtBatch(5, ruin("first", lambda p: p.affine.weights[0]))
    with pytest.raises(NonFiniteError, match="z of layer 'first'"):
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[ruined, guard, checkpoint])
    assert not checkpoint.path.exists()
    assert all(np.isfinite(value).all() for value in state(model))


@pytest.mark.once
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_what_it_goes_back_to_has_a_finite_loss(every):
    """Weights can be finite and give none: those of the last step before a loss that was not."""
    model, guard = make(rate=1e3), ibnn.TerminateOnNonFinite(every=every)
    with pytest.warns(UserWarning, match="before"):
        fit(model, guard, epochs=20)
    assert np.isfinite(model.evaluate(X, Y, verbose=0)).all()


@pytest.mark.once
def test_the_end_of_an_epoch_proves_no_weights_that_have_just_been_kept():
    model, guard = make(), ibnn.TerminateOnNonFinite(every=5)  # and there are 10 batches

    class InTheSecond(AtBatch):
        def on_epoch_begin(self, epoch, logs=None):
            self.batch = 2 if epoch == 1 else None

    ruined = InTheSecond(None, ruin("first", lambda posterior: posterior.affine.weights[0]))
    with pytest.warns(UserWarning, match="batch 5 of epoch 2 .*those of 10 batches before"):
        fit(model, guard, ruined)


@pytest.mark.once
def test_infinite_data():
    x = X.copy()
    x[30] = np.inf
    model, guard = make(), ibnn.TerminateOnNonFinite(every=1)
    with pytest.warns(UserWarning, match="finite"):
        fit(model, guard, x=x)
    assert all(np.isfinite(value).all() for value in state(model))


@pytest.mark.once
def test_other_models_get_the_weights_named(eagerly):
    model, guard = make(kind="plain"), ibnn.TerminateOnNonFinite(every=1)
    with pytest.warns(UserWarning, match="Weights that are not finite: .*posterior"):
        fit(model, guard, AtBatch(4, ruin("second", lambda p: p.affine.weights[0])))
    assert all(np.isfinite(value).all() for value in state(model))


def test_says_nothing_of_a_sound_training_and_changes_nothing():
    guard = ibnn.TerminateOnNonFinite(every=3)
    with_guard = fit(make(), guard).history["loss"]
    without = fit(make(), keras.callbacks.Callback()).history["loss"]
    assert guard.message is None
    np.testing.assert_allclose(with_guard, without, rtol=1e-6)


@pytest.mark.once
def test_weights_that_are_bad_from_the_beginning():
    model, guard = make(), ibnn.TerminateOnNonFinite()
    ruin("first", lambda posterior: posterior.affine.weights[0])(model)
    with pytest.warns(UserWarning, match="not finite from the beginning"):
        fit(model, guard)


@pytest.mark.once
@pytest.mark.slow
def test_batches_that_keras_runs_at_once_are_counted():
    model, guard = build(), ibnn.TerminateOnNonFinite(every=3)
    model.compile(
        model.optimizer, model.loss, steps_per_execution=2, jit_compile=backend.jit_pays()
    )
    ruin_after = AtBatch(5, ruin("first", lambda posterior: posterior.affine.weights[0]))
    with pytest.warns(UserWarning, match="After batch 6 of epoch 1.*those of 6 batches before"):
        fit(model, guard, ruin_after)


@pytest.mark.once
def test_a_model_that_is_built_in_its_first_step_has_nothing_to_go_back_to(eagerly):
    model = keras.Sequential([ibnn.StochasticDense(3, train_size=80)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1e30), loss, jit_compile=backend.jit_pays())
    guard = ibnn.TerminateOnNonFinite(every=1)
    with pytest.warns(UserWarning, match="none to go back to"):
        fit(model, guard, x=X * 1e10)


def test_a_loaded_model_tells_of_the_fault_too(tmp_path):
    model = build()
    ruin("second", lambda posterior: posterior.flows[0].u)(model)
    fit(model, keras.callbacks.Callback(), epochs=1)
    assert model.fault == "z of layer 'second'"
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.fault == "z of layer 'second'"
    loaded.clear_fault()
    assert loaded.fault is None


@pytest.mark.parametrize("every", [0, -1, 1.5, "often"])
def test_every_must_be_a_whole_number(every):
    with pytest.raises(ValueError, match="`every`"):
        ibnn.TerminateOnNonFinite(every=every)
