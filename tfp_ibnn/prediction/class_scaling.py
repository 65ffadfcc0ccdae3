"""Scaling of a trained classifier by parameters for each class."""

from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.conversion.wrappers import innermost
from tfp_ibnn.likelihoods.categorical import log_of
from tfp_ibnn.likelihoods.class_scaling import (
    SMALLEST_LOG_P,
    Isotonic,
    Vector,
    best_isotonic,
    best_vector,
    identical_maps,
)
from tfp_ibnn.prediction.scaling import FittedScaling


class _ClassScaling(FittedScaling):
    """A classifier whose outputs are rescaled by parameters for each class.

    Args:
        model: the classifier.
        from_logits: whether it returns logits; None infers it.
        classes: number of classes; None reads it off the graph of the model.
        **kwargs: those of `keras.Model`.
    """

    def __init__(
        self,
        model: keras.Model,
        from_logits: bool | None = None,
        classes: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, from_logits, **kwargs)
        if classes is None:
            classes = _classes_of(model)
        self.classes = checks.positive_integer("classes", classes, least=2)

    def _add_parameter(self, name: str, values: np.ndarray) -> keras.Variable:
        start = keras.initializers.Constant(values)
        return self.add_weight(values.shape, start, name=name, trainable=False, autocast=False)

    def _read(self, outputs: Any) -> tuple[Any, bool]:
        outputs, from_logits = super()._read(outputs)
        found = max(outputs.shape[-1], 2)
        if found != self.classes:
            raise ValueError(
                f"`classes` is {self.classes}, but model {self.model.name!r} has {found}: give "
                f"classes={found}."
            )
        return outputs, from_logits

    def _read_classes(self, outputs: Any) -> tuple[Tensor, bool, bool]:
        """Return outputs (..., classes), whether they are logits, and whether one stood for two."""
        outputs, from_logits = self._read(outputs)
        outputs = ops.cast(outputs, self.variable_dtype)
        is_binary = outputs.shape[-1] == 1
        if is_binary:
            first = ops.zeros_like(outputs) if from_logits else 1 - outputs
            outputs = ops.concatenate([first, outputs], axis=-1)
        return outputs, from_logits, is_binary

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "classes": self.classes}


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class VectorScaling(_ClassScaling):
    """A classifier with a scale and a bias for each class, fitted to validation data.

    Log-probabilities log(p) become scale * log(p) + bias, which are the logits of the output. The
    output has the form of the classifier's: logits, or probabilities. The scales are 1 and the
    biases 0 until `fit` is called. `fit` minimizes the negative log-likelihood, with a pull towards
    the best single temperature that vanishes with more examples. It helps where the errors differ
    from class to class, which `TemperatureScaling` cannot correct; the predicted class may change.
    Reference: Guo et al., arXiv 1706.04599.

    Args:
        model: the classifier, (batch, ...) to (batch, ..., classes), or (batch, ..., 1) for two.
        from_logits: whether it returns logits; None reads it off the activation of the last layer,
            or, for a model with its own `call`, off the loss it is compiled with.
        classes: number of classes; None reads it off the graph of the model.
        **kwargs: those of `keras.Model`.

    Attributes:
        scales: of the classes, a non-trainable weight (classes,).
        biases: of the classes, in nats, a non-trainable weight (classes,).

    Example:
        >>> import keras, numpy as np, tfp_ibnn as ibnn
        >>> rarely_second = keras.Sequential([keras.Input((2,)), keras.layers.Softmax()])
        >>> scaled = ibnn.VectorScaling(rarely_second)
        >>> scaled = scaled.fit(np.zeros((400, 2)), np.arange(400) % 4 == 0)
        >>> scaled.predict(np.zeros((1, 2)), verbose=0).round(2).tolist()  # one of four is second
        [[0.75, 0.25]]
    """

    def __init__(
        self,
        model: keras.Model,
        from_logits: bool | None = None,
        classes: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, from_logits, classes, **kwargs)
        self.scales = self._add_parameter("scales", np.ones(self.classes))
        self.biases = self._add_parameter("biases", np.zeros(self.classes))

    def best(self, log_p: np.ndarray, labels: np.ndarray, weight: np.ndarray) -> Vector:
        return best_vector(log_p, labels, weight)

    def assign(self, parameter: Vector) -> None:
        self.scales.assign(parameter.scale)
        self.biases.assign(parameter.bias)

    def scale(self, outputs: Any) -> Tensor:
        """Return an output of the classifier with the scales and biases applied."""
        outputs, from_logits, is_binary = self._read_classes(outputs)
        log_p = ops.log_softmax(outputs if from_logits else log_of(outputs), axis=-1)
        log_p = ops.maximum(log_p, SMALLEST_LOG_P)
        logits = self.scales * log_p + self.biases
        if is_binary:
            logits = logits[..., 1:] - logits[..., :1]
            return logits if from_logits else ops.sigmoid(logits)
        return logits if from_logits else ops.softmax(logits, axis=-1)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class IsotonicScaling(_ClassScaling):
    """A classifier with a monotone map of each class's probability, fitted to validation data.

    The map of each class is the isotonic regression of that class against the rest; the results
    are divided by their sum. Two classes share one map. The output has the form of the
    classifier's: logits, or probabilities. It is unchanged until `fit` is called. A map is more
    flexible than a temperature, but needs more examples. Each is that of scikit-learn's
    `IsotonicRegression`, kept from 0 and 1 by 1 / (N + classes) for N examples, since otherwise a
    single example could have an infinite NLL. The predicted class may change. Reference: Zadrozny
    and Elkan, Transforming classifier scores into accurate multiclass probability estimates (2002).

    Args:
        model: the classifier, (batch, ...) to (batch, ..., classes), or (batch, ..., 1) for two.
        from_logits: whether it returns logits; None reads it off the activation of the last layer,
            or, for a model with its own `call`, off the loss it is compiled with.
        classes: number of classes; None reads it off the graph of the model.
        **kwargs: those of `keras.Model`.

    Attributes:
        inputs_of_maps: probabilities at the corners of each map, a non-trainable weight (maps,
            512). A map with more corners is thinned out to this number.
        outputs_of_maps: the probabilities they are mapped to, a non-trainable weight.

    Example:
        >>> import keras, numpy as np, tfp_ibnn as ibnn
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Softmax()])
        >>> scaled = ibnn.IsotonicScaling(model)
        >>> scaled = scaled.fit(np.zeros((400, 2)), np.arange(400) % 4 == 0)
        >>> scaled.predict(np.zeros((1, 2)), verbose=0).round(2).tolist()  # one of four is second
        [[0.75, 0.25]]
    """

    def __init__(
        self,
        model: keras.Model,
        from_logits: bool | None = None,
        classes: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, from_logits, classes, **kwargs)
        maps = identical_maps(self.classes)
        self.inputs_of_maps = self._add_parameter("inputs_of_maps", maps.inputs)
        self.outputs_of_maps = self._add_parameter("outputs_of_maps", maps.outputs)

    def best(self, log_p: np.ndarray, labels: np.ndarray, weight: np.ndarray) -> Isotonic:
        return best_isotonic(log_p, labels, weight)

    def assign(self, parameter: Isotonic) -> None:
        self.inputs_of_maps.assign(parameter.inputs)
        self.outputs_of_maps.assign(parameter.outputs)

    def scale(self, outputs: Any) -> Tensor:
        """Return an output of the classifier, mapped."""
        outputs, from_logits, is_binary = self._read_classes(outputs)
        p = ops.softmax(outputs, axis=-1) if from_logits else outputs
        if self.classes == 2:
            second = interpolated(p[..., 1:], self.inputs_of_maps, self.outputs_of_maps)
            p = ops.concatenate([1 - second, second], axis=-1)
        else:
            p = interpolated(p, self.inputs_of_maps, self.outputs_of_maps)
            p = p / ops.sum(p, axis=-1, keepdims=True)
        if not from_logits:
            return p[..., 1:] if is_binary else p
        logits = log_of(p)
        return logits[..., 1:] - logits[..., :1] if is_binary else logits


def interpolated(x: Tensor, inputs: Tensor, outputs: Tensor) -> Tensor:
    """Return piecewise-linear maps of x, constant beyond their first and last corners.

    Args:
        x: (..., maps).
        inputs: the increasing inputs of the corners of each map, (maps, corners); the number of
            corners is a power of two.
        outputs: the outputs at these corners, (maps, corners).
    """
    maps, corners = inputs.shape
    inputs = ops.reshape(inputs, (-1,))
    outputs = ops.reshape(outputs, (-1,))
    first = np.arange(maps, dtype="int32") * corners
    # A binary search for the last corner that is not above x.
    below = ops.zeros_like(x, dtype="int32") + first
    step = corners // 2
    while step:
        middle = below + step
        below = ops.where(ops.take(inputs, middle) <= x, middle, below)
        step //= 2
    below = ops.minimum(below, first + corners - 2)
    left = ops.take(inputs, below)
    width = ops.take(inputs, below + 1) - left
    share = (x - left) / ops.where(width > 0, width, 1)
    share = ops.clip(share, 0, 1)
    low = ops.take(outputs, below)
    return low + share * (ops.take(outputs, below + 1) - low)


def _classes_of(model: keras.Model) -> int:
    """Return the number of classes of a model with a graph, or raise."""
    graph = functional_graph(innermost(model))
    if graph is None or len(graph.outputs) != 1:
        raise ValueError(
            f"`classes` is unknown: model {model.name!r} has no graph with one output. Give the "
            "number of classes, such as classes=10."
        )
    return max(graph.outputs[0].shape[-1], 2)
