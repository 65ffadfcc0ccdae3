"""Scores by densities: against closed forms of Gaussians, and where the density alone misleads."""

import keras
import numpy as np
import pytest
from keras import layers
from scipy import stats

import tfp_ibnn as ibnn
from tests.layer_checklist import numpy
from tests.precision import at_least

RNG = np.random.default_rng(0)
KINDS = ("density", "typicality", "likelihood_ratio")
SIZE = 20
SCALES = np.linspace(0.5, 2, SIZE)


@pytest.fixture(autouse=True)
def fast(eagerly):
    """Nothing said here is about compiled graphs."""


def gaussian(shape=(SIZE,), loc=0.0, scale=1.0, **options):
    """A density that is N(loc, scale^2) by column."""
    density = ibnn.FlowDensity([], **options)
    input_shape = (None, *shape)
    density.build((input_shape, (None, 2)) if "condition" in options else input_shape)
    density.loc.assign(np.broadcast_to(loc, shape[-1:]))
    density.scale.assign(np.broadcast_to(scale, shape[-1:]))
    return density


def drawn(count, spread=1.0):
    return (spread * SCALES * RNG.normal(size=(count, SIZE))).astype("float32")


KNOWN = drawn(400)
NEW = drawn(400)
SIMPLE = drawn(300, 0.3)
WIDE = drawn(300, 2.0)


def detector(kind, **options):
    background = gaussian(scale=0.5, **options) if kind == "likelihood_ratio" else None
    model = gaussian(scale=SCALES, **options)
    return ibnn.OODDetector(model, kind, background=background)


def log_p(x):
    return stats.norm.logpdf(x, scale=SCALES).sum(axis=1)


def expected(kind, x):
    if kind == "density":
        return -log_p(x)
    if kind == "typicality":
        return np.abs(log_p(x) - log_p(KNOWN).mean())
    return stats.norm.logpdf(x, scale=0.5).sum(axis=1) - log_p(x)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_the_closed_forms_of_gaussians(kind):
    found = detector(kind).fit(KNOWN)
    close = {"rtol": 1e-4, "atol": at_least(1e-3)}
    for x in (NEW, SIMPLE, WIDE):
        np.testing.assert_allclose(found.score(x), expected(kind, x), **close)
        np.testing.assert_allclose(numpy(found(x)), expected(kind, x), **close)
    limit = np.quantile(expected(kind, KNOWN), 0.9, method="higher")
    assert found.threshold(0.9) == pytest.approx(limit, rel=1e-3, abs=1e-3)


@pytest.mark.once
@pytest.mark.parametrize("spread", [0.2, 3.0])
def test_auroc_in_one_dimension_is_that_of_two_gaussians(spread):
    """P(|spread z| > |z'|) = 2 arctan(spread) / pi, of independent z, z' ~ N(0, 1)."""
    found = ibnn.OODDetector(gaussian((1,)), "density")
    known = RNG.normal(size=(20_000, 1))
    found.fit(known[:100])
    unknown = spread * RNG.normal(size=(20_000, 1))
    auroc = found.evaluate(known, unknown)["auroc"]
    assert auroc == pytest.approx(2 * np.arctan(spread) / np.pi, abs=0.01)


@pytest.mark.once
def test_inputs_of_less_spread_are_found_by_all_but_the_density():
    found = {kind: detector(kind).fit(KNOWN) for kind in KINDS}
    auroc = {kind: each.evaluate(NEW, SIMPLE)["auroc"] for kind, each in found.items()}
    assert auroc["density"] < 0.01  # their densities are higher than those of all known ones
    assert auroc["typicality"] > 0.99
    assert auroc["likelihood_ratio"] > 0.99
    for kind in ("density", "typicality"):
        assert found[kind].evaluate(NEW, WIDE)["auroc"] > 0.99


@pytest.mark.parametrize("kind", ["typicality", "likelihood_ratio"])
@pytest.mark.parametrize("data", ["rows", "whole images", "pairs"])
def test_a_detector_from_a_file_scores_the_same(kind, data, tmp_path):
    x = RNG.normal(size=(30, 2)).astype("float32")
    flows = [ibnn.flows.AffineCoupling(hidden=4)]
    condition = None
    if data == "pairs":
        condition = 3
        x = (x, RNG.normal(size=(30, 3)).astype("float32"))
    elif data == "whole images":
        x = RNG.integers(0, 4, (30, 2, 2, 2))
        flows.append(ibnn.flows.Dequantize(4))
    models = [ibnn.FlowDensity(flows, condition=condition) for _ in range(2)]
    for model in models:
        model.compile(keras.optimizers.SGD(0.01))
        model.fit(x, verbose=0)
    background = models[1] if kind == "likelihood_ratio" else None
    made = ibnn.OODDetector(models[0], kind, background=background).fit(x)
    made.save(tmp_path / "made.keras")
    loaded = keras.saving.load_model(tmp_path / "made.keras")
    known = made.score(x)
    assert known.shape == (30,)
    assert known.std() > 0
    np.testing.assert_allclose(loaded.score(x), known, rtol=1e-5, atol=1e-5)
    assert loaded.threshold() == made.threshold()
    # The densities come from the file too.
    np.testing.assert_allclose(loaded.fit(x).score(x), known, rtol=1e-5, atol=1e-5)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return (KNOWN[100 * index : 100 * index + 100],)


@pytest.mark.parametrize("kind", ["typicality", "likelihood_ratio"])
def test_datasets_are_scored_like_arrays(kind):
    by_arrays = detector(kind).fit(KNOWN)
    by_batches = detector(kind).fit(Batches())
    close = {"rtol": 1e-4, "atol": at_least(1e-3)}
    np.testing.assert_allclose(by_batches.score(Batches()), by_arrays.score(KNOWN), **close)
    assert by_batches.threshold() == pytest.approx(by_arrays.threshold(), rel=1e-4, abs=1e-3)


def test_the_density_is_that_of_now():
    """One that is trained on after `fit` is not copied."""
    found = detector("density").fit(KNOWN)
    before = found.score(NEW)
    found.inner.scale.assign(2 * SCALES)
    np.testing.assert_allclose(
        found.score(NEW),
        -stats.norm.logpdf(NEW, scale=2 * SCALES).sum(axis=1),
        rtol=1e-4,
        atol=at_least(1e-3),
    )
    assert np.abs(found.score(NEW) - before).mean() > 1


def classifier():
    return keras.Sequential([keras.Input((SIZE,)), layers.Dense(3, "softmax")])


def ratio(background, **options):
    return ibnn.OODDetector(gaussian(**options), "likelihood_ratio", background=background)


@pytest.mark.once
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ibnn.OODDetector(gaussian()), "`model` is a density: take score='density'"),
        (lambda: ibnn.OODDetector(gaussian(), "knn"), "`model` is a density: .*got 'knn'"),
        (lambda: ibnn.OODDetector(classifier(), "density"), "needs a density .* got a Sequential"),
        (lambda: ibnn.OODDetector(ibnn.FlowDensity([]), "density"), "not built yet: call its"),
        (lambda: ratio(None), "needs another trained density as `background`.*got None"),
        (lambda: ratio(ibnn.FlowDensity([])), "needs another trained density as `background`"),
        (lambda: ratio(gaussian((3,))), r"of the shape \(20,\); it takes \(3,\)"),
        (lambda: ratio(gaussian(condition=2)), "either both have a condition or none"),
        (
            lambda: ibnn.OODDetector(gaussian(), "density", background=gaussian()),
            "`background` is for score='likelihood_ratio' only",
        ),
        (
            lambda: ibnn.OODDetector(classifier(), background=gaussian()),
            "`background` is for .*got score='max_probability'",
        ),
        (lambda: ibnn.OODDetector(gaussian(), "density").score(NEW), "call `fit` first"),
        (lambda: detector("density").fit(KNOWN[:, :3]), r"\(examples, 20\); got \(400, 3\)"),
        (lambda: detector("density").fit(np.nan * KNOWN), "`x` holds NaN"),
        (lambda: detector("density").fit(KNOWN).score(np.nan * NEW), "values of `x` hold NaN"),
        (lambda: detector("density").fit(KNOWN).score(1e30 * NEW), "log-densities hold NaN or inf"),
        (lambda: detector("density").fit((KNOWN, KNOWN)), "takes `x` alone"),
        (
            lambda: detector("density").fit(KNOWN, sample_weight=np.ones(400)),
            "`sample_weight` is for scores of features at positions",
        ),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.once
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="a SavedModel")
def test_export_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"write density.export\(path\)"):
        detector("density").fit(KNOWN).export(tmp_path / "detector")
