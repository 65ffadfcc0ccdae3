"""Recipes of posteriors: their arguments, their start, and the Gaussian in closed form."""

import inspect

import numpy as np
import pytest

import tfp_ibnn as ibnn
from tests.flows.tools import close, numpy
from tests.posteriors.tools import CLOSED_FORM, Grid, draw, log_density
from tests.registry import (
    RECIPES,
    make_posterior,
)
from tfp_ibnn.posteriors import Template


def test_registry_holds_every_recipe():
    recipes = {name for name in ibnn.__all__ if name.startswith("Normal")}
    assert recipes | {"MixturePosterior"} == {name.split("-")[0] for name in RECIPES}


def test_gaussian_has_the_closed_form(float64):
    posterior = make_posterior("NormalAffine", channels=3, seed=1)
    m, raw = numpy(posterior.affine.shift.value), numpy(posterior.affine.raw_scale.value)
    s, p = 1e-6 + np.log1p(np.exp(raw)), 0.5
    z, kl = draw(posterior, 200_000)
    expected = np.sum(np.log(p / s) + (s**2 + (m - 1) ** 2) / (2 * p**2) - 0.5)
    close(kl, expected, 1e-10)
    close(float(posterior.entropy()), np.sum(np.log(s) + 0.5 * np.log(2 * np.pi * np.e)), 1e-10)
    each = log_density(posterior.distribution(), z) - log_density(posterior.prior(), z)
    assert abs(each.mean() - kl) < 5 * each.std() / len(z) ** 0.5
    assert np.all(np.abs(z.mean(axis=0) - m) < 5 * s / len(z) ** 0.5)
    np.testing.assert_allclose(z.std(axis=0), s, rtol=0.02)


@pytest.mark.parametrize("channels", [1, 2])
def test_gaussian_agrees_with_quadrature(float64, channels):
    posterior = make_posterior("NormalAffine", channels, seed=4)
    grid = Grid(posterior)
    close(grid.integral(), 1.0, 1e-6)
    close(float(posterior.sample_and_kl()[1]), grid.kl(posterior), 1e-5)
    close(float(posterior.entropy()), grid.integral(-grid.log_q), 1e-5)


@pytest.mark.once
@pytest.mark.parametrize("name", [n for n in RECIPES if n.startswith("Normal")])
def test_every_recipe_starts_at_kl_zero(name):
    arguments = {} if name in CLOSED_FORM else {"depth": 4}
    posterior = RECIPES[name](initial_scale=0.5, **arguments)
    posterior.build((None, 8))
    assert abs(draw(posterior, 2000)[1].mean()) <= 8e-5
    np.testing.assert_allclose(numpy(posterior.mean()), 1.0, atol=1e-5)


def test_initial_scale_is_that_of_z():
    posterior = ibnn.NormalPlanar1d(initial_scale=0.01, prior_scale=0.5)
    posterior.build((3,))
    z, kl = draw(posterior, 4000)
    np.testing.assert_allclose(z.std(axis=0), 0.01, rtol=0.1)
    expected = 3 * (np.log(0.5 / 0.01) + (0.01 / 0.5) ** 2 / 2 - 0.5)
    np.testing.assert_allclose(kl.mean(), expected, rtol=0.02)


@pytest.mark.parametrize("depth", [0])
def test_depth_zero_is_told_of_the_recipe_without_a_flow(depth):
    with pytest.raises(ValueError, match=r"`depth`.*got 0.*NormalAffine\(\)"):
        ibnn.NormalPlanar1d(depth=depth)


@pytest.mark.parametrize("keyword", ["foo", "flows"])
def test_unknown_keywords_are_told_by_the_recipe(keyword):
    with pytest.raises(
        TypeError, match=rf"NormalPlanar1d does not take `{keyword}`\. It takes: "
    ) as e:
        ibnn.NormalPlanar1d(**{keyword: 1})
    assert "depth, initial_scale" in str(e.value)
    assert "flows" not in str(e.value).split("It takes")[1]


def by_keyword(function):
    """Return the defaults of the arguments that a function takes by name only."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


@pytest.mark.once
@pytest.mark.parametrize("name", [x for x in ibnn.__all__ if x.startswith("Normal")])
def test_recipes_show_every_argument_with_its_default(name):
    recipe = getattr(ibnn, name)
    expected = {**by_keyword(ibnn.Posterior.__init__), **by_keyword(Template.__init__)}
    if inspect.isfunction(recipe):
        shown = by_keyword(recipe)
        expected.update(by_keyword(ibnn.FlowPosterior.__init__))
    else:
        shown = by_keyword(recipe.__init__)
    assert expected.items() <= shown.items()


def test_defaults_learn_and_the_prior_is_wider_than_the_start():
    posterior = ibnn.NormalPlanar1d()
    posterior.build((None, 3))
    loc, scale = numpy(posterior.affine.shift.value), float(posterior.affine.bijector().scale[0])
    assert (posterior.prior_scale, posterior.prior_loc) == (0.3, 1.0)
    np.testing.assert_allclose([*loc, scale], [1.0, 1.0, 1.0, 0.1], rtol=1e-5)
