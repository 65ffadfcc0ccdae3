"""The Hessian of layers of any kind against Jacobians."""

import numpy as np
import pytest

from tests.weights.laplace.tools import fit_images
from tests.weights.laplace_tools import gauss_newton, jacobian, network

pytestmark = [
    pytest.mark.filterwarnings("ignore:The network does not seem to be trained"),
    pytest.mark.filterwarnings("ignore:The scale and shift"),
]


@pytest.mark.slow
def test_layers_of_any_kind():
    """Depthwise convolutions and the scale of normalizations, if asked for."""
    model = network("other")
    la = fit_images(model, "diag", "depthwise.*kernel|gamma")
    assert len(la.sampled) == 3
    wanted = gauss_newton(*jacobian(model, la.sampled))
    np.testing.assert_allclose(la.structure.eigenvalues(), np.diag(wanted), rtol=1e-5)
