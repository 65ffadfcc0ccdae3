"""What each effort tries, and what the next one has gained where it was measured."""

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

# From results/calibrate/runs.jsonl: test NLLs of 55 runs on eleven networks, five seeds each, of
# "fine-tuned + temperature" less "as it is + temperature", or without a temperature in regressions,
# where that number is the median of the runs and of the runs on a network.
GAINS = {
    "seconds": (
        "effort='minutes' would fine-tune it: in our study that lowered the NLL by 0.0015 nats in "
        "the median run, and by 0.018 to 0.042 on 5 of 11 networks (docs/calibrate.md)."
    ),
    "minutes": (
        "effort='trainings' would train ensembles; our study does not have them yet "
        "(docs/calibrate.md)."
    ),
}
"""What the effort after each one might gain, in a sentence."""


def up_to(effort: str) -> list[str]:
    """Return the efforts that one includes, itself last."""
    names = list(METHODS)
    return names[: names.index(effort) + 1]
