"""Densities by flows: against quadrature, closed forms, their own draws, and bad input."""

import keras
import numpy as np
import pytest
from scipy import stats

import tfp_ibnn as ibnn
from tests.layer_checklist import numpy
from tfp_ibnn import flows

RNG = np.random.default_rng(0)
X = (RNG.normal(size=(60, 2)) * [3.0, 0.1] + [5.0, -2.0]).astype("float32")
C = RNG.normal(size=(60, 3)).astype("float32")
COUPLINGS = [flows.AffineCoupling(hidden=8), flows.AffineCoupling(hidden=8, swap=True)]


def made(layers=(), seed=0, data=X, **options):
    """Return a density adapted to data, with weights that differ from their start."""
    keras.utils.set_random_seed(seed)
    density = ibnn.FlowDensity(list(layers), **options)
    density.adapt(data)
    rng = np.random.default_rng(seed)
    for v in density.trainable_variables:
        v.assign(numpy(v) + 0.2 * rng.normal(size=v.shape))
    density.compile(keras.optimizers.Adam(0.01), run_eagerly=True)
    return density


def grid(density, edge=12.0, count=161):
    """Points around the data, and the area of each."""
    loc, scale = numpy(density.loc), numpy(density.scale)
    ticks = np.linspace(-edge, edge, count)
    points = np.stack(np.meshgrid(ticks, ticks), -1).reshape(-1, 2)
    return loc + scale * points, np.prod(scale) * (ticks[1] - ticks[0]) ** 2


@pytest.mark.parametrize(
    ("layers", "options"),
    [
        (COUPLINGS, {}),
        ([flows.SplineCoupling(hidden=8, bins=4), flows.SplineCoupling(swap=True)], {}),
        ([flows.MaskedAutoregressive(hidden=8)], {"base": 3}),
        ([flows.Inverse(flows.Planar())], {"condition": 3}),
        ([], {"base": 2}),
    ],
    ids=["coupling", "spline", "mixture", "conditional", "base"],
)
def test_density_integrates_to_one(float64, layers, options):
    density = made(layers, **options)
    points, area = grid(density)
    data = points
    if options.get("condition"):
        data = (points, np.tile([[0.5, -1.0, 2.0]], (len(points), 1)))
    assert np.exp(numpy(density(data))).sum() * area == pytest.approx(1, abs=2e-3)


def test_without_flows_it_is_the_gaussian_of_the_data(float64):
    density, x = made(), X.astype("float64")
    expected = stats.norm.logpdf(x, x.mean(0), x.std(0)).sum(-1)
    np.testing.assert_allclose(numpy(density(X.astype("float64"))), expected, rtol=1e-6)


def test_mixture_base_is_the_mixture(float64):
    density = made(base=3)
    loc, raw = numpy(density.base_loc), numpy(density.base_raw_scale)
    eps = (X - numpy(density.loc)) / numpy(density.scale)
    parts = stats.norm.pdf(eps[:, None], loc, 1e-6 + np.log1p(np.exp(raw))).prod(-1)
    expected = np.log(parts.mean(-1)) - np.log(numpy(density.scale)).sum()
    np.testing.assert_allclose(numpy(density(X.astype("float64"))), expected, rtol=1e-6)


def test_conditional_affine_flow_is_the_linear_gaussian(float64):
    density = made([flows.Affine()], condition=3)
    (flow,) = density.flows
    maps = {v.path.split("/")[-1]: numpy(v) for v in flow.weights}
    c = C / 3**0.5  # the root of its size
    shift = maps["shift"] + c @ maps["shift_of_condition"]
    scale = 1e-6 + np.log1p(np.exp(maps["raw_scale"] + c @ maps["raw_scale_of_condition"]))
    loc = numpy(density.loc) + numpy(density.scale) * shift
    x = X.astype("float64")
    expected = stats.norm.logpdf(x, loc, numpy(density.scale) * scale).sum(-1)
    np.testing.assert_allclose(numpy(density((x, C.astype("float64")))), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("layers", "options"),
    [(COUPLINGS, {"base": 3}), ([flows.MaskedAutoregressive(hidden=8)], {"condition": 3})],
    ids=["mixture", "conditional"],
)
def test_draws_have_the_density(layers, options):
    """The mean and deviation of each column, and of log p, against sums over a grid."""
    density, number = made(layers, **options), 4000
    points, area = (part.astype("float32") for part in map(np.asarray, grid(density)))
    given = [None, None]
    if options.get("condition"):
        given = [
            np.tile([[0.5, -1.0, 0.2]], (n, 1)).astype("float32") for n in (number, len(points))
        ]
    draws = density.sample(number, seed=1, condition=given[0])

    def log_prob(x, c):
        return numpy(density(x if c is None else (x, c))).astype("float64")

    found = np.column_stack([draws, log_prob(draws, given[0])])
    logs = log_prob(points, given[1])
    mass = np.exp(logs) * area
    assert mass.sum() == pytest.approx(1, abs=1e-3)
    values = np.column_stack([points, logs])
    mean = mass @ values
    deviation = np.sqrt(mass @ (values - mean) ** 2)
    assert np.abs((found.mean(0) - mean) / deviation).max() < 4 / number**0.5
    np.testing.assert_allclose(found.std(0), deviation, rtol=0.06)


def test_draws_repeat_by_seed():
    density = made(COUPLINGS, base=2)
    first, again, other = (density.sample(5, seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.1
    np.testing.assert_array_equal(density.sample(5), density.sample(5, seed=0))


@pytest.mark.slow
def test_training_finds_the_density_of_skewed_data():
    rng = np.random.default_rng(1)
    first = rng.normal(size=800)
    x = np.column_stack([first, first**2 + 0.5 * rng.normal(size=800)]).astype("float32")
    gaussian = stats.multivariate_normal(x.mean(0), np.cov(x.T)).logpdf(x).mean()
    keras.utils.set_random_seed(0)
    density = ibnn.FlowDensity([flows.MaskedAutoregressive()])
    density.compile(keras.optimizers.Adam(0.03))
    density.fit(x, epochs=50, batch_size=200, verbose=0)
    truth = stats.norm.logpdf(first) + stats.norm.logpdf(x[:, 1], first**2, 0.5)
    assert gaussian + 0.2 < numpy(density(x)).mean() < truth.mean() + 0.1


def test_training_finds_the_linear_gaussian():
    """The likelihood of the least-squares line, and of its residuals, is the maximum."""
    x = (2 * C[:, :1] - C[:, 1:2] + 0.5 * RNG.normal(size=(60, 1)) + 3).astype("float32")
    inputs = np.column_stack([C, np.ones(60)])
    residuals = x - inputs @ np.linalg.lstsq(inputs, x, rcond=None)[0]
    # The deviation may depend on the condition too, so that a little more can be reached.
    best = stats.norm.logpdf(residuals, scale=residuals.std()).mean()
    density = ibnn.FlowDensity([flows.Affine()], condition=3)
    density.compile(keras.optimizers.Adam(0.1))
    history = density.fit((x, C), epochs=60, batch_size=60, verbose=0).history
    found = numpy(density((x, C))).mean()
    assert best - 0.02 < found < best + 0.15
    bits = np.array(history["bits_per_dimension"]) * np.log(2)
    np.testing.assert_allclose(bits, history["loss"], rtol=1e-4)


def test_weights_multiply_losses_as_in_keras(eagerly):
    density = made(COUPLINGS)
    weight = (RNG.uniform(size=len(X)) * (np.arange(len(X)) < 40)).astype("float32")
    losses = -numpy(density(X))
    scores = {"evaluate": density.evaluate(X, sample_weight=weight, batch_size=13, verbose=0)}
    density.optimizer.learning_rate = 0.0
    given = {"sample_weight": weight, "validation_data": (X, None, weight), "batch_size": 13}
    history = density.fit(X, **given, verbose=0).history
    for mark in ("", "val_"):
        scores[mark] = [history[f"{mark}{key}"][0] for key in ("loss", "bits_per_dimension")]
    for loss, bits in scores.values():
        assert loss == pytest.approx(np.mean(weight * losses), rel=1e-4)
        expected = np.average(losses, weights=weight) / (2 * np.log(2))
        assert bits == pytest.approx(expected, rel=1e-4)


def test_validation_of_a_conditional_density_in_every_form(eagerly):
    density = made(COUPLINGS, condition=1)
    c = X[:, :1]
    density.fit((X, c), epochs=1, verbose=0)
    density.optimizer.learning_rate = 0.0
    expected = -np.mean(density.log_prob(X, c))
    weights = np.ones(len(X))
    forms = ((X, c), [X, c], ((X, c), None), ((X, c), None, weights), (X, c, weights))
    for held_out in forms:
        history = density.fit((X, c), validation_data=held_out, verbose=0).history
        assert history["val_loss"][0] == pytest.approx(expected, rel=1e-4)


def test_nan_in_a_condition_and_batch_norm_are_refused():
    density, c = made(COUPLINGS, condition=1), X[:, :1].copy()
    c[3] = np.nan
    with pytest.raises(ValueError, match="`condition` hold NaN"):
        density.log_prob(X, c)
    for flow in (ibnn.flows.BatchNorm(), ibnn.flows.Inverse(ibnn.flows.BatchNorm())):
        for layers in (lambda f: [f], lambda f: [flows.Dequantize(8, [f])]):
            with pytest.raises(ValueError, match="must not have BatchNorm"):
                ibnn.FlowDensity(layers(flow))


def encoder():
    layers = [keras.layers.Embedding(5, 4), keras.layers.Dropout(0.1), keras.layers.Flatten()]
    return keras.Sequential([keras.Input((1,), dtype="int32"), *layers])


@pytest.mark.parametrize("kind", ["plain", pytest.param("size", marks=pytest.mark.slow), "model"])
def test_fit_save_and_load(eagerly, kind, tmp_path):
    condition = {"plain": None, "size": 3, "model": encoder()}[kind]
    given = {"plain": None, "size": C, "model": np.arange(60)[:, None] % 5}[kind]
    data = X if given is None else (X, given)
    density = ibnn.FlowDensity(
        [flows.Inverse(flows.Affine()), COUPLINGS[0]], condition=condition, base=2
    )
    density.compile("adam")
    history = density.fit(data, batch_size=60, verbose=0, validation_data=data).history
    assert set(history) >= {"loss", "bits_per_dimension", "val_loss", "val_bits_per_dimension"}
    assert np.isfinite(history["val_loss"]).all()
    density.save(tmp_path / "density.keras")
    loaded = keras.models.load_model(tmp_path / "density.keras")
    np.testing.assert_allclose(loaded.log_prob(X, given), density.log_prob(X, given), atol=1e-5)
    draws = [each.sample(60, condition=given) for each in (density, loaded)]
    np.testing.assert_allclose(*draws, atol=1e-5)
    before = numpy(loaded.loc)
    loaded.fit(keras.tree.map_structure(lambda part: part[:20], data), verbose=0)
    np.testing.assert_array_equal(numpy(loaded.loc), before)  # adapted once


def test_a_dataset_is_fitted_as_it_comes(eagerly):
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return (X[20 * index : 20 * index + 20],)

    density = ibnn.FlowDensity(COUPLINGS)
    density.compile("adam")
    density.fit(Batches(), verbose=0)
    assert (numpy(density.loc), numpy(density.scale)) == (pytest.approx(0), pytest.approx(1))
    density.adapt(X)
    np.testing.assert_allclose(numpy(density.loc), X.mean(0), rtol=1e-5)


def test_compiled_equals_eager():
    density = made(COUPLINGS)
    np.testing.assert_allclose(density.log_prob(X), numpy(density(X)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["conv1x1", pytest.param("continuous", marks=pytest.mark.slow)])
def test_training_is_the_same_under_xla_with_a_smaller_last_batch(kind):
    layers, data, options = [flows.InvertibleConv1x1()], (X[:10], C[:10]), {"condition": 3}
    if kind == "continuous":
        network = keras.layers.Conv2D(3, 2, padding="same", activation="tanh")
        options = {"network": network, "event_ndims": 3, "trace": "hutchinson", "steps": 1}
        layers, data, options = [flows.Continuous(**options)], X[:40].reshape(10, 2, 2, 2), {}
    losses = []
    for how in ({"jit_compile": True}, {"jit_compile": False}):
        keras.utils.set_random_seed(1)
        density = ibnn.FlowDensity(layers, **options)
        density.compile(keras.optimizers.SGD(0.01), **how)
        history = density.fit(data, batch_size=4, epochs=2, shuffle=False, verbose=0)
        losses.append(history.history["loss"])
    # XLA draws other noise, of which the continuous flow's trace is made.
    np.testing.assert_allclose(*losses, rtol=1e-3 if kind == "continuous" else 1e-6)
    assert losses[0][1] < losses[0][0]


@pytest.mark.parametrize("name", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_leaves_it_in_float32(policy, name):
    policy(name)
    condition = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    density = made([flows.Inverse(flows.Radial()), *COUPLINGS], condition=condition)
    assert {v.dtype for v in density.weights} == {"float32"}
    assert density.sample(60, condition=C).dtype == numpy(density((X, C))).dtype == "float32"


def test_unlikely_rows_are_detected():
    density = made()
    far = X + 8 * numpy(density.scale)
    scores = [-numpy(density(x)) for x in (X, far)]
    assert ibnn.metrics.auroc(*scores) > 0.99


def with_nan():
    x = X.copy()
    x[7, 1] = np.nan
    return x


def constant():
    return np.where([True, False], X, 1.0)


UNBUILT = keras.Sequential([keras.layers.Dense(2)], name="new")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda d, c: d.fit(with_nan()),
            "values of `x` hold NaN .* in 1 of 60 rows; the first is number 7",
        ),
        (lambda d, c: d.fit(constant()), r"vary in every column; columns \[1\] do not"),
        (lambda d, c: d.fit(np.round(X)), "whole numbers only: end `flows` with"),
        (lambda d, c: d.fit(X, X), "no targets"),
        (lambda d, c: d.fit((X, C)), r"takes `x` alone, .* got 2 array\(s\)"),
        (lambda d, c: d.fit(X[:, 0]), r"\(examples, size\); got \(60,\): use x\[:, None\]"),
        (lambda d, c: d.fit(X[:0]), r"got \(0, 2\)"),
        (lambda d, c: d.sample(3), "not built yet"),
        (lambda d, c: c.fit(X), "needs a `condition`"),
        (lambda d, c: c.fit((X, C[:5])), r"`condition` must have the shape \(60, 3\)"),
        (lambda d, c: c.log_prob(X, C[:, :2]), r"`condition` must have the shape \(60, 3\)"),
        (lambda d, c: c.export("nowhere"), "without a condition"),
        (lambda d, c: ibnn.FlowDensity([]).export("nowhere"), "trained densities"),
        (lambda d, c: ibnn.FlowDensity(["planar"]), "`flows` must be a list of flows"),
        (lambda d, c: ibnn.FlowDensity([], base=0), "`base`"),
        (lambda d, c: ibnn.FlowDensity([], condition=0), "`condition`"),
        (lambda d, c: ibnn.FlowDensity([flows.Planar(condition_size=2)]), "condition_size=None"),
        (lambda d, c: flows.Inverse("planar"), "`flow` must be a flow"),
        (lambda d, c: ibnn.FlowDensity([], condition=UNBUILT), "model of known shape, .*got 'new'"),
    ],
)
def test_bad_input_is_named(call, message):
    densities = ibnn.FlowDensity(COUPLINGS), ibnn.FlowDensity(COUPLINGS, condition=3)
    with pytest.raises(ValueError, match=message):
        call(*densities)


@pytest.mark.parametrize(
    "given", [{"metrics": ["mse"]}, {"weighted_metrics": ["mse"]}, {"loss": "mse"}]
)
def test_losses_and_metrics_of_others_are_refused(given):
    density = made(COUPLINGS)
    density.compile("adam", **given)
    for call in (density.fit, density.evaluate):
        with pytest.raises(ValueError, match=r"model's own: write `compile\(optimizer\)`"):
            call(X, verbose=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ibnn.FlowDensity([]).loc, "FlowDensity has no attribute 'loc' yet: call it on"),
        (lambda: flows.Planar().inverse_and_log_det(X), "Planar has no attribute 'bijector' yet"),
        (lambda: flows.Argmax(3).generate(X), "Argmax has no attribute 'channels' yet"),
        (lambda: made().foo, r"FlowDensity has no attribute 'foo'\.$"),
    ],
)
def test_what_is_not_built_yet_says_so(call, message):
    with pytest.raises(AttributeError, match=message):
        call()


def test_bad_input_of_a_trained_density_is_named():
    density, other = made(COUPLINGS), made(COUPLINGS, condition=3)
    for x in (np.zeros((4, 3)), np.zeros((4, 1))):
        with pytest.raises(ValueError, match=r"\(examples, 2\); got \(4, "):
            density.log_prob(x)
        with pytest.raises(ValueError, match=r"\(examples, 2\); got \(4, "):
            density(x)
    with pytest.raises(ValueError, match="`number`"):
        density.sample(0)
    with pytest.raises(ValueError, match=r"`condition` must have the shape \(4, 3\)"):
        other.sample(4, condition=C)


@pytest.mark.once
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="a SavedModel")
def test_export(tmp_path):
    import tensorflow as tf

    density = made([flows.MaskedAutoregressive(hidden=4)], base=2)
    density.export(tmp_path / "model")
    signatures = tf.saved_model.load(str(tmp_path / "model")).signatures
    found = signatures["log_prob"](x=tf.constant(X))["log_prob"]
    np.testing.assert_allclose(numpy(found), numpy(density(X)), rtol=1e-4, atol=1e-5)
    draws = signatures["sample"](number=tf.constant(2000), seed=tf.constant(1))["x"]
    expected = density.sample(2000)
    np.testing.assert_allclose(
        numpy(draws).mean(0), expected.mean(0), atol=0.15 * expected.std(0).max()
    )
    assert numpy(draws).shape == (2000, 2)


def test_inverse_gives_its_condition_and_precision_to_the_flow():
    flow = flows.Inverse(flows.Planar(), condition_size=2, dtype="float64")
    assert (flow.flow.condition_size, flow.flow.dtype) == (2, "float64")
    again = flows.Inverse.from_config(flow.get_config())
    assert (again.condition_size, again.flow.condition_size, again.dtype) == (2, 2, "float64")
