"""The likelihood that a calibration takes from a loss."""

import keras

from tests.calibration.tools import LOGITS, compiled
from tfp_ibnn.likelihoods import Point
from tfp_ibnn.likelihoods.infer import likelihood_for_calibration


def test_loss_of_a_function_or_a_list():
    for loss in ("mse", keras.losses.mean_squared_error, ["mse"], keras.losses.MeanSquaredError()):
        output, _ = likelihood_for_calibration(compiled(loss, 2), None)
        assert (type(output), output.size) == (Point, 2)
    assert likelihood_for_calibration(compiled("mse"), LOGITS)[0].from_logits
