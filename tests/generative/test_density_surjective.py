"""Densities of whole numbers, of images, and with other surjections."""

import keras
import numpy as np
import pytest
from scipy import stats

import tfp_ibnn as ibnn
from tests.flows.test_all_event_ndims import Rows
from tests.flows.tools import inverse, log_det
from tests.layer_checklist import numpy
from tests.registry import SURJECTIONS, perturb
from tfp_ibnn import flows

RNG = np.random.default_rng(0)
LEVELS = 3
X = RNG.binomial(LEVELS - 1, [0.3, 0.7], size=(300, 2))
IMAGES = RNG.integers(0, 4, (24, 4, 4, 2))
CELLS = np.stack(np.meshgrid(range(LEVELS), range(LEVELS), indexing="ij"), -1).reshape(-1, 2)


def made(last, data=X, seed=0, **options):
    density = ibnn.FlowDensity([flows.AffineCoupling(hidden=8), last], **options)
    density.adapt(data)
    perturb(density, seed, 0.5)
    density.adapt(data)
    density.compile("adam")
    return density


def cells(density, step=0.05, edge=12.0):
    """The probabilities of all x by sums over a grid of z: the outer cells have the tails too."""
    plain = ibnn.FlowDensity(density.flows)
    plain.build((None, 2))
    # Copies, since Keras gives the arrays of a model away when it predicts on JAX.
    plain.loc.assign(numpy(density.loc))
    plain.scale.assign(numpy(density.scale))
    plain.flows[0].set_weights(density.flows[0].get_weights())
    ticks = np.arange(-edge, edge, step) + step / 2
    points = np.stack(np.meshgrid(ticks, ticks, indexing="ij"), -1).reshape(-1, 2)
    mass = np.exp(plain.log_prob(points, batch_size=10**6)) * step**2
    places = np.floor(points)
    inside = [mass[(places == cell).all(-1)].sum() for cell in CELLS]
    clipped = np.clip(places, 0, LEVELS - 1)
    return np.array(inside), np.array([mass[(clipped == cell).all(-1)].sum() for cell in CELLS])


@pytest.mark.once
@pytest.mark.parametrize(
    "variational",
    [
        pytest.param(False, id="uniform", marks=pytest.mark.slow),
        pytest.param(True, id="variational"),
    ],
)
def test_whole_numbers_have_the_mass_of_their_cells(variational):
    last = flows.Dequantize(LEVELS, [flows.Affine()] if variational else [])
    density = made(last)
    for flow in density.surjection.built_flows:  # wide, or the mean of the weights takes too long
        flow.raw_scale.assign([1.5, 1.0])
        flow._linear_maps["raw_scale"].assign([[0.2, 0.0], [0.1, -0.2]])
    inside, clipped = cells(density)
    assert clipped.sum() == pytest.approx(1, abs=2e-3)
    repeats = 4000
    logs = numpy(density(np.repeat(CELLS, repeats, axis=0), training=True)).reshape(-1, repeats)
    weights = np.exp(logs.astype("float64"))
    error = weights.std(-1) / repeats**0.5
    assert (np.abs(weights.mean(-1) - inside) < 4 * error + 1e-3 * inside).all()
    assert (logs.mean(-1) < np.log(inside)).all()
    draws = density.sample(20_000, seed=1)
    found = np.array([(draws == cell).all(-1).mean() for cell in CELLS])
    assert (np.abs(found - clipped) < 4 * np.sqrt(clipped / 20_000) + 1e-3).all()


def test_bits_are_those_of_the_whole_numbers(eagerly):
    density = made(flows.Dequantize(LEVELS))
    logs = density.log_prob(X)
    np.testing.assert_array_equal(logs, density.log_prob(X))  # the noise is fixed
    loss, bits = density.evaluate(X, batch_size=1000, verbose=0)
    assert loss == pytest.approx(-logs.mean(), rel=1e-4)
    assert bits == pytest.approx(loss / (2 * np.log(2)), rel=1e-5)
    first, second = (numpy(density(X, training=True)) for _ in range(2))
    assert np.abs(first - second).max() > 1e-3
    _, counts = np.unique(X, axis=0, return_counts=True)
    entropy = stats.entropy(counts) / (2 * np.log(2))
    assert bits > entropy


@pytest.mark.parametrize(
    "name",
    [
        name if name == "dequantize-variational" else pytest.param(name, marks=pytest.mark.slow)
        for name in SURJECTIONS
    ],
)
def test_every_surjection_is_trained_saved_and_loaded(eagerly, name, tmp_path):
    data = X if SURJECTIONS[name]().levels else np.abs(RNG.normal(size=(60, 2)))
    c = RNG.normal(size=(len(data), 2)).astype("float32")
    density = ibnn.FlowDensity([flows.Affine(), SURJECTIONS[name]()], condition=2, base=2)
    density.compile("adam")
    history = density.fit((data, c), batch_size=len(data), epochs=2, verbose=0).history
    assert np.isfinite(history["loss"]).all()
    density.save(tmp_path / "density.keras")
    loaded = keras.models.load_model(tmp_path / "density.keras")
    np.testing.assert_allclose(loaded.log_prob(data, c), density.log_prob(data, c), atol=1e-5)
    draws = [each.sample(len(c), condition=c) for each in (density, loaded)]
    np.testing.assert_allclose(*draws, atol=1e-5)
    assert draws[0].shape == data.shape
    density.surjection.check(draws[0])
    one, other = (numpy(d((data, c), training=True)) for d in (density, loaded))
    np.testing.assert_allclose(one, other, atol=1e-5)  # the state of the noise too


@pytest.mark.parametrize("data", [X[:40], IMAGES], ids=["rows", "images"])
def test_the_bound_of_a_row_depends_on_nothing_else(eagerly, data):
    """Neither on the size of its batch nor on its place; but rows differ in their noise."""
    levels = int(data.max()) + 1
    density = ibnn.FlowDensity([flows.Affine(), flows.Dequantize(levels, [flows.Affine()])])
    density.adapt(data)
    density.compile("adam")
    perturb(density, 0, 0.3)
    known = density.log_prob(data)
    for order, batch_size in ((slice(None), 7), (slice(None, None, -1), 7), (slice(3, 4), 1)):
        found = density.log_prob(data[order], batch_size=batch_size)
        np.testing.assert_allclose(found, known[order], rtol=1e-5, atol=1e-5)
    noise = numpy(density._noise(density._rows(IMAGES if data is IMAGES else CELLS), False))
    noise = noise.reshape(len(noise), -1)
    assert len(np.unique(noise)) == noise.size  # of each row and each pixel


@pytest.mark.once
def test_density_of_slices_integrates_to_one_and_has_its_draws(float64):
    density = ibnn.FlowDensity([flows.Affine(), flows.Slice(1, flows=[flows.Affine()])], base=2)
    density.adapt(RNG.normal(size=(60, 2)))
    perturb(density.surjection, 0, 0.5)
    ticks = np.linspace(-12, 12, 241)
    points = np.stack(np.meshgrid(ticks, ticks), -1).reshape(-1, 2)
    mass = np.exp(numpy(density(points))) * 0.1**2
    assert mass.sum() == pytest.approx(1, abs=1e-4)
    draws, mean = density.sample(4000, seed=1), mass @ points
    deviation = np.sqrt(mass @ (points - mean) ** 2)
    assert np.abs((draws.mean(0) - mean) / deviation).max() < 4 / 4000**0.5
    np.testing.assert_allclose(draws.std(0), deviation, rtol=0.06)
    moment = mass @ points.prod(-1) - mean.prod()
    assert np.cov(draws.T)[0, 1] == pytest.approx(moment, abs=0.1 * deviation.prod())


def test_images_without_flows_are_gaussian_by_channel(float64):
    x = RNG.normal(size=(50, 3, 2, 2)) * [2.0, 0.5] + [1.0, -1.0]
    density = ibnn.FlowDensity([])
    density.adapt(x)
    flat = x.reshape(-1, 2)
    expected = stats.norm.logpdf(x, flat.mean(0), flat.std(0)).sum((1, 2, 3))
    np.testing.assert_allclose(numpy(density(x)), expected, rtol=1e-6)


def test_flows_of_matrices_and_of_vectors_add_up(float64):
    """A flow of whole matrices (event_ndims=2), then one of each of their rows."""
    x = RNG.normal(size=(5, 3, 2))
    density = ibnn.FlowDensity([Rows(), flows.Affine()])
    density.build((None, 3, 2))
    perturb(density.flows[0], 0)
    perturb(density.flows[1], 1)
    rows, affine = density.flows
    middle = inverse(affine, x)
    expected = stats.norm.logpdf(inverse(rows, middle)).sum((1, 2))
    expected += log_det(rows, middle, "inverse") + log_det(affine, x, "inverse").sum(1)
    np.testing.assert_allclose(numpy(density(x)), expected, rtol=1e-9)


def test_images_of_whole_numbers(eagerly):
    couplings = [flows.InvertibleConv1x1(), flows.AffineCoupling(hidden=4)]
    density = ibnn.FlowDensity([*couplings, flows.Dequantize(4)], condition=2)
    density.compile(keras.optimizers.Adam(1e-2))
    c = RNG.normal(size=(24, 2)).astype("float32")
    history = density.fit((IMAGES, c), batch_size=24, epochs=2, verbose=0).history
    bits = np.array(history["bits_per_dimension"])
    np.testing.assert_allclose(bits, np.array(history["loss"]) / (32 * np.log(2)), rtol=1e-4)
    logs, draws = density.log_prob(IMAGES, c), density.sample(24, seed=1, condition=c)
    assert (logs.shape, draws.shape) == ((24,), IMAGES.shape)
    assert np.isin(draws, range(4)).all()
    assert np.abs(logs - density.log_prob(IMAGES, -c)).max() > 1e-4


@pytest.mark.parametrize("name", ["mixed_bfloat16"])
def test_mixed_precision_leaves_it_in_float32(policy, name):
    policy(name)
    density = made(flows.Dequantize(LEVELS, [flows.Affine()]))
    assert {v.dtype for v in density.trainable_weights} == {"float32"}
    assert density.sample(5).dtype == numpy(density(X)).dtype == "float32"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: d.fit(IMAGES / 3), "whole numbers from 0 to 3, unscaled; got from 0.0 to 1.0"),
        (lambda d: d.fit(IMAGES + 1), "got from 1.0 to 4.0"),
        (lambda d: d.fit(np.zeros((5,))), r"shape \(examples, size\); got \(5,\)"),
        (lambda d: ibnn.FlowDensity([]).fit(IMAGES), "end `flows` with Dequantize"),
        (lambda d: ibnn.FlowDensity([flows.Slice(1)]).fit(IMAGES), "end `flows` with Dequantize"),
        (
            lambda d: ibnn.FlowDensity([flows.Dequantize(), flows.Affine()]),
            "`flows` must be a list of flows",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(ibnn.FlowDensity([flows.Dequantize(4)]))


def test_other_shapes_are_refused_after_training():
    density = made(flows.Dequantize(LEVELS))
    for shape in ((4, 3), (4, 2, 2), (0, 2)):
        with pytest.raises(ValueError, match=r"\(examples, 2\); got"):
            density.log_prob(np.zeros(shape))


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="a SavedModel")
def test_export(tmp_path):
    import tensorflow as tf

    density = made(flows.Dequantize(LEVELS))
    density.export(tmp_path / "model")
    signatures = tf.saved_model.load(str(tmp_path / "model")).signatures
    found = signatures["log_prob"](x=tf.constant(X, "float32"))["log_prob"]
    np.testing.assert_allclose(numpy(found), numpy(density(X)), rtol=1e-4, atol=1e-5)
    draws = signatures["sample"](number=tf.constant(20), seed=tf.constant(1))["x"]
    assert np.isin(numpy(draws), range(LEVELS)).all()


@pytest.mark.once
def test_evaluate_checks_pairs(eagerly):
    density = made(flows.Dequantize(LEVELS), condition=1)
    c = np.ones((len(X), 1))
    assert np.isfinite(density.evaluate((X, c), verbose=0)).all()
    for bad in (X / LEVELS, X + 1):
        with pytest.raises(ValueError, match="whole numbers from 0 to 2"):
            density.evaluate((bad, c), verbose=0)
