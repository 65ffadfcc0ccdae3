"""Flows of images at several scales, in float64."""

import keras
import numpy as np
import pytest
from keras import ops

import tfp_ibnn as ibnn
from tests import autodiff
from tests.flows.tools import close, draws, forward, inverse, jacobian, log_det, numpy
from tests.registry import IMAGE_FLOWS, perturb
from tfp_ibnn import flows

every_flow = pytest.mark.parametrize("name", IMAGE_FLOWS)
SHAPE = (4, 4, 1)


def made(name, **kwargs):
    flow = IMAGE_FLOWS[name](**kwargs)
    flow.build((None, *SHAPE))
    perturb(flow, 2, 0.5)
    return flow


@every_flow
@pytest.mark.parametrize("way", ["forward", pytest.param("inverse", marks=pytest.mark.slow)])
def test_log_det_is_that_of_the_autodiff_jacobian(float64, name, way):
    flow, x = made(name, condition_size=3), draws((2, *SHAPE))
    condition = draws((2, 1, 1, 3), seed=7)
    expected = np.linalg.slogdet(jacobian(flow, x, way, condition))[1]
    close(log_det(flow, x, way, condition), expected, 1e-9)
    mapped, found = getattr(flow, f"{way}_and_log_det")(x, condition)
    close(numpy(found), expected, 1e-9)
    other = {"forward": inverse, "inverse": forward}[way]
    close(other(flow, numpy(mapped), condition), x, 1e-9)
    assert np.abs(numpy(mapped) - x).max() > 0.1


def test_channels_of_blocks_are_their_pixels(float64):
    flow = flows.Squeeze([flows.Affine()])
    flow.build((None, *SHAPE))
    perturb(flow, 2)
    scale, x = np.exp(np.arange(4.0) / 4), draws((3, *SHAPE))
    flow.flows[0].raw_scale.assign(np.log(np.expm1(scale - 1e-6)))
    flow.flows[0].shift.assign(np.arange(4.0))
    y = numpy(flow.forward_and_log_det(x)[0])
    for row, column in np.ndindex(2, 2):
        part = 2 * row + column
        expected = x[:, row::2, column::2] * scale[part] + part
        close(y[:, row::2, column::2], expected, 1e-6)


def test_half_of_the_noise_skips_the_coarser_scale(float64):
    """The upper pixels of each block are noise till the flows of the finest scale."""
    flow = flows.Squeeze([], [flows.Affine()])
    flow.build((None, *SHAPE))
    perturb(flow, 2)
    x = draws((3, *SHAPE))
    y = numpy(flow.forward_and_log_det(x)[0])
    close(y[:, 0::2], x[:, 0::2], 1e-12)
    assert np.abs(y[:, 1::2] - x[:, 1::2]).min() > 1e-3


@pytest.mark.slow
@every_flow
def test_any_leading_axes_and_compiled(name):
    flow, x = made(name), draws((2, 3, *SHAPE), dtype="float32")
    whole = numpy(*flow.inverse_and_log_det(x))
    compiled = autodiff.jit(flow.inverse_and_log_det, flow.weights)(ops.convert_to_tensor(x[1]))
    for one, other, again in zip(whole, flow.inverse_and_log_det(x[1]), compiled, strict=True):
        close(one[1], numpy(other), 1e-5)
        close(numpy(again), numpy(other), 1e-5)


@pytest.mark.once
@every_flow
def test_config_round_trip(name):
    flow, x = made(name, condition_size=3), draws((2, *SHAPE), dtype="float32")
    config = keras.saving.serialize_keras_object(flow)
    twin = keras.saving.deserialize_keras_object(config)
    assert keras.saving.serialize_keras_object(twin) == config
    twin.build((None, *SHAPE))
    twin.set_weights(flow.get_weights())
    condition = draws((1, 1, 1, 3), dtype="float32")
    np.testing.assert_array_equal(forward(twin, x, condition), forward(flow, x, condition))


@pytest.mark.once
@pytest.mark.parametrize(
    ("recipe", "kind"), [(flows.RealNVP, flows.AffineCoupling), (flows.Glow, flows.GlowStep)]
)
def test_recipes(float64, recipe, kind):
    vectors = recipe(3, hidden=4)
    assert [type(flow) for flow in vectors] == [kind] * 3
    assert [flow.swap for flow in vectors] == [False, True, False]
    (flow,) = recipe(2, hidden=4, scales=2)
    flow.build((None, *SHAPE))
    (inner,) = flow.coarser
    assert [type(x) for x in (*flow.flows, *inner.flows)] == [kind] * 4
    assert (inner.channels, inner.flows[0].channels, inner.coarser) == (2, 8, [])
    x = draws((1, *SHAPE))
    close(inverse(flow, forward(flow, x)), x, 1e-9)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"even height and width; got \(None, 4, 3, 2\)"):
        flows.Squeeze([]).build((None, 4, 3, 2))
    with pytest.raises(ValueError, match="last 3 axes"):
        flows.Squeeze([]).build((2, 2))
    with pytest.raises(ValueError, match="`coarser` must be a list of flows"):
        flows.Squeeze([], "planar")


@pytest.mark.slow
def test_a_density_of_images_of_whole_numbers_at_two_scales(eagerly, tmp_path):
    images = np.random.default_rng(0).integers(0, 4, (24, *SHAPE))
    c = draws((24, 2), dtype="float32")
    density = ibnn.FlowDensity([*flows.RealNVP(2, 4, scales=2), flows.Dequantize(4)], condition=2)
    density.compile(keras.optimizers.Adam(1e-2))
    history = density.fit((images, c), batch_size=24, epochs=5, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    logs, found = density.log_prob(images, c), density.sample(24, seed=1, condition=c)
    assert (logs.shape, found.shape) == ((24,), images.shape)
    assert np.isin(found, range(4)).all()
    density.save(tmp_path / "density.keras")
    loaded = keras.models.load_model(tmp_path / "density.keras")
    np.testing.assert_allclose(loaded.log_prob(images, c), logs, rtol=1e-5)


@pytest.mark.once
def test_images_without_channels_are_refused():
    """Their examples would be taken for rows of pixels."""
    density = ibnn.FlowDensity([*flows.RealNVP(2, 4, scales=1), flows.Dequantize(256)])
    with pytest.raises(ValueError, match=r"\(examples, height, width, channels\); got \(8, 4, 4\)"):
        density.fit(np.random.default_rng(0).integers(0, 256, (8, 4, 4)), verbose=0)


@pytest.mark.once
def test_log_det_around_a_random_one_is_random():
    random = flows.Continuous(trace="hutchinson", steps=1)
    assert flows.Squeeze([flows.Affine()]).exact_log_det
    assert not flows.Squeeze([flows.Affine()], [random]).exact_log_det


@pytest.mark.once
@pytest.mark.parametrize(
    "bad", [{"steps": 0}, {"steps": 1.5}, {"scales": -1}, {"scales": "2"}], ids=str
)
def test_recipes_name_bad_arguments(bad):
    (name,) = bad
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        flows.Glow(**bad)
