"""What every flow promises, for every flow of the registry, in float64 at parameters of order 1."""

import keras
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from keras import ops

from tests import autodiff, layer_checklist
from tests.flows.tools import close, draws, forward, inverse, jacobian, log_det
from tests.registry import (
    FLOW_NAMES,
    FLOWS,
    IMAGE_FLOWS,
    LINEAR,
    START_AS_ROTATION,
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

ROWS = 50  # in most tests, since JAX compiles each operation anew for another shape

every_flow = pytest.mark.parametrize("name", FLOW_NAMES)
# Another setting of a flow makes no difference to shapes, precisions, compilers and derivatives.
KINDS = [name for name in FLOWS if name not in VARIANTS]
every_kind = pytest.mark.parametrize("name", KINDS)
every_trained_kind = pytest.mark.parametrize("name", [x for x in KINDS if x not in UNTRAINED])


def marks(name, size):
    if size == 2 and min_channels(name) == 1:
        return [pytest.mark.once, pytest.mark.slow]
    return [pytest.mark.once] if name in VARIANTS or size == 2 else []


# The smallest of all, the smallest of a coupling, and an odd one with more than three channels.
every_size = pytest.mark.parametrize(
    ("name", "channels"),
    [
        pytest.param(name, size, marks=marks(name, size))
        for name in FLOWS
        for size in (1, 2, 5)
        if size >= min_channels(name)
    ],
)


def test_registry_holds_every_flow():
    public = {member for member in vars(flows).values() if isinstance(member, type)}
    layers = {member for member in public if issubclass(member, flows.Flow)}
    assert {type(make()) for make in (FLOWS | IMAGE_FLOWS).values()} == layers - {flows.Flow}


@every_size
def test_log_det_is_that_of_the_autodiff_jacobian(float64, name, channels):
    flow, x = make_flow(name, channels, seed=2), draws((ROWS, channels))
    close(log_det(flow, x), np.linalg.slogdet(jacobian(flow, x))[1], tolerance(name, 1e-9))


@every_flow
def test_inverse_log_det_is_that_of_the_autodiff_jacobian(float64, name):
    flow, y = make_flow(name, seed=2), draws((ROWS, 3))
    expected = np.linalg.slogdet(jacobian(flow, y, "inverse"))[1]
    close(log_det(flow, y, "inverse"), expected, tolerance(name, 1e-9))
    x, found = flow.inverse_and_log_det(ops.convert_to_tensor(y))
    close(ops.convert_to_numpy(x), inverse(flow, y), 1e-9)
    found = np.broadcast_to(ops.convert_to_numpy(found), (ROWS,))
    close(found, expected, tolerance(name, 1e-9))


@every_size
def test_inverse_undoes_forward_and_forward_undoes_inverse(float64, name, channels):
    flow, x = make_flow(name, channels, seed=2), draws((ROWS, channels))
    close(inverse(flow, forward(flow, x)), x, tolerance(name, 1e-8))
    close(forward(flow, inverse(flow, x)), x, tolerance(name, 1e-8))


@every_kind
def test_inverse_in_float32_is_as_good_as_the_condition_allows(name):
    flow, x = make_flow(name, seed=2), draws((50, 3), dtype="float32")
    condition = np.linalg.cond(jacobian(flow, x))
    back = inverse(flow, forward(flow, x))
    assert back.dtype == np.float32
    assert np.all(np.max(np.abs(back - x), axis=-1) <= 1e-4 * condition)


@every_kind
def test_derivative_of_the_inverse_is_the_inverse_of_the_derivative(float64, name):
    flow, x = make_flow(name, seed=2), draws((ROWS, 3))
    expected = np.linalg.inv(jacobian(flow, x))
    close(jacobian(flow, forward(flow, x), "inverse"), expected, tolerance(name, 1e-8))


@every_trained_kind
def test_inverse_carries_gradients_to_the_weights(float64, name):
    # From f(g(y)) = y: the derivative of the inverse g is -J^-1 times that of f at x = g(y).
    flow, x = make_flow(name, seed=2), draws((1, 3))
    y, back = forward(flow, x), np.linalg.inv(jacobian(flow, x))[0]
    weights = flow.trainable_weights

    def of_inverse():
        return ops.sum(flow.bijector().inverse(ops.convert_to_tensor(y)) * covector)

    def of_forward():
        return -ops.sum(flow.bijector().forward(ops.convert_to_tensor(x)) * (covector @ back))

    covector = draws((3,), seed=3)
    actual = autodiff.weight_gradients(of_inverse, weights)
    desired = autodiff.weight_gradients(of_forward, weights)
    for one, other in zip(actual, desired, strict=True):
        close(one, other, tolerance(name, 1e-8))


@pytest.mark.once
@every_kind
def test_any_leading_shape_equals_a_loop(float64, name):
    flow, x = make_flow(name, seed=2), draws((2, 1, 2, 3))
    for function in (forward, inverse, log_det):
        looped = np.stack([function(flow, row) for row in x.reshape(-1, 3)])
        for part, expected in ((x, looped), (x[0, :, 0], looped[:1])):
            whole = function(flow, part)
            assert whole.shape[: part.ndim - 1] == part.shape[:-1]
            close(whole.reshape(expected.shape), expected, 1e-12)


@every_flow
def test_forward_and_log_det_gives_draws_and_log_det(float64, name):
    flow, x = make_flow(name, seed=2), draws((ROWS, 3))
    y, found = flow.forward_and_log_det(ops.convert_to_tensor(x))
    close(ops.convert_to_numpy(y), forward(flow, x), 1e-12)
    close(np.broadcast_to(ops.convert_to_numpy(found), (ROWS,)), log_det(flow, x), 1e-12)


@every_kind
def test_compiled_equals_eager(float64, name):
    flow, x = make_flow(name, seed=2), draws((ROWS, 3))

    def everything(v):
        bijector = flow.bijector()
        found = bijector.forward_log_det_jacobian(v, event_ndims=1)
        return bijector.forward(v), bijector.inverse(v), found

    compiled = autodiff.jit(everything, flow.weights)
    for seed in (2, 5):  # the second time without compiling anew
        perturb(flow, seed)
        v = ops.convert_to_tensor(x)
        for one, other in zip(compiled(v), everything(v), strict=True):
            close(ops.convert_to_numpy(one), ops.convert_to_numpy(other), 1e-10)


@pytest.mark.parametrize("name", TRAINED_NAMES)
def test_every_weight_gets_a_gradient(float64, name):
    flow, x = make_flow(name, seed=2), ops.convert_to_tensor(draws((ROWS, 3)))
    direction = draws((ROWS, 3), seed=3)

    def loss():
        y, found = flow.forward_and_log_det(x)
        return ops.sum(y * direction) + ops.sum(found)

    assert flow.trainable_weights
    gradients = autodiff.weight_gradients(loss, flow.trainable_weights)
    for weight, gradient in zip(flow.trainable_weights, gradients, strict=True):
        assert np.all(np.isfinite(gradient)), weight.path
        assert np.any(gradient != 0), weight.path


@every_size
def test_start_preserves_measure(float64, name, channels):
    flow, x = make_flow(name, channels), draws((ROWS, channels))
    y = forward(flow, x)
    # Keras rounds a constant start to float32 on its way to a float64 weight.
    close(log_det(flow, x), 0.0, 1e-6)
    close(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1), 1e-6)
    if name in START_AS_ROTATION and channels > 1:
        assert np.max(np.abs(y - x)) > 0.1
    else:
        close(y, x, 1e-6)


@every_flow
def test_only_a_linear_flow_maps_the_mean_to_the_mean(float64, name):
    flow, x = make_flow(name, seed=2), draws((ROWS, 3))
    gap = np.max(np.abs(forward(flow, x).mean(axis=0) - forward(flow, x.mean(axis=0))))
    assert gap < 1e-12 if isinstance(flow, LINEAR) else gap > 1e-3


@every_flow
def test_perturbed_is_not_the_identity(float64, name):
    flow, x = make_flow(name, seed=2), draws((ROWS, 3))
    assert np.max(np.abs(forward(flow, x) - x)) > 0.1
    assert (np.max(np.abs(log_det(flow, x))) > 0.01) == (name not in VOLUME_PRESERVING)


@every_trained_kind
def test_new_weights_give_new_results_for_the_same_tensor(float64, name):
    flow, x = make_flow(name, seed=2), draws((ROWS, 3))
    same = ops.convert_to_tensor(x)

    def results():
        bijector = flow.bijector()
        found = bijector.forward_log_det_jacobian(same, event_ndims=1)
        tensors = bijector.forward(same), bijector.inverse(same), found
        return [ops.convert_to_numpy(t) for t in tensors]

    old = results()
    perturb(flow, seed=5)
    new = results()
    for before, after in zip(old, new, strict=True):
        assert not np.allclose(before, after)
    close(new[0], forward(flow, x.copy()), 1e-12)
    close(new[1], inverse(flow, x.copy()), 1e-12)
    close(np.broadcast_to(new[2], (ROWS,)), log_det(flow, x.copy()), 1e-12)


@every_flow
def test_config_round_trip(float64, name):
    flow, x = make_flow(name, seed=2), draws((ROWS, 3))
    config = flow.get_config()
    assert type(flow).from_config(config).get_config() == config
    twin = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(flow))
    assert type(twin) is type(flow)
    assert twin.get_config() == config
    twin.build((None, 3))
    twin.set_weights(flow.get_weights())
    np.testing.assert_array_equal(forward(twin, x), forward(flow, x))


@every_kind
@pytest.mark.parametrize(
    ("setting", "given_to"),
    [("mixed_bfloat16", "keras"), ("bfloat16", "layer"), ("float64", "layer")],
)
def test_precision_under_policies(policy, name, setting, given_to):
    expected = "float64" if setting == "float64" else "float32"
    if given_to == "keras":
        policy(setting)
    flow = make_flow(name, seed=2, **({"dtype": setting} if given_to == "layer" else {}))
    kinds = {keras.backend.standardize_dtype(weight.dtype) for weight in flow.weights}
    assert kinds - {layer_checklist.INTEGER} == (set() if name in UNTRAINED else {expected})
    coarse = "float64" if setting == "float64" else setting.removeprefix("mixed_")
    y = flow(ops.cast(draws((2, 3)), coarse))
    found = flow.forward_and_log_det(ops.cast(draws((2, 3)), expected))
    assert {keras.backend.standardize_dtype(t.dtype) for t in (y, *found)} == {expected}


@every_trained_kind
def test_trains_as_a_layer_of_a_model(eagerly, name):
    model = keras.Sequential([keras.Input((3,)), FLOWS[name]()])
    perturb(model, seed=2)
    model.compile("sgd", "mse")
    before = [ops.convert_to_numpy(w.value) for w in model.trainable_weights]
    x = draws((8, 3), dtype="float32")
    history = model.fit(x, -x, epochs=1, batch_size=8, verbose=0).history
    assert np.isfinite(history["loss"][0])
    for old, weight in zip(before, model.trainable_weights, strict=True):
        new = ops.convert_to_numpy(weight.value)
        assert np.all(np.isfinite(new)), weight.path
        assert np.any(new != old), weight.path


@every_flow
@pytest.mark.parametrize(
    "shape", [(None, 0), (None, None), (), [(None, 2), (None, 2)], {"x": (None, 2)}, None]
)
def test_unusable_input_shapes_are_refused(name, shape):
    flow = FLOWS[name]()
    with pytest.raises(ValueError, match="shape") as caught:
        flow.build(shape)
    assert type(flow).__name__ in str(caught.value)
    assert str(shape) in str(caught.value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1, 0, "many", None, True])
@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (flows.ActNorm, "limit"),
        (flows.Affine, "initial_scale"),
        (flows.AffineCoupling, "hidden"),
        (flows.AffineCoupling, "limit"),
        (flows.BatchNorm, "limit"),
        (flows.Continuous, "hidden"),
        (flows.Continuous, "steps"),
        (flows.GlowStep, "hidden"),
        (flows.InverseAutoregressive, "hidden"),
        (flows.InverseAutoregressive, "limit"),
        (flows.InvertibleConv1x1, "limit"),
        (flows.Residual, "hidden"),
        (flows.Residual, "lipschitz"),
        (flows.Spline, "bins"),
        (flows.Spline, "interval"),
        (flows.SplineCoupling, "hidden"),
        (flows.SplineCoupling, "limit"),
        (flows.Sylvester, "units"),
    ],
)
def test_arguments_must_be_positive_numbers(make, argument, bad):
    with pytest.raises(ValueError, match=f"`{argument}`") as caught:
        make(**{argument: bad})
    assert repr(bad) in str(caught.value)


@pytest.mark.parametrize(
    ("make", "argument", "bad"),
    [
        (flows.Affine, "initial_shift", float("nan")),
        (flows.AffineCoupling, "hidden", 2.5),
        (flows.AffineCoupling, "mask", "quarters"),
        (flows.AffineCoupling, "mask", None),
        (flows.AffineCoupling, "mask", [True, True]),
        (flows.AffineCoupling, "network", "deep"),
        (flows.BatchNorm, "momentum", float("nan")),
        (flows.BatchNorm, "momentum", -0.1),
        (flows.BatchNorm, "momentum", 1.0),
        (flows.Continuous, "network", 3),
        (flows.Continuous, "tolerance", 0.0),
        (flows.Continuous, "trace", "closed"),
        (flows.GlowStep, "start", "random"),
        (flows.InvertibleConv1x1, "start", "random"),
        (flows.InvertibleConv1x1, "start", None),
        (flows.Residual, "lipschitz", 1.0),
        (flows.Residual, "log_det", "random"),
        (flows.Sylvester, "units", 1.5),
    ],
)
def test_other_bad_arguments(make, argument, bad):
    with pytest.raises(ValueError, match=f"`{argument}`") as caught:
        make(**{argument: bad})
    assert repr(bad) in str(caught.value)


# float32 at the edges.

SIZES = (0.0, 1e-30, 1e-10, 1e-3, 1.0, 1e1, 1e2, 1e3)

_compiled = {}


def everything_compiled(name):
    """A flow, and a compiled function that gives all it computes; remembered between examples."""
    if name not in _compiled:
        flow = make_flow(name, dtype="float32")

        def everything(x):
            there, back = flow.bijector(), flow.bijector()
            return {
                "forward": there.forward(x),
                "log-det": there.forward_log_det_jacobian(x, event_ndims=1),
                "inverse": back.inverse(x),
                "inverse log-det": back.inverse_log_det_jacobian(x, event_ndims=1),
            }

        _compiled[name] = flow, autodiff.jit(everything, flow.weights)
    return _compiled[name]


@every_kind
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 10**6),
    input_size=st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e2, 1e4]),
    weight_sizes=st.lists(st.sampled_from(SIZES), min_size=8, max_size=8),
    kind=st.sampled_from(["uniform", "corner", "sparse"]),
)
@example(0, 1e4, [1e3] * 8, "corner")
def test_float32_stays_finite_at_the_edges(name, seed, input_size, weight_sizes, kind):
    # Not more than 3 channels: the inverse of a triangular matrix with entries of 1e3 grows by that
    # factor with every row, and from some 6 rows on float32 cannot hold it.
    flow, compiled = everything_compiled(name)
    rng = np.random.default_rng(seed)

    def sample(shape, size):
        unit = rng.uniform(-1, 1, size=shape)
        unit = unit if kind == "uniform" else np.sign(unit)
        kept = rng.random(size=shape) < 0.5 if kind == "sparse" else 1
        return (size * unit * kept).astype("float32")

    for weight, size in zip(flow.trainable_weights, weight_sizes, strict=False):
        weight.assign(sample(weight.shape, size))
    x = sample((4, 3), input_size)
    found = compiled(ops.convert_to_tensor(x))
    found["inverse of forward"] = compiled(found["forward"])["inverse"]
    for label, value in found.items():
        assert np.all(np.isfinite(ops.convert_to_numpy(value))), label
