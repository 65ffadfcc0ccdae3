"""What each effort tries, and what the next one might gain."""

from collections.abc import Mapping, Sequence

from tfp_ibnn.calibration.fine_tuned import fine_tuned, gaussian
from tfp_ibnn.calibration.fresh import ensembles, swag_on_the_way, trained_with_noise
from tfp_ibnn.calibration.trials import Method
from tfp_ibnn.calibration.untrained import (
    as_it_is,
    given,
    laplace_of_all_weights,
    laplace_of_the_last_layer,
    mc_dropout,
)
from tfp_ibnn.calibration.untrained_noise import mc_batch_norm, noise

METHODS: Mapping[str, Sequence[Method]] = {
    "seconds": (
        as_it_is,
        given,
        mc_dropout,
        mc_batch_norm,
        noise,
        laplace_of_the_last_layer,
    ),
    "minutes": (fine_tuned, gaussian, laplace_of_all_weights),
    "trainings": (ensembles, swag_on_the_way, trained_with_noise),
}
"""The methods of each effort, which come on top of those before; a new method is one more."""

GAINS = {
    "seconds": (
        "effort='minutes' would also fine-tune it, which has helped networks that were trained at "
        "a constant learning rate (docs/calibrate.md)."
    ),
    "minutes": (
        "effort='trainings' would also train ensembles, which cost more passes per prediction "
        "(docs/calibrate.md)."
    ),
}
"""What the effort after each one might gain, in a sentence."""


def up_to(effort: str) -> list[str]:
    """Return the efforts that one includes, itself last."""
    names = list(METHODS)
    return names[: names.index(effort) + 1]
