"""The linear regression that tests of several files compare with."""

import pytest

from tests.diagnostics.regression import Linear


@pytest.fixture(scope="module")
def linear():
    return Linear()
