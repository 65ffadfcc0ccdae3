"""What a stochastic model keeps track of while it trains."""

from typing import Any

import keras
from keras import ops

from tfp_ibnn import noise
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.layers.base import StochasticLayer


class TrainSizeCheck(keras.callbacks.Callback):
    """Compares `train_size` with the examples of the first epoch, at no cost in the steps."""

    _is_open = True
    _steps = 0

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # For data of unknown length; JAX may be late with the end of a batch.
        self._steps = batch + 1

    def on_epoch_end(self, *_: Any) -> None:
        steps = self.params["steps"] or self._steps
        if self._is_open and steps and not self.model.stop_training:
            self.model._check_train_size(steps)
        self._is_open = False

    on_test_begin = on_epoch_end  # validation resets the metrics


class LossPart(keras.metrics.Mean):
    """The mean of a part of the loss; a loop that updates all metrics with targets skips it."""

    def update_state(self, *_: Any, **__: Any) -> None:
        """Do nothing: see `record`."""

    def record(self, value: Tensor, examples: Any) -> None:
        """Add the value of a batch.

        Args:
            value: a scalar, the mean over the examples.
            examples: how many there are.
        """
        super().update_state(value, sample_weight=examples)


def first_bad(forward_pass: noise.Pass, layers: list[StochasticLayer]) -> Tensor:
    """Return which of z and KL, layer by layer, is the first that is not finite.

    Args:
        forward_pass: a pass in which the layers have drawn.
        layers: the stochastic layers of a model, in order.

    Returns:
        An integer, from 1 for the z of the first layer on; 0 if all are finite.
    """
    numbers = [0.0]
    for layer in layers:
        numbers.append(_sum(forward_pass.recall(layer)))
        numbers.append(forward_pass.kl_by_layer.get(layer, 0.0))
    numbers = [ops.cast(number, "float32") for number in numbers]
    is_finite = ops.isfinite(ops.stack(numbers))
    is_bad = ops.logical_not(is_finite)
    return ops.argmax(is_bad)


def _sum(latent: Any) -> Tensor | float:
    """Return a number that is finite if a latent is.

    With noise at each position z is large; one example shows what the weights do.
    """
    total = 0
    for part in keras.tree.flatten(latent):
        if part is not None:
            total = total + ops.sum(part if len(part.shape) == 2 else part[:1])
    return total
