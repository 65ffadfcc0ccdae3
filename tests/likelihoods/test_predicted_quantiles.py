"""Predicted quantiles behind the verbs: mixtures of draws, intervals, scores and refusals."""

import keras
import numpy as np
import pytest
import scipy.stats
from keras import layers, ops
from scipy.optimize import brentq
from sklearn.metrics import mean_pinball_loss

import tfp_ibnn as ibnn
from tests.likelihoods.test_dirichlet import predicted
from tests.likelihoods.tools import ends_in
from tests.monte_carlo_tools import averaged, data, numpy, set_weights
from tfp_ibnn.layers import PinballLoss, QuantileHead
from tfp_ibnn.likelihoods import Quantiles
from tfp_ibnn.likelihoods.infer import likelihood_of

LEVELS = (0.1, 0.3, 0.5, 0.9)
LOC = np.array([[0.3, -2.0], [0.9, 5.0], [-1.0, 0.0]])  # draws, examples
SCALE = np.array([[1.0, 0.2], [0.5, 3.0], [2.0, 0.2]])
Z = scipy.stats.norm.ppf(LEVELS)


def of_normals(loc, scale):
    """The quantiles of normal distributions, (examples, levels)."""
    return loc[:, None] + scale[:, None] * Z


# ------------------------------------------------------------------------------------- predictions


def test_one_network_gives_its_own_quantiles():
    outputs = np.sort(data(3, 4), axis=1)
    prediction = predicted(Quantiles(LEVELS), outputs, interval=0.8)
    np.testing.assert_allclose(prediction["quantiles"][:, 0], outputs, rtol=1e-6)
    np.testing.assert_allclose(prediction["mean"], outputs[:, 2:3], rtol=1e-6)
    np.testing.assert_allclose(prediction["lower"], outputs[:, :1], rtol=1e-6)
    np.testing.assert_allclose(prediction["upper"], outputs[:, 3:], rtol=1e-6)
    np.testing.assert_allclose(prediction["epistemic"], 0, atol=1e-12)
    assert sorted(prediction) == ["epistemic", "lower", "mean", "quantiles", "upper"]


def test_quantiles_of_normal_draws_are_those_of_their_mixture():
    """To float precision: each is where the mean of the distribution functions has the level."""
    outputs = [of_normals(*draw) for draw in zip(LOC, SCALE, strict=True)]
    prediction = predicted(Quantiles(LEVELS), *outputs, interval=0.8)
    expected = np.empty((2, 4))
    for example, (loc, scale) in enumerate(zip(LOC.T, SCALE.T, strict=True)):
        for place, level in enumerate(LEVELS):

            def excess(x, loc=loc, scale=scale, level=level):
                return scipy.stats.norm.cdf(x, loc, scale).mean() - level

            expected[example, place] = brentq(excess, -50, 50)
    np.testing.assert_allclose(prediction["quantiles"][:, 0], expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(prediction["lower"], expected[:, :1], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(prediction["upper"], expected[:, 3:], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(prediction["mean"], LOC.mean(axis=0)[:, None], rtol=1e-5)
    np.testing.assert_allclose(prediction["epistemic"], LOC.var(axis=0)[:, None], rtol=1e-5)


def test_draws_that_disagree_widen_the_interval_and_averages_of_quantiles_do_not():
    first, second = (
        of_normals(np.array([-3.0]), np.ones(1)),
        of_normals(np.array([3.0]), np.ones(1)),
    )
    mixture = predicted(Quantiles(LEVELS), first, second)["quantiles"][0, 0]
    average = (first + second)[0] / 2
    assert mixture[3] - mixture[0] > 2 * (average[3] - average[0])


def test_quantiles_of_draws_of_any_shape_are_those_of_a_sample_of_their_mixture():
    """Draws that are skewed: one is normal in two parts, which is what the head's levels say."""
    rng = np.random.default_rng(0)
    outputs = [np.sort(3 * rng.normal(size=(4, 4)), axis=1) for _ in range(3)]
    found = predicted(Quantiles(LEVELS), *outputs)["quantiles"][:, 0]
    z = rng.normal(size=400_000)
    for example in range(4):
        samples = []
        for draw in outputs:
            q = draw[example]
            inside = np.interp(z, Z, q)
            below = q[0] + (z - Z[0]) * (q[1] - q[0]) / (Z[1] - Z[0])
            above = q[3] + (z - Z[3]) * (q[3] - q[2]) / (Z[3] - Z[2])
            samples.append(np.where(z < Z[0], below, np.where(z > Z[3], above, inside)))
        sample = np.sort(np.concatenate(samples))
        share = np.searchsorted(sample, found[example]) / len(sample)
        np.testing.assert_allclose(share, LEVELS, atol=0.003)


def test_quantiles_that_cross_are_equal_or_not_finite():
    crossing = np.array([[3.0, 1.0, 2.0, 4.0], [1.0, 1.0, 1.0, 1.0]])
    found = predicted(Quantiles(LEVELS), crossing)["quantiles"][:, 0]
    np.testing.assert_allclose(found, np.sort(crossing, axis=1), rtol=1e-6)
    found = predicted(Quantiles(LEVELS), crossing, crossing + 1)["quantiles"][:, 0]
    assert (np.diff(found) >= 0).all()
    np.testing.assert_allclose(found[1, [0, 3]], [1, 2], atol=1e-5)  # half at 1, half at 2
    for place in (0, 2, 3):
        for value in (np.nan, np.inf):
            broken = crossing.copy()
            broken[0, place] = value
            both = ops.convert_to_tensor(np.stack([crossing, broken]))
            draws, _ = Quantiles(LEVELS).draws(both)
            assert np.isnan(numpy(draws)[1, 0]).all()
            assert np.isfinite(numpy(draws)[1, 1]).all()


def head_of(numbers=1, levels=LEVELS, shape=(4,)):
    plain = [layers.Dense(numbers * len(levels)), QuantileHead(levels, numbers)]
    return set_weights(keras.Sequential([keras.Input(shape), *plain]))


def noisy(numbers=1, levels=LEVELS, shape=(4,)):
    model = head_of(numbers, levels, shape)
    return ibnn.to_stochastic(model, ibnn.NormalAffine(initial_scale=0.5), train_size=10)


def test_options_of_monte_carlo():
    mc = averaged(noisy(2), 7, seed=0, return_samples=True, standard_error=True, interval=0.8)
    x = data(5, 4)
    prediction = mc.predict(x, verbose=0)
    draws = [mc.draw(x, number) for number in range(7)]
    quantiles = np.stack([numpy(draw["quantiles"]) for draw in draws])
    assert quantiles.shape == (7, 5, 2, 4)
    medians = quantiles[..., 2]
    np.testing.assert_allclose(numpy(draws[3]["mean"]), medians[3], rtol=1e-6)
    np.testing.assert_allclose(prediction["samples"], medians.swapaxes(0, 1), rtol=1e-5, atol=1e-6)
    error = medians.std(axis=0, ddof=1) / np.sqrt(7)
    np.testing.assert_allclose(prediction["standard_error"], error, rtol=1e-4, atol=1e-6)
    found = prediction["quantiles"]
    assert found.shape == (5, 2, 4)
    assert (quantiles.min(axis=0) <= found + 1e-5).all()
    assert (found <= quantiles.max(axis=0) + 1e-5).all()
    np.testing.assert_array_equal(prediction["upper"], found[..., 3])


def test_positions_have_quantiles_of_their_own():
    mc = averaged(noisy(1, shape=(3, 4)), 4, seed=0)
    prediction = mc.predict(data(5, 3, 4), verbose=0)
    assert prediction["quantiles"].shape == (5, 3, 1, 4)
    assert prediction["mean"].shape == (5, 3, 1)


@pytest.mark.parametrize("policy_name", ["mixed_bfloat16"])
def test_predictions_of_half_precision_are_in_float32(policy, policy_name):
    policy(policy_name)
    mc = averaged(noisy(), 3, seed=0, interval=0.8)
    prediction = mc(ops.convert_to_tensor(data(5, 4)))
    assert {keras.backend.standardize_dtype(x.dtype) for x in prediction.values()} == {"float32"}
    assert (np.diff(numpy(prediction["quantiles"])) >= 0).all()


def test_a_file_predicts_the_same(eagerly, tmp_path):
    mc = averaged(noisy(), 3, seed=0, interval=0.8)
    mc.save(tmp_path / "mc.keras")
    loaded = keras.saving.load_model(tmp_path / "mc.keras")
    x = data(5, 4)
    again = loaded.predict(x, verbose=0)
    for name, value in mc.predict(x, verbose=0).items():
        np.testing.assert_allclose(again[name], value, rtol=1e-5)
    given = averaged(ends_in(units=4), 2, seed=0, head=Quantiles(LEVELS))
    given.save(tmp_path / "given.keras")
    assert keras.saving.load_model(tmp_path / "given.keras").likelihood.levels == LEVELS


# ------------------------------------------------------------------------------------------ scores


def test_evaluation_is_scikit_learns(eagerly):
    mc = averaged(noisy(2), 5, seed=0)
    x = data(30, 4)
    y = data(30, 2, seed=1)
    weight = np.linspace(0, 2, 30).astype("float32")
    prediction = mc.predict(x, verbose=0)
    found = mc.evaluate(x, y, sample_weight=weight, verbose=0, return_dict=True, batch_size=8)
    quantiles = prediction["quantiles"]
    losses = [
        mean_pinball_loss(y, quantiles[..., place], alpha=level, sample_weight=weight)
        for place, level in enumerate(LEVELS)
    ]
    assert sorted(found) == ["loss", "pinball", "rmse"]
    assert found["pinball"] == pytest.approx(np.mean(losses), rel=1e-4)
    error = np.square(y - prediction["mean"]).mean(axis=1)
    assert found["rmse"] == pytest.approx(np.sqrt(np.average(error, weights=weight)), rel=1e-4)


@pytest.mark.once
def test_crps_is_that_of_a_normal_distribution_if_there_are_levels_for_it():
    levels = tuple(np.arange(1, 40) / 40)
    head = Quantiles(levels, len(levels))
    y = np.array([-2.0, 0.1, 1.5], "float32")
    quantiles = np.tile(scipy.stats.norm.ppf(levels), (3, 1))
    prediction = {"quantiles": ops.convert_to_tensor(quantiles[:, None], "float32")}
    prediction["mean"] = prediction["quantiles"][..., 19]
    scores = head.scores()
    head.update(scores, y, prediction, None)
    found = {score.name: float(score.result()) for score in scores}
    normal = scipy.stats.norm
    crps = y * (2 * normal.cdf(y) - 1) + 2 * normal.pdf(y) - 1 / np.sqrt(np.pi)
    assert found["crps"] == pytest.approx(crps.mean(), rel=0.01)
    evenly = tuple(np.arange(1, 10) / 10)
    for enough, few in ((evenly, evenly[1:]), (evenly, evenly[:4] + evenly[5:])):
        assert [score.name for score in Quantiles(enough).scores()][2:] == ["crps"]
        assert [score.name for score in Quantiles(few).scores()][2:] == []


@pytest.mark.once
def test_quantiles_among_several_outputs():
    inputs = keras.Input((4,))
    outputs = {
        "kind": layers.Dense(3, activation="softmax", name="kind")(inputs),
        "size": QuantileHead(name="size")(layers.Dense(3)(inputs)),
    }
    model = keras.Model(inputs, outputs)
    model.compile("sgd", {"kind": "sparse_categorical_crossentropy", "size": PinballLoss()})
    mc = averaged(model, 1, seed=0)
    x, y = data(6, 4), {"kind": np.arange(6) % 3, "size": data(6)}
    assert mc.predict(x, verbose=0)["size"]["quantiles"].shape == (6, 1, 3)
    scores = mc.evaluate(x, y, verbose=0, return_dict=True)
    assert {"size_pinball", "size_rmse", "kind_nll"} <= set(scores)


# ------------------------------------------------------------------------- what it is, and refuses


@pytest.mark.once
def test_quantiles_are_found_by_the_layer_and_by_the_loss():
    model = head_of()
    assert likelihood_of(model).levels == LEVELS
    assert likelihood_of(noisy()).levels == LEVELS
    by_loss = ends_in(units=4)
    by_loss.compile("sgd", PinballLoss(LEVELS))
    assert likelihood_of(by_loss).levels == LEVELS
    steps = keras.Sequential([keras.Input((2, 4)), layers.TimeDistributed(QuantileHead(LEVELS))])
    assert likelihood_of(steps).levels == LEVELS
    model.compile("sgd", PinballLoss((0.1, 0.3, 0.5, 0.7)))
    with pytest.raises(ValueError, match=r"levels \(0.1, 0.3, 0.5, 0.9\), its PinballLoss has"):
        likelihood_of(model)


@pytest.mark.once
def test_an_interval_that_is_not_among_the_levels_is_refused_with_one_that_is():
    match = r"0.9 ends at quantiles 0.05 and 0.95, .*MonteCarlo\(model, interval=0.8\)"
    with pytest.raises(ValueError, match=match):
        ibnn.MonteCarlo(noisy(), interval=0.9)
    with pytest.raises(ValueError, match=match):
        ibnn.Conformal(head_of(), "cqr")
    with pytest.raises(ValueError, match="use the entry `quantiles`"):
        ibnn.MonteCarlo(noisy(levels=(0.1, 0.5)), interval=0.8)


@pytest.mark.once
def test_what_needs_a_density_is_refused():
    model = head_of()
    model.compile("sgd", PinballLoss(LEVELS))
    x, y = data(20, 4), data(20)
    with pytest.raises(ValueError, match='no density, by which `calibrate`.*"cqr"'):
        ibnn.calibrate(model, (x, y))
    for posterior in (ibnn.Laplace, ibnn.GaussianVI, ibnn.LastLayerHMC):
        with pytest.raises(ValueError, match="quantiles, which have no density.*DeepEnsemble"):
            posterior(model).fit(x, y, verbose=0)
    with pytest.raises(ValueError, match="predicts numbers"):
        ibnn.TemperatureScaling(model).fit(x, y)
    with pytest.raises(ValueError, match="`teacher` .* Quantiles"):
        ibnn.distill(averaged(noisy(), 2), x, epochs=0, verbose=0)


@pytest.mark.once
def test_an_ensemble_is_a_mixture():
    members = [set_weights(head_of(), seed) for seed in range(3)]
    x = data(5, 4)
    prediction = averaged(ibnn.DeepEnsemble(members)).predict(x, verbose=0)
    outputs = np.stack([numpy(member(x)) for member in members])
    expected = predicted(Quantiles(LEVELS), *outputs)["quantiles"]
    np.testing.assert_allclose(prediction["quantiles"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.once
def test_conformal_intervals_are_the_quantiles_moved_by_a_constant(eagerly):
    mc = averaged(noisy(levels=(0.05, 0.5, 0.95)), 8, seed=0)
    x, y = data(60, 4), data(60, seed=1)
    intervals = ibnn.Conformal(mc, "cqr").fit(x[:40], y[:40])
    quantiles = mc.predict(x, verbose=0)["quantiles"][:, 0]
    low, high = quantiles[:40, 0], quantiles[:40, 2]
    score = np.sort(np.maximum(low - y[:40], y[:40] - high))
    moved = score[int(np.ceil(41 * 0.9)) - 1]
    expected = np.stack([quantiles[:, 0] - moved, quantiles[:, 2] + moved], axis=1)
    np.testing.assert_allclose(intervals.predict(x), expected, rtol=1e-4, atol=1e-4)
