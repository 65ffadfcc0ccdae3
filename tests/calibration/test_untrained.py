"""What is not trained: Laplace, of a part of many examples, at the best of some priors."""

import numpy as np
import pytest

from tests.calibration.tools import Batches, classes
from tfp_ibnn.calibration import examples, untrained
from tfp_ibnn.calibration.examples import Examples, Training, Validation
from tfp_ibnn.calibration.trials import Setting


def test_prior_precision_of_laplace_is_that_of_the_least_nll(small):
    held_out, output = (
        Examples(small.x[60:], small.y[60:].astype(int)),
        classes(3, from_logits=False),
    )
    training = Training((small.x[:60], small.y[:60]), 60, 2, None, 0)
    data = Validation(held_out, held_out)
    setting = Setting(small.model, output, *2 * [None], training, data, 2, 0)
    trial = next(untrained.laplace_of_the_last_layer(setting))
    place = [x is trial.engine.network.prior_precision for x in trial.engine.network.variables]
    priors = [float(state[place.index(True)]) for state in trial.states]
    np.testing.assert_allclose(np.divide(priors, priors[0]), untrained.PRIOR_FACTORS, rtol=1e-5)
    trial.try_states(data, output)
    nll = [output.best_nll(trial.engine.draw(x, held_out.x), held_out.y) for x in trial.states]
    assert trial.nll == min(nll) < max(nll)
    assert trial.best is trial.states[np.argmin(nll)]


def test_laplace_uses_a_part_of_many_examples(small, monkeypatch):
    monkeypatch.setattr(untrained, "EXAMPLES", 25)
    x, y, output = small.x[:60], small.y[:60], classes(3, from_logits=False)
    for data in ((x, y), Batches(x, y)):
        training = Training(data, 60, 2, None, 0)
        some = examples.read(data, small.model, output, "train", every=3)
        np.testing.assert_array_equal(some.x, x[::3])
        np.testing.assert_array_equal(some.y, y[::3])
    setting = Setting(small.model, output, *2 * [None], training, None, 2, 0)
    posterior = next(untrained.laplace_of_the_last_layer(setting)).engine.network
    config = posterior.get_config()
    assert config["fit"]["examples"] == 20
    assert config["temperature"] == pytest.approx(1 / 3)
