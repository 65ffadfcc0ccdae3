import keras
import numpy as np
import pytest

from tests.flows.tools import close, draws, forward, inverse, jacobian, log_det, numpy
from tests.registry import make_flow

pytestmark = pytest.mark.once

both_starts = pytest.mark.parametrize("name", ["conv1x1-identity", "conv1x1-orthogonal"])


def matrix(flow):
    """The matrix that the flow multiplies a column by."""
    return forward(flow, np.eye(flow.channels)).T


@both_starts
@pytest.mark.parametrize("channels", [1, 2, 5, 32])
def test_log_det_is_that_of_the_matrix(float64, name, channels):
    flow = make_flow(name, channels, seed=2)
    x = draws((2, channels))
    close(forward(flow, x), x @ matrix(flow).T, 1e-11)
    close(log_det(flow, x), np.linalg.slogdet(matrix(flow))[1], 1e-10)


def test_matrix_is_the_product_of_its_factors(float64):
    flow = make_flow("conv1x1-orthogonal", 5, seed=2)
    bijector = flow.bijector()
    lower, upper, order = numpy(bijector.lower, bijector.upper, bijector.permutation)
    assert np.all(np.triu(lower, 1) == 0)
    assert np.all(np.diagonal(lower) == 1)
    assert np.all(np.tril(upper, -1) == 0)
    assert sorted(order) == list(range(5))
    close(matrix(flow), (lower @ upper)[order], 1e-12)


@both_starts
@pytest.mark.parametrize("raw", [-1e6, 1e6])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_matrix_never_becomes_singular(name, raw, dtype):
    flow, x = make_flow(name, 4, dtype=dtype), draws((5, 4), dtype=dtype)
    factors = numpy(flow.factors.value).copy()
    np.fill_diagonal(factors, raw)
    flow.factors.assign(factors)
    change = log_det(flow, x) - np.sum(np.log(np.abs(numpy(flow.diagonal.value))))
    close(change, np.sign(raw) * 4 * 3.0, 1e-5)
    assert np.linalg.matrix_rank(jacobian(flow, x[0])) == 4
    close(inverse(flow, forward(flow, x)), x, 1e-8 if dtype == "float64" else 1e-3)


@pytest.mark.parametrize("channels", [1, 2, 3, 7, 64])
def test_random_start_is_orthogonal(float64, channels):
    found = matrix(make_flow("conv1x1-orthogonal", channels))
    close(found @ found.T, np.eye(channels), 1e-12)


def test_start_is_repeatable_and_each_flow_has_its_own():
    def three():
        return [matrix(make_flow("conv1x1-orthogonal", 4, dtype="float64")) for _ in range(3)]

    keras.utils.set_random_seed(7)
    first = three()
    keras.utils.set_random_seed(7)
    again = three()
    np.testing.assert_array_equal(first, again)
    assert np.max(np.abs(first[0] - first[1])) > 0.1
    keras.utils.set_random_seed(8)
    assert np.max(np.abs(first[0] - three()[0])) > 0.1


@both_starts
def test_only_the_factors_are_trained(name):
    flow = make_flow(name, 4)
    assert [weight.name for weight in flow.trainable_weights] == ["factors"]
    assert {weight.name for weight in flow.non_trainable_weights} == {"permutation", "diagonal"}
