"""The symmetries of a network: different weights that give the same function."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from keras.layers import Dense
from scipy.optimize import linear_sum_assignment

from tfp_ibnn.conversion.graph import Graph
from tfp_ibnn.likelihoods.numbers import finite_numbers
from tfp_ibnn.weights.features import check_network

_PROBE = np.outer(np.geomspace(0.01, 100, 30), [1, -1]).astype("float32")
_BALANCING_SWEEPS = 100
_MATCHING_SWEEPS = 10
_TINY = 1e-60
_IGNORED = ("Dropout", "GaussianHead")  # layers without weights


def canonical(model: Any, draws: Any) -> np.ndarray:
    """Return draws of all weights, each as the copy of it that is close to the first draw.

    Copies give the same function: units are permuted; negated if the activation is odd (tanh); and
    rescaled if it is homogeneous (relu), so that what comes in and goes out has equal norms, the
    likeliest under a Gaussian prior. Costs O(units^3) per draw.

    Args:
        model: a chain of Dense layers, each used once; Dropout between them is allowed.
        draws: (..., size), flat values of all weights in the order of `model.weights`.

    Returns:
        The draws in float64, of the same shape.

    Raises:
        ValueError: if the model is not such a chain, or the draws do not fit it.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> model = keras.Sequential([keras.Input((1,)), *map(keras.layers.Dense, (1, 1))])
        >>> ibnn.diagnostics.canonical(model, [[2, 0, 2, 0], [-1, 0, -9, 0]])[1].tolist()
        [3.0, 0.0, 3.0, 0.0]
    """
    dense_layers = _dense_chain(model)
    ends = np.cumsum([layer.count_params() for layer in dense_layers])
    rows = checked_rows(draws, ends[-1], "draws")
    hidden_layers = _hidden_layers(dense_layers, np.split(rows, ends[:-1], axis=1))
    homogeneous = [layer for layer in hidden_layers if layer.is_homogeneous]
    # One layer is balanced by the first sweep; neighbors change each other's norms.
    for _ in range(_BALANCING_SWEEPS):
        for layer in homogeneous:
            layer.balance()
    for row in range(len(rows)):
        _match_to_first(hidden_layers, row)
    return rows.reshape(np.shape(draws))


def checked_rows(values: Any, size: int, name: str) -> np.ndarray:
    """Return a copy of values (..., size) in float64 as rows, or raise.

    Args:
        values: array of finite numbers, whose last axis has the given size.
        size: how many numbers a row must have.
        name: of the argument, for errors.

    Returns:
        Rows (N, size), N at least 1.
    """
    if not np.size(values):
        raise ValueError(f"`{name}` must be at least one row of {size} numbers; got none.")
    copied = np.array(values, "float64")
    last_axis = copied.shape[-1:]
    return finite_numbers(copied.reshape(-1, *last_axis), size, f"`{name}`")


class _HiddenLayer(NamedTuple):
    """The units of a hidden layer in all draws: views, which are changed in place.

    Attributes:
        incoming: (draws, inputs + 1, units), the kernel, whose last row is the bias.
        outgoing: (draws, units, outputs), the next layer's kernel.
        is_homogeneous: whether f(c x) = c f(x) for c > 0.
        is_odd: whether f(-x) = -f(x).
    """

    incoming: np.ndarray
    outgoing: np.ndarray
    is_homogeneous: bool
    is_odd: bool

    def balance(self) -> None:
        """Rescale each unit so that its incoming and outgoing weights have equal norms."""
        squares_in = np.sum(self.incoming**2, axis=1)
        squares_out = np.sum(self.outgoing**2, axis=2)
        squares_in = np.maximum(squares_in, _TINY)
        ratio = squares_out / squares_in
        ratio = ratio + _TINY
        by_input = ratio[:, None, :]
        by_output = ratio[:, :, None]
        self.incoming[...] *= by_input**0.25
        self.outgoing[...] *= by_output**-0.25

    def match(self, row: int, *, with_outgoing: bool) -> None:
        """Permute and negate the units of a draw so that they are most like those of the first."""
        incoming = self.incoming[row]
        outgoing = self.outgoing[row]
        first_incoming = self.incoming[0]
        products = first_incoming.T @ incoming
        if with_outgoing:
            first_outgoing = self.outgoing[0]
            products += first_outgoing @ outgoing.T
        gain = np.abs(products) if self.is_odd else products
        pairs = linear_sum_assignment(gain, maximize=True)
        _, order = pairs
        is_negated = self.is_odd & (products[pairs] < 0)
        sign = np.where(is_negated, -1.0, 1.0)
        self.incoming[row] = incoming[:, order] * sign
        outgoing = outgoing[order]
        self.outgoing[row] = outgoing * sign[:, None]


def _dense_chain(model: Any) -> list[Dense]:
    """Return the Dense layers of a model that is a chain of them, or raise."""
    check_network(model)
    layers = Graph(model, lambda _: True).layers
    dense = [layer for layer in layers if type(layer) is Dense]
    ignored = [layer for layer in layers if type(layer).__name__ in _IGNORED]
    is_chain = len(dense) + len(ignored) == len(layers)
    is_used_once = len(set(dense)) == len(dense)
    if not dense or not is_chain or not is_used_once:
        raise ValueError(
            "`model` must be a chain of Dense layers, each used once; got "
            f"{', '.join(type(layer).__name__ for layer in layers)}."
        )
    return dense


def _hidden_layers(dense_layers: list[Dense], parts: list[np.ndarray]) -> list[_HiddenLayer]:
    """Return the hidden layers, by the weights (draws, numbers) of each Dense layer."""
    kernels = []
    for layer, part in zip(dense_layers, parts, strict=True):
        # The bias is a kernel's last row; a unit is a column of it, and a row of the next one.
        kernels.append(part.reshape(len(part), -1, layer.units))
    hidden_layers = []
    for layer, (incoming, following) in zip(dense_layers, pairwise(kernels), strict=False):
        is_homogeneous, is_odd = _symmetries(layer.activation)
        hidden_layer = _HiddenLayer(
            incoming,
            outgoing=following[:, : layer.units],
            is_homogeneous=is_homogeneous,
            is_odd=is_odd,
        )
        hidden_layers.append(hidden_layer)
    return hidden_layers


def _symmetries(activation: Callable[..., Any]) -> tuple[bool, bool]:
    """Return whether an activation is homogeneous, and whether it is odd, at a probe.

    One that mixes units, such as softmax, is neither.
    """
    at_probe = activation(_PROBE)
    for column in range(_PROBE.shape[1]):
        tripled = 3 * _PROBE
        tripled[:, column] = _PROBE[:, column]
        others_tripled = activation(tripled)
        if not np.allclose(at_probe[:, column], others_tripled[:, column]):
            return False, False
    doubled = activation(2.0 * _PROBE)
    negated = activation(-1.0 * _PROBE)
    is_homogeneous = np.allclose(doubled, 2 * at_probe)
    is_odd = np.allclose(negated, -at_probe)
    return is_homogeneous, is_odd


def _match_to_first(hidden_layers: list[_HiddenLayer], row: int) -> None:
    """Bring the units of a draw into the order of the first draw, layer by layer."""
    for sweep in range(_MATCHING_SWEEPS):
        for layer in hidden_layers:
            # In the first sweep, the units of the next layer are not in order yet.
            layer.match(row, with_outgoing=sweep > 0)
