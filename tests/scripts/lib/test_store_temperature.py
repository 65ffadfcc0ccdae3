import numpy as np
import pytest
import scipy.special

from lib.store import cross_fit, fit_temperature


def made_up(count=4000, sharpness=1.0):
    """Predictions that would be calibrated at a temperature of `sharpness`, and labels."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (count, 3))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    return sharpness * logits, labels


def test_the_temperature_is_found():
    logits, labels = made_up(sharpness=2.0)
    found = fit_temperature(scipy.special.softmax(logits, axis=1), labels)
    assert float(found.temperature) == pytest.approx(2.0, abs=0.1)


def test_cross_fitted_temperatures_know_no_example_they_are_used_on():
    # The even examples are underconfident, the odd right; each half gets the other's temperature.
    logits, labels = made_up()
    logits[::2] /= 2
    found, temperatures = cross_fit(scipy.special.softmax(logits, axis=1), labels)
    assert temperatures == [pytest.approx(1.0, abs=0.05), pytest.approx(0.5, abs=0.04)]
    swapped = logits.copy()
    swapped[1::2] /= 0.5
    log = scipy.special.log_softmax(swapped, axis=1)[np.arange(4000), labels]
    assert -np.log(found[np.arange(4000), labels]).mean() == pytest.approx(-log.mean(), abs=0.02)
