import csv
import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfp_ibnn as ibnn
from tests.layer_checklist import numpy, posterior_weights, stir
from tests.registry import AT_PRIOR
from tfp_ibnn.training.callbacks import posterior_statistics
from tfp_ibnn.training.optimizers import ScaledSchedule

N = 16
schedules = keras.optimizers.schedules


def data(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


X, Y = data(N, 4), data(N, 2, seed=1)


def network(posterior=None, train_samples=1, **kwargs):
    posterior = posterior or ibnn.NormalAffine(initial_scale=0.2)
    inputs = keras.Input((4,))
    hidden = ibnn.StochasticDense(
        3, "tanh", posterior=posterior, train_size=N, name="one", **kwargs
    )
    last = ibnn.StochasticDense(2, posterior=posterior, train_size=N, name="two", **kwargs)
    return ibnn.StochasticModel(inputs, last(hidden(inputs)), train_samples=train_samples)


def plain_network(**kwargs):
    """The same without the class of its own."""
    return keras.Sequential(
        [
            keras.Input((4,)),
            ibnn.StochasticDense(
                2,
                posterior=ibnn.NormalAffine(initial_scale=0.2),
                train_size=N,
                name="one",
                **kwargs,
            ),
        ]
    )


def fit(model, epochs=1, callbacks=(), **kwargs):
    if model.built and not model.optimizer.built:  # TensorFlow would trace the first step twice
        model.optimizer.build(model.trainable_variables)
    return model.fit(
        X, Y, batch_size=8, epochs=epochs, callbacks=list(callbacks), verbose=0, **kwargs
    ).history


def rates(optimizer):
    return tuple(
        float(numpy(ops.convert_to_tensor(part.learning_rate)))
        for part in (optimizer.deterministic, optimizer.stochastic)
    )


def values(weights):
    return [numpy(weight.value).copy() for weight in weights]


# Two learning rates.


def groups(model):
    """Which weights each optimizer moves, found by a step with the other rate at zero."""
    optimizer = model.optimizer
    moved = []
    for silent in ("stochastic", "deterministic"):
        before = values(model.trainable_weights)
        parts = (optimizer.deterministic, optimizer.stochastic)
        kept = [float(numpy(part.learning_rate)) for part in parts]
        getattr(optimizer, silent).learning_rate = 0.0
        model.fit(X, Y, batch_size=N, verbose=0)
        for part, rate in zip(parts, kept, strict=True):
            part.learning_rate = rate
        after = values(model.trainable_weights)
        moved.append(
            {
                weight.path
                for weight, old, new in zip(model.trainable_weights, before, after, strict=True)
                if not np.array_equal(old, new)
            }
        )
    return moved


@pytest.mark.parametrize("make", [network, plain_network])
def test_each_weight_has_its_optimizer_before_and_after_loading(eagerly, make, tmp_path):
    model = make()
    model.compile(ibnn.two_speed(keras.optimizers.SGD(0.1, momentum=0.9), 0.02), "mse")
    fit(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, ibnn.TwoSpeed)
    assert rates(loaded.optimizer) == pytest.approx((0.1, 0.02))
    assert int(loaded.optimizer.deterministic.iterations) == 2
    for old, new in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(numpy(old.value), numpy(new.value))

    for one in (model, loaded):
        # Without momentum a weight whose rate is 0 stays where it is.
        one.compile(ibnn.two_speed(keras.optimizers.SGD(0.1), 0.02), "mse")
        posterior = {w.path for w in posterior_weights(one) if w.trainable}
        slow, fast = groups(one)
        assert slow == {w.path for w in one.trainable_weights} - posterior
        assert fast == posterior


@keras.saving.register_keras_serializable(package="tests")
class Bent(ibnn.FlowPosterior):
    """A posterior of a user's own: with a Keras layer inside, and a name of its own."""

    def build(self, input_shape):
        super().build(input_shape)
        self.bend = layers.Dense(1, name="bend")
        self.bend.build(input_shape)

    def transform(self, noise, component=None, training=False):
        draw = super().transform(noise, component, training)
        return draw._replace(z=draw.z + self.bend(noise))


@pytest.mark.slow
def test_posteriors_are_known_whatever_the_layers_are_called(eagerly, tmp_path):
    inputs = keras.Input((4,))
    own = layers.Dense(4, name="posterior")(inputs)
    nested = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="posterior")])
    template = Bent([ibnn.flows.Planar()], name="mine", seed=1)
    last = ibnn.StochasticDense(2, posterior=template, train_size=N, name="posterior_1")
    model = ibnn.StochasticModel(inputs, last(nested(own)))
    model.compile(ibnn.two_speed(keras.optimizers.SGD(0.1), 0.02), "mse")
    stir(model)
    model.save(tmp_path / "model.keras")
    for one in (model, keras.models.load_model(tmp_path / "model.keras")):
        posterior = {w.path for w in ibnn.stochastic_layers(one)[0].posterior.trainable_weights}
        slow, fast = groups(one)
        assert fast == posterior
        assert len(fast) == 7  # affine 2, planar 3, bend 2
        assert slow == {w.path for w in one.trainable_weights} - posterior


def test_loaded_model_goes_on_with_both_optimizers(eagerly, tmp_path):
    model = network()
    model.compile(ibnn.two_speed(keras.optimizers.SGD(0.1), 0.02), "mse")
    fit(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    slow, fast = groups(loaded)
    posterior = {w.path for w in posterior_weights(loaded)}
    assert fast <= posterior
    assert len(fast) == 4
    assert len(slow) == 4
    assert not slow & posterior


def test_rates_take_effect(eagerly):
    model = network()
    model.compile(ibnn.two_speed(keras.optimizers.SGD(0.1), 0.02), "mse")
    ibnn.set_noise(model, on=False)  # then both rates see the same gradient
    first = values(model.trainable_weights)
    model.fit(X, Y, batch_size=N, verbose=0)
    moves = [b - a for a, b in zip(first, values(model.trainable_weights), strict=True)]
    reference = network()
    for weight, value in zip(reference.trainable_weights, first, strict=True):
        weight.assign(value)
    reference.compile(keras.optimizers.SGD(0.1), "mse")
    ibnn.set_noise(reference, on=False)
    reference.fit(X, Y, batch_size=N, verbose=0)
    plain = [b - a for a, b in zip(first, values(reference.trainable_weights), strict=True)]
    mine = {w.path for w in posterior_weights(model)}
    for weight, move, expected in zip(model.trainable_weights, moves, plain, strict=True):
        factor = 0.2 if weight.path in mine else 1.0
        np.testing.assert_allclose(move, factor * expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.1, weight_decay=0.5),
        lambda: keras.optimizers.AdamW(0.1, weight_decay=0.5),
    ],
    ids=["SGD", "AdamW"],
)
def test_posteriors_have_no_weight_decay(make):
    model = network(ibnn.NormalAffine(initial_scale=0.2, beta=0.0))
    optimizer = ibnn.two_speed(make(), 0.1)
    assert optimizer.deterministic.weight_decay == 0.5
    assert not optimizer.stochastic.weight_decay
    model.compile(optimizer, loss=None)
    # No gradient at all: what moves, moves by its decay.
    optimizer.build(model.trainable_variables)
    before = values(model.trainable_weights)
    zeros = [ops.zeros(w.shape) for w in model.trainable_weights]
    optimizer.apply(zeros, model.trainable_weights)
    mine = {w.path for w in posterior_weights(model)}
    for weight, old in zip(model.trainable_weights, before, strict=True):
        new = numpy(weight.value)
        if weight.path in mine:
            np.testing.assert_array_equal(new, old)
        else:
            np.testing.assert_allclose(new, old * (1 - 0.1 * 0.5), rtol=1e-5)


def test_learning_rate_scheduler_moves_both():
    model = plain_network()
    model.compile(ibnn.two_speed(keras.optimizers.SGD(0.1), 0.02), "mse")
    seen = []
    log = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(rates(model.optimizer))
    )
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 / (1 + epoch))
    history = fit(model, 3, [schedule, log])
    expected = [(0.1, 0.02), (0.05, 0.01), (0.1 / 3, 0.02 / 3)]
    np.testing.assert_allclose(seen, expected, rtol=1e-5)
    np.testing.assert_allclose(history["learning_rate"], [0.1, 0.05, 0.1 / 3], rtol=1e-5)


def test_reduce_on_plateau_moves_both():
    model = plain_network()
    model.compile(ibnn.two_speed(keras.optimizers.SGD(0.1), 0.02), "mse")
    reduce = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e9)
    fit(model, 3, [reduce])
    assert rates(model.optimizer) == pytest.approx((0.1 / 4, 0.02 / 4))


def test_schedules_are_scaled(eagerly, tmp_path):
    schedule = schedules.CosineDecay(0.1, 10)
    model = plain_network()
    model.compile(ibnn.two_speed(keras.optimizers.SGD(schedule), 0.02), "mse")
    assert rates(model.optimizer) == pytest.approx((0.1, 0.02))
    fit(model)
    slow, fast = rates(model.optimizer)
    assert slow == pytest.approx(float(schedule(2)))
    assert slow < 0.1
    assert fast == pytest.approx(0.2 * slow)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert rates(loaded.optimizer) == pytest.approx((slow, fast))
    fit(loaded)
    assert rates(loaded.optimizer)[1] == pytest.approx(0.2 * float(schedule(4)))
    with pytest.raises(TypeError, match="LearningRateSchedule"):
        model.optimizer.learning_rate = 0.5


def test_schedule_for_the_posteriors(eagerly):
    schedule = schedules.ExponentialDecay(0.02, 2, 0.5)
    model = plain_network()
    model.compile(ibnn.two_speed(keras.optimizers.SGD(0.1), schedule), "mse")
    fit(model)
    assert rates(model.optimizer) == pytest.approx((0.1, 0.01))


def test_schedule_that_starts_at_zero():
    schedule = schedules.CosineDecay(0.0, 10, warmup_target=0.1, warmup_steps=2)
    with pytest.raises(ValueError, match=r"starts at 0.*`stochastic_lr` of 0.02"):
        ibnn.two_speed(keras.optimizers.SGD(schedule), 0.02)
    optimizer = ibnn.two_speed(keras.optimizers.SGD(schedule), schedule)
    assert rates(optimizer) == (0, 0)


def test_scaled_schedule_round_trip():
    schedule = ScaledSchedule(schedules.ExponentialDecay(0.1, 2, 0.5), 3.0)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(schedule))
    assert float(again(2)) == pytest.approx(0.15)


@pytest.mark.parametrize("through", [(0.5,), (1e-3, 7.0), (0.0,), (0.0, 0.0, 0.3)])
def test_setting_the_rate_keeps_the_ratio(through):
    optimizer = ibnn.two_speed(keras.optimizers.SGD(0.1), 0.02)
    for rate in through:
        optimizer.learning_rate = rate
        assert rates(optimizer) == pytest.approx((rate, 0.2 * rate))
    optimizer.learning_rate = 0.1
    assert rates(optimizer) == pytest.approx((0.1, 0.02))


def test_ratio_survives_zero_through_a_config():
    optimizer = ibnn.two_speed(keras.optimizers.SGD(0.1), 0.02)
    optimizer.learning_rate = 0.3
    again = ibnn.TwoSpeed.from_config(optimizer.get_config())
    again.learning_rate = 0.1
    assert rates(again) == pytest.approx((0.1, 0.02))


def test_config_round_trip():
    optimizer = ibnn.two_speed(keras.optimizers.Adam(0.1, beta_1=0.7, clipnorm=1.0), 0.02)
    for again in (
        ibnn.TwoSpeed.from_config(optimizer.get_config()),
        keras.optimizers.deserialize(keras.optimizers.serialize(optimizer)),
    ):
        assert isinstance(again, ibnn.TwoSpeed)
        assert rates(again) == pytest.approx((0.1, 0.02))
        for part in (again.deterministic, again.stochastic):
            assert isinstance(part, keras.optimizers.Adam)
            assert part.beta_1 == 0.7
            assert part.clipnorm == 1.0


def test_all_weights_share_one_gradient_norm():
    weight, posterior = (keras.Variable(np.ones(2, "float32")) for _ in range(2))
    posterior.of_posterior = True
    optimizer = ibnn.two_speed(keras.optimizers.SGD(0.1, global_clipnorm=1.0), 0.01)
    optimizer.build([weight, posterior])
    gradients = [ops.convert_to_tensor([x, 0.0]) for x in (3.0, 4.0)]
    optimizer.apply(gradients, [weight, posterior])  # of norm 5, clipped to 1
    np.testing.assert_allclose(numpy(weight.value), [1 - 0.1 * 3 / 5, 1], rtol=1e-6)
    np.testing.assert_allclose(numpy(posterior.value), [1 - 0.01 * 4 / 5, 1], rtol=1e-6)


@pytest.mark.parametrize("name", ["Nadam", "Muon"])
def test_an_optimizer_with_its_own_step_is_followed(name):
    """With one rate for both it does what the optimizer alone does for all weights."""

    def run(make):
        weights = [keras.Variable(np.full((2, 3), 0.5, "float32")) for _ in range(2)]
        weights[1].of_posterior = True
        optimizer = make(getattr(keras.optimizers, name)(0.1, weight_decay=0.0))
        optimizer.build(weights)
        for seed in range(3):
            gradients = [ops.convert_to_tensor(data(2, 3, seed=seed + i)) for i in (0, 9)]
            optimizer.apply(gradients, weights)
        return values(weights)

    together = run(lambda optimizer: ibnn.two_speed(optimizer, 0.1))
    np.testing.assert_allclose(together, run(lambda optimizer: optimizer), rtol=1e-5)


def test_both_parts_must_agree_on_what_concerns_all_weights():
    clipped, other = keras.optimizers.SGD(0.1, global_clipnorm=1.0), keras.optimizers.SGD(0.1)
    with pytest.raises(ValueError, match=r"agree in `global_clipnorm`.*got \[1.0, None\]"):
        ibnn.TwoSpeed(clipped, other)


def test_averages_of_all_weights_are_swapped_in_for_validation(tmp_path):
    model = plain_network(kernel_initializer="ones")
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, momentum=0.9)
    model.compile(ibnn.two_speed(optimizer, 0.02), "mse")
    before = values(model.trainable_weights)
    trained, validated = [], []
    log = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: trained.append(values(log.model.trainable_weights)),
        on_test_batch_end=lambda batch, logs: validated.append(values(log.model.trainable_weights)),
    )
    swap = keras.callbacks.SwapEMAWeights()
    fit(model, callbacks=[swap, log], validation_data=(X, Y), validation_batch_size=N)
    first, second = trained
    for place, old in enumerate(before):
        assert not np.allclose(first[place], old)
        expected = (first[place] + second[place]) / 2  # the first average is of one step
        np.testing.assert_allclose(validated[0][place], expected, rtol=1e-5, atol=1e-6)
        found = numpy(model.trainable_weights[place].value)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)  # kept at the end
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for old, new in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(numpy(old.value), numpy(new.value))
    fit(loaded)


def test_original_optimizer_is_the_deterministic_one():
    own = keras.optimizers.SGD(0.1)
    assert ibnn.two_speed(own, 0.02).deterministic is own


def test_float16_loss_scaling(policy):
    policy("mixed_float16")
    model = plain_network()
    model.compile(ibnn.two_speed(keras.optimizers.Adam(0.01), 0.002), "mse")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert isinstance(model.optimizer.inner_optimizer, ibnn.TwoSpeed)
    before = values(model.trainable_weights)
    history = fit(model)
    assert np.isfinite(history["loss"]).all()
    moves = [
        np.abs(b - a).max() for a, b in zip(before, values(model.trainable_weights), strict=True)
    ]
    mine = {w.path for w in posterior_weights(model)}
    # Two steps of Adam move a weight by twice the rate at most.
    for weight, move in zip(model.trainable_weights, moves, strict=True):
        rate = 0.002 if weight.path in mine else 0.01
        assert rate / 2 < move < 2.1 * rate, weight.path


@pytest.mark.parametrize("value", [0, -0.1, float("nan"), "fast", None])
def test_bad_stochastic_rate(value):
    for rate in (0.1, schedules.CosineDecay(0.1, 10)):
        with pytest.raises(ValueError, match="`stochastic_lr`") as caught:
            ibnn.two_speed(keras.optimizers.SGD(rate), value)
        assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        keras.optimizers.SGD,
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
        ibnn.two_speed(keras.optimizers.SGD(0.1), 0.02),
    ],
    ids=["class", "loss-scale", "two-speed"],
)
def test_bad_optimizer(value):
    with pytest.raises(ValueError, match="`optimizer` must be"):
        ibnn.two_speed(value, 0.02)


def test_optimizer_by_its_name():
    optimizer = ibnn.two_speed("adam", stochastic_lr=0.02)
    assert rates(optimizer) == pytest.approx((0.001, 0.02))
    for part in (optimizer.deterministic, optimizer.stochastic):
        assert isinstance(part, keras.optimizers.Adam)


# Annealing.


def test_annealing_sets_beta_in_every_layer_without_retracing():
    traces = []

    def loss(y, prediction):
        traces.append(1)
        return ops.mean(ops.square(y - prediction), axis=-1)

    inner = plain_network()
    inputs = keras.Input((4,))
    model = keras.Model(inputs, ibnn.StochasticDense(2, train_size=N)(inner(inputs)))
    model.compile("sgd", loss)
    betas, counts = [], []

    def record(epoch, logs):
        betas.append([float(numpy(v.posterior.beta.value)) for v in ibnn.stochastic_layers(model)])
        counts.append(len(traces))

    log = keras.callbacks.LambdaCallback(on_epoch_end=record)
    fit(model, 5, [ibnn.KLAnnealing(4, start=0.2, stop=1.0), log])
    np.testing.assert_allclose(betas, [[b, b] for b in (0.2, 0.4, 0.6, 0.8, 1.0)], rtol=1e-6)
    assert counts[0] == counts[-1] > 0


@pytest.mark.parametrize("make", [network, plain_network])
def test_annealing_reaches_the_loss(make):
    model = make()
    model.compile(keras.optimizers.SGD(0.0), loss=lambda y, prediction: 0.0 * prediction)
    history = fit(model, 4, [ibnn.KLAnnealing(2, stop=3.0)])["loss"]
    model(X)
    per_beta = sum(map(float, model.losses)) / 3.0
    np.testing.assert_allclose(
        history, [0.0, 1.5 * per_beta, 3 * per_beta, 3 * per_beta], rtol=1e-4
    )


def test_annealing_can_fall_and_resume(eagerly):
    annealing = ibnn.KLAnnealing(4, start=2.0, stop=0.0)
    assert [annealing.beta(e) for e in (0, 1, 4, 9)] == [2.0, 1.5, 0.0, 0.0]
    model = plain_network()
    model.compile("sgd", "mse")
    fit(model, 4, [ibnn.KLAnnealing(4)], initial_epoch=3)
    assert float(numpy(model.layers[-1].posterior.beta.value)) == 0.75


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [
        ({"epochs": 0}, "epochs"),
        ({"epochs": 2.5}, "epochs"),
        ({"epochs": 2, "start": -1.0}, "start"),
        ({"epochs": 2, "stop": float("nan")}, "stop"),
    ],
)
def test_bad_annealing(kwargs, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        ibnn.KLAnnealing(**kwargs)


@pytest.mark.parametrize("callback", [lambda: ibnn.KLAnnealing(2), ibnn.PosteriorLog])
def test_callbacks_need_a_stochastic_layer(callback):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)], name="plain")
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="'plain' has no stochastic layer"):
        fit(model, 1, [callback()])


# The log.

KEYS = ("kl", "z_mean", "z_std", "entropy")


def test_log_appears_in_history_and_csv(eagerly, tmp_path):
    model = network()
    model.compile("sgd", "mse")
    path = tmp_path / "log.csv"
    callbacks = [ibnn.KLAnnealing(2), ibnn.PosteriorLog(), keras.callbacks.CSVLogger(path)]
    history = fit(model, 2, callbacks)
    expected = {f"{name}/{key}" for name in ("one", "two") for key in KEYS} | {"beta"}
    assert expected <= set(history)
    assert history["beta"] == [0.0, 0.5]
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert expected <= set(rows[0])
    assert len(rows) == 2
    for row, value in zip(rows, history["two/kl"], strict=True):
        assert float(row["two/kl"]) == pytest.approx(value)
    statistics = posterior_statistics(model.get_layer("two"))
    for key in KEYS:
        assert history[f"two/{key}"][-1] == pytest.approx(statistics[key])


def test_statistics():
    layer = ibnn.StochasticDense(2, posterior=ibnn.NormalAffine(initial_scale=0.2), train_size=N)
    layer.build((None, 3))
    found = posterior_statistics(layer)
    ratio = 0.2 / 0.3
    assert found["kl"] == pytest.approx(3 * (-np.log(ratio) + (ratio**2 - 1) / 2), rel=1e-4)
    assert found["entropy"] == pytest.approx(3 * np.log(0.2 * np.sqrt(2 * np.pi * np.e)), rel=1e-4)
    assert found["z_mean"] == pytest.approx(1.0, abs=1e-5)
    assert found["z_std"] == pytest.approx(0.2, rel=0.2)


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="Keras's TensorBoard needs TensorFlow"
)
def test_log_appears_in_tensorboard(eagerly, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorflow.python.summary.summary_iterator import summary_iterator

    model = plain_network()
    model.compile("sgd", "mse")
    board = keras.callbacks.TensorBoard(tmp_path, write_graph=False)
    fit(model, 1, [ibnn.PosteriorLog(), board])
    tags = {
        value.tag
        for path in tmp_path.rglob("events*")
        for event in summary_iterator(str(path))
        for value in event.summary.value
    }
    assert {f"epoch_one/{key}" for key in KEYS} | {"epoch_beta"} <= tags


def test_layers_of_one_name_have_entries_of_their_own(eagerly):
    def block(scale, name):
        inputs = keras.Input((4,))
        posterior = ibnn.NormalAffine(initial_scale=scale)
        layer = ibnn.StochasticDense(4, posterior=posterior, train_size=N, name=name)
        return keras.Model(inputs, layer(inputs))

    x = inputs = keras.Input((4,))
    # The last has the name that the second would get for being the second.
    for scale, name in [(0.2, "same"), (0.4, "same"), (0.3, "same_2")]:
        x = block(scale, name)(x)
    model = keras.Model(inputs, layers.Dense(2)(x))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    history = fit(model, 1, [ibnn.PosteriorLog()])
    found = [history[key][0] for key in history if key.endswith("/kl")]
    expected = [posterior_statistics(v)["kl"] for v in ibnn.stochastic_layers(model)]
    assert len(set(expected)) == 3
    assert sorted(found) == pytest.approx(sorted(expected))


# The model.


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
