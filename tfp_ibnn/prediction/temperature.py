"""Temperature scaling of a trained classifier."""

import warnings
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.likelihoods import Categorical, Labels
from tfp_ibnn.likelihoods.temperature import BOUNDS, best_temperature
from tfp_ibnn.prediction.scaling import FittedScaling

_REASONS = {
    BOUNDS[0]: "every prediction is right: the colder, the better",
    BOUNDS[1]: "the predictions are no better than chance",
}
"""Why a fitted temperature is at a bound."""


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class TemperatureScaling(FittedScaling):
    """A classifier whose logits z are divided by a temperature T fitted to validation data.

    The output is z / T where the classifier returns logits, and softmax(log(p) / T) where it
    returns probabilities p. The predicted class stays the same; T > 1 makes it less confident. T is
    1 until `fit` is called. Of a `MonteCarlo` the "mean" is scaled; that of a scaled model averages
    scaled draws. Reference: Guo et al., arXiv 1706.04599.

    Args:
        model: the classifier, (batch, ...) to (batch, ..., classes), or (batch, ..., 1) for two.
        from_logits: whether it returns logits; None asks the activation of its last layer, or of a
            model with a `call` of its own the loss it is compiled with.
        **kwargs: those of `keras.Model`.

    Attributes:
        temperature: T, a weight that training leaves alone.

    Example:
        >>> import keras, numpy as np, tfp_ibnn as ibnn
        >>> too_sure = keras.Sequential([keras.Input((2,)), keras.layers.Rescaling(10.0)])
        >>> scaled = ibnn.TemperatureScaling(too_sure, from_logits=True)
        >>> x = np.eye(2)[[0, 0, 0, 0, 1, 1, 1, 1]]
        >>> scaled = scaled.fit(x, np.array([0, 0, 0, 1, 1, 1, 1, 0]))
        >>> round(float(scaled.temperature), 2)  # right three times of four: 10 / T = log 3
        9.1
    """

    def __init__(self, model: keras.Model, from_logits: bool | None = None, **kwargs: Any) -> None:
        super().__init__(model, from_logits, **kwargs)
        self.temperature = self.add_weight(
            (), "ones", name="temperature", trainable=False, autocast=False
        )

    def scale(self, outputs: Any) -> Tensor:
        """Return an output of the classifier at the temperature."""
        outputs, from_logits = self._read(outputs)
        outputs = ops.cast(outputs, self.temperature.dtype)
        is_binary = outputs.shape[-1] == 1
        likelihood = Labels(from_logits) if is_binary else Categorical(from_logits)
        return likelihood.scaled(outputs, self.temperature)

    def best(self, log_p: np.ndarray, labels: np.ndarray, weight: np.ndarray) -> float:
        """Return the temperature of the least negative log-likelihood; warn if it is at a bound.

        Args:
            log_p: log-probabilities of the classifier, (examples, classes).
            labels: classes (examples,).
            weight: how often each example counts, (examples,).
        """
        temperature = best_temperature(log_p[:, None], labels, weight)
        if temperature in _REASONS:
            # From `fit`, the warning points at the line that calls it.
            warnings.warn(
                f"The temperature stops at {temperature:g}, because on these data "
                f"{_REASONS[temperature]}. Fit it to more data that the model was not trained on.",
                stacklevel=3,
            )
        return temperature

    def assign(self, parameter: float) -> None:
        self.temperature.assign(parameter)
