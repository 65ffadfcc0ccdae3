"""The loss of a stochastic model, its samples in training, and the train size it is told."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfp_ibnn as ibnn
from tests.layer_checklist import numpy, stir
from tests.registry import AT_PRIOR
from tests.training.tools import N, X, Y, data, fit, network, values
from tfp_ibnn.training.callbacks import posterior_statistics


@pytest.mark.parametrize("posterior", [ibnn.NormalAffine, ibnn.NormalPlanar1d])
def test_loss_is_nll_and_kl(request, posterior):
    if posterior is ibnn.NormalPlanar1d:  # the other is compiled
        request.getfixturevalue("eagerly")
    model = network(posterior(initial_scale=0.2))
    stir(model)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    history = fit(model, 2, validation_data=(X[:6], Y[:6]))
    for prefix in ("", "val_"):
        loss, nll, kl = (np.array(history[prefix + key]) for key in ("loss", "nll", "kl"))
        assert np.all(kl > 0.1)
        np.testing.assert_allclose(loss, nll + kl / N, rtol=1e-5)
    with ibnn.noise_off(model):
        logs = model.evaluate(X, Y, verbose=0, return_dict=True)
        assert logs["kl"] == 0
        expected = np.mean((numpy(model(X)) - Y) ** 2)
    assert logs["nll"] == pytest.approx(expected, rel=1e-5)
    assert logs["loss"] == pytest.approx(expected, rel=1e-5)


def test_kl_of_the_log_is_that_of_the_layers(eagerly):
    model = network()
    model.compile(loss="mse")
    logs = model.evaluate(X, Y, verbose=0, return_dict=True)
    expected = sum(posterior_statistics(layer)["kl"] for layer in ibnn.stochastic_layers(model))
    assert logs["kl"] == pytest.approx(expected, rel=1e-5)


def test_uneven_batches_are_weighted_by_their_size(eagerly):
    model = network()
    ibnn.set_noise(model, on=False)
    model.compile(loss="mse")
    logs = model.evaluate(X[:10], Y[:10], batch_size=8, verbose=0, return_dict=True)
    expected = np.mean((numpy(model(X[:10])) - Y[:10]) ** 2)
    assert logs["nll"] == pytest.approx(expected, rel=1e-5)
    assert logs["loss"] == pytest.approx(expected, rel=1e-5)


def test_regularizer_is_apart(eagerly):
    model = network(kernel_regularizer=keras.regularizers.L2(0.3))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    history = fit(model)
    rest = history["loss"][0] - history["nll"][0] - history["kl"][0] / N
    kernels = [v.layer.kernel for v in ibnn.stochastic_layers(model)]
    expected = 0.3 * sum(np.sum(numpy(kernel.value) ** 2) for kernel in kernels)
    assert rest == pytest.approx(expected, rel=1e-4)


def test_samples_average_the_log_likelihoods(eagerly):
    one, four = network(), network(train_samples=4)
    four.set_weights(one.get_weights())
    for model in (one, four):
        ibnn.set_noise(model, on=False)
        model.compile(keras.optimizers.SGD(0.1), "mse")
    first = one.fit(X, Y, batch_size=N, verbose=0, shuffle=False).history
    second = four.fit(X, Y, batch_size=N, verbose=0, shuffle=False).history
    for key in ("loss", "nll", "kl"):
        assert first[key] == pytest.approx(second[key], rel=1e-5)
    for a, b in zip(values(one.trainable_weights), values(four.trainable_weights), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_samples_have_their_own_noise_and_examples_stay_with_their_targets(eagerly):
    inputs = keras.Input((1,))
    layer = ibnn.Stochastic(layers.Identity(), ibnn.NormalAffine(**AT_PRIOR, seed=1), train_size=N)
    model = ibnn.StochasticModel(inputs, layer(inputs), train_samples=500)

    # With the inputs as targets, z is the ratio of the two.
    def first(y, prediction):
        return prediction / y

    def second(y, prediction):
        return ops.square(prediction / y)

    def size(y, prediction):
        return ops.ones_like(y) * ops.cast(ops.shape(y)[0], y.dtype)

    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[first, second, size])
    x = np.array([[1.0], [100.0]], "float32")
    logs = model.fit(x, x, verbose=0).history
    assert logs["size"] == pytest.approx([1000])
    assert logs["first"] == pytest.approx([1.0], abs=0.06)
    assert logs["second"] == pytest.approx([1.25], abs=0.12)
    assert model.evaluate(x, x, verbose=0, return_dict=True)["size"] == 2  # in training only


def test_sample_weights(eagerly):
    one, three = network(), network(train_samples=3)
    three.set_weights(one.get_weights())
    weight = np.linspace(0, 2, N).astype("float32")
    found = []
    for model in (one, three):
        ibnn.set_noise(model, on=False)
        model.compile(keras.optimizers.SGD(0.0), "mse")
        history = model.fit(X, Y, sample_weight=weight, batch_size=8, shuffle=False, verbose=0)
        found.append(history.history["nll"][0])
    errors = np.mean((numpy(one(X)) - Y) ** 2, axis=1)
    assert found[0] == pytest.approx(np.mean(errors * weight), rel=1e-4)
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize("kind", ["tuple", "dict"])
def test_several_inputs(eagerly, kind):
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    layer = ibnn.StochasticDense(2, train_size=N)
    inputs = (a, b) if kind == "tuple" else {"a": a, "b": b}
    model = ibnn.StochasticModel(inputs, layer(a - b), train_samples=2)
    ibnn.set_noise(model, on=False)
    model.compile(keras.optimizers.SGD(0.0), "mse")
    other = data(N, 4, seed=5)
    x = (X, other) if kind == "tuple" else {"a": X, "b": other}
    history = model.fit(x, Y, batch_size=8, verbose=0).history
    expected = np.mean((numpy(layer.layer(X - other)) - Y) ** 2)
    assert history["nll"][0] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"steps_per_execution": 2},
        pytest.param({"run_eagerly": True}, marks=pytest.mark.once),
        pytest.param(
            {"jit_compile": True},
            marks=pytest.mark.skipif(
                keras.backend.backend() != "jax", reason="XLA on the CPU is slow on TensorFlow"
            ),
        ),
    ],
    ids=str,
)
def test_ways_of_execution(options):
    model = network(train_samples=2)
    model.compile(keras.optimizers.SGD(0.0), "mse", **options)
    history = fit(model, 2, validation_data=(X, Y))
    expected = sum(posterior_statistics(layer)["kl"] for layer in ibnn.stochastic_layers(model))
    for prefix in ("", "val_"):
        loss, nll, kl = (np.array(history[prefix + key]) for key in ("loss", "nll", "kl"))
        np.testing.assert_allclose(kl, expected, rtol=1e-4)
        np.testing.assert_allclose(loss, nll + kl / N, rtol=1e-4)


def unlike(train_size, *args, samples=1, compiled=None, **kwargs):
    """The warnings that `fit` gives of a train size."""
    inputs = keras.Input((4,))
    outputs = ibnn.StochasticDense(2, train_size=train_size)(inputs)
    model = ibnn.StochasticModel(inputs, outputs, train_samples=samples)
    model.compile("sgd", "mse", **(compiled or {}))
    model.optimizer.build(model.trainable_variables)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.fit(*args, **{"verbose": 0, **kwargs})
    return [str(w.message) for w in caught if "`train_size`" in str(w.message)]


def test_a_train_size_unlike_the_data_is_told_once():
    (message,) = unlike(4, X, Y, batch_size=4, epochs=2, validation_data=(X, Y))
    assert "`train_size` is 4, but the first epoch had 16 training examples" in message
    assert "4 times as much" in message
    assert "Write train_size=16." in message
    batches = ibnn.data.ShuffledBatches(X, Y, 3)
    assert len(unlike(len(batches), batches, shuffle=False, callbacks=batches.follow())) == 1


@pytest.mark.slow
def test_a_train_size_within_a_batch_of_the_data_is_silent(eagerly):
    assert not unlike(13, X, Y, batch_size=3, validation_split=0.2)  # 13 of 16
    weights = {
        "sample_weight": np.full(N, 0.1),
        "samples": 3,
        "compiled": {"steps_per_execution": 2},
    }
    assert not unlike(N, X, Y, batch_size=4, **weights)
    assert unlike(3 * N, X, Y, batch_size=4, **weights)
    batches = ibnn.data.ShuffledBatches(X, Y, 5, drop_remainder=True)
    assert not unlike(N, batches, shuffle=False, callbacks=batches.follow())


class OwnStep(ibnn.StochasticModel):
    """Counts no examples."""

    def compute_loss(self, *args, **kwargs):
        return keras.Model.compute_loss(self, *args, **kwargs)


@pytest.mark.filterwarnings("error:`train_size`")
def test_train_size_is_not_checked_where_nothing_is_counted():
    inputs = keras.Input((3,))
    model = OwnStep(inputs, ibnn.StochasticDense(1, train_size=1000)(inputs))
    model.compile("sgd", "mse")
    model.fit(X[:4, :3], Y[:4, :1], verbose=0)


def test_train_size_is_not_checked_where_an_epoch_is_no_pass_over_the_data(eagerly):
    assert not unlike(1000, X, Y, batch_size=4, steps_per_epoch=2)

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = True

    assert not unlike(N, X, Y, batch_size=2, callbacks=[Stop()])


def test_samples_survive_saving(tmp_path):
    model = network(train_samples=4)
    model.save(tmp_path / "model.keras")
    for copy in (
        ibnn.StochasticModel.from_config(model.get_config()),
        keras.models.load_model(tmp_path / "model.keras"),
    ):
        assert isinstance(copy, ibnn.StochasticModel)
        assert copy.train_samples == 4


def test_a_clone_is_a_stochastic_model_of_one_sample():
    copy = keras.models.clone_model(network(train_samples=4))
    assert isinstance(copy, ibnn.StochasticModel)
    assert copy.train_samples == 1


@pytest.mark.parametrize("value", [0, -1, 1.5, "x"])
def test_bad_train_samples(value):
    with pytest.raises(ValueError, match="`train_samples`") as caught:
        network(train_samples=value)
    assert repr(value) in str(caught.value)
