"""The whole Gauss-Newton matrix, its diagonal and its largest eigenvalues, against Jacobians."""

import numpy as np
import pytest

from tests.weights.laplace.tools import fit_images
from tests.weights.laplace_tools import dense, gauss_newton, jacobian, slow_on_jax

pytestmark = [
    pytest.mark.filterwarnings("ignore:The network does not seem to be trained"),
    pytest.mark.filterwarnings("ignore:The scale and shift"),
]


@pytest.fixture(scope="module")
def reference(plain):
    """The Gauss-Newton matrix over all weights but those of batch normalization."""
    variables = [v for v in plain.trainable_weights if "batch" not in v.path]
    return gauss_newton(*jacobian(plain, variables))


def test_full_and_diagonal_are_the_gauss_newton_matrix(eagerly, plain, reference):
    full = fit_images(plain, "full")
    np.testing.assert_allclose(dense(full.structure), reference, atol=1e-6)
    last = fit_images(plain, "full", "last_layer").structure  # which is summed in another way
    np.testing.assert_allclose(dense(last), reference[-last.size :, -last.size :], atol=1e-6)
    diagonal = fit_images(plain, "diag")
    np.testing.assert_allclose(
        diagonal.structure.eigenvalues(), np.diag(reference), rtol=1e-6, atol=1e-8
    )


@slow_on_jax
def test_low_rank_has_the_largest_eigenvalues(plain, reference):
    values, vectors = np.linalg.eigh(reference)
    # The matrix has a rank of 14, two for each example.
    whole = fit_images(plain, "lowrank", rank=16)
    np.testing.assert_allclose(dense(whole.structure), reference, atol=1e-6)
    part = fit_images(plain, "lowrank", rank=3).structure
    np.testing.assert_allclose(np.sort(part.eigenvalues())[-3:], values[-3:], rtol=1e-4)
    wanted = (vectors[:, -3:] * values[-3:]) @ vectors[:, -3:].T
    np.testing.assert_allclose(dense(part), wanted, atol=2e-2 * values[-1])


@pytest.mark.once
def test_low_rank_warns_if_it_has_not_converged(eagerly, plain, monkeypatch):
    monkeypatch.setattr("tfp_ibnn.weights.laplace.full.LowRank.passes", 1)
    with pytest.warns(UserWarning, match="still change after 1 passes"):
        fit_images(plain, "lowrank", rank=2)
