"""TensorFlow's operations that the converter to ONNX lacks, by operations that ONNX has."""

from collections.abc import Callable
from typing import Any

import numpy as np


class _Formula:
    """Operations of ONNX in place of an operation of TensorFlow.

    Args:
        graph: the graph of the converter.
        node: what is replaced; the first operations take its inputs.
        to_numpy: returns the type in NumPy for one of ONNX.
    """

    def __init__(self, graph: Any, node: Any, to_numpy: Callable[[int], Any]) -> None:
        self._graph = graph
        self._node = node
        self._type = graph.get_dtype(node.input[0])
        self._number = to_numpy(self._type)
        self._count = 0

    def constant(self, value: float) -> str:
        """Return a number as a tensor of the type of the inputs."""
        array = np.array(value, self._number)
        return self._graph.make_const(self._name(), array).output[0]

    def __call__(self, operation: str, *inputs: str) -> str:
        """Return the tensor that an operation of ONNX makes of others."""
        return self._graph.make_node(operation, list(inputs), name=self._name()).output[0]

    def finish(self, result: str) -> None:
        """Let a tensor take the place of the replaced one."""
        node = self._node
        shape = self._graph.get_shape(node.output[0])
        self._graph.remove_node(node.name)
        self._graph.make_node(
            "Identity",
            [result],
            name=node.name,
            outputs=node.output,
            shapes=[shape],
            dtypes=[self._type],
        )

    def _name(self) -> str:
        self._count += 1
        return f"{self._node.name}_tfp_ibnn_{self._count}"


def _erfc(of: _Formula, x: str) -> str:
    """Return 1 - erf(x)."""
    return of("Sub", of.constant(1), of("Erf", x))


def _log1p(of: _Formula, x: str) -> str:
    """Return log(1 + x) without the rounding of 1 + x, by Kahan's correction near 0.

    With u = 1 + x rounded, it is x log(u) / (u - 1), and x where u = 1.
    """
    one = of.constant(1)
    u = of("Add", one, x)
    logarithm = of("Log", u)
    ratio = of("Div", x, of("Sub", u, one))
    corrected = of("Mul", logarithm, ratio)
    near_0 = of("Where", of("Equal", u, one), x, corrected)
    is_near = of("Less", of("Abs", x), one)
    return of("Where", is_near, near_0, logarithm)


def _tanh_grad(of: _Formula, y: str, upstream: str) -> str:
    """Return upstream (1 - y^2), with y = tanh(x)."""
    slope = of("Sub", of.constant(1), of("Mul", y, y))
    return of("Mul", upstream, slope)


def _sigmoid_grad(of: _Formula, y: str, upstream: str) -> str:
    """Return upstream y (1 - y), with y = sigmoid(x)."""
    rest = of("Sub", of.constant(1), y)
    return of("Mul", upstream, of("Mul", y, rest))


def _relu_grad(of: _Formula, upstream: str, x: str) -> str:
    """Return upstream where x > 0, else 0."""
    zero = of.constant(0)
    return of("Where", of("Greater", x, zero), upstream, zero)


def _softplus_grad(of: _Formula, upstream: str, x: str) -> str:
    """Return upstream sigmoid(x)."""
    return of("Mul", upstream, of("Sigmoid", x))


def _elu_grad(of: _Formula, upstream: str, y: str) -> str:
    """Return upstream where y > 0, else upstream (y + 1), with y = elu(x)."""
    below = of("Mul", upstream, of("Add", y, of.constant(1)))
    return of("Where", of("Greater", y, of.constant(0)), upstream, below)


_FORMULAS: dict[str, Callable[..., str]] = {
    "Erfc": _erfc,
    "Log1p": _log1p,
    "TanhGrad": _tanh_grad,
    "SigmoidGrad": _sigmoid_grad,
    "ReluGrad": _relu_grad,
    "SoftplusGrad": _softplus_grad,
    "EluGrad": _elu_grad,
}


def handlers(to_numpy: Callable[[int], Any]) -> dict[str, tuple[Callable[..., None], list]]:
    """Return what the converter takes as `custom_op_handlers`.

    Args:
        to_numpy: returns the type in NumPy for one of ONNX.

    Returns:
        By the names of operations, a function and its further arguments, of which there are none.
    """
    return {name: (_handler(formula, to_numpy), []) for name, formula in _FORMULAS.items()}


def _handler(formula: Callable[..., str], to_numpy: Callable[[int], Any]) -> Callable[..., None]:
    """Return a function that replaces an operation in a graph of the converter."""

    def replace(graph: Any, node: Any, *_: Any) -> None:
        of = _Formula(graph, node, to_numpy)
        of.finish(formula(of, *node.input))

    return replace
