"""One learning rate for the weights, and another for the posteriors."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfp_ibnn as ibnn
from tests.layer_checklist import numpy, posterior_weights, stir
from tests.training.tools import N, X, Y, data, fit, network, plain_network, values
from tfp_ibnn.training.optimizers import ScaledSchedule

schedules = keras.optimizers.schedules


def rates(optimizer):
    return tuple(
        float(numpy(ops.convert_to_tensor(part.learning_rate)))
        for part in (optimizer.deterministic, optimizer.stochastic)
    )


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
