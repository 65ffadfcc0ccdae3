"""The trials of a calibration."""

import numpy as np

from tests.calibration.tools import classes
from tfp_ibnn.calibration import trials
from tfp_ibnn.calibration.examples import Examples, Training, Validation


def test_prior_precision_of_laplace_is_that_of_the_least_nll(small):
    examples, output = (
        Examples(small.x[60:], small.y[60:].astype(int)),
        classes(3, from_logits=False),
    )
    training = Training((small.x[:60], small.y[:60]), 60, 2, None, 0)
    data = Validation(examples, examples)
    trial = next(
        trials.laplace(trials.Setting(small.model, output, *2 * [None], training, data, 2, 0))
    )
    place = [x is trial.engine.network.prior_precision for x in trial.engine.network.variables]
    priors = [float(state[place.index(True)]) for state in trial.states]
    np.testing.assert_allclose(np.divide(priors, priors[0]), trials.PRIOR_FACTORS, rtol=1e-5)
    trial.try_states(data, output)
    nll = [output.best_nll(trial.engine.draw(x, examples.x), examples.y) for x in trial.states]
    assert trial.nll == min(nll) < max(nll)
    assert trial.best is trial.states[np.argmin(nll)]
