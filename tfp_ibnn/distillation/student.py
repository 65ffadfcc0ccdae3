"""The student: a network with two heads, and their initial values."""

from typing import Any, NamedTuple

import keras
from keras import layers, ops

from tfp_ibnn._core import checks, keras_internals
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.conversion.convert import without_uncertainty
from tfp_ibnn.conversion.copying import copy_of
from tfp_ibnn.conversion.graph import Graph, extended, functional_graph
from tfp_ibnn.layers.heads import GaussianHead
from tfp_ibnn.likelihoods import (
    Beta,
    Categorical,
    Dirichlet,
    Gaussian,
    Labels,
    Likelihood,
    Point,
    SecondOrder,
    SpreadGaussian,
    SpreadPoint,
)
from tfp_ibnn.likelihoods.categorical import log_of
from tfp_ibnn.likelihoods.last_layer import output_call, own_activation
from tfp_ibnn.prediction.monte_carlo import MonteCarlo

_KINDS: dict[type[Likelihood], type[SecondOrder]] = {
    Labels: Beta,
    Categorical: Dirichlet,
    Gaussian: SpreadGaussian,
    SpreadGaussian: SpreadGaussian,
    Point: SpreadPoint,
    SpreadPoint: SpreadPoint,
}
"""The likelihood of a student, by that of its teacher."""


class Student(NamedTuple):
    """A network to be trained, and what its outputs mean."""

    network: keras.Model
    likelihood: SecondOrder
    second_head: layers.Dense | None = None  # None if the network has its own
    is_copy: bool = False  # of the teacher's network

    def begin(self, teacher: dict[str, Tensor]) -> None:
        """Set the second head to the constant that fits a teacher's prediction best.

        Args:
            teacher: the dict that `MonteCarlo` returns for some examples.
        """
        if self.second_head is not None:
            start = self.likelihood.start(teacher)
            self.second_head.bias.assign(ops.cast(start, self.second_head.bias.dtype))


def student_kind(likelihood: Likelihood) -> type[SecondOrder]:
    """Return the likelihood of a student for a teacher with this one, or raise."""
    for kind, of_student in _KINDS.items():
        if isinstance(likelihood, kind):
            return of_student
    raise ValueError(
        "`teacher` must predict one output of classes, labels or numbers; its likelihood is "
        f"{type(likelihood).__name__}. Distill several outputs one at a time: "
        "keras.Model(model.inputs, output)."
    )


def copied_student(teacher: MonteCarlo, likelihood: SecondOrder) -> Student:
    """Return a copy of the teacher's network at its posterior mean, with a second head.

    Args:
        teacher: the one whose network is copied.
        likelihood: that of the student.
    """
    network = copy_of(without_uncertainty(teacher))
    graph = functional_graph(network)
    if graph is None:
        raise ValueError(
            f"The network of `teacher`, {network.name!r}, has its own `call`: give `student`, a "
            "Keras model with the same inputs that returns features (N, d)."
        )
    features = _features(graph)
    first = _logits(network, teacher.likelihood)
    student = _with_second_head(network, first, features, likelihood)
    return student._replace(is_copy=True)


def given_student(network: Any, likelihood: SecondOrder) -> Student:
    """Return a user's network, with two heads if its outputs are features.

    Args:
        network: a built Keras model.
        likelihood: that of the student.
    """
    if not isinstance(network, keras.Model) or not network.built:
        raise ValueError(f"`student` must be a built Keras model; got {network!r}.")
    graph = functional_graph(network)
    if graph is None:
        return Student(network, likelihood)
    if len(graph.outputs) != 1:
        raise ValueError(f"`student` must have one output; got {len(graph.outputs)}.")
    end = own_activation(output_call(network)[0])
    if end in ("softmax", "sigmoid"):
        raise ValueError(
            f"`student`, {network.name!r}, ends in a {end}: give it without its last layer, "
            f"so that it returns features, or with {likelihood.width} outputs and no activation."
        )
    (outputs,) = graph.outputs
    if outputs.shape[-1] == likelihood.width:
        return Student(network, likelihood)
    features = ops.cast(outputs, checks.full_precision(outputs.dtype))
    first = layers.Dense(likelihood.first_size, dtype=features.dtype)(features)
    if isinstance(likelihood, SpreadGaussian):
        first = GaussianHead(dtype=features.dtype)(first)
    return _with_second_head(graph, first, features, likelihood)


def _with_second_head(
    network: keras.Model, first: Tensor, features: Tensor, likelihood: SecondOrder
) -> Student:
    """Return a student whose second head, on features, is constant at first."""
    dtype = checks.full_precision(first.dtype)
    head = layers.Dense(likelihood.head_size, kernel_initializer="zeros", dtype=dtype)
    outputs = likelihood.joined(first, head(features))
    student = extended(network, outputs, f"{network.name}_distilled")
    return Student(student, likelihood, head)


def _features(graph: keras.Model) -> Tensor:
    """Return the input of the last layer with weights; if its positions differ, the outputs."""
    (outputs,) = graph.outputs
    layer, node = keras_internals.origin(outputs)
    while len(node.input_tensors) == 1:
        (tensor,) = node.input_tensors
        if isinstance(layer, keras.Model):
            break
        if getattr(layer, "weights", None):
            has_positions = tensor.shape[:-1] == outputs.shape[:-1]
            return tensor if has_positions else outputs
        layer, node = keras_internals.origin(tensor)
    return outputs


def _logits(network: keras.Model, likelihood: Likelihood) -> Tensor:
    """Return the logits of a classifier, whose last activation is removed, or the numbers."""
    (outputs,) = functional_graph(network).outputs
    if not likelihood.is_classifier or likelihood.from_logits:
        return outputs
    layer, node = output_call(network)
    end = own_activation(layer)
    is_called_once = Graph(network, lambda _: True).layers.count(layer) == 1
    if end in ("softmax", "sigmoid") and is_called_once and hasattr(layer, "activation"):
        layer.activation = keras.activations.linear
        return outputs
    p = ops.cast(outputs, checks.full_precision(outputs.dtype))
    return log_of(p) - log_of(1 - p) if isinstance(likelihood, Labels) else log_of(p)
