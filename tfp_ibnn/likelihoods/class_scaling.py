"""Scalings with parameters for each class: vector scaling, and isotonic regression."""

import dataclasses
import math

import numpy as np
from scipy.optimize import isotonic_regression, minimize
from scipy.special import log_softmax, softmax

from tfp_ibnn.likelihoods.temperature import DOUBT, best_temperature

CORNERS = 512
"""The number of corners that each map of `Isotonic` is stored with, a power of two."""

SMALLEST_LOG_P = math.log(np.finfo("float32").tiny)
"""In place of the logarithm of 0."""


class ClassScaling:
    """What changes the probabilities of each class by parameters of its own."""

    def probabilities(self, log_p: np.ndarray) -> np.ndarray:
        """Return the scaled probabilities.

        Args:
            log_p: log-probabilities up to a constant, (..., classes).
        """
        raise NotImplementedError(f"{type(self).__name__} must define `probabilities`.")

    def __str__(self) -> str:
        return "by class"


@dataclasses.dataclass(frozen=True, eq=False)
class Vector(ClassScaling):
    """A scale and a bias for each class: softmax(scale * log p + bias).

    Args:
        scale: (classes,).
        bias: (classes,), in nats.
    """

    scale: np.ndarray
    bias: np.ndarray

    def probabilities(self, log_p: np.ndarray) -> np.ndarray:
        scaled = self.scale * normalized(log_p) + self.bias
        return softmax(scaled, axis=-1)


@dataclasses.dataclass(frozen=True, eq=False)
class Isotonic(ClassScaling):
    """A rising map of each class's probability, linear between corners; the results add up to 1.

    Args:
        inputs: probabilities at the corners, (maps, `CORNERS`), rising. Two classes have one map,
            for the second of them; otherwise each class has one.
        outputs: what the corners are mapped to, (maps, `CORNERS`).
    """

    inputs: np.ndarray
    outputs: np.ndarray

    def probabilities(self, log_p: np.ndarray) -> np.ndarray:
        p = softmax(log_p, axis=-1)
        of_classes = np.moveaxis(p, -1, 0)
        if len(self.inputs) == 1:
            of_classes = of_classes[1:]
        mapped = []
        for values, inputs, outputs in zip(of_classes, self.inputs, self.outputs, strict=True):
            mapped.append(np.interp(values, inputs, outputs))
        if len(mapped) == 1:
            second = mapped[0]
            mapped = [1 - second, second]
        stacked = np.stack(mapped, axis=-1)
        total = np.sum(stacked, axis=-1, keepdims=True)
        return stacked / total


def normalized(log_p: np.ndarray) -> np.ndarray:
    """Return log-probabilities that are given up to a constant, none below `SMALLEST_LOG_P`."""
    log_p = log_softmax(log_p, axis=-1)
    return np.maximum(log_p, SMALLEST_LOG_P)


def best_vector(log_p: np.ndarray, y: np.ndarray, weight: np.ndarray | None = None) -> Vector:
    """Return the scale a and the bias b of each class with the lowest negative log-likelihood.

        NLL = -mean_i log softmax(a * log p_i + b)[y_i] + DOUBT / N * sum_c [(a_c T - 1)^2 + b_c^2]

    T is the best temperature. The last term pulls towards it, so that a class with few examples
    changes little; it vanishes as N grows. The NLL is convex, so it has only one minimum.

    Args:
        log_p: log-probabilities up to a constant, (examples, classes).
        y: classes (examples,).
        weight: how often each example counts; None is once.
    """
    temperature = best_temperature(log_p[:, None], y, weight, DOUBT)
    log_p = normalized(log_p.astype("float64"))
    features = log_p / temperature
    count, classes = features.shape
    if weight is None:
        weight = np.ones(count)
    loss = _VectorLoss(features, y, weight)
    result = minimize(
        loss,
        loss.start,
        jac=True,
        method="L-BFGS-B",
        options={"gtol": 1e-9, "ftol": 1e-15, "maxiter": 1000},
    )
    scale = result.x[:classes]
    bias = result.x[classes:]
    return Vector(scale / temperature, bias)


class _VectorLoss:
    """The loss of scales and biases, and its gradient.

    Args:
        features: log-probabilities at the best temperature, (examples, classes).
        y: classes (examples,).
        weight: how often each example counts, (examples,).
    """

    def __init__(self, features: np.ndarray, y: np.ndarray, weight: np.ndarray) -> None:
        count, classes = features.shape
        self._features = features
        self._is_label = np.zeros((count, classes))
        self._is_label[np.arange(count), y] = 1
        total = weight.sum()
        self._share = weight[:, None] / total
        self._pull = DOUBT / total
        scales = np.ones(classes)
        biases = np.zeros(classes)
        self.start = np.concatenate([scales, biases])

    def __call__(self, parameters: np.ndarray) -> tuple[float, np.ndarray]:
        scale, bias = np.split(parameters, 2)
        logits = scale * self._features + bias
        log_q = log_softmax(logits, axis=-1)
        q = np.exp(log_q)
        observed = self._is_label * log_q
        nll = -np.sum(self._share * observed)
        # The derivative of the NLL by the logits.
        error = self._share * (q - self._is_label)
        by_example = error * self._features
        of_scale = np.sum(by_example, axis=0)
        of_bias = np.sum(error, axis=0)
        gradient = np.concatenate([of_scale, of_bias])
        distance = parameters - self.start
        squares = distance**2
        penalty = self._pull * np.sum(squares)
        of_penalty = 2 * self._pull * distance
        return nll + penalty, gradient + of_penalty


def best_isotonic(log_p: np.ndarray, y: np.ndarray, weight: np.ndarray | None = None) -> Isotonic:
    """Return the rising maps of least squared error, each of one class against the rest.

    They are those of scikit-learn's `IsotonicRegression(out_of_bounds="clip")` for probabilities
    from 1 / (N + K) to (N + 1) / (N + K), for N examples of K classes (the rule of succession):
    with a probability of 0, the NLL of the first surprise is infinite.

    Args:
        log_p: log-probabilities up to a constant, (examples, classes).
        y: classes (examples,).
        weight: how often each example counts; None is once.
    """
    p = softmax(log_p, axis=-1)
    count, classes = p.shape
    if weight is None:
        weight = np.ones(count)
    total = weight.sum()
    with_pseudocounts = total + classes
    lowest = 1 / with_pseudocounts
    most = total + 1
    highest = most / with_pseudocounts
    inputs = []
    outputs = []
    mapped = [1] if classes == 2 else range(classes)
    for number in mapped:
        is_class = y == number
        corners, fitted = _isotonic_regression(p[:, number], is_class, weight)
        bounded = np.clip(fitted, lowest, highest)
        inputs.append(corners)
        outputs.append(bounded)
    return Isotonic(np.stack(inputs), np.stack(outputs))


def identical_maps(classes: int) -> Isotonic:
    """Return the maps that change nothing, for a number of classes."""
    maps = 1 if classes == 2 else classes
    line = np.linspace(0, 1, CORNERS)
    repeats = (maps, 1)
    both = np.tile(line, repeats)
    return Isotonic(both, both)


def _isotonic_regression(
    p: np.ndarray, is_class: np.ndarray, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the corners of an isotonic regression, (CORNERS,) inputs and outputs.

    Args:
        p: probabilities (examples,).
        is_class: whether each example is of the class.
        weight: how often each example counts, (examples,).
    """
    counts = weight > 0
    p = p[counts]
    weight = weight[counts]
    positive_weight = weight * is_class[counts]
    # Examples of one probability become one, with their mean.
    inputs, place = np.unique(p, return_inverse=True)
    total = np.bincount(place, weight)
    positive = np.bincount(place, positive_weight)
    share = positive / total
    regression = isotonic_regression(share, weights=total)
    fitted = regression.x
    stored = _stored_corners(fitted)
    return inputs[stored], fitted[stored]


def _stored_corners(values: np.ndarray) -> np.ndarray:
    """Return the places (CORNERS,) where a rising map begins or ends to be flat."""
    rises = np.diff(values) != 0
    end = [True]
    after_rise = np.concatenate([end, rises])
    before_rise = np.concatenate([rises, end])
    is_corner = after_rise | before_rise
    corners = np.flatnonzero(is_corner)
    if len(corners) > CORNERS:
        # They are thinned out evenly; both ends stay.
        last = len(corners) - 1
        evenly = np.linspace(0, last, CORNERS)
        places = np.round(evenly).astype(int)
        return corners[places]
    missing = CORNERS - len(corners)
    return np.pad(corners, (0, missing), mode="edge")
