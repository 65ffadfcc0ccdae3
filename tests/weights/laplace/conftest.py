"""Networks, and what is known of their posterior."""

import numpy as np
import pytest
from scipy.special import softmax

from tests.weights.laplace.tools import POINTS, fitted, small
from tests.weights.laplace_tools import network


@pytest.fixture(scope="module")
def plain():
    return network()


@pytest.fixture(scope="module")
def model():
    return small()


@pytest.fixture(scope="module")
def full(model):
    return fitted(model, hessian_structure="full", prior_precision=0.5)


@pytest.fixture(scope="module")
def by_hand(model):
    """Features with a 1, logits and the posterior covariance of the last layer, in float64."""
    kernel, bias, w, b = (x.astype("float64") for x in model.get_weights())
    phi = np.concatenate([np.maximum(POINTS @ kernel + bias, 0), np.ones((60, 1))], axis=1)
    matrix = np.concatenate([w, b[None]])
    hessian = 0.5 * np.eye(18)
    for row in phi:
        p = softmax(row @ matrix)
        hessian += np.kron(np.outer(row, row), np.diag(p) - np.outer(p, p))
    return phi, phi @ matrix, np.linalg.inv(hessian)
