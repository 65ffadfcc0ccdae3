"""What finished predictions give without more training: a temperature, and their average."""

from collections.abc import Sequence

import keras
import numpy as np

from tfp_ibnn.prediction.temperature import TemperatureScaling

__all__ = ["average", "cross_fit", "fit_temperature"]


def fit_temperature(probabilities: np.ndarray, labels: np.ndarray) -> TemperatureScaling:
    """Return temperature scaling fitted to predictions; it takes predictions as its input.

    Args:
        probabilities: class probabilities, (examples, classes).
        labels: classes, (examples,).

    Example:
        >>> import numpy as np, tfp_ibnn as ibnn
        >>> overconfident = np.array([[0.9, 0.1], [0.9, 0.1], [0.9, 0.1], [0.9, 0.1]])
        >>> scaling = ibnn.prediction.fit_temperature(overconfident, np.array([0, 0, 0, 1]))
        >>> bool(scaling.temperature > 1)
        True
    """
    inputs = keras.Input(np.shape(probabilities)[1:])
    identity = keras.Model(inputs, keras.layers.Identity()(inputs))
    return TemperatureScaling(identity, from_logits=False).fit(probabilities, labels)


def cross_fit(probabilities: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, list[float]]:
    """Return predictions at temperatures fitted to other examples, and the two temperatures.

    Every second example has the temperature that was fitted to the others, and these have the one
    fitted to those: for models without held-out data.

    Args:
        probabilities: class probabilities, (examples, classes).
        labels: classes, (examples,).
    """
    scaled, temperatures = np.empty_like(probabilities), []
    for half in (0, 1):
        model = fit_temperature(probabilities[1 - half :: 2], labels[1 - half :: 2])
        temperatures.append(float(model.temperature))
        scaled[half::2] = keras.ops.convert_to_numpy(model(probabilities[half::2]))
    return scaled, temperatures


def average(predictions: Sequence[np.ndarray]) -> np.ndarray:
    """Return the prediction of an ensemble: the mean of its members' class probabilities.

    Args:
        predictions: one array (examples, classes) per member.
    """
    shapes = {np.shape(prediction) for prediction in predictions}
    if len(shapes) != 1:
        raise ValueError(
            "`predictions` must hold arrays of one shape, (examples, classes), at least one; got "
            f"the shapes {sorted(shapes)}."
        )
    return np.mean(predictions, axis=0)
