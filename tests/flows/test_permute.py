import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn
from tests.flows.tools import close, draws, forward, inverse, log_det, numpy
from tests.registry import make_flow
from tfp_ibnn import flows

KINDS = ("reverse", "shuffle", [1, 3, 4, 0, 2])


def made(kind, channels=5, **options):
    flow = flows.Permute(kind, **options)
    flow.build((None, channels))
    return flow


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_channels_are_moved_and_come_back_without_rounding(kind):
    flow, x = made(kind), draws((7, 2, 5), dtype="float32")
    order = numpy(flow.permutation.value)
    assert sorted(order) == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(forward(flow, x), x[..., order])
    np.testing.assert_array_equal(inverse(flow, forward(flow, x)), x)
    np.testing.assert_array_equal(forward(flow, inverse(flow, x)), x)
    for direction in ("forward", "inverse"):
        np.testing.assert_array_equal(log_det(flow, x, direction), np.zeros((7, 2)))


@pytest.mark.once
def test_the_order_is_the_one_asked_for():
    np.testing.assert_array_equal(made("reverse").permutation, [4, 3, 2, 1, 0])
    np.testing.assert_array_equal(made([1, 3, 4, 0, 2]).permutation, [1, 3, 4, 0, 2])
    np.testing.assert_array_equal(made(np.array([1, 0]), 2).permutation, [1, 0])
    assert flows.Permute().kind == "reverse"


@pytest.mark.once
def test_a_random_order_is_that_of_its_seed():
    def orders(*seeds):
        return [tuple(numpy(made("shuffle", 20, seed=seed).permutation.value)) for seed in seeds]

    first, again, other = orders(1, 1, 2)
    assert first == again != other
    assert sorted(first) == list(range(20)) != list(first)
    keras.utils.set_random_seed(7)
    two = orders(None, None)
    keras.utils.set_random_seed(7)
    assert orders(None, None) == two
    assert two[0] != two[1]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_file_keeps_the_order(kind, tmp_path):
    flow = flows.Permute(kind)
    model = keras.Sequential([keras.Input((5,)), flow])
    model.save(tmp_path / "permute.keras")
    keras.utils.set_random_seed(99)  # a new random order is another one
    loaded = keras.models.load_model(tmp_path / "permute.keras").layers[-1]
    np.testing.assert_array_equal(loaded.permutation, numpy(flow.permutation.value))
    assert loaded.get_config() == flow.get_config()
    model.save_weights(tmp_path / "permute.weights.h5")
    twin = keras.Sequential([keras.Input((5,)), flows.Permute(kind)])
    twin.load_weights(tmp_path / "permute.weights.h5")
    x = draws((3, 5), dtype="float32")
    np.testing.assert_array_equal(numpy(twin(x)), x[:, numpy(flow.permutation.value)])


def test_a_posterior_with_it_survives_its_file(tmp_path):
    between = [flows.AffineCoupling(hidden=4), flows.Permute("shuffle"), flows.AffineCoupling()]
    det = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    sto = ibnn.to_stochastic(det, ibnn.FlowPosterior(between), train_size=10)
    sto.save(tmp_path / "sto.keras")
    loaded = keras.models.load_model(tmp_path / "sto.keras")
    orders = [x.layers[-1].posterior.flows[1].permutation for x in (sto, loaded)]
    np.testing.assert_array_equal(*map(numpy, orders))
    x = draws((3, 6), dtype="float32")
    first, again = (ibnn.MonteCarlo(m, 4, seed=0, head="point")(x)["mean"] for m in (sto, loaded))
    np.testing.assert_allclose(numpy(first), numpy(again), rtol=1e-6)


@pytest.mark.once
def test_couplings_of_one_half_move_all_channels_with_it_between(float64):
    first, last = (make_flow("coupling", 4, seed=seed) for seed in (1, 2))
    x = draws((5, 4))
    np.testing.assert_array_equal(forward(last, forward(first, x))[:, :2], x[:, :2])
    moved = forward(last, forward(made("reverse", 4), forward(first, x)))
    assert np.all(np.abs(moved - x[:, ::-1]).max(axis=0) > 0.1)


@pytest.mark.once
def test_a_condition_makes_no_difference_but_must_fit():
    plain, flow = made("reverse"), made("reverse", condition_size=2)
    x, condition = draws((4, 5), dtype="float32"), draws((4, 2), dtype="float32")
    np.testing.assert_array_equal(forward(flow, x, condition), forward(plain, x))
    np.testing.assert_array_equal(inverse(flow, x, condition), inverse(plain, x))
    y, found = flow.forward_and_log_det(x, condition)
    np.testing.assert_array_equal(numpy(y), forward(plain, x))
    close(numpy(found), 0, 0)
    with pytest.raises(ValueError, match=r"must have the shape \(..., 2\); got \(4, 5\)"):
        flow.forward_and_log_det(x, x)
    with pytest.raises(ValueError, match="needs `condition`"):
        flow(x)
    chained = ibnn.FlowDensity([flows.AffineCoupling(), flows.Permute()], condition=2)
    assert np.isfinite(chained.log_prob(x, condition)).all()


@pytest.mark.once
@pytest.mark.parametrize(
    "bad",
    [
        "sorted",
        None,
        3,
        [],
        [0, 2],
        [1, 1, 0],
        [0.5, 1.0],
        [False, True],
        [[0, 1]],
        [-1, 0],
        ["a", "b"],
    ],
)
def test_an_order_must_name_each_channel_once(bad):
    with pytest.raises(ValueError, match="`kind` must be") as caught:
        flows.Permute(bad)
    assert repr(bad) in str(caught.value)


@pytest.mark.once
def test_other_bad_arguments():
    with pytest.raises(ValueError, match=r"`kind` must order 3 channels.*\(None, 3\).*\[1, 0\]"):
        made([1, 0], 3)
    with pytest.raises(ValueError, match="`seed` is for kind='shuffle'; got kind='reverse'"):
        flows.Permute(seed=1)
    for seed in (-1, 0.5, "one"):
        with pytest.raises(ValueError, match="`seed` must be"):
            flows.Permute("shuffle", seed=seed)
