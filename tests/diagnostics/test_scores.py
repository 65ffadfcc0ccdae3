"""Scores of a posterior, against closed forms, brute force and ArviZ itself."""

import importlib.util
import sys
import types

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment
from scipy.stats import norm

import tfp_ibnn as ibnn
from tests.diagnostics.regression import normal
from tfp_ibnn import diagnostics

# Bounds of the evidence


def test_the_exact_posterior_has_the_evidence_for_its_elbo(linear, full_precision):
    exact = normal(linear.mean, linear.covariance)
    weights = diagnostics.log_weights(exact, linear.target, 100)
    np.testing.assert_allclose(weights, linear.evidence, atol=5e-3)
    assert diagnostics.elbo(exact, linear.target, 100).error < 1e-3


def test_the_elbo_is_the_evidence_less_the_kl(linear):
    wide = normal(linear.mean, 1.5 * linear.covariance)
    elbo = diagnostics.elbo(wide, linear.target)
    assert elbo.error < 0.02
    assert abs(elbo.value - (linear.evidence - linear.kl(1.5))) < 4 * elbo.error
    bound = diagnostics.importance_bound(wide, linear.target, number=16)
    # For many weights the gap is about var(p / q) / 2n, with E[(p / q)^2] = 1.5^3 / 2^1.5.
    gap = (1.5**3 / 2**1.5 - 1) / 32
    assert abs(bound.value - (linear.evidence - gap)) < 4 * bound.error + gap / 4
    assert bound.error < 0.02


@pytest.mark.once
def test_standard_errors_are_those_of_repeated_estimates():
    q = ibnn.tfd.MultivariateNormalDiag(np.zeros(2, "float32"), np.ones(2, "float32"))

    def target(w):
        return norm(0, 1.3).logpdf(w).sum(axis=1)

    truth = -2 * (np.log(1.3) + 0.5 / 1.3**2 - 0.5)
    found = diagnostics.elbo(q, target, 512, seed=1)
    values = diagnostics.log_weights(q, target, 100 * 512).reshape(100, 512).mean(axis=1)
    assert abs(values.mean() - truth) < 4 * found.error / np.sqrt(100)
    assert found.error == pytest.approx(values.std(), rel=0.25)
    found = diagnostics.importance_bound(q, target, 4096, number=4)
    values = diagnostics.log_weights(q, target, 4 * 1024 * 40).reshape(40, 1024, 4)
    values = np.log(np.exp(values).mean(axis=2)).mean(axis=1)
    assert abs(found.value - values.mean()) < 4 * found.error
    assert found.error == pytest.approx(values.std(), rel=0.35)


@pytest.mark.once
def test_bad_targets_and_draws_are_refused(linear):
    q = normal(linear.mean, linear.covariance)
    with pytest.raises(ValueError, match="`target` must give .10,. numbers below infinity"):
        diagnostics.log_weights(q, lambda w: w, 10)
    with pytest.raises(ValueError, match="`target` must give"):
        diagnostics.log_weights(q, lambda w: np.full(len(w), np.nan), 10)
    with pytest.raises(ValueError, match="`draws` must be a whole number of at least 128"):
        diagnostics.importance_bound(q, linear.target, draws=100)


# k-hat


def psis(weights):
    """ArviZ's own answer, whichever release it is."""
    if importlib.util.find_spec("arviz_stats"):  # of itself, it needs NumPy and SciPy alone
        return pytest.importorskip("arviz_stats.base").array_stats.psislw(-weights)[1]
    return pytest.importorskip("arviz").psislw(weights)[1]


@pytest.mark.once
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("k", [0.2, 0.5, 0.9])
def test_k_hat_is_the_tail_of_pareto_weights(k):
    weights = k * np.random.default_rng(1).exponential(size=20_000)
    before, expected = weights.copy(), psis(weights)
    assert diagnostics.k_hat(weights) == expected
    np.testing.assert_array_equal(weights, before)
    assert diagnostics.k_hat(weights) == pytest.approx(k, abs=0.12)
    # Nearly bounded on the other side: the sign counts.
    assert diagnostics.k_hat(-weights) < 0


@pytest.mark.once
def test_k_hat_negates_what_later_releases_of_arviz_take(monkeypatch):
    seen = []
    stats = types.SimpleNamespace(psislw=lambda x: (seen.append(x), (None, np.float64(0.3)))[1])
    monkeypatch.setitem(sys.modules, "arviz_stats", types.ModuleType("arviz_stats"))
    base = types.ModuleType("arviz_stats.base")
    base.array_stats = stats
    monkeypatch.setitem(sys.modules, "arviz_stats.base", base)
    assert diagnostics.k_hat(np.arange(30.0)) == 0.3
    np.testing.assert_array_equal(seen[0], -np.arange(30.0))


@pytest.mark.once
def test_k_hat_names_what_an_incomplete_arviz_lacks(monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.split(".")[0] == "arviz_stats"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "arviz_stats").mkdir()
    (tmp_path / "arviz_stats" / "__init__.py").write_text("import no_such_loader")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_loader'"):
        diagnostics.k_hat(np.arange(30.0))


# Distances


def closed_mmd(m, s, h):
    """Squared MMD of N(0, 1) and N(m, s^2) under a Gaussian kernel."""

    def kernel(shift, variance):
        return h / np.sqrt(h**2 + variance) * np.exp(-(shift**2) / (2 * (h**2 + variance)))

    return kernel(0, 2) + kernel(0, 2 * s**2) - 2 * kernel(m, 1 + s**2)


@pytest.mark.once
def test_mmd_is_the_double_sum():
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(12, 2)), rng.normal(0.5, 2.0, size=(15, 2))
    y12 = y[:12]

    def kernel(a, b, h):
        return np.exp(-np.sum((a - b) ** 2) / (2 * h**2))

    both = np.concatenate([x, y12])
    pairs = [(i, j) for i in range(24) for j in range(i)]
    median = np.median([np.linalg.norm(both[i] - both[j]) for i, j in pairs])
    for h, found in ((0.7, diagnostics.mmd(x, y, 0.7)), (median, diagnostics.mmd(x, y))):
        total = sum(
            kernel(x[i], x[j], h) + kernel(y[i], y[j], h) - kernel(x[i], y[j], h)
            - kernel(x[j], y[i], h)
            for i in range(12)
            for j in range(12)
            if i != j
        )  # fmt: skip
        assert found.value == pytest.approx(total / (12 * 11))


@pytest.mark.once
def test_mmd_of_gaussians_has_a_closed_form_and_its_error_is_right():
    rng = np.random.default_rng(3)
    found = [
        diagnostics.mmd(rng.normal(size=(100, 1)), rng.normal(0.5, 1.5, (100, 1)), 1.0)
        for _ in range(200)
    ]
    values, errors = np.transpose(found)
    assert values.mean() == pytest.approx(
        closed_mmd(0.5, 1.5, 1.0), abs=4 * values.std() / 200**0.5
    )
    assert 0.8 < errors.mean() / values.std() < 1.3


@pytest.mark.once
def test_the_sliced_wasserstein_distance_is_that_of_the_best_matching():
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=(40, 1)), rng.exponential(size=(40, 1))
    cost = (x - y.T) ** 2
    best = np.sqrt(cost[linear_sum_assignment(cost)].mean())
    assert diagnostics.sliced_wasserstein(x, y, number=3) == pytest.approx(best)
    assert diagnostics.sliced_wasserstein(x, np.repeat(x, 2, axis=0)) == pytest.approx(0)
    # Of Gaussians: (m1 - m2)^2 + (s1 - s2)^2.
    x, y = rng.normal(size=(50_000, 1)), rng.normal(0.6, 1.8, size=(50_000, 1))
    assert diagnostics.sliced_wasserstein(x, y, number=1) == pytest.approx(1.0, abs=0.03)


@pytest.mark.once
def test_directions_are_uniform_and_repeat():
    rng = np.random.default_rng(5)
    x, shift = rng.normal(size=(50, 5)), np.array([3.0, 0.0, 4.0, 0.0, 0.0])
    # A shift m along a direction d moves all by m.d, whose square is |m|^2 / 5 on average.
    far = diagnostics.sliced_wasserstein(x, x + shift, number=4000)
    assert far == pytest.approx(5 / np.sqrt(5), rel=0.05)
    few = [diagnostics.sliced_wasserstein(x, x + shift, 3, seed) for seed in (0, 0, 1)]
    assert few[0] == few[1] != few[2]


@pytest.mark.once
def test_predictions_are_compared_input_by_input():
    p = np.array([[0.5, 0.5, 0.0], [0.1, 0.2, 0.7], [1.0, 0.0, 0.0], [0.3, 0.3, 0.4]])
    q = np.array([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7], [0.0, 1.0, 0.0], [0.2, 0.2, 0.6]])
    each = np.array([0.25, 0, 1, 0.2])
    found = diagnostics.total_variation(p, q)
    assert found.value == pytest.approx(each.mean())
    assert found.error == pytest.approx(each.std(ddof=1) / 2)
    assert str(diagnostics.agreement(p, q)) == "0.75 ± 0.49"
    between = diagnostics.disagreement(np.stack([p, q, p]))
    expected = each.mean() * np.array([[0, 1, 0], [1, 0, 1], [0, 1, 0]])
    np.testing.assert_allclose(between, expected, atol=1e-12)


# Simulation-based calibration


@pytest.mark.once
@pytest.mark.parametrize("shapes", [((5, 1), (5, 1)), ((5, 3), (1, 3)), ((5,), (5,))])
def test_predictions_of_other_shapes_are_refused(shapes):
    p, q = (np.full(shape, 0.5) for shape in shapes)
    for score in (diagnostics.total_variation, diagnostics.agreement):
        with pytest.raises(ValueError, match="2 or more classes"):
            score(p, q)


@pytest.mark.once
def test_halves_of_a_reference_share_no_chain():
    rng = np.random.default_rng(0)
    chains = rng.normal(size=(4, 500, 2)) + np.array([0, 0, 1, 1])[:, None, None]  # do not agree
    report = diagnostics.report(rng.normal(size=(2000, 2)), chains)
    assert report.scores["largest error of a mean"][1] > 0.8
    assert len(report.reference) == 1000


def simulate(rng):
    """Two weights from N(0, 1), and three noisy views of each."""
    w = rng.normal(size=2)
    return w, w + 0.5 * rng.normal(size=(3, 2))


def sampler(shift=0.0, factor=1.0):
    def sample(data, number, rng):
        variance = 1 / (1 + 3 / 0.25)
        mean = variance * data.sum(axis=0) / 0.25
        return mean + shift + factor * np.sqrt(variance) * rng.normal(size=(number, 2))

    return sample


@pytest.mark.once
def test_a_right_sampler_passes_and_wrong_ones_are_flagged():
    calibration = diagnostics.simulation_based_calibration
    right = [calibration(simulate, sampler(), seed=seed)[1] for seed in range(20)]
    assert min(right) > 0.005
    assert np.mean(right) > 0.3
    for wrong in (sampler(factor=0.7), sampler(factor=1.4), sampler(shift=0.15)):
        assert calibration(simulate, wrong)[1] < 1e-3


@pytest.mark.once
def test_ranks_count_the_draws_below_the_truth():
    draws = np.stack([np.arange(99.0), np.full(99, 7.0)], axis=1)
    found, p_value = diagnostics.simulation_based_calibration(
        lambda rng: (np.array([40.5, 8.0]), None), lambda *_: draws, runs=50
    )
    assert found.tolist() == [[41, 99]] * 50
    assert p_value < 1e-50
    for wrong in (draws[:50], draws.T, draws * np.nan, None):
        with pytest.raises(ValueError, match=r"\(99, size\), all finite; got \(2,\) and"):
            diagnostics.simulation_based_calibration(simulate, lambda *_, wrong=wrong: wrong)
    for wrong in (np.full(2, np.inf), np.zeros(0), 1.0):
        with pytest.raises(ValueError, match="size at least 1, and .* all finite"):
            diagnostics.simulation_based_calibration(
                lambda _, wrong=wrong: (wrong, None), lambda *_: draws
            )


@pytest.mark.once
def test_ties_are_broken_at_random():
    def coin(rng):
        return rng.integers(0, 2, 1).astype("float64"), None

    _, p_value = diagnostics.simulation_based_calibration(
        coin, lambda _, number, rng: rng.integers(0, 2, (number, 1)), runs=400
    )
    assert p_value > 0.01
