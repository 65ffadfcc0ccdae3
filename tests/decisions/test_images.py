"""Sets and intervals at pixels and steps, and what is promised of them."""

import keras
import numpy as np
import pytest
from keras import layers
from scipy.special import softmax

import tfp_ibnn as ibnn
from tests.decisions.test_conformal_coverage import assert_covered
from tfp_ibnn.decisions import images
from tfp_ibnn.decisions.images import Pixels, image_score, pixel_threshold, pixels_of

RNG = np.random.default_rng(0)
LOGITS = (2 * RNG.normal(size=(40, 4, 5, 3))).astype("float32")
P = softmax(LOGITS, axis=-1)
Y = np.array([RNG.choice(3, p=p / p.sum()) for p in P.reshape(-1, 3)]).reshape(40, 4, 5)
OLD, NEW = slice(25), slice(25, 40)


@pytest.fixture(autouse=True)
def fast(eagerly):
    """Nothing said here is about compiled graphs."""


def identity(*shape, **head):
    model = keras.Sequential([keras.Input(shape), layers.Activation("linear")])
    return ibnn.MonteCarlo(model, 1, seed=0, **head)


def sets(method="lac", **options):
    model = identity(None, None, 3, head="softmax", from_logits=True)
    return ibnn.Conformal(model, method, **{"coverage": 0.8, **options})


def slow_pixel_threshold(losses_at, candidates, count, coverage):
    """The definition of conformal risk control, by a search over all thresholds."""
    for threshold in np.sort(candidates):
        if (np.sum(losses_at(threshold)) + 1) / (count + 1) <= 1 - coverage + 1e-9:
            return threshold
    return None


# The guarantee, by simulation.

CALIBRATIONS, IMAGES, NEW_IMAGES, PIXELS = 1000, 11, 20, 30


def correlated(rng):
    """Scores of the pixels of images of which some are hard; the hard ones have fewer pixels."""
    shape = (CALIBRATIONS, IMAGES + NEW_IMAGES, 1)
    difficulty = rng.normal(size=shape)
    scores = difficulty + 0.2 * rng.normal(size=(*shape[:2], PIXELS))
    count = np.where(difficulty > 1, 6, PIXELS)
    return scores, (np.arange(PIXELS) < count).astype(float)


@pytest.mark.once
def test_the_mean_share_of_pixels_is_covered():
    """By images the promise is kept; a quantile of all pixels, as if independent, breaks it."""
    scores, weight = correlated(np.random.default_rng(1))
    weight /= weight.sum(axis=2, keepdims=True)
    missed = {"images": [], "pixels": []}
    for each, share in zip(scores, weight, strict=True):
        old = [Pixels(s[w > 0], w[w > 0]) for s, w in zip(each, share, strict=True)][:IMAGES]
        pooled = np.sort(np.concatenate([image.scores for image in old]))
        naive = pooled[int(np.ceil((len(pooled) + 1) * 0.9)) - 1]
        for name, limit in (("images", pixel_threshold(old, 0.9)), ("pixels", naive)):
            is_missed = each[IMAGES:] > limit
            missed[name].append(np.sum(is_missed * share[IMAGES:]) / NEW_IMAGES)
    mean = {name: np.mean(values) for name, values in missed.items()}
    error = {name: np.std(values) / np.sqrt(CALIBRATIONS) for name, values in missed.items()}
    assert 0.1 - 2 / (IMAGES + 1) - 4 * error["images"] < mean["images"]
    assert mean["images"] < 0.1 + 4 * error["images"]
    assert mean["pixels"] > 0.1 + 10 * error["pixels"]


@pytest.mark.once
def test_pixels_alone_in_their_images_are_split_conformal():
    """With one pixel an image counts as an example does, and the coverage is exact."""
    rng = np.random.default_rng(2)
    scores = rng.normal(size=(1000, 64))
    one = np.ones(1)
    limits = [pixel_threshold([Pixels(s[None], one) for s in row[:39]], 0.9) for row in scores]
    np.testing.assert_array_equal(limits, np.sort(scores[:, :39], axis=1)[:, 35])
    assert_covered(np.sum(scores[:, 39:] <= np.array(limits)[:, None], axis=1), 25, 39, True)


@pytest.mark.once
def test_images_are_covered():
    """The number of new images with 80 % of their pixels covered is beta-binomial."""
    scores, weight = correlated(np.random.default_rng(3))
    limits = []
    of_images = np.empty(scores.shape[:2])
    for place in np.ndindex(of_images.shape):
        counts = weight[place] > 0
        of_images[place] = image_score(scores[place][counts], weight[place][counts], 0.8)
    limits = np.sort(of_images[:, :IMAGES], axis=1)[:, 10]
    share = np.sum(weight * (scores <= limits[:, None, None]), axis=2) / weight.sum(axis=2)
    counts = np.sum(share[:, IMAGES:] >= 0.8 - 1e-9, axis=1)
    assert_covered(counts, NEW_IMAGES, IMAGES, True)
    pooled = np.where(weight > 0, scores, np.nan)[:, :IMAGES].reshape(CALIBRATIONS, -1)
    naive = np.nanquantile(pooled, 0.9, axis=1, method="higher")
    share = np.sum(weight * (scores <= naive[:, None, None]), axis=2) / weight.sum(axis=2)
    assert np.mean(share[:, IMAGES:] >= 0.8) < 0.85


@pytest.mark.once
def test_thresholds_are_those_of_the_definition():
    rng = np.random.default_rng(4)
    for count, coverage in ((9, 0.9), (14, 0.8), (30, 0.85)):
        scores = np.round(rng.normal(size=(count, 7)), 1)  # with ties
        weight = rng.uniform(0.1, 1, size=(count, 7))
        weight /= weight.sum(axis=1, keepdims=True)

        def losses(threshold, scores=scores, weight=weight):
            return np.sum(weight * (scores > threshold), axis=1)

        found = pixel_threshold(list(map(Pixels, scores, weight)), coverage)
        assert found == slow_pixel_threshold(losses, scores.ravel(), count, coverage)
        for image, own in zip(scores, weight, strict=True):
            limit = image_score(image, own, 0.6)
            assert own[image <= limit].sum() >= 0.6 - 1e-9
            assert own[image < limit].sum() < 0.6


@pytest.mark.once
def test_a_sample_of_pixels_has_their_shares(monkeypatch):
    monkeypatch.setattr(images, "MOST_PIXELS", 5)
    scores, weight = np.arange(8.0), np.arange(1.0, 9)
    above = [
        np.sum(kept.shares[kept.scores > 5])
        for kept in (pixels_of(scores, weight, np.random.default_rng(seed)) for seed in range(2000))
    ]
    error = np.std(above) / np.sqrt(2000)
    assert np.mean(above) == pytest.approx((7 + 8) / 36, abs=4 * error)


# The object.


@pytest.mark.parametrize("method", ["lac", "aps"])
def test_sets_of_pixels(method):
    made = sets(method).fit(LOGITS[OLD], Y[OLD], batch_size=10)
    flat = sets(method, coverage=0.8)._parts({"mean": P.reshape(-1, 3)}, None)
    scores = np.asarray(flat["score"]).reshape(P.shape)
    true = np.take_along_axis(scores, Y[..., None], axis=-1)[OLD].reshape(25, -1)
    pixels = [Pixels(image, np.full(20, 1 / 20)) for image in true]
    limit = pixel_threshold(pixels, 0.8)
    np.testing.assert_allclose(made.thresholds, [[limit + 1]], rtol=1e-6)
    found = made.predict(LOGITS)
    assert found.shape == P.shape
    if method == "lac":
        np.testing.assert_array_equal(found, scores <= limit + 1e-6)
    np.testing.assert_array_equal(made(LOGITS)["set"], found)
    covered = np.take_along_axis(found, Y[..., None], axis=-1)[..., 0]
    shares = covered.mean(axis=(1, 2))
    scores = made.evaluate(LOGITS[NEW], Y[NEW])
    margin = 1.96 * shares[NEW].std(ddof=1) / np.sqrt(15)
    assert scores == pytest.approx(
        {
            "coverage": shares[NEW].mean(),
            "lower": shares[NEW].mean() - margin,
            "upper": min(shares[NEW].mean() + margin, 1),
            "size": found[NEW].sum(axis=-1).mean(),
            "pixel_coverage": shares[NEW].mean(),
            "image_coverage": np.mean(shares[NEW] >= 0.9),
        }
    )


def test_images_of_a_file(tmp_path):
    made = sets(per="image", share=0.7).fit(LOGITS[OLD], Y[OLD])
    scores = made.evaluate(LOGITS[NEW], Y[NEW])
    assert scores["coverage"] == scores["image_coverage"]
    assert scores["coverage"] != scores["pixel_coverage"]
    true = np.take_along_axis(1 - P, Y[..., None], axis=-1)[OLD].reshape(25, -1)
    of_images = np.sort(np.sort(true, axis=1)[:, 13])  # 14 of 20 pixels
    np.testing.assert_allclose(made.thresholds, [[of_images[20]]], rtol=1e-5)
    made.save(tmp_path / "sets.keras")
    loaded = keras.saving.load_model(tmp_path / "sets.keras")
    assert loaded.evaluate(LOGITS[NEW], Y[NEW]) == scores
    np.testing.assert_array_equal(loaded.predict(LOGITS), made.predict(LOGITS))


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="TensorFlow writes SavedModels")
def test_sets_of_pixels_are_exported(tmp_path):
    import tensorflow as tf

    made = sets().fit(LOGITS[OLD], Y[OLD])
    made.export(tmp_path / "1")
    served = tf.saved_model.load(str(tmp_path / "1")).signatures["serve"]
    found = served(inputs=tf.constant(LOGITS[NEW]))
    np.testing.assert_array_equal(found["set"], made.predict(LOGITS[NEW]))


def test_masks_weights_and_datasets():
    """What is masked or has no weight may hold any label, and is not scored."""
    model = keras.Sequential([keras.Input((6, 3)), layers.Masking(), layers.Activation("softmax")])
    rng = np.random.default_rng(5)
    x = rng.normal(size=(30, 6, 3)).astype("float32")
    mask = np.arange(6) < rng.integers(1, 7, size=(30, 1))
    weight = rng.integers(0, 3, size=(30, 6))
    weight[:, 0] = 1
    y = rng.integers(3, size=(30, 6))
    hidden = np.where(mask & (weight > 0), y, 99)
    made = ibnn.Conformal(model, coverage=0.8)
    made.fit(np.where(mask[..., None], x, 0), hidden, sample_weight=weight)
    p = softmax(x, axis=-1)
    scores = 1 - np.take_along_axis(p, y[..., None], axis=-1)[..., 0]
    shares = mask * weight / np.sum(mask * weight, axis=1, keepdims=True)
    counts = shares > 0
    pixels = [Pixels(s[c], w[c]) for s, w, c in zip(scores, shares, counts, strict=True)]
    np.testing.assert_allclose(made.thresholds, [[pixel_threshold(pixels, 0.8)]], rtol=1e-5)
    inputs = np.where(mask[..., None], x, 0)
    parts = [(inputs[s], hidden[s], weight[s]) for s in (slice(12), slice(12, 30))]
    again = ibnn.Conformal(model, coverage=0.8).fit(iter(parts))
    np.testing.assert_array_equal(again.thresholds, made.thresholds)
    found = made.evaluate(inputs, hidden, sample_weight=weight)
    covered = np.sum(shares * (scores <= made.thresholds[0, 0] + 1e-6), axis=1)
    assert found["coverage"] == pytest.approx(covered.mean())
    assert made.evaluate(iter(parts)) == pytest.approx(found)


@pytest.mark.once
def test_classes_and_groups_have_their_own_thresholds():
    groups = np.arange(40) % 2
    made = sets(coverage=0.6, by="class").fit(LOGITS, Y, groups)
    true = np.take_along_axis(1 - P, Y[..., None], axis=-1)[..., 0]
    for group in (0, 1):
        for c in range(3):
            pixels = []
            for scores, labels in zip(true[groups == group], Y[groups == group], strict=True):
                own = scores[labels == c]
                if len(own):
                    pixels.append(Pixels(own, np.full(len(own), 1 / len(own))))
            limit = pixel_threshold(pixels, 0.6)
            assert made.thresholds[group, c] == pytest.approx(limit, rel=1e-5)
    expected = 1 - P <= made.thresholds[groups][:, None, None] + 1e-6
    np.testing.assert_array_equal(made.predict(LOGITS, groups, batch_size=7), expected)
    assert made.evaluate(LOGITS, Y, groups)["coverage"] > 0.55


def test_intervals_of_steps():
    rng = np.random.default_rng(6)
    raw = rng.normal(size=(30, 8, 2)).astype("float32")
    scale = np.log1p(np.exp(raw[..., 1])) + 1e-3
    y = raw[..., 0] + scale * rng.normal(size=(30, 8))
    model = keras.Sequential([keras.Input((8, 2)), ibnn.layers.GaussianHead()])
    made = ibnn.Conformal(model, coverage=0.8).fit(raw[:20], y[:20])
    scores = np.abs(y - raw[..., 0])[:20] / scale[:20]
    limit = pixel_threshold([Pixels(s, np.full(8, 1 / 8)) for s in scores], 0.8)
    expected = np.stack([raw[..., 0] - limit * scale, raw[..., 0] + limit * scale], axis=-1)
    np.testing.assert_allclose(made.predict(raw), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(made(raw)["interval"], made.predict(raw), rtol=1e-5)
    inside = (expected[..., 0] <= y) & (y <= expected[..., 1])
    assert made.evaluate(raw[20:], y[20:, :, None])["coverage"] == pytest.approx(inside[20:].mean())


@pytest.mark.once
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sets(per="step"), "`per` must be one of 'pixel', 'image'; got 'step'"),
        (lambda: sets(share=1.0), "`share` must be between 0 and 1"),
        (lambda: sets("aps", randomized=0), "`randomized` is for outputs without positions"),
        (lambda: sets(coverage=0.9).fit(LOGITS[:8], Y[:8]), "needs 9 examples.*; got 8"),
        (lambda: sets(per="image").fit(LOGITS[:3], Y[:3]), "needs 4 examples.*; got 3"),
        (lambda: sets().fit(LOGITS, None), "labels are missing"),
        (lambda: sets().fit(LOGITS, Y[:, :3]), r"at each position of the outputs, \(32, 4, 5\)"),
        (lambda: sets().fit(LOGITS, Y + 1), "from 0 to 2; got 3"),
        (lambda: sets().fit(LOGITS, Y, np.arange(3)), "`groups` must be 40 ids"),
        (lambda: sets().fit(LOGITS, Y, steps=3), "`steps` is not for outputs with positions"),
        (lambda: sets().fit(iter([(LOGITS, Y)]), Y), "`y` and `sample_weight` must come from"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class Own(keras.Model):
    def call(self, x):
        return x


@pytest.mark.once
def test_a_model_without_a_graph_is_refused():
    own = Own()
    own(LOGITS)
    model = ibnn.MonteCarlo(own, 1, head="softmax", from_logits=True)
    with pytest.raises(ValueError, match=r"Functional or Sequential model; it predicts \(40, 4, 5"):
        ibnn.Conformal(model).fit(LOGITS, Y)


@pytest.mark.once
def test_weights_of_whole_examples_are_refused():
    model = identity(3, head="softmax", from_logits=True)
    with pytest.raises(ValueError, match="`sample_weight` is for outputs with positions"):
        ibnn.Conformal(model).fit(LOGITS[:, 0, 0], Y[:, 0, 0], sample_weight=np.ones(40))


@pytest.mark.once
def test_weights_of_1_change_nothing():
    """18 of 20 pixels are a share of 0.9, which float32 rounds down."""
    expected = sets(per="image").fit(LOGITS, Y).thresholds
    ones = np.ones(Y.shape, "float32")
    found = sets(per="image").fit(LOGITS, Y, sample_weight=ones).thresholds
    np.testing.assert_array_equal(found, expected)
