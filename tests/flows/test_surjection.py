"""What every surjection promises: against quadrature over its noise, and closed forms."""

import itertools

import keras
import numpy as np
import pytest
from keras import ops
from scipy import integrate, stats

from tests import autodiff
from tests.flows.tools import close, draws, numpy
from tests.registry import SURJECTIONS, make_surjection
from tfp_ibnn import flows

every_surjection = pytest.mark.parametrize("name", SURJECTIONS)
LOC, SCALE = np.array([0.7, 1.2, 0.3]), np.array([1.3, 0.8, 1.1])  # of the latents
CONDITION = np.array([[0.5, -1.0]])


def test_registry_holds_every_surjection():
    public = {kind for kind in vars(flows).values() if isinstance(kind, type)}
    known = {kind for kind in public if issubclass(kind, flows.Surjection)}
    assert {type(make()) for make in SURJECTIONS.values()} == known - {flows.Surjection}


def data(name, count=20, channels=2, seed=3):
    rng = np.random.default_rng(seed)
    levels = SURJECTIONS[name]().levels
    if levels:
        return rng.integers(0, levels, (count, channels)).astype("float64")
    x = rng.normal(size=(count, channels))
    return np.abs(x) if name == "absolute" else x


def truth(name, x, surjection, condition):
    """p(x) of one row by closed forms and integrals, where z is normal by LOC and SCALE."""
    first = stats.norm(LOC[0], SCALE[0])
    if name.startswith("dequantize"):
        return first.cdf(x[0] + 1) - first.cdf(x[0])
    if name == "absolute":
        return first.pdf(x[0]) + first.pdf(-x[0])
    if name == "augment":
        return first.pdf(x[0])
    if name == "slice":
        (flow,) = surjection.built_flows
        maps = {v.path.split("/")[-1]: numpy(v) for v in flow.weights}
        given = x[:1] if condition is None else np.concatenate([x[:1], condition[0]])
        given = given / len(given) ** 0.5
        loc = maps["shift"] + given @ maps["shift_of_condition"]
        raw = maps["raw_scale"] + given @ maps["raw_scale_of_condition"]
        return first.pdf(x[0]) * stats.norm.pdf(x[1], loc, 1e-6 + np.log1p(np.exp(raw)))[0]
    others = [k for k in range(3) if k != x[0]]

    def wins(t):
        return stats.norm.pdf(t, LOC[int(x[0])], SCALE[int(x[0])]) * np.prod(
            [stats.norm.cdf(t, LOC[k], SCALE[k]) for k in others]
        )

    return integrate.quad(wins, -10, 12)[0]


def quadrature(surjection, x, condition):
    """E[p(z) exp(V)] and E[log p(z) + V] over the noise, of one row."""
    size = 1 if surjection.is_exact else surjection.noise_channels
    # z is to be wider than p(z); as u grows, argmax's z nears its limit slowly.
    ticks = np.linspace(*{1: (-30, 30, 8001), 3: (-10, 32, 41)}[size])
    noise = np.array(list(itertools.product(ticks, repeat=size)))
    log_weight = stats.norm.logpdf(noise).sum(-1) + size * np.log(ticks[1] - ticks[0])
    rows = np.tile(x, (len(noise), 1))
    z, v = map(numpy, surjection.inference_and_contribution(rows, noise, condition))
    latents = surjection.latent_channels
    logs = stats.norm.logpdf(z, LOC[:latents], SCALE[:latents]).sum(-1) + v
    return np.exp(log_weight + logs).sum(), np.exp(log_weight) @ logs


@pytest.mark.once
@pytest.mark.parametrize(
    ("name", "condition"),
    [
        pytest.param(
            name,
            condition,
            id=f"{name}-{end}",
            marks=pytest.mark.slow if (name, end) == ("argmax", "condition") else [],
        )
        for name in SURJECTIONS
        for end, condition in (("plain", None), ("condition", CONDITION))
    ],
)
def test_contribution_gives_the_probability_and_a_bound(float64, name, condition):
    size = None if condition is None else 2
    surjection = make_surjection(name, 2 if name == "slice" else 1, seed=4, condition_size=size)
    total = 0
    for x in np.unique(data(name, 12, surjection.channels), axis=0)[:4]:
        expected = truth(name, x, surjection, condition)
        mean, bound = quadrature(surjection, x, condition)
        # The grid has an error where a sign jumps, and in three dimensions.
        tolerance = {"absolute": 1e-3, "argmax": 3e-3}.get(name, 1e-5)
        assert mean == pytest.approx(expected, rel=tolerance)
        if surjection.is_exact:
            assert bound == pytest.approx(np.log(expected), rel=1e-9)
        else:
            assert bound < np.log(expected) - 1e-6
        total += expected
    if name == "argmax":
        assert total == pytest.approx(1, rel=1e-9)  # these were all categories


def test_signs_are_exact_where_the_latents_are_symmetric(float64):
    surjection, x = make_surjection("absolute"), data("absolute")
    z, v = map(numpy, surjection.inference_and_contribution(x, draws(x.shape)))
    close(stats.norm.logpdf(z).sum(-1) + v, stats.halfnorm.logpdf(x).sum(-1), 1e-12)
    assert (z < 0).any()
    assert (z > 0).any()


def test_dequantization_starts_as_the_uniform_one(float64):
    x, noise = data("dequantize", 200), draws((200, 2))
    plain, flexible = (make_surjection(f"dequantize{end}") for end in ("", "-variational"))
    for surjection in (plain, flexible):
        z, v = map(numpy, surjection.inference_and_contribution(x, noise))
        close(z - x, stats.norm.cdf(noise), 1e-6)
        close(v, 0, 1e-5)


@every_surjection
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_generate_undoes_inference(request, name, dtype):
    if dtype == "float64":
        request.getfixturevalue("float64")
    surjection, x = make_surjection(name, seed=4), data(name, 500).astype(dtype)
    noise = 3 * draws((500, surjection.noise_channels), dtype=dtype)
    z, v = surjection.inference_and_contribution(x, noise)
    assert numpy(z).shape == (500, surjection.latent_channels)
    assert numpy(v).shape == (500,)
    assert {keras.backend.standardize_dtype(t.dtype) for t in (z, v)} == {dtype}
    found = numpy(surjection.generate(z, noise))
    kept = slice(1) if name == "slice" else slice(None)
    np.testing.assert_array_equal(found[:, kept], x[:, kept])
    if name == "slice":  # the noise is of the density that inference states
        again, density = surjection.draw(found[:, 1:], z, None, "inverse")
        close(numpy(again), noise, 1e-4)
        close(numpy(surjection.inference_and_contribution(found, None)[1]), numpy(density), 1e-5)


def test_the_highest_of_many_levels_is_not_rounded_up():
    surjection = flows.Dequantize(2**16)
    surjection.build((None, 1))
    x, noise = np.full((3, 1), 2.0**16 - 1), np.array([[-9.0], [0.0], [9.0]], "float32")
    np.testing.assert_array_equal(
        numpy(surjection.generate(surjection.inference_and_contribution(x, noise)[0])), x
    )
    np.testing.assert_array_equal(
        numpy(surjection.generate(np.array([[-3.0], [1e6]]))), x[:2] * [[0], [1]]
    )


@pytest.mark.slow
@every_surjection
def test_compiled_equals_eager_on_images(name):
    surjection = make_surjection(name, seed=4, condition_size=2)
    x = data(name, 12).reshape(2, 3, 2, 2).astype("float32")
    noise = draws((2, 3, 2, surjection.noise_channels), dtype="float32")
    condition = draws((2, 1, 1, 2), dtype="float32")

    def both(x, noise, condition):
        z, v = surjection.inference_and_contribution(x, noise, condition)
        return z, v, surjection.generate(z, noise, condition)

    tensors = [ops.convert_to_tensor(part) for part in (x, noise, condition)]
    compiled = autodiff.jit(both, surjection.weights)(*tensors)
    rows = [x[0, 1], noise[0, 1], np.tile(condition[0, 0], (2, 1))]
    for one, other, row in zip(compiled, both(*tensors), both(*rows), strict=True):
        close(numpy(one), numpy(other), 1e-5)
        close(numpy(other)[0, 1], numpy(row), 1e-5)


@every_surjection
def test_every_weight_gets_a_gradient_and_survives_a_config(name):
    surjection, x = make_surjection(name, seed=4, condition_size=2), data(name)
    noise, condition = draws((20, surjection.noise_channels)), draws((20, 2))

    def loss():
        z, v = surjection.inference_and_contribution(x, noise, condition)
        return ops.sum(v) - ops.sum(z * z)

    if surjection.trainable_weights:
        gradients = autodiff.weight_gradients(loss, surjection.trainable_weights)
        assert all(np.isfinite(gradient).all() and gradient.any() for gradient in gradients)
    config = keras.saving.serialize_keras_object(surjection)
    twin = keras.saving.deserialize_keras_object(config)
    assert keras.saving.serialize_keras_object(twin) == config
    twin.build((None, 2))
    twin.set_weights(surjection.get_weights())
    pairs = [part.inference_and_contribution(x, noise, condition) for part in (surjection, twin)]
    for one, other in zip(*pairs, strict=True):
        np.testing.assert_array_equal(numpy(one), numpy(other))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: flows.Dequantize(1), "`levels`"),
        (lambda: flows.Dequantize(4, ["planar"]), "`flows` must be a list"),
        (lambda: flows.Argmax(2.5), "`levels`"),
        (lambda: flows.Slice(0), "`size`"),
        (lambda: make_surjection("slice", 1), "`size` must be below the 1 channels; got 1"),
        (lambda: make_surjection("slice", None), "shape"),
        (lambda: flows.Dequantize(4).check(np.ones(3) / 2), "whole numbers from 0 to 3, unscaled"),
        (lambda: flows.Argmax(4).check(np.array([4.0])), "got from 4.0 to 4.0"),
        (lambda: flows.AbsoluteValue().check(np.array([-1.0])), "numbers from 0 to inf"),
        (
            lambda: make_surjection("augment").inference_and_contribution(
                np.ones((1, 2)), np.ones((1, 1)), CONDITION
            ),
            "`condition` must be None",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_good_data_pass():
    flows.Dequantize(4).check(np.array([[0, 3]]))
    flows.Slice(1).check(np.array([[-5.5, 1e9]]))
