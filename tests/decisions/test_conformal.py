import functools
import json
import pickle
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers
from scipy.stats import beta

import tfp_ibnn as ibnn
from tfp_ibnn.layers import GaussianHead

K, N = 4, 60
RNG = np.random.default_rng(0)
P = RNG.dirichlet(np.ones(K), size=200).astype("float32")
Y = np.array([RNG.choice(K, p=p / p.sum()) for p in P.astype("float64")])
NUMBERS = RNG.normal(size=(200, 2)).astype("float32")
TARGETS = NUMBERS[:, 0] + RNG.normal(size=200) * np.log1p(np.exp(NUMBERS[:, 1]))
METHODS = ("lac", "aps", "raps")


@pytest.fixture(autouse=True)
def fast(eagerly):
    """Nothing said here is about compiled graphs."""


def identity(size):
    """A model whose prediction is its input."""
    return keras.Sequential([keras.Input((size,)), layers.Activation("linear")])


def at_once(model, **options):
    """Average a model, all examples in one batch: Keras's batches take longer than the rest."""
    mc = ibnn.MonteCarlo(model, 1, seed=0, **options)
    mc.predict = lambda x, **_: mc.predict_on_batch(x)
    return mc


@functools.cache
def classifier():
    return at_once(identity(K), head="softmax", from_logits=False)


def conformal(method, coverage=0.8, **options):
    return ibnn.Conformal(classifier(), method, coverage, **options)


def gaussian():
    return keras.Sequential([keras.Input((2,)), GaussianHead()])


def threshold(scores, coverage):
    """The definition: the smallest number that enough scores do not exceed."""
    wanted = np.ceil((len(scores) + 1) * coverage)
    return min(s for s in scores if np.sum(scores <= s) >= wanted)


def slow_scores(p, method, k=1, penalty=0.1):
    """The scores by a loop over classes, each with the mass of those before it."""
    score, before = np.zeros_like(p), np.zeros_like(p)
    for row, values in enumerate(p):
        total = 0.0
        for rank, c in enumerate(np.argsort(-values), start=1):
            before[row, c] = total + (method == "raps") * penalty * max(0, rank - 1 - k)
            total += values[c]
            score[row, c] = total + (method == "raps") * penalty * max(0, rank - k)
    return (1 - p, None) if method == "lac" else (score, before)


@pytest.mark.once
@pytest.mark.parametrize("method", METHODS)
def test_sets_are_those_of_the_definition(method):
    found = conformal(method).fit(P[:N], Y[:N])
    score, before = slow_scores(P, method)
    limit = threshold(score[np.arange(N), Y[:N]], 0.8)
    np.testing.assert_allclose(found.thresholds, [[limit]], rtol=1e-5)
    known = score <= limit + 1e-6 if method == "lac" else before < limit - 1e-6
    np.testing.assert_array_equal(found.predict(P), known)
    if method != "lac":
        # The last label is included: the mass of a set reaches the limit, without it does not.
        assert found.predict(P).any(axis=1).all()
    scores = found.evaluate(P[N:], Y[N:])
    covered = known[N:][np.arange(200 - N), Y[N:]]
    assert scores["coverage"] == pytest.approx(covered.mean())
    assert scores["size"] == pytest.approx(known[N:].sum(axis=1).mean())
    hits, misses = covered.sum(), (~covered).sum()  # Clopper and Pearson, by the beta distribution
    assert scores["lower"] == pytest.approx(beta.ppf(0.025, hits, misses + 1))
    assert scores["upper"] == pytest.approx(beta.ppf(0.975, hits + 1, misses))


@pytest.mark.once
@pytest.mark.parametrize("method", METHODS)
def test_sets_grow_with_the_coverage(method):
    sizes = [conformal(method, c).fit(P[:N], Y[:N]).predict(P) for c in (0.5, 0.9, 0.98)]
    for smaller, larger in zip(sizes, sizes[1:], strict=False):
        assert (smaller <= larger).all()
    assert sizes[0].sum() < sizes[-1].sum()


@pytest.mark.once
def test_randomization_has_a_seed_and_shrinks_sets():
    plain = conformal("aps").fit(P[:N], Y[:N]).predict(P)
    once, again, other = (
        conformal("aps", randomized=seed).fit(P[:N], Y[:N]).predict(P) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(once, again)
    assert (once != other).any()
    assert once.sum() < plain.sum()


@pytest.mark.once
def test_each_class_and_group_has_its_own_threshold():
    groups = np.arange(200) % 2
    found = conformal("lac", 0.7, by="class").fit(P, Y, groups)
    thresholds = found.thresholds
    for g in (0, 1):
        for c in range(K):
            mine = (groups == g) & (c == Y)
            assert thresholds[g, c] == threshold(1 - P[mine, c], 0.7)
    sets = found.predict(P, groups)
    np.testing.assert_array_equal(sets, 1 - P <= thresholds[groups])
    assert found.evaluate(P, Y, groups)["coverage"] >= 0.7
    for wrong in (None, groups[1:], groups + 0.5, groups.astype(str), np.full(200, np.inf)):
        with pytest.raises(ValueError, match="`groups` must"):
            found.predict(P, wrong)


@pytest.mark.once
@pytest.mark.parametrize("ids", [(1, 2), (0, 200_000_000), (-(2**62) - 1, 2**62 + 1)])
def test_groups_are_any_whole_numbers(ids, tmp_path):
    plain = conformal("lac", by="class").fit(P, Y, np.arange(200) % 2)
    groups = np.array(ids)[np.arange(200) % 2]
    found = conformal("lac", by="class").fit(P, Y, groups)
    np.testing.assert_array_equal(found.thresholds, plain.thresholds)
    found.save(tmp_path / "sets.keras")
    loaded = keras.saving.load_model(tmp_path / "sets.keras")
    for sets in (found, loaded):
        np.testing.assert_array_equal(
            sets.predict(P[:9], groups[:9]), plain.predict(P[:9], np.arange(9) % 2)
        )
        with pytest.raises(ValueError, match=f"has 7, 8, .* saw no .* it saw {ids[0]}, {ids[1]}"):
            sets.predict(P[:3], [7, 8, ids[0]])


@pytest.mark.once
def test_groups_in_a_file_without_ids_are_counted_from_0():
    found = conformal("lac").fit(P, Y, Y + 5)
    limits = {"limits": np.asarray(found.arrays["limits"])}
    found.load_own_variables(limits)
    assert found.predict(P[:K], np.arange(K)).shape == (K, K)
    with pytest.raises(ValueError, match="has 4, of which `fit` saw no example"):
        found.predict(P[:1], [4])


def test_intervals():
    """Split conformal with and without a predicted deviation; quantiles of three origins."""
    loc, scale = NUMBERS[:, 0], np.log1p(np.exp(NUMBERS[:, 1])) + 1e-3
    split = ibnn.Conformal(at_once(gaussian()), "split", 0.8).fit(NUMBERS[:N], TARGETS[:N, None])
    q = threshold((np.abs(TARGETS - loc) / scale)[:N], 0.8)
    known = np.stack([loc - q * scale, loc + q * scale], axis=1)
    np.testing.assert_allclose(split.predict(NUMBERS), known, rtol=1e-4, atol=1e-4)
    scores = split.evaluate(NUMBERS, TARGETS)
    inside = (known[:, 0] <= TARGETS) & (known[:, 1] >= TARGETS)
    assert scores["coverage"] == pytest.approx(inside.mean(), abs=0.006)
    assert scores["size"] == pytest.approx(np.mean(2 * q * scale), rel=1e-4)

    cqr = ibnn.Conformal(at_once(gaussian(), interval=0.8), "cqr", 0.8).fit(
        NUMBERS[:N], TARGETS[:N]
    )
    far = 1.2815516 * scale
    q = threshold(np.maximum(loc - far - TARGETS, TARGETS - loc - far)[:N], 0.8)
    known = np.stack([loc - far - q, loc + far + q], axis=1)
    np.testing.assert_allclose(cqr.predict(NUMBERS), known, rtol=1e-3, atol=1e-3)

    quantiles = np.stack([loc - 1, loc + 2], axis=1)
    point = at_once(identity(2), head="point", interval=0.8)
    outputs = ibnn.Conformal(point, "cqr", 0.8).fit(quantiles[:N], TARGETS[:N])
    q = threshold(np.maximum(loc - 1 - TARGETS, TARGETS - loc - 2)[:N], 0.8)
    np.testing.assert_allclose(
        outputs.predict(quantiles), quantiles + [-q, q], rtol=1e-4, atol=1e-4
    )
    one = at_once(identity(1), head="point")
    plain = ibnn.Conformal(one, "split", 0.8).fit(loc[:N, None], TARGETS[:N])
    q = threshold(np.abs(TARGETS - loc)[:N], 0.8)
    known = np.stack([loc - q, loc + q], axis=1)
    np.testing.assert_allclose(plain.predict(loc[:, None]), known, rtol=1e-4, atol=1e-4)


def test_one_sigmoid_is_two_classes():
    model = keras.Sequential([keras.Input((1,)), layers.Activation("sigmoid")])
    x, y = NUMBERS[:, :1], (TARGETS > 0).astype(int)
    p = 1 / (1 + np.exp(-x))
    found = ibnn.Conformal(model, "lac", 0.8).fit(x[:N], y[:N])
    q = threshold(np.where(y, 1 - p[:, 0], p[:, 0])[:N], 0.8)
    known = np.concatenate([p, 1 - p], axis=1) <= q + 1e-6
    np.testing.assert_array_equal(found.predict(x), known)


def stochastic():
    inputs = keras.Input((K,))
    outputs = ibnn.StochasticDense(3, activation="softmax", train_size=50)(inputs)
    return keras.Model(inputs, outputs)


def test_of_a_posterior_pickled(eagerly):
    """The draws are those of `fit`, after pickling too."""
    found = ibnn.Conformal(ibnn.MonteCarlo(stochastic(), samples=4), "aps", by="class")
    found.fit(P[:60], Y[:60] % 3)
    sets = found.predict(P[:30])
    np.testing.assert_array_equal(found.predict(P[:30], batch_size=7), sets)
    loaded = pickle.loads(pickle.dumps(found))
    np.testing.assert_array_equal(loaded.predict(P[:30]), sets)
    np.testing.assert_array_equal(loaded.thresholds, found.thresholds)
    assert ibnn.Conformal(stochastic()).inner.samples == 128
    assert ibnn.Conformal(stochastic()).method == "lac"
    assert ibnn.Conformal(gaussian()).method == "split"


@pytest.mark.once
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: conformal("split"), "`method` must be one of 'lac', 'aps', 'raps'; got 'split'"),
        (lambda: ibnn.Conformal(gaussian(), "lac"), "`method` must be one of 'split', 'cqr'"),
        (lambda: conformal("best"), "`method` must be one of"),
        (lambda: conformal("lac", 1), "`coverage` must be between 0 and 1; got 1"),
        (lambda: conformal("lac", randomized=0), "`randomized` is for 'aps' and 'raps'"),
        (lambda: conformal("lac", by="group"), "`by` must be one of None, 'class'"),
        (lambda: conformal("raps", penalty=-1), "`penalty` must be 0 or above"),
        (lambda: conformal("lac").predict(P), "call `fit`"),
        (lambda: conformal("lac")(P), "call `fit`"),
        (
            lambda: conformal("aps", randomized=0).fit(P.tolist(), Y),
            r"`x` must be arrays, from which `randomized` .*; got \['float'\]",
        ),
        (lambda: conformal("aps", randomized=0).fit(P[:0], Y[:0]), "`x` holds no examples"),
        (lambda: conformal("lac").fit(P, Y, Y % 2)(P), "for `predict` alone"),
        (lambda: conformal("lac", 0.9).fit(P[:8], Y[:8]), "needs 9 examples.*; got 8"),
        (lambda: conformal("lac", 0.99).fit(P[:98], Y[:98]), "needs 99 examples.*; got 98"),
        (lambda: conformal("lac", by="class").fit(P[:9], 0 * Y[:9]), "of each class.*; got 0"),
        (lambda: conformal("lac").fit(P, None), "`y` must have the shape"),
        (lambda: conformal("lac").fit(P, Y + 1), "`y` must be whole numbers from 0 to 3"),
        (lambda: conformal("lac").fit(P, Y[1:]), "`y` must hold 200 numbers, .*; got 199"),
        (lambda: conformal("lac").fit(P, np.array([*"abcd"])[Y]), "`y` must be whole numbers .*'"),
        (lambda: conformal("lac").fit(P, Y, Y % 2).predict(P), "`groups` must be given, as"),
        (lambda: conformal("lac", randomized=True), "`randomized` is for .*; `method` is 'lac'"),
        (lambda: conformal("aps", randomized=True), "must be None or a seed, such as 0; got True"),
        (lambda: conformal("lac").fit(np.nan * P, Y), "`x` holds NaN"),
        (lambda: conformal("lac").fit(2 * P, Y), "not probabilities"),
        (lambda: ibnn.Conformal(gaussian(), "split").fit(NUMBERS, None), "`y` must"),
        (lambda: ibnn.Conformal(gaussian(), "split").fit(NUMBERS, NUMBERS), r"\(N, 1\); got \(200"),
        (
            lambda: ibnn.Conformal(gaussian()).fit(NUMBERS, ["a"] * 200),
            "`y` must be finite num.*'a'",
        ),
        (lambda: ibnn.Conformal(layers.Dense(2)), "`model` must be a Keras model"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_several_numbers_or_labels_are_refused():
    four = keras.Sequential([keras.Input((4,)), GaussianHead()])
    with pytest.raises(ValueError, match="one number per example"):
        ibnn.Conformal(four, "split").fit(P, Y)
    many = keras.Sequential([keras.Input((4,)), layers.Activation("sigmoid")])
    with pytest.raises(ValueError, match="one number per example"):
        ibnn.Conformal(many).fit(P, Y)


@pytest.mark.once
def test_the_page_says_what_the_comparison_with_mapie_found():
    root = Path(__file__).parents[2]
    record = json.loads((root / "results/benchmark/mapie.json").read_text())
    page = (root / "docs/decisions.md").read_text()
    assert {row["method"] for row in record["rows"]} == set(METHODS)
    assert not any(row["sets that differ"] for row in record["rows"])
    assert record["options"]["peer"] in page
    assert all(f"{row['examples']} new examples" in page for row in record["rows"])
    assert all(f"{100 * row['coverage']:.0f}" in page for row in record["rows"])
