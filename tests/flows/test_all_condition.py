"""What every flow promises when it has a condition; float64, at parameters of order 1."""

import keras
import numpy as np
import pytest
from keras import ops

import tfp_ibnn as ibnn
from tests import autodiff
from tests.flows.tools import close, draws, forward, inverse, jacobian, log_det
from tests.registry import (
    FLOWS,
    TRAINED_NAMES,
    UNTRAINED,
    VARIANTS,
    VOLUME_PRESERVING,
    make_flow,
    min_channels,
    perturb,
    tolerance,
)
from tfp_ibnn import flows

SIZE = 2  # of the conditions
ROWS = 10  # in most tests, since JAX compiles each operation anew for another shape

every_flow = pytest.mark.parametrize("name", TRAINED_NAMES)
KINDS = [name for name in FLOWS if name not in VARIANTS | UNTRAINED]
QUICK = ("affine", "autoregressive", "coupling", "planar")
every_kind = pytest.mark.parametrize("name", KINDS)
# Without a condition, all are compiled and trained; with one, most in `make test-slow`.
some_kinds = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in KINDS]
)


def marks(name, size):
    # One channel is special to autoregressive flows, whose first channel depends on no other.
    if size == 1:
        return [pytest.mark.once] + [pytest.mark.slow] * ("autoregressive" not in name)
    return [pytest.mark.once] if name in VARIANTS else []


every_size = pytest.mark.parametrize(
    ("name", "channels"),
    [
        pytest.param(name, size, marks=marks(name, size))
        for name in FLOWS
        for size in (1, 3)
        if size >= min_channels(name) and name not in UNTRAINED
    ],
)


def make(name, channels=3, seed=None, **kwargs):
    return make_flow(name, channels, seed, condition_size=SIZE, **kwargs)


def conditions(*lead, dtype="float64"):
    return draws((*lead, SIZE), seed=7, dtype=dtype)


@every_flow
def test_start_is_the_unconditional_flow_for_any_condition(float64, name):
    plain, flow = make_flow(name, seed=2), make(name)
    own = {weight.path.split("/", 1)[1]: weight for weight in flow.weights}
    for weight in plain.weights:
        own.pop(weight.path.split("/", 1)[1]).assign(weight.value)
    assert own  # the linear maps
    assert all(path.endswith("_of_condition") for path in own)
    x, condition = draws((ROWS, 3)), 100 * conditions(ROWS)
    close(forward(flow, x, condition), forward(plain, x), 1e-12)
    close(inverse(flow, x, condition), inverse(plain, x), 1e-12)
    close(log_det(flow, x, condition=condition), log_det(plain, x), 1e-12)


@every_size
def test_log_dets_are_those_of_the_autodiff_jacobians(float64, name, channels):
    flow, x, condition = make(name, channels, seed=2), draws((ROWS, channels)), conditions(ROWS)
    for direction in ("forward", "inverse"):
        expected = np.linalg.slogdet(jacobian(flow, x, direction, condition))[1]
        close(log_det(flow, x, direction, condition), expected, tolerance(name, 1e-9))


@every_size
def test_inverse_undoes_forward_and_forward_undoes_inverse(float64, name, channels):
    flow, x, condition = make(name, channels, seed=2), draws((ROWS, channels)), conditions(ROWS)
    back = inverse(flow, forward(flow, x, condition), condition)
    close(back, x, tolerance(name, 1e-8))
    close(forward(flow, inverse(flow, x, condition), condition), x, tolerance(name, 1e-8))


@every_size
def test_every_output_depends_on_the_condition_of_its_own_row(float64, name, channels):
    flow, x, condition = make(name, channels, seed=2), draws((ROWS, channels)), conditions(ROWS)
    other = condition.copy()
    other[1] += 1
    for function in (forward, inverse, log_det):
        before, after = (function(flow, x, condition=c) for c in (condition, other))
        change = np.abs(after - before).reshape(ROWS, -1)
        close(np.delete(change, 1, axis=0), 0, 1e-12)
        if function is not log_det or name not in VOLUME_PRESERVING:
            assert np.max(change[1]) > 1e-3, function.__name__
    # Each channel by itself, but for those that a coupling keeps.
    moved = np.abs(forward(flow, x, other) - forward(flow, x, condition))[1] > 1e-6
    assert np.sum(moved) >= (channels // 2 if "coupling" in name else channels)


@every_flow
def test_forward_and_log_det_gives_both(float64, name):
    flow, x, condition = make(name, seed=2), draws((2, 4, 3)), conditions(2, 4)
    y, found = flow.forward_and_log_det(ops.convert_to_tensor(x), condition)
    close(ops.convert_to_numpy(y), forward(flow, x, condition), 1e-12)
    close(ops.convert_to_numpy(found), log_det(flow, x, condition=condition), 1e-12)
    close(ops.convert_to_numpy(flow(x, condition=condition)), forward(flow, x, condition), 1e-12)


@every_flow
def test_every_weight_and_condition_gets_a_gradient(float64, name):
    flow, x, condition = make(name, seed=2), draws((16, 3)), conditions(16)
    direction = draws((16, 3), seed=3)

    def loss(condition=condition):
        y, found = flow.forward_and_log_det(ops.convert_to_tensor(x), condition)
        return ops.sum(y * direction) + ops.sum(found)

    assert np.all(autodiff.gradient(loss, condition) != 0)
    gradients = autodiff.weight_gradients(loss, flow.trainable_weights)
    for weight, gradient in zip(flow.trainable_weights, gradients, strict=True):
        assert np.all(np.isfinite(gradient)), weight.path
        assert np.any(gradient != 0), weight.path


@every_kind
@pytest.mark.parametrize(
    ("lead", "rows"),
    [
        ((2, 2), (2, 1)),
        pytest.param((1,), (3,), marks=pytest.mark.slow),
        pytest.param((2, 2), (), marks=pytest.mark.slow),
        pytest.param((), (2, 1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_broadcasting_equals_a_loop(float64, name, lead, rows):
    flow, x, condition = make(name, seed=2), draws((*lead, 3)), conditions(*rows)
    whole = np.broadcast_shapes(lead, rows)
    each_x = np.broadcast_to(x, (*whole, 3)).reshape(-1, 3)
    each_condition = np.broadcast_to(condition, (*whole, SIZE)).reshape(-1, SIZE)
    for function in (forward, inverse, log_det):
        found = function(flow, x, condition=condition)
        assert found.shape[: len(whole)] == whole
        pairs = zip(each_x, each_condition, strict=True)
        looped = np.stack([function(flow, v, condition=c) for v, c in pairs])
        close(found.reshape(looped.shape), looped, 1e-8)


@some_kinds
def test_compiled_equals_eager(float64, name):
    flow, x, condition = make(name, seed=2), draws((5, 3)), conditions(5)

    def everything(v, condition):
        bijector = flow.bijector(condition)
        return bijector.inverse(v), *flow.forward_and_log_det(v, condition)

    compiled = autodiff.jit(everything, flow.weights)
    arrays = ops.convert_to_tensor(x), ops.convert_to_tensor(condition)
    for one, other in zip(compiled(*arrays), everything(*arrays), strict=True):
        close(ops.convert_to_numpy(one), ops.convert_to_numpy(other), 1e-10)


@every_flow
def test_config_round_trip(name):
    flow = make(name, seed=2)
    config = flow.get_config()
    assert config["condition_size"] == SIZE
    twin = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(flow))
    assert twin.get_config() == config
    twin.build((None, 3))
    twin.set_weights(flow.get_weights())
    x, condition = draws((5, 3), dtype="float32"), conditions(5, dtype="float32")
    np.testing.assert_array_equal(forward(twin, x, condition), forward(flow, x, condition))


@some_kinds
def test_trains_in_a_model_and_survives_its_file(eagerly, name, tmp_path):
    inputs, condition = keras.Input((3,)), keras.Input((SIZE,))
    outputs = FLOWS[name](condition_size=SIZE)(inputs, condition=condition)
    assert outputs.shape == (None, 3)
    model = keras.Model([inputs, condition], outputs)
    perturb(model, seed=2)
    model.compile("sgd", "mse")
    x = [draws((8, 3), dtype="float32"), conditions(8, dtype="float32")]
    before = [ops.convert_to_numpy(w.value) for w in model.trainable_weights]
    model.fit(x, -x[0], epochs=1, batch_size=8, verbose=0)
    for old, weight in zip(before, model.trainable_weights, strict=True):
        new = ops.convert_to_numpy(weight.value)
        assert np.all(np.isfinite(new)), weight.path
        assert np.any(new != old), weight.path
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    expected = model.predict(x, verbose=0)
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), expected)
    x[1] = -x[1]
    assert not np.allclose(loaded.predict(x, verbose=0), expected)


@every_kind
def test_a_missing_an_unexpected_or_a_wrong_condition_is_refused(name):
    plain, flow, x = make_flow(name), make(name), draws((4, 3), dtype="float32")
    good, wrong = conditions(4, dtype="float32"), draws((4, 3), dtype="float32")
    cases = [
        (plain, good, "without `condition_size`; got a tensor of shape \\(4, 2\\)"),
        (flow, None, "condition_size=2 needs `condition`"),
        (flow, wrong, "must have the shape \\(..., 2\\); got \\(4, 3\\)"),
        (flow, np.float32(1), "must have the shape \\(..., 2\\); got \\(\\)"),
    ]
    for flow, condition, message in cases:
        for call in (
            lambda: flow.bijector(condition),  # noqa: B023
            lambda: flow.forward_and_log_det(x, condition),  # noqa: B023
            lambda: flow(x, condition=condition),  # noqa: B023
        ):
            with pytest.raises(ValueError, match=message):
                call()


@pytest.mark.parametrize("bad", [0, -1, 1.5, "two", float("nan"), True])
def test_condition_size_must_be_a_positive_integer(bad):
    with pytest.raises(ValueError, match="`condition_size`") as caught:
        flows.Planar(condition_size=bad)
    assert repr(bad) in str(caught.value)


def test_a_flow_that_never_has_a_condition_need_not_take_one():
    class Double(flows.Flow):
        def bijector(self):
            two = ops.full((self.channels,), 2.0)
            return flows.AffineBijector(shift=ops.zeros_like(two), scale=two)

    x = draws((4, 3), dtype="float32")
    close(ops.convert_to_numpy(Double()(x)), 2 * x, 1e-6)
    with pytest.raises(ValueError, match="without `condition_size`"):
        Double()(x, condition=conditions(4, dtype="float32"))


@pytest.mark.parametrize("training", [False, True])
def test_batch_norm_takes_statistics_over_all_rows(float64, training):
    flow, x, condition = make("batchnorm"), draws((64, 3)), conditions(64)
    flow.raw_log_scale.assign(draws((3,), seed=5))
    perturbed = draws((SIZE, 3), seed=4)
    flow._linear_maps["shift"].assign(perturbed)
    y, found = flow.forward_and_log_det(x, condition, training=training)
    plain = make_flow("batchnorm")
    plain.raw_log_scale.assign(draws((3,), seed=5))
    expected, same = plain.forward_and_log_det(x, training=training)
    close(ops.convert_to_numpy(y - expected), condition @ perturbed / SIZE**0.5, 1e-12)
    close(ops.convert_to_numpy(found), ops.convert_to_numpy(same), 1e-12)


def test_adapt_holds_at_condition_zero(float64):
    flow, x = make("actnorm", seed=2), 3 + draws((1000, 3))
    flow.adapt(x)
    y = forward(flow, x, np.zeros(SIZE))
    close(y.mean(axis=0), 0, 1e-6)
    close(y.std(axis=0), 1, 1e-6)


def test_posteriors_refuse_flows_with_a_condition():
    with pytest.raises(
        ValueError, match="`flows` must have condition_size=None .* Planar with condition_size=2"
    ):
        ibnn.FlowPosterior([flows.Planar(condition_size=2)])
