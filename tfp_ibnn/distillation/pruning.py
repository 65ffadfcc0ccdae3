"""A plain network without the weights or channels that a posterior found to be noise."""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn.conversion.channels import OF_MODEL, Link, link_to, without_channels
from tfp_ibnn.conversion.classes import deterministic_model
from tfp_ibnn.conversion.copying import folded_copy_of
from tfp_ibnn.conversion.wrappers import innermost
from tfp_ibnn.layers import StochasticLayer
from tfp_ibnn.layers.control import some_stochastic_layers
from tfp_ibnn.layers.inside import places
from tfp_ibnn.layers.model import StochasticSubclass
from tfp_ibnn.prediction.batch_norm import batch_norms
from tfp_ibnn.weights.base import input_batches, set_statistics

_BATCH_SIZE = 256


def prune(model: keras.Model, keep: float = 0.1, data: Any = None) -> keras.Model:
    """Return a plain Keras model without the random weights and channels of least signal to noise.

    What is random is ranked by |mean| / standard deviation, over all layers together:

    - weights of `MeanField` and `MNF`: all but the share `keep` become 0, the others their means
      (Bayes by Backprop, arXiv 1505.05424). The model keeps its size; a file of it compresses.
    - z of input channels: all but the share `keep` of the channels are removed from the layers
      between which they run, and the model is smaller. It computes what the posterior means do with
      these z at 0 (Bayesian compression, arXiv 1705.08665). Each layer keeps one at least; after
      a `Flatten` a channel counts by the root mean square over its positions. A posterior whose
      prior is around 0, such as `NormalAffine(prior=ibnn.priors.Cauchy(0.1))`, pushes them there.

    Channels are removed where a Dense layer or convolution makes them for one other, with nothing
    but batch normalization, elementwise activations, dropout, pooling and `Flatten` between. Others
    all stay, as those of the model's inputs do, and a warning says why.

    Args:
        model: with posteriors over weights, or z, or both; trained.
        keep: share of weights, and of removable channels, that stay: above 0, and 1 for all.
        data: training inputs, or a dataset, by which batch normalization computes its mean and
            variance anew; None leaves them as they are.

    Returns:
        A built model, not compiled: fine-tune it if its accuracy has dropped.

    Raises:
        ValueError: If an argument is not of these values, the model has no stochastic layer, or it
            has posteriors over z alone and no channel can be removed.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> stack = [keras.layers.Dense(8, "relu"), keras.layers.Dense(3)]
        >>> det = keras.Sequential([keras.Input((4,)), *stack])
        >>> sto = ibnn.to_stochastic(det, ibnn.NormalAffine(), train_size=100)
        >>> [layer.units for layer in ibnn.prune(sto, keep=0.25).layers[1:]]
        [2, 3]
    """
    if not 0 < checks.finite("keep", keep) <= 1:
        raise ValueError(f"`keep` must be above 0 and at most 1; got {keep!r}.")
    model = innermost(model)
    some_stochastic_layers(model)
    network = model.model if isinstance(model, StochasticSubclass) else model
    folded = folded_copy_of(network)
    ranked = _ranked_layers(network, folded)
    weights = [part for part in ranked if part.name != "z"]
    factors = [part for part in ranked if part.name == "z"]
    ways = [link_to(part.plain, folded) for part in factors]
    if not weights and not any(isinstance(way, Link) for way in ways):
        raise ValueError(f"`model` has no channel that can be removed. {_told(factors, ways)}")
    expected = [Link if way == OF_MODEL else way for way in ways]
    if _told(factors, expected):
        warnings.warn(_told(factors, expected), stacklevel=2)
    _set_to_zero(weights, keep)
    kept = _kept_channels(factors, ways, keep)
    pruned = without_channels(folded, kept) if kept else folded
    if data is not None:
        _update_statistics(pruned, data)
    return deterministic_model(model, pruned)


class _Ranked(NamedTuple):
    """Something random of one layer."""

    plain: keras.layers.Layer
    """The layer in the folded model."""

    name: str
    """Of a weight, or "z"."""

    ratios: np.ndarray
    """The signal-to-noise ratios."""


def _ranked_layers(network: keras.Model, folded: keras.Model) -> list[_Ranked]:
    """Return what is random in a model, with the plain layers of its folded copy."""
    plain = places(folded)
    ranked = []
    for steps, place in places(network).items():
        if isinstance(place.layer, StochasticLayer):
            for name, ratios in place.layer.signal_to_noise().items():
                ranked.append(_Ranked(plain[steps].layer, name, ratios))
    return ranked


def _largest(groups: Sequence[np.ndarray], keep: float) -> list[np.ndarray]:
    """Return which numbers are among the largest of all, a share of them, in each group."""
    flat = [group.ravel() for group in groups]
    every = np.concatenate(flat)
    share = round(keep * len(every))
    count = max(1, share)
    order = np.argsort(-every, kind="stable")
    is_kept = np.zeros(len(every), bool)
    is_kept[order[:count]] = True
    sizes = [group.size for group in groups]
    ends = np.cumsum(sizes)
    parts = np.split(is_kept, ends[:-1])
    pairs = zip(parts, groups, strict=True)
    return [part.reshape(group.shape) for part, group in pairs]


def _set_to_zero(weights: Sequence[_Ranked], keep: float) -> None:
    """Set the weights of least signal to noise to 0."""
    if not weights:
        return
    masks = _largest([part.ratios for part in weights], keep)
    for part, mask in zip(weights, masks, strict=True):
        variable = getattr(part.plain, part.name)
        value = ops.convert_to_numpy(variable)
        variable.assign(np.where(mask, value, np.zeros_like(value)))


def _kept_channels(
    factors: Sequence[_Ranked], ways: Sequence[Link | str], keep: float
) -> list[tuple[Link, np.ndarray]]:
    """Return for each way of channels the numbers of those that stay.

    Args:
        factors: the z of layers.
        ways: of the channels that each z multiplies, or why they all stay.
        keep: the share that stays.
    """
    links = []
    scores = []
    for part, way in zip(factors, ways, strict=True):
        if isinstance(way, Link):
            by_position = part.ratios.reshape(way.positions, way.channels)
            mean_square = np.mean(by_position**2, axis=0)
            links.append(way)
            scores.append(np.sqrt(mean_square))
    masks = _largest(scores, keep) if scores else []
    kept = []
    for link, mask, score in zip(links, masks, scores, strict=True):
        best = np.argmax(score)
        mask[best] = True
        kept.append((link, np.flatnonzero(mask)))
    return kept


def _told(factors: Sequence[_Ranked], ways: Sequence[Any]) -> str:
    """Return in words which layers keep all channels, and why; "" if none do."""
    reasons = []
    for part, way in zip(factors, ways, strict=True):
        if isinstance(way, str):
            reasons.append(f"{part.plain.name!r} keeps all channels of its input: {way}.")
    return " ".join(reasons)


def _update_statistics(model: keras.Model, data: Any) -> None:
    """Let batch normalization compute its statistics from data."""
    norms = batch_norms(model)
    if not norms:
        raise ValueError(
            f"`data` is for models with batch normalization; {model.name!r} has none. Leave it out."
        )
    set_statistics(model, norms, list(input_batches(data, _BATCH_SIZE)))
