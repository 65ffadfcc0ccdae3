"""The loss of a compiled model, divided by the negative log-likelihood of one example.

Keras averages over all answers of a batch: over examples, and over the positions or numbers of each
example. The ELBO sums over the answers of an example, so the KL is divided by their number as well.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import losses, ops

from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.keras_losses import OutputLoss, output_losses
from tfp_ibnn.layers.heads import DistributionNLL, GaussianNLL
from tfp_ibnn.layers.quantiles import PinballLoss, pinball_loss

# Keras's losses, by what one negative log-likelihood belongs to.
_BY_EXAMPLE = (losses.ctc,)
_BY_POSITION = (
    losses.categorical_crossentropy,
    losses.categorical_focal_crossentropy,
    losses.kl_divergence,
    losses.sparse_categorical_crossentropy,
)
_BY_NUMBER = (losses.binary_crossentropy, losses.binary_focal_crossentropy, losses.poisson)

_POINT_FACTORS: dict[Callable[..., Any], Callable[[float], float]] = {
    losses.mean_squared_error: lambda s: 2 * s**2,
    losses.mean_squared_logarithmic_error: lambda s: 2 * s**2,
    losses.huber: lambda s: s**2,
    losses.log_cosh: lambda s: s**2,
    losses.mean_absolute_error: lambda s: s,
    losses.mean_absolute_percentage_error: lambda s: 100 * s,
    pinball_loss: lambda s: s / 2,
}
"""The loss of a number over its NLL, up to a constant, if the loss leaves the noise's scale open.

The noise is Gaussian, or Laplacian for absolute errors, and relative for percentages. The mean
pinball loss counts like half the absolute error, which it is at the level 0.5: the mean over the
levels of the log-densities of asymmetric Laplace distributions, whose scale is s / 2.
"""

_TOLERANCE = 0.01  # between outputs, so that `loss_weights` rounded to three digits pass
_ROWS = 32  # Keras's own batch size


class _Term(NamedTuple):
    """The loss of one output, `scale` times the negative log-likelihood of an example's answers."""

    place: str | int | None
    weight: float
    scale: float


def kl_scale(
    parts: Sequence[OutputLoss], noise_scale: float | None, copies: int = 1
) -> float | None:
    """Return Keras's loss divided by the negative log-likelihood of one example.

    With symbolic outputs, None if that depends on the data. Warns where it has to assume something.

    Args:
        parts: the losses of all outputs.
        noise_scale: the scale of the targets' noise, for losses that leave it open; None is 1.
        copies: number of copies of each example in a training batch.

    Returns:
        The factor of the KL in addition to beta / train_size.

    Raises:
        ValueError: If a `noise_scale` is given for losses that do not leave it open.
    """
    open_parts = [part for part in parts if _leaves_noise_open(part.loss)]
    if noise_scale is not None and not open_parts:
        names = ", ".join(part.loss.name for part in parts)
        raise ValueError(
            "`noise_scale` is for losses that leave the noise of the targets open, such as 'mse'; "
            f"got the loss {names!r}. Leave it out."
        )
    answers = [_answers(part, copies) for part in parts]
    if None in answers or any(map(_needs_values, parts)):
        return None
    if open_parts and noise_scale is None:
        _warn_of_open_noise(open_parts[0].loss)
    _warn_of_unknown(parts, answers)
    terms = [
        _term(part, count, noise_scale or 1.0)
        for part, count in zip(parts, answers, strict=True)
        if part.weight > 0
    ]
    scales = [term.weight * term.scale for term in terms]
    if not scales:
        return 1.0
    if min(scales) < (1 - _TOLERANCE) * max(scales):
        _warn_of_tempering(terms)
    # The largest, so that no output counts for more than its likelihood.
    return max(scales)


def _term(part: OutputLoss, answers: float, noise_scale: float) -> _Term:
    """Return the part of an output in the loss.

    Args:
        part: the loss of the output.
        answers: how many log-likelihoods of an example it averages over.
        noise_scale: the scale of the targets' noise, for a loss that leaves it open.
    """
    point_factor = _POINT_FACTORS.get(_function(part.loss))
    factor = 1.0 if point_factor is None else point_factor(noise_scale)
    return _Term(part.place, part.weight, factor / answers)


def scale_of(model: keras.Model) -> float | None:
    """Return `kl_scale` for any model of one output, or None if its shape does not determine it."""
    graph = model
    if isinstance(model, keras.Sequential):
        graph = keras_internals.functional_behind(model)
    if not (model.compiled and keras_internals.is_functional(graph)):
        return None
    parts = output_losses(model, graph.output, graph.output)
    if len(parts) != 1 or _leaves_noise_open(parts[0].loss):
        return None
    answers = _answers(parts[0], copies=1)
    return None if answers is None else parts[0].weight / answers


def first_batch(arguments: dict[str, Any]) -> tuple[Any, Any] | None:
    """Return inputs and targets of one batch of what `fit` was given, or None if it has none.

    From arrays it takes examples at equal distances. A generator in `arguments` is replaced by one
    that starts with the batch that was taken from it.

    Args:
        arguments: of `fit`, by name; changed if `x` is a generator.

    Returns:
        Inputs and targets; None without targets, and for data of unknown kinds.
    """
    x = arguments.get("x")
    y = arguments.get("y")
    if y is not None:
        return _rows_of_all(x, y, arguments.get("batch_size") or _ROWS)
    if isinstance(x, keras.utils.PyDataset):
        batch = copy.copy(x)[0]  # a copy, since it may count what is taken
    elif _is_stream(x):
        batches = iter(x)
        batch = next(batches, None)
        if batches is x and batch is not None:
            arguments["x"] = _resumed(batch, batches)
    else:
        return None
    inputs, targets, _ = keras.utils.unpack_x_y_sample_weight(batch)
    return None if targets is None else (inputs, targets)


def _rows_of_all(x: Any, y: Any, size: int) -> tuple[Any, Any]:
    """Return `size` examples of arrays, at equal distances."""
    number = len(keras.tree.flatten(x)[0])
    rows = np.linspace(0, number - 1, min(number, size))
    rows = rows.astype(int)

    def chosen(part: Any) -> np.ndarray:
        return np.asarray(part)[rows]

    return keras.tree.map_structure(chosen, (x, y))


def _is_stream(x: Any) -> bool:
    """Whether data is given batch by batch, and not as arrays."""
    is_iterable = hasattr(x, "__iter__") and not isinstance(x, (list, dict))
    return is_iterable and not hasattr(x, "shape")


def _resumed(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    """Yield a batch that was taken out of an iterator, then the others."""
    yield first
    yield from rest


def _function(loss: keras.losses.Loss) -> Callable[..., Any] | None:
    """Return the function of a loss of Keras, or of ours; None for a class of another kind."""
    if isinstance(loss, PinballLoss):
        return pinball_loss
    return getattr(loss, "fn", None)


def _outputs_per_number(loss: keras.losses.Loss) -> int:
    """Return how many outputs a network has for each number of its targets."""
    return len(loss.levels) if isinstance(loss, PinballLoss) else 1


def _leaves_noise_open(loss: keras.losses.Loss) -> bool:
    """Whether a loss says nothing about how noisy the targets are, like a squared error."""
    return _function(loss) in _POINT_FACTORS


def _is_known(loss: keras.losses.Loss) -> bool:
    """Whether it is known what a loss averages over."""
    if isinstance(loss, (GaussianNLL, DistributionNLL)):
        return True
    known = (*_BY_EXAMPLE, *_BY_POSITION, *_BY_NUMBER, *_POINT_FACTORS)
    return _function(loss) in known


def _needs_values(part: OutputLoss) -> bool:
    """Whether only the values of a loss can show what it averages over: classes, or numbers."""
    if not isinstance(part.y_pred, keras.KerasTensor) or _is_known(part.loss):
        return False
    sizes = part.y_pred.shape[1:]
    return sizes not in ((), (1,))


def _answers(part: OutputLoss, copies: int) -> float | None:
    """Return how many log-likelihoods of an example a loss averages over.

    Args:
        part: the loss of an output, with symbolic outputs or those of a batch.
        copies: number of copies of each example in a training batch.

    Returns:
        Their mean number in the batch; None if it is unknown.
    """
    if isinstance(part.y_pred, keras.KerasTensor):
        return _answers_by_shape(part)
    y_true = ops.convert_to_tensor(part.y_true, part.loss.dtype)
    y_pred = ops.convert_to_tensor(part.y_pred, part.loss.dtype)
    values = part.loss.call(y_true, y_pred)
    shape = part.y_pred.shape
    examples, *positions = shape[:-1] or shape
    if len(values.shape):
        positions = values.shape[1:]
    number = math.prod(positions)
    averaged = 1.0  # by the loss itself, for each of its values
    if _function(part.loss) in (*_BY_NUMBER, *_POINT_FACTORS):
        numbers = math.prod(shape[1:]) / _outputs_per_number(part.loss)
        averaged = numbers / number
    if part.loss.reduction == "sum":  # over the batch
        return averaged / (examples * copies)
    share = _share_of_kept(part.y_pred, values)
    return share * number * averaged or None


def _share_of_kept(*tensors: Any) -> float:
    """Return the share of the values that the masks of all tensors keep."""
    masks = [keras_internals.mask_of(tensor) for tensor in tensors]
    kept = [ops.convert_to_numpy(mask).astype(bool) for mask in masks if mask is not None]
    if not kept:
        return 1.0
    return float(np.mean(np.logical_and.reduce(kept)))


def _answers_by_shape(part: OutputLoss) -> float | None:
    """Return `_answers` for a symbolic output."""
    loss = part.loss
    ignores_a_class = getattr(loss, "ignore_class", None) is not None
    is_masked = keras_internals.mask_of(part.y_pred) is not None
    if ignores_a_class or is_masked or loss.reduction == "sum":
        return None
    if _function(loss) in _BY_EXAMPLE:
        return 1.0
    shape = list(part.y_pred.shape)
    if _function(loss) not in (*_BY_NUMBER, *_POINT_FACTORS) and len(shape) > 1:
        axis = getattr(loss, "axis", None) or -1  # that of the classes, or parameters
        del shape[axis]
    sizes = shape[1:]
    if None in sizes:
        return None
    return math.prod(sizes) / _outputs_per_number(loss)


def _warn_of_open_noise(loss: keras.losses.Loss) -> None:
    warnings.warn(
        f"The loss {loss.name!r} does not say how noisy the targets are, so the KL is weighted for "
        "noise of scale 1. Write compile(..., noise_scale=0.3) for another scale, or learn it with "
        "ibnn.layers.GaussianHead and the loss ibnn.layers.GaussianNLL.",
        stacklevel=5,
    )


def _warn_of_unknown(parts: Sequence[OutputLoss], answers: Sequence[float]) -> None:
    for part, count in zip(parts, answers, strict=True):
        if count != 1 and not _is_known(part.loss):
            warnings.warn(
                f"The KL is weighted as if the loss {part.loss.name!r} were the mean of "
                f"{count:.5g} negative log-likelihoods per example. If it is the mean of another "
                "number of them, write compile(..., kl_scale=1 / number).",
                stacklevel=5,
            )


def _warn_of_tempering(terms: Sequence[_Term]) -> None:
    exact = {term.place: float(f"{1 / term.scale:.4g}") for term in terms}
    shown = exact if all(isinstance(place, str) for place in exact) else [*exact.values()]
    warnings.warn(
        "The losses of the outputs are not in proportion to their negative log-likelihoods, so the "
        "KL is weighted for the output that counts most. The exact ELBO has "
        f"loss_weights={shown}, or a multiple of these.",
        stacklevel=5,
    )
