"""Remove channels between two layers of a plain Keras model."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import activations, layers

from tfp_ibnn._core import keras_internals
from tfp_ibnn.conversion.copying import copy_with
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.layers.base import CONVOLUTIONS, has_lora, is_quantized

_KERNELS = (layers.Dense, *CONVOLUTIONS)
"""Layers whose kernels end in the axes of input and output channels."""

_POOLINGS = (
    *(layers.AveragePooling1D, layers.AveragePooling2D, layers.AveragePooling3D),
    *(layers.GlobalAveragePooling1D, layers.GlobalAveragePooling2D, layers.GlobalAveragePooling3D),
    *(layers.GlobalMaxPooling1D, layers.GlobalMaxPooling2D, layers.GlobalMaxPooling3D),
    *(layers.MaxPooling1D, layers.MaxPooling2D, layers.MaxPooling3D),
)
_DROPOUTS = (
    *(layers.AlphaDropout, layers.Dropout, layers.GaussianDropout, layers.GaussianNoise),
    *(layers.SpatialDropout1D, layers.SpatialDropout2D, layers.SpatialDropout3D),
)
_APART = (layers.ELU, layers.LeakyReLU, layers.ReLU, *_DROPOUTS, *_POOLINGS)
"""Layers without weights that treat each channel apart from the others."""

_ELEMENTWISE = (
    *(activations.elu, activations.exponential, activations.gelu, activations.hard_sigmoid),
    *(activations.leaky_relu, activations.linear, activations.mish, activations.relu),
    *(activations.relu6, activations.selu, activations.sigmoid, activations.silu),
    *(activations.softplus, activations.softsign, activations.tanh),
)


OF_MODEL = "they are inputs of the model"
"""Why channels stay that no layer makes."""


class Link(NamedTuple):
    """The way of channels from the layer that makes them to the one layer that takes them."""

    maker: keras.layers.Layer
    """A Dense layer or convolution."""

    norms: list[tuple[keras.layers.Layer, int]]
    """Batch normalizations between, and how many entries of each there are for a channel."""

    taker: keras.layers.Layer
    """A Dense layer or convolution."""

    positions: int
    """How many inputs of the taker there are for a channel: several after a `Flatten`."""

    @property
    def channels(self) -> int:
        """How many channels there are."""
        return self.maker.kernel.shape[-1]


def link_to(taker: keras.layers.Layer, model: keras.Model) -> Link | str:
    """Return where the inputs of a layer come from, if some of their channels can be removed.

    Args:
        taker: a layer of the model.
        model: a plain Keras model.

    Returns:
        The way, or in words why there is none.
    """
    graph = functional_graph(model)
    if graph is None or taker not in graph.layers:
        return "it is inside of another layer, or of a model with a `call` of its own"
    way = _way_to(taker, graph)
    if isinstance(way, str):
        return way
    maker, *between = way
    positions = 1
    norms = []
    for layer, shape in between:
        if isinstance(layer, layers.Flatten):
            if None in shape[1:]:
                return f"{layer.name!r} flattens an unknown number of positions"
            positions *= math.prod(shape[1:-1])
        if isinstance(layer, layers.BatchNormalization):
            norms.append((layer, positions))
    return Link(maker[0], norms, taker, positions)


def _way_to(
    taker: keras.layers.Layer, graph: keras.Model
) -> list[tuple[keras.layers.Layer, tuple[int | None, ...]]] | str:
    """Return the layers before one, each with its input shape, from one with a kernel on."""
    nodes = list(keras_internals.nodes_in_order(graph))
    calls = Counter(id(node.operation) for node in nodes)
    uses = Counter(id(tensor) for node in nodes for tensor in node.input_tensors)
    uses.update(id(tensor) for tensor in graph.outputs)
    makers = {id(tensor): node for node in nodes for tensor in node.outputs}
    node = next(node for node in nodes if node.operation is taker)
    way: list[tuple[Any, tuple[int | None, ...]]] = []
    while True:
        layer = node.operation
        shape = tuple(node.input_tensors[0].shape)
        reason = _obstacle(layer, shape, is_taker=not way)
        if calls[id(layer)] > 1:
            reason = f"{layer.name!r} is called more than once"
        if reason:
            return reason
        way.insert(0, (layer, shape))
        if type(layer) in _KERNELS and len(way) > 1:
            return way[:-1]
        (source,) = node.input_tensors
        if id(source) not in makers:
            return OF_MODEL
        node = makers[id(source)]
        if uses[id(source)] > 1:
            return f"the output of {node.operation.name!r} is used elsewhere, too"


def _obstacle(layer: Any, shape: tuple[int | None, ...], is_taker: bool) -> str:
    """Return why channels cannot be removed before or behind a layer, or "".

    Args:
        layer: a layer or operation.
        shape: of its first input.
        is_taker: whether it is the layer that takes the channels, whose outputs stay.
    """
    where = f"{layer.name!r} ({type(layer).__name__})"
    if getattr(layer, "data_format", None) == "channels_first":
        return f"{where} has its channels first"
    if type(layer) in _KERNELS:
        if is_quantized(layer) or has_lora(layer) or getattr(layer, "groups", 1) > 1:
            return f"{where} is quantized, or has LoRA or groups"
        return "" if is_taker else _mixing(layer)
    if is_taker:
        return f"{where} is neither Dense nor a convolution"
    if type(layer) is layers.Activation:
        return _mixing(layer)
    if type(layer) is layers.BatchNormalization:
        is_over_channels = layer.axis in (-1, len(shape) - 1)
        return "" if is_over_channels else f"{where} is over another axis than the last"
    if type(layer) in (layers.Flatten, *_APART):
        return ""
    return f"{where} may mix channels"


def _mixing(layer: keras.layers.Layer) -> str:
    """Return in words that an activation may need all channels of an input, or ""."""
    if layer.activation in _ELEMENTWISE or type(layer.activation) in _APART:
        return ""
    return f"the activation of {layer.name!r} is not known to be elementwise"


def without_channels(model: keras.Model, kept: Sequence[tuple[Link, np.ndarray]]) -> keras.Model:
    """Return a copy of a model in which layers make and take fewer channels.

    Args:
        model: a plain Keras model.
        kept: links in the model, each with the numbers of the channels that stay.

    Returns:
        A built model, not compiled.
    """
    weights: dict[Any, list[np.ndarray]] = {}

    def take(layer: keras.layers.Layer, index: np.ndarray, axis: int, number: int | None) -> None:
        arrays = weights.setdefault(layer, layer.get_weights())
        for place in range(len(arrays))[:number]:
            arrays[place] = np.take(arrays[place], index, axis)

    for link, channels in kept:
        take(link.maker, channels, axis=-1, number=None)
        for norm, positions in link.norms:
            take(norm, _places(channels, link.channels, positions), axis=-1, number=None)
        taken = _places(channels, link.channels, link.positions)
        take(link.taker, taken, axis=-2, number=1)  # the kernel alone
    smaller = {layer: _resized(layer, arrays) for layer, arrays in weights.items()}
    copy = copy_with(model, smaller)
    for layer, arrays in weights.items():
        smaller[layer].set_weights(arrays)
        smaller[layer].trainable = layer.trainable
    return copy


def _places(channels: np.ndarray, count: int, positions: int) -> np.ndarray:
    """Return where channels are in an axis that has all `count` of them for each position."""
    starts = count * np.arange(positions)
    places = starts[:, None] + channels
    return places.ravel()


def _resized(layer: keras.layers.Layer, weights: list[np.ndarray]) -> keras.layers.Layer:
    """Return an unbuilt layer like another one, with as many outputs as weights have."""
    config = layer.get_config()
    size = "units" if type(layer) is layers.Dense else "filters"
    if size in config:
        config[size] = weights[0].shape[-1]
    return type(layer).from_config(config)
