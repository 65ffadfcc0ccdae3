"""Training and evaluation of a user's own: what `to_stochastic` carries over, and what it names."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfp_ibnn as ibnn
from tests.layer_checklist import numpy
from tfp_ibnn.layers.carried import METHODS, own_methods

ON_JAX = keras.backend.backend() == "jax"
N = 12
X = np.random.default_rng(0).normal(size=(N, 3)).astype("float32")
Y = np.random.default_rng(1).normal(size=(N, 2)).astype("float32")


def noted(found, **more):
    """The logs of a step, which JAX returns with its state, and more in them."""
    if isinstance(found, tuple):
        return {**found[0], **more}, found[1]
    return {**found, **more}


class OwnTraining:
    """Overrides everything, mixed into models of either kind; backends differ in nothing here."""

    def compile(self, optimizer, factor, **kwargs):
        super().compile(optimizer=optimizer, loss="mse", **kwargs)
        self.factor = factor

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        self.extra.update_state(ops.mean(y_pred))
        return self.factor * self.scale * loss

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "counted": ops.ones(())}

    def train_step(self, *args):
        return noted(super().train_step(*args), trained=ops.ones(()))

    def test_step(self, *args):
        return noted(super().test_step(*args), tested=ops.ones(()))

    def predict_step(self, *args):
        found = super().predict_step(*args)
        return (found[0] + 100.0, found[1]) if isinstance(found, tuple) else found + 100.0


@keras.saving.register_keras_serializable(package="tests.carried")
class Opened(OwnTraining, keras.Model):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.extra = keras.metrics.Mean(name="extra")
        self.scale = 1.0


@keras.saving.register_keras_serializable(package="tests.carried")
class Closed(OwnTraining, keras.Model):
    def __init__(self, scale=0.5, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(2)
        self.extra = keras.metrics.Mean(name="extra")
        self.scale = scale

    def call(self, x):
        return self.dense(x)

    def get_config(self):
        return {**super().get_config(), "scale": self.scale}


def opened(kind=Opened):
    x = keras.Input((3,))
    model = kind(x, layers.Dense(2)(x))
    model.scale = 0.5
    return model


def closed():
    model = Closed()
    model(X)
    return model


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(("make", "own"), [(opened, Opened), (closed, Closed)])
def test_training_and_evaluation_are_the_users(make, own, tmp_path):
    original = make()
    original.compile(keras.optimizers.SGD(0.1), factor=3.0)  # which it keeps, in `factor`
    original.fit(X, Y, verbose=0)
    model = ibnn.to_stochastic(original, ibnn.NormalAffine(initial_scale=0.1), train_size=N)
    assert isinstance(model, own)
    assert model.factor == 3.0
    model.compile(keras.optimizers.SGD(0.0), factor=4.0, kl_scale=1.0)
    logs = model.fit(X, Y, batch_size=N, verbose=0).history
    assert logs.keys() >= {"nll", "kl", "extra", "counted", "trained"}
    assert logs["nll"][0] + logs["kl"][0] / N == pytest.approx(logs["loss"][0], rel=1e-4)
    with ibnn.noise_off(model):
        tested = model.evaluate(X, Y, verbose=0, return_dict=True)
        error = np.mean((numpy(original(X)) - Y) ** 2)
        assert tested["loss"] == pytest.approx(4.0 * 0.5 * error, rel=1e-4)
        assert tested["tested"] == 1
        expected = numpy(original(X)) + 100.0
        np.testing.assert_allclose(model.predict(X, verbose=0), expected, rtol=1e-5)
    with warnings.catch_warnings(action="ignore"):  # Keras: a `compile` of one's own is not redone
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded, own)
    loaded.compile(keras.optimizers.SGD(0.1), factor=4.0, kl_scale=1.0)
    assert loaded.fit(X, Y, batch_size=N, verbose=0).history["trained"] == [1]
    plain = ibnn.to_deterministic(loaded)
    assert type(plain) is own
    assert ibnn.to_deterministic(model).scale == 0.5


class WithoutLosses(keras.Model):
    """Leaves out what layers add to the loss."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return ops.mean(ops.square(y - y_pred))


def test_the_kl_is_added_to_a_loss_that_leaves_it_out():
    model = ibnn.to_stochastic(opened(WithoutLosses), ibnn.NormalAffine(), train_size=N)
    model.compile(keras.optimizers.SGD(0.0), kl_scale=1.0)
    logs = model.fit(X, Y, batch_size=N, verbose=0).history
    assert logs["kl"][0] > 0
    assert logs["loss"][0] == pytest.approx(logs["nll"][0] + logs["kl"][0] / N, rel=1e-4)


class Guide(keras.Model):
    """Trains as Keras's guide shows it, with a loop over all metrics."""

    adds_losses = True

    def _loss(self, y, y_pred, losses):
        return ops.mean(ops.square(y - y_pred)) + sum(losses)

    def _tensorflow_step(self, x, y):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self._loss(y, y_pred, self.losses if self.adds_losses else [])
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            metric.update_state(*((loss,) if metric.name == "loss" else (y, y_pred)))
        return {metric.name: metric.result() for metric in self.metrics}

    def _jax_step(self, state, x, y):
        import jax

        def loss_and_updates(trainable, fixed):
            options = {"return_losses": True} if self.adds_losses else {}
            y_pred, fixed, *losses = self.stateless_call(
                trainable, fixed, x, training=True, **options
            )
            if not self.adds_losses:
                return self.compute_loss(x, y, y_pred), (y_pred, fixed)
            return self._loss(y, y_pred, *losses), (y_pred, fixed)

        trainable, fixed, optimizer, metrics = state
        step = jax.value_and_grad(loss_and_updates, has_aux=True)
        (loss, (y_pred, fixed)), gradients = step(trainable, fixed)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        logs, updated = {}, []
        for metric in self.metrics:
            own = metrics[len(updated) : len(updated) + len(metric.variables)]
            values = (loss,) if metric.name == "loss" else (y, y_pred)
            own = metric.stateless_update_state(own, *values)
            logs[metric.name] = metric.stateless_result(own)
            updated += own
        return logs, (trainable, fixed, optimizer, updated)

    def train_step(self, *args):
        *state, (x, y) = args
        return self._jax_step(*state, x, y) if ON_JAX else self._tensorflow_step(x, y)


class Careless(Guide):
    adds_losses = False


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_step_written_by_hand_trains_the_posterior():
    model = ibnn.to_stochastic(opened(Guide), ibnn.NormalAffine(), train_size=N)
    assert isinstance(model, Guide)
    model.compile("sgd", "mse", metrics=["mae"], kl_scale=1.0)
    posterior = ibnn.stochastic_layers(model)[0].posterior
    before = [numpy(weight.value).copy() for weight in posterior.trainable_weights]
    logs = model.fit(X, Y, batch_size=6, verbose=0).history
    assert np.isfinite(logs["loss"] + logs["mae"]).all()
    after = [numpy(weight.value) for weight in posterior.trainable_weights]
    assert not any(np.array_equal(*pair) for pair in zip(before, after, strict=True))
    assert np.isfinite(model.evaluate(X, Y, verbose=0)).all()


def test_a_step_without_the_kl_is_warned_of():
    model = ibnn.to_stochastic(opened(Careless), ibnn.NormalAffine(), train_size=N)
    model.compile("sgd", "mse", kl_scale=1.0)
    with pytest.warns(UserWarning, match=r"trains without the KL divergence.*`self.losses`"):
        model.fit(X, Y, batch_size=6, verbose=0)


class Chain(OwnTraining, keras.Sequential):
    pass


class OwnArguments(keras.Model):
    def __init__(self, units):
        x = keras.Input((3,))
        super().__init__(x, layers.Dense(units)(x))

    def train_step(self, *args):
        raise NotImplementedError


class OwnAttributes(keras.Model):
    """Its training uses parts that were set after the constructor."""

    def train_step(self, *args):
        raise NotImplementedError


def with_attribute(value):
    inputs = keras.Input((3,))
    model = OwnAttributes(inputs, layers.Dense(2)(inputs))
    model.used_in_training = value
    return model


@pytest.mark.once
@pytest.mark.parametrize(
    ("model", "names"),
    [
        (lambda: Chain([keras.Input((3,)), layers.Dense(2)]), "compile, compute_loss.*train_step"),
        (lambda: OwnArguments(2), "OwnArguments defines: train_step"),
        (lambda: with_attribute(layers.Dense(3)), "OwnAttributes defines: train_step"),
        (lambda: with_attribute([layers.Dense(3)]), "OwnAttributes defines: train_step"),
        (lambda: with_attribute({"a": keras.metrics.Mean()}), "OwnAttributes defines: train_step"),
    ],
)
def test_what_cannot_be_carried_is_named_with_a_remedy(model, names):
    with pytest.warns(UserWarning, match=rf"{names}.*subclass of ibnn.StochasticModel") as caught:
        copy = ibnn.to_stochastic(model(), ibnn.NormalAffine(), train_size=N)
    files = [warning.filename for warning in caught if "subclass of" in str(warning.message)]
    assert files == [__file__]

    class Mine(ibnn.StochasticModel):  # what the warning says
        def test_step(self, *args):
            return noted(super().test_step(*args), tested=ops.ones(()))

    mine = Mine(copy.inputs, copy.outputs)
    mine.compile("sgd", "mse", kl_scale=1.0)
    assert mine.evaluate(X, Y, verbose=0, return_dict=True)["tested"] == 1
    with pytest.warns(UserWarning, match=r"without what Mine defines: test_step"):
        ibnn.to_deterministic(mine)


@pytest.mark.once
def test_own_methods():
    assert own_methods(keras.Model) == own_methods(ibnn.StochasticModel) == []
    assert own_methods(Opened) == [name for name in METHODS if name in vars(OwnTraining)]


@pytest.mark.once
def test_a_class_that_is_not_known_loads_with_a_warning(tmp_path):
    model = ibnn.to_stochastic(opened(Guide), ibnn.NormalAffine(), train_size=N)
    model.save(tmp_path / "model.keras")
    with pytest.warns(UserWarning, match=r"'Guide' is not known.*custom_objects"):
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert not isinstance(loaded, Guide)
    objects = {"Guide": Guide}
    loaded = keras.models.load_model(tmp_path / "model.keras", custom_objects=objects)
    assert isinstance(loaded, Guide)
