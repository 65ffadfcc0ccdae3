"""What a posterior takes from the depth of its model and the number of examples."""

import pytest

import tfp_ibnn as ibnn


def test_the_prior_scale_is_settled_by_the_depth_unless_it_is_given():
    assert [ibnn.NormalAffine().at_depth(depth).prior_scale for depth in (1, 10, 15, 60)] == (
        pytest.approx([0.3, 0.3, 0.2, 0.05])
    )
    template, given = ibnn.NormalAffine(seed=3), ibnn.NormalAffine(prior_scale=0.3)
    assert given.at_depth(60) is given
    settled = template.at_depth(15)
    assert settled.get_config() == {**template.get_config(), "prior_scale": 0.2}
    assert template.prior_scale == 0.3
    assert settled.at_depth(1).prior_scale == 0.2


def test_a_deep_model_does_not_start_wider_than_its_prior():
    assert [ibnn.NormalAffine().at_depth(depth).initial_scale for depth in (1, 15, 60)] == (
        pytest.approx([0.1, 0.1, 0.05])
    )
    assert ibnn.NormalAffine(initial_scale=None).at_depth(60).initial_scale is None
    assert ibnn.MixturePosterior().at_depth(100).initial_scale == pytest.approx(0.03)


@pytest.mark.parametrize(("train_size", "beta"), [(3, 1.0), (500, 1.0), (5000, 10.0)])
def test_a_layer_gives_beta_by_the_number_of_examples(train_size, beta):
    template = ibnn.NormalAffine()
    layer = ibnn.StochasticDense(2, posterior=template, train_size=train_size)
    layer.build((None, 3))
    assert float(layer.posterior.beta.value) == layer.posterior.initial_beta == beta
    assert layer.posterior.get_config()["beta"] == beta
    assert template.get_config()["beta"] is None
    assert (
        float(ibnn.NormalAffine(beta=2.0).copy_for_layer("float32", None, 5000).initial_beta) == 2
    )
    template.build((None, 3))
    assert float(template.beta.value) == 1.0
