"""Posteriors of flows: their mean, their start, and subclasses of a user's own."""

import keras
import numpy as np
import pytest
from keras import ops

import tfp_ibnn as ibnn
from tests import autodiff
from tests.flows.tools import close, numpy, slope_by_differences
from tests.posteriors.tools import draw, log_density
from tests.registry import FLOW_NAMES, FLOWS, make_posterior, min_channels, over
from tfp_ibnn import noise
from tfp_ibnn._core.backend import tfd


@pytest.mark.parametrize(
    "name",
    ["NormalAffine", "NormalPlanar1d", "NormalGlowStep", "mixture-base", "mixture-base-planar"],
)
def test_the_distribution_of_flows_has_their_mean(float64, name):
    posterior = make_posterior(name, channels=4, seed=1, size=0.7)
    for q in (posterior.distribution(), posterior.distribution().copy()):
        assert isinstance(q, ibnn.tfd.TransformedDistribution)
        close(numpy(q.mean()), numpy(posterior.mean()), 1e-6)


def test_shared_mixture_base_has_the_kl_given_the_component(float64):
    posterior = make_posterior("mixture-base-shared", channels=3, seed=1)
    noise = np.random.default_rng(2).normal(size=(6, 3))
    index = np.arange(6, dtype="int32") % 3
    found = posterior.transform(ops.convert_to_tensor(noise), index)
    loc = numpy(posterior.base_loc.value)[index]
    scale = 1e-6 + np.log1p(np.exp(numpy(posterior.base_raw_scale.value)))[index]
    log_q = np.sum(-0.5 * noise**2 - 0.5 * np.log(2 * np.pi) - np.log(scale), axis=-1)
    z = ops.convert_to_tensor(loc + scale * noise)
    for flow in (*posterior.flows, posterior.affine):
        z, log_det = flow.bijector().forward(z), flow.bijector().forward_log_det_jacobian(z, 1)
        log_q = log_q - numpy(log_det)
    close(numpy(found.z), numpy(z), 1e-10)
    close(numpy(found.entropy), -log_q, 1e-10)
    close(numpy(found.kl), log_q - log_density(posterior.prior(), z), 1e-10)


@pytest.mark.parametrize("order", ["last", "first"])
def test_affine_map_is_where_it_was_asked_for(float64, order):
    posterior = ibnn.FlowPosterior([ibnn.flows.Radial()], affine=order)
    posterior.build((3,))
    posterior.affine.shift.assign([3.0, -1.0, 0.5])
    radial = posterior.flows[0]
    radial.raw_beta.assign(1.5)
    noise = ops.convert_to_tensor(np.random.default_rng(2).normal(size=(4, 3)))
    first, then = (posterior.affine, radial) if order == "first" else (radial, posterior.affine)
    expected = then.bijector().forward(first.bijector().forward(noise))
    close(numpy(posterior.transform(noise).z), numpy(expected), 1e-12)


@pytest.mark.once
@pytest.mark.parametrize("name", FLOW_NAMES)
@pytest.mark.parametrize("channels", [7])
def test_kl_starts_at_zero_and_the_mean_at_prior_loc(name, channels):
    posterior = over(name)(prior_scale=0.3, prior_loc=1.5)
    posterior.build((None, channels))
    z, kl = draw(posterior, 2000)
    assert z.dtype == "float32"
    assert abs(kl.mean()) <= 1e-5 * channels
    np.testing.assert_allclose(numpy(posterior.mean()), 1.5, atol=1e-5)
    assert np.all(np.abs(z.mean(axis=0) - 1.5) < 5 * 0.3 / 2000**0.5)
    np.testing.assert_allclose(z.std(axis=0), 0.3, rtol=0.1)


def test_batchnorm_starts_at_zero_up_to_its_sampling_error():
    posterior = over("batchnorm")()
    posterior.build((None, 4))
    noise = np.random.default_rng(0).normal(size=(4000, 4)).astype("float32")
    found = posterior.transform(ops.convert_to_tensor(noise), training=True)
    assert abs(numpy(found.kl).mean()) < 4 * 4 / 4000**0.5
    np.testing.assert_allclose(numpy(found.z).mean(axis=0), 1.0, atol=1e-4)


@pytest.mark.once
@pytest.mark.parametrize("name", ["mixture-base", "mixture-base-planar"])
def test_mixture_base_starts_near_unit_variance(name):
    posterior = make_posterior(name, channels=500)
    z = draw(posterior, 300)[0]
    np.testing.assert_allclose(np.mean((z - 1) ** 2), 0.25, rtol=0.1)


def test_learned_prior_scale_gets_its_gradient(float64):
    posterior = make_posterior("learned-prior-scale", channels=3, seed=1)
    raw = float(numpy(posterior.raw_prior_scale.value))
    z = np.random.default_rng(0).normal(size=(2, 3))
    scale = 1e-6 + np.log1p(np.exp(raw))
    expected = np.sum(
        -0.5 * ((z - 1) / scale) ** 2 - np.log(scale) - 0.5 * np.log(2 * np.pi), axis=-1
    )
    close(log_density(posterior.prior(), z), expected, 1e-9)
    assert posterior.raw_prior_scale.trainable

    def kl():
        return ops.sum(posterior.summary().kl) / 128

    (found,) = autodiff.weight_gradients(kl, [posterior.raw_prior_scale])
    close(found, slope_by_differences(kl, posterior.raw_prior_scale), 1e-5)
    assert abs(found) > 1e-3


@pytest.mark.parametrize("name", [n for n in FLOWS if min_channels(n) > 1])
def test_a_single_channel_is_told_which_recipe_can_serve(name):
    with pytest.raises(ValueError, match="at least 2 channels.*NormalPlanar1d"):
        over(name)().build((None, 1))


@pytest.mark.parametrize("wrong", ["planar", ibnn.flows.Planar, keras.layers.Dense(2)])
def test_flows_must_be_flows(wrong):
    with pytest.raises(ValueError, match="`flows`") as caught:
        ibnn.FlowPosterior([ibnn.flows.Planar(), wrong])
    assert repr(wrong) in str(caught.value)


class Doubled(ibnn.FlowPosterior):
    """A posterior whose mean is its own."""

    def mean(self):
        return 2 * super().mean()


class Bent(ibnn.FlowPosterior):
    """A posterior whose draws are its own."""

    def transform(self, noise, component=None, training=False):
        draw = super().transform(noise, component, training)
        return draw._replace(z=draw.z**3)


@pytest.mark.parametrize("flows", [[], [ibnn.flows.Planar()]], ids=["gaussian", "flow"])
@pytest.mark.parametrize("kind", [Doubled, Bent])
def test_a_subclass_is_its_own_mean_without_noise(kind, flows):
    posterior = kind(flows)
    posterior.build((None, 3))
    assert not posterior.is_centered
    draw = posterior.draw(noise.Pass(seed=0), 4, (), ops.convert_to_tensor(False))
    np.testing.assert_allclose(draw.z, np.broadcast_to(posterior.mean(), (4, 3)), rtol=1e-6)


class Cube:
    """Another way to draw, which a posterior may mix in."""

    def transform(self, noise, component=None, training=False):
        draw = super().transform(noise, component, training)
        return draw._replace(z=draw.z**3)


def test_draws_of_a_mixin_are_draws_of_its_own():
    class Mixed(Cube, ibnn.FlowPosterior):
        pass

    assert not Mixed().is_centered
    posterior = Mixed([ibnn.flows.Planar()])
    posterior.build((None, 3))
    assert posterior.fixed_noise() is None


def test_a_flow_with_a_map_of_its_own_sees_no_other_draws_in_training():
    class Centered(ibnn.flows.Planar):
        def forward_and_log_det(self, x, condition=None, training=False):
            return x - ops.mean(x, axis=0), ops.zeros_like(x[..., 0])

    posterior = ibnn.FlowPosterior([Centered()])
    posterior.build((None, 3))
    assert posterior.fixed_noise(training=True) is None
    assert posterior.fixed_noise() is not None


class WideFirst(ibnn.FlowPosterior):
    """A posterior whose prior is wider in its first channel."""

    def prior(self):
        scale = ops.convert_to_tensor([2.0, 0.5, 0.5], dtype=self.dtype)
        normal = tfd.Normal(ops.ones_like(scale), scale)
        return tfd.Independent(normal, reinterpreted_batch_ndims=1)


@pytest.mark.parametrize("flows", [[], [ibnn.flows.Planar()]], ids=["gaussian", "flow"])
def test_a_prior_of_its_own_is_the_one_of_the_kl(flows):
    posterior = WideFirst(flows, dtype="float64")
    posterior.build((3,))
    noise = np.random.default_rng(0).normal(size=(5, 3))
    draw = posterior.transform(noise)
    if flows:
        expected = posterior.distribution().log_prob(draw.z) - posterior.prior().log_prob(draw.z)
    else:
        q = tfd.Independent(tfd.Normal(*posterior.loc_and_scale()), reinterpreted_batch_ndims=1)
        expected = tfd.kl_divergence(q, posterior.prior())
    np.testing.assert_allclose(draw.kl, expected, rtol=1e-9)


@pytest.mark.parametrize("name", ["NormalAffine", "over-conv1x1-orthogonal", "NormalPlanar1d"])
def test_the_standard_deviation_of_z(name):
    """Exact for linear flows, and otherwise that of 128 draws."""
    posterior = make_posterior(name, channels=3, seed=1)
    distribution = posterior.distribution()
    draws = numpy(posterior.transform(np.random.default_rng(0).normal(size=(20_000, 3))).z)
    rtol = 0.02 if distribution.bijector.is_constant_jacobian else 0.2
    np.testing.assert_allclose(numpy(distribution.stddev()), draws.std(axis=0), rtol=rtol)
