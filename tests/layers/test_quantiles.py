"""The quantile head and its loss, against closed forms and scikit-learn."""

import keras
import numpy as np
import pytest
import scipy.stats
from keras import layers, ops
from sklearn.linear_model import QuantileRegressor
from sklearn.metrics import mean_pinball_loss

import tfp_ibnn as ibnn
from tests.autodiff import gradient
from tests.monte_carlo_tools import data, numpy
from tfp_ibnn.layers import PinballLoss, QuantileHead
from tfp_ibnn.layers.quantiles import middle_of

LEVELS = [(0.05, 0.5, 0.95), (0.1, 0.9), (0.001, 0.01, 0.1, 0.6), tuple(np.arange(1, 20) / 20)]


# -------------------------------------------------------------------------------------------- head


@pytest.mark.parametrize("levels", LEVELS)
def test_inputs_of_zero_give_the_distances_of_a_standard_normal(levels):
    y = numpy(QuantileHead(levels)(np.zeros((2, len(levels)), "float32")))
    normal = scipy.stats.norm.ppf(levels)
    np.testing.assert_allclose(y[1], normal - normal[middle_of(levels)], rtol=1e-5, atol=1e-6)


def test_the_middle_is_free_and_the_others_follow_by_their_formula():
    x = data(5, 6)  # two numbers of three levels
    y = numpy(QuantileHead(outputs=2)(x))
    gap = scipy.stats.norm.ppf(0.95)
    distance = gap * np.logaddexp(0, x + np.log(np.e - 1))
    np.testing.assert_array_equal(y[:, 2:4], x[:, 2:4])
    np.testing.assert_allclose(y[:, 4:], x[:, 2:4] + distance[:, 4:], rtol=1e-5)
    np.testing.assert_allclose(y[:, :2], x[:, 2:4] - distance[:, :2], rtol=1e-5)


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("size", [1.0, 30.0, 1e4])
def test_quantiles_never_cross(levels, size):
    """Not by a rounding error either, and not in half precision."""
    x = size * data(300, len(levels))
    for dtype in ("float32", "bfloat16"):
        y = numpy(ops.cast(QuantileHead(levels, dtype=dtype)(x), "float32"))
        assert np.isfinite(y).all()
        assert (np.diff(y) >= 0).all()


@pytest.mark.once
@pytest.mark.parametrize("shape", [(5, 6), (5, 3, 6), (5, 2, 3, 6)])
def test_head_keeps_the_shape(shape):
    layer = QuantileHead(outputs=2)
    assert layer(data(*shape)).shape == shape
    assert layer.compute_output_shape(shape) == shape
    assert layer(keras.Input(shape[1:])).shape == (None, *shape[1:])


@pytest.mark.once
def test_a_wrong_number_of_inputs_is_refused_with_the_right_one():
    with pytest.raises(ValueError, match="needs 6 inputs.*outputs=2.*4.*before it 6 units"):
        QuantileHead(outputs=2)(data(5, 4))


@pytest.mark.once
@pytest.mark.parametrize("make", [QuantileHead, PinballLoss])
@pytest.mark.parametrize(
    "levels", [0.5, (0.5,), (), (0.5, 0.5), (0.9, 0.1), (0, 0.5), (0.5, 1), "ab", None, [[0.1], 2]]
)
def test_levels_that_do_not_increase_between_0_and_1_are_refused(make, levels):
    with pytest.raises(ValueError, match="`levels` must be"):
        make(levels)


@pytest.mark.once
def test_configs_return():
    for made in (QuantileHead([0.1, 0.9], 2, name="head"), PinballLoss(np.array([0.1, 0.9]))):
        again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(made))
        assert type(again) is type(made)
        assert again.get_config() == made.get_config()
        assert again.levels == (0.1, 0.9)


# -------------------------------------------------------------------------------------------- loss


@pytest.mark.parametrize("shape", [(6, 1), (6, 3), (4, 2, 3)])
def test_loss_is_the_mean_over_levels_and_numbers_of_scikit_learns(shape):
    levels = LEVELS[2]
    y = data(*shape)
    q = data(*shape, len(levels), seed=1)
    outputs = np.moveaxis(q, -1, -2).reshape(*shape[:-1], -1)  # level by level
    found = float(PinballLoss(levels)(y, outputs))
    expected = [
        mean_pinball_loss(y.ravel(), q[..., place].ravel(), alpha=level)
        for place, level in enumerate(levels)
    ]
    np.testing.assert_allclose(found, np.mean(expected), rtol=1e-5)
    each = numpy(PinballLoss(levels, reduction=None)(y, outputs))
    assert each.shape == shape[:-1]
    np.testing.assert_allclose(each.mean(), found, rtol=1e-5)


def test_slope_of_the_loss_is_minus_the_level_below_the_target_and_its_complement_above():
    y = np.zeros((1, 1), "float32")
    loss = PinballLoss((0.2, 0.7), reduction="sum")
    slope = gradient(lambda q: loss(y, q), np.float32([[-1.0, 3.0]]))
    np.testing.assert_allclose(2 * slope, [[-0.2, 1 - 0.7]], rtol=1e-5)


@pytest.mark.once
def test_over_many_levels_it_is_half_the_crps():
    """In closed form for a normal distribution (Gneiting et al. 2005, equation 5)."""
    levels = (np.arange(1000) + 0.5) / 1000
    loc, scale = 0.7, 1.6
    y = np.array([-3.0, 0.5, 0.7, 2.0, 6.0])
    z = (y - loc) / scale
    normal = scipy.stats.norm
    crps = scale * (z * (2 * normal.cdf(z) - 1) + 2 * normal.pdf(z) - 1 / np.sqrt(np.pi))
    quantiles = np.tile(normal(loc, scale).ppf(levels), (len(y), 1))
    loss = numpy(PinballLoss(levels, reduction=None)(y, quantiles))
    np.testing.assert_allclose(2 * loss, crps, rtol=4e-3)


def test_loss_takes_targets_with_and_without_an_axis():
    outputs = data(6, 3)
    one, other = (numpy(PinballLoss(reduction=None)(y, outputs)) for y in (data(6), data(6, 1)))
    assert one.shape == (6,)
    np.testing.assert_array_equal(one, other)


@pytest.mark.once
def test_loss_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="3 levels need as many outputs .* has 4 outputs"):
        PinballLoss()(data(6), data(6, 4))
    with pytest.raises(ValueError, match="shape"):
        PinballLoss()(data(6, 2), data(6, 3))


@pytest.mark.parametrize("policy_name", ["float64", "mixed_bfloat16"])
def test_the_loss_of_other_precisions_is_in_full_precision(policy, policy_name):
    policy(policy_name)
    y = QuantileHead()(np.ones((3, 3), "float32"))
    dtype = keras.backend.standardize_dtype(y.dtype)
    assert dtype == ("float64" if policy_name == "float64" else "bfloat16")
    loss = PinballLoss()(np.full((3,), 0.1, "float32"), y)
    of_loss = keras.backend.standardize_dtype(loss.dtype)
    assert of_loss == ("float64" if policy_name == "float64" else "float32")
    stored = numpy(ops.cast(y, "float64"))
    expected = np.mean(
        [
            mean_pinball_loss(np.full(3, 0.1), q, alpha=a)
            for q, a in zip(stored.T, LEVELS[0], strict=True)
        ]
    )
    np.testing.assert_allclose(float(loss), expected, rtol=1e-6)


# -------------------------------------------------------------------------------------- regression


def trained(units, x, y, levels, steps, rate=0.05, bias=True):
    """A network trained on all examples in each step, at a rate that falls to 0."""
    model = keras.Sequential([keras.Input(x.shape[1:])])
    for width in units:
        model.add(layers.Dense(width, "tanh"))
    model.add(layers.Dense(len(levels), use_bias=bias))
    model.add(QuantileHead(levels))
    schedule = keras.optimizers.schedules.CosineDecay(rate, steps)
    model.compile(keras.optimizers.Adam(schedule), PinballLoss(levels))
    x = np.tile(x, (steps, *[1] * (x.ndim - 1)))
    y = np.tile(y, steps)
    model.fit(x, y, batch_size=len(y) // steps, shuffle=False, verbose=0)
    return model


@pytest.mark.once
def test_quantiles_of_groups_are_those_of_scikit_learn():
    """A linear model of which both can represent every solution, so that there is one answer."""
    levels = (0.05, 0.3, 0.5, 0.8, 0.95)
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(3), 101)  # no level has two best quantiles
    x = np.eye(3, dtype="float32")[group]
    y = (2 * group + (1 + group) * rng.gumbel(size=len(group))).astype("float32")
    model = trained((), x, y, levels, 1500, bias=False)
    found = numpy(model(np.eye(3, dtype="float32")))
    for place, level in enumerate(levels):
        peer = QuantileRegressor(quantile=level, alpha=0, fit_intercept=False).fit(x, y)
        np.testing.assert_allclose(found[:, place], peer.coef_, atol=0.02)


@pytest.mark.once
def test_quantiles_of_a_linear_model_are_close_to_those_of_scikit_learn():
    """y = 1 + 2 x + noise, whose quantiles are parallel lines."""
    rng = np.random.default_rng(1)
    x = rng.uniform(-1, 1, (1000, 1)).astype("float32")
    y = (1 + 2 * x[:, 0] + 0.5 * rng.normal(size=1000)).astype("float32")
    found = numpy(trained((), x, y, LEVELS[0], 600)(x))
    for place, level in enumerate(LEVELS[0]):
        peer = QuantileRegressor(quantile=level, alpha=0).fit(x, y).predict(x)
        truth = 1 + 2 * x[:, 0] + 0.5 * scipy.stats.norm.ppf(level)
        np.testing.assert_allclose(found[:, place], peer, atol=0.05)
        np.testing.assert_allclose(found[:, place], truth, atol=0.15)


@pytest.mark.once
def test_noise_that_depends_on_the_input_is_covered_and_its_width_found():
    """Each level in the exact binomial interval of one in a thousand, on two parts of the data."""

    def examples(count, seed):
        rng = np.random.default_rng(seed)
        x = rng.uniform(-1, 1, (count, 1)).astype("float32")
        scale = 0.2 + 0.8 * np.abs(x[:, 0])
        return x, (np.sin(3 * x[:, 0]) + scale * rng.normal(size=count)).astype("float32"), scale

    x, y, _ = examples(4000, 2)
    model = trained((16,), x, y, LEVELS[0], 600, rate=0.03)
    x, y, scale = examples(600, 3)
    found = numpy(model(x))
    for half in (x[:, 0] < 0, np.abs(x[:, 0]) > 0.5):
        law = scipy.stats.binom(half.sum(), LEVELS[0])
        low, high = law.interval(1 - 1e-3)
        below = np.sum(y[half, None] <= found[half], axis=0)
        assert (low <= below).all()
        assert (below <= high).all()
    width = found[:, 2] - found[:, 0]
    right = 2 * scipy.stats.norm.ppf(0.95) * scale
    np.testing.assert_allclose(width.mean(), right.mean(), rtol=0.05)
    assert np.corrcoef(width, right)[0, 1] > 0.97


def test_a_trained_model_can_be_saved_and_converted(tmp_path):
    model = trained((4,), data(20, 3), data(20), LEVELS[0], 1)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    x = data(4, 3, seed=1)
    np.testing.assert_array_equal(numpy(loaded(x)), numpy(model(x)))
    assert loaded.loss.levels == LEVELS[0]
    sto = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=20)
    with ibnn.noise_off(sto):
        np.testing.assert_allclose(numpy(sto(x)), numpy(model(x)), atol=1e-6)
