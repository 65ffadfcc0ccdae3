"""Any distribution of TensorFlow Probability."""

from collections.abc import Callable
from typing import Any

from keras import ops

from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.layers.heads import log_prob
from tfp_ibnn.likelihoods.numbers import Numbers


class Distribution(Numbers):
    """A TFP distribution of the targets, which a function makes from the outputs.

    A prediction keeps all outputs, as `parameters`: the loss is minus the log-density under the
    equal mixture of all draws' distributions.

    Args:
        make: the function, as for `layers.DistributionNLL`.
    """

    needs_all_draws = True

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def draws(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means and the variances."""
        distribution = self.make(_merged(outputs))
        try:
            mean = distribution.mean()
            variance = distribution.variance()
        except NotImplementedError:
            raise ValueError(
                f"A {type(distribution).__name__} has no mean and variance that TFP knows."
            ) from None
        draws, examples, *_ = ops.shape(outputs)
        sizes = (draws, examples, *ops.shape(mean)[1:])
        return ops.reshape(mean, sizes), ops.reshape(variance, sizes)

    def interval(self, draws: Tensor, within: Tensor, level: float) -> tuple[Tensor, Tensor]:
        raise ValueError("An `interval` is not for TFP distributions: use their `parameters`.")

    def of_all_draws(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return the `parameters` (examples, draws, ...), the outputs themselves."""
        return {"parameters": ops.moveaxis(outputs, 0, 1)}

    def loss(self, y_true: Any, prediction: dict[str, Tensor]) -> Tensor:
        target, _ = self.pair(y_true, prediction)
        parameters = prediction["parameters"]
        outputs = ops.moveaxis(parameters, 1, 0)
        count = ops.shape(outputs)[0]
        sizes = ops.shape(target)
        targets = ops.broadcast_to(target, (count, *sizes))
        targets = _merged(targets)
        outputs = _merged(outputs)
        distribution = self.make(outputs)
        densities = log_prob(distribution, targets, outputs)
        positions = ops.shape(densities)[1:]
        densities = ops.reshape(densities, (count, -1, *positions))
        log_count = ops.log(ops.cast(count, densities.dtype))
        return log_count - ops.logsumexp(densities, axis=0)


def _merged(values: Tensor) -> Tensor:
    """Return values with draws and examples on one axis, as in training, where there is one."""
    positions = ops.shape(values)[2:]
    return ops.reshape(values, (-1, *positions))
