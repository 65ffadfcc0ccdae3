"""The density of a posterior is that of its draws."""

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import norm

import tfp_ibnn as ibnn
from tests.diagnostics.regression import X, Y, network, numpy
from tfp_ibnn import diagnostics
from tfp_ibnn.diagnostics.targets import PosteriorDensity
from tfp_ibnn.weights.refinement import RefinedPosterior


def check(density, slopes=False):
    """Draws come with the density that `log_prob` gives them, and gradients are its slopes."""
    w, log_q = density.sample_and_log_prob(64, seed=3)
    assert w.shape == (64, density.size)
    np.testing.assert_allclose(density.values(w), log_q, rtol=1e-4, atol=2e-3)
    if not slopes:
        return
    np.testing.assert_array_equal(density.sample_and_log_prob(64, seed=3)[0], w)
    assert not np.array_equal(density.sample_and_log_prob(64, seed=4)[0], w)
    way = np.random.default_rng(0).normal(size=w.shape) * w.std(axis=0)
    change = density.values(w[:8] + 1e-2 * way[:8]) - density.values(w[:8] - 1e-2 * way[:8])
    slope = np.sum(density.gradients(w[:8]) * way[:8], axis=1)
    np.testing.assert_allclose(slope, change / 2e-2, rtol=0.05, atol=0.1)


def test_the_density_of_a_model_is_the_product_of_its_layers():
    sto = network(ibnn.NormalAffine(initial_scale=0.2))
    first, second = (layer.posterior for layer in ibnn.stochastic_layers(sto))
    first.affine.shift.assign([1.0, 2.0, 3.0])
    density = PosteriorDensity(sto)
    check(density, slopes=True)
    z = density.sample_and_log_prob(4000)[0]
    loc = [numpy(q.distribution().mean()) for q in (first, second)]
    np.testing.assert_allclose(z.mean(axis=0), np.concatenate(loc), atol=0.02)
    parts = [q.distribution().log_prob(w) for q, w in ((first, z[:9, :3]), (second, z[:9, 3:]))]
    np.testing.assert_allclose(density.values(z[:9]), sum(map(numpy, parts)), rtol=1e-5, atol=1e-5)


@pytest.mark.once
def test_layers_that_share_a_component_are_one_mixture():
    sto = network(ibnn.MixturePosterior(components=2, initial_scale=0.1))
    locs = []
    for layer in ibnn.stochastic_layers(sto):
        q = layer.posterior
        q.loc.assign(np.outer([-2.0, 2.0], np.ones(q.channels)))
        locs.append((numpy(q.loc), numpy(q.distribution().components_distribution.stddev())))
    loc, scale = (np.concatenate(parts, axis=1) for parts in zip(*locs, strict=True))
    density = PosteriorDensity(sto)
    check(density)
    z = density.sample_and_log_prob(64, seed=3)[0]
    assert len(np.unique(np.sign(z), axis=0)) == 2  # a product would have four
    each = norm(loc, scale).logpdf(z[:, None]).sum(axis=-1)
    np.testing.assert_allclose(density.values(z), logsumexp(each, axis=1) - np.log(2), rtol=1e-4)
    flows = ibnn.FlowPosterior(components=2, shared_components=True)
    with pytest.raises(ValueError, match="mixtures of flows share their component"):
        PosteriorDensity(network(flows))


def test_flows_have_a_density():
    posterior = ibnn.NormalPlanar1d()
    posterior.build((3,))
    check(PosteriorDensity(posterior))


@pytest.mark.parametrize("name", ["vi", "refined", pytest.param("laplace", marks=pytest.mark.slow)])
def test_posteriors_over_weights_have_a_density(linear, name, full_precision):
    factor = np.linalg.cholesky(linear.covariance)
    if name == "laplace":
        posterior = ibnn.Laplace(linear.model, subset_of_weights="last_layer").fit(X, Y)
    elif name == "vi":
        posterior = linear.vi
        posterior.assign(linear.mean, factor, np.zeros((0, 3)))
    else:
        posterior = RefinedPosterior(linear.model, [ibnn.flows.Radial()], [0, 1])
        posterior.set_base(linear.mean, factor)
    density = PosteriorDensity(posterior)
    assert density.size == 3
    check(density)


@pytest.mark.slow
def test_the_density_of_a_flow_has_slopes():
    posterior = ibnn.NormalPlanar1d()
    posterior.build((3,))
    check(PosteriorDensity(posterior), slopes=True)


def test_half_precision_of_a_network_leaves_its_density_alone(policy):
    policy("mixed_bfloat16")
    check(PosteriorDensity(network(ibnn.NormalAffine())))


@pytest.mark.once
@pytest.mark.parametrize("given", ["mean field", "samples", "batch", "unbuilt"])
def test_what_has_no_density_is_refused(given):
    wrong = {
        "mean field": lambda: network(ibnn.MeanField()),
        "samples": lambda: np.zeros((5, 2)),
        "batch": lambda: ibnn.tfd.Normal([0.0, 1.0], 1.0),
        "unbuilt": ibnn.NormalAffine,
    }
    with pytest.raises(ValueError, match="`posterior` must be a built model with z"):
        diagnostics.elbo(wrong[given](), lambda w: w[:, 0])
