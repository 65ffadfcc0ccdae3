"""A mixture draws from its members in turn, also after loading."""

import keras
import numpy as np
import pytest
from keras import ops

import tfp_ibnn as ibnn
from tests.autodiff import quick
from tests.weights.swag import X, network


def test_a_mixture_takes_its_members_in_turn(mixture):
    """Draw s is draw s // 2 of member s mod 2, each with a key of its own."""
    key_of_all = ops.convert_to_tensor(ibnn.noise.counter.key_from_seed(1))
    draws = []
    for number in range(3):
        member, place = mixture.members[number % 2], number % 2
        key = ibnn.noise.key_of_part(key_of_all, place)
        draw = quick(lambda n, m=member, k=key: m.sampler(3).draw(X, k, n), member.variables)
        outputs = ops.softmax(draw(ops.convert_to_tensor(number // 2, "int32"))[0])
        draws.append(ops.convert_to_numpy(outputs))
    for one, other in ((0, 2), (0, 1)):
        assert np.abs(draws[one] - draws[other]).max() > 1e-3
    mc = ibnn.MonteCarlo(mixture, samples=3, seed=1)
    for number, expected in enumerate(draws):
        found = ops.convert_to_numpy(mc.draw(X, number)["mean"])
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.once
def test_multi_swag(plain):
    """Members of one size have draws of their own, and finite sets all have their turn."""
    posteriors = [plain[0].posterior() for _ in range(2)]
    mixture = ibnn.WeightMixture(posteriors)
    assert ibnn.MonteCarlo(mixture, samples=50).samples == 50
    finite = mixture.materialize(2)
    assert [member.count for member in finite.members] == [2, 2]
    assert ibnn.MonteCarlo(finite).samples == 4
    kernels = [ops.convert_to_numpy(member.weights[0]) for member in finite.members]
    assert np.abs(kernels[0] - kernels[1]).max() > 1e-3
    uneven = ibnn.WeightMixture([*finite.members, network(7, norm=False)])
    assert ibnn.MonteCarlo(uneven).samples == 6  # the one set of the third is counted twice
    mc = ibnn.MonteCarlo(mixture, samples=2, seed=0)
    one, other = (ops.convert_to_numpy(mc.draw(X, number)["mean"]) for number in (0, 1))
    assert np.abs(one - other).max() > 1e-4


@pytest.mark.once
def test_members_of_mixtures_in_a_mixture_have_draws_of_their_own(plain):
    """Whatever the path to a member: the second of the first is not the first of the second."""
    swag = plain[0].posterior()
    pairs = [ibnn.WeightMixture([swag, swag]) for _ in range(2)]
    mc = ibnn.MonteCarlo(ibnn.WeightMixture(pairs), samples=4, seed=0)
    means = [ops.convert_to_numpy(mc.draw(X, number)["mean"]) for number in range(4)]
    for number, first in enumerate(means):
        for second in means[:number]:
            assert np.abs(first - second).max() > 1e-4


@pytest.mark.once
def test_a_file_holds_a_mixture(mixture, tmp_path):
    mc = ibnn.MonteCarlo(mixture, samples=2, seed=0)
    mc.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    found, expected = (ops.convert_to_numpy(x.draw(X, 1)["mean"]) for x in (loaded, mc))
    np.testing.assert_allclose(found, expected, atol=1e-6)
