"""Padding: the positions that Keras masks say to leave out."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tfp_ibnn import noise
from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.conversion.wrappers import innermost
from tfp_ibnn.layers import inside
from tfp_ibnn.likelihoods.base import with_rank
from tfp_ibnn.likelihoods.several import output_names
from tfp_ibnn.metrics._base import spread

Masks = Callable[[Any], dict[str, Tensor]]
"""Gives, for inputs, the masks of outputs by name, "" for one; those without padding have none."""

_BATCH = 256
"""How many examples to ask for masks at once."""


def output_masks(model: keras.Model) -> Masks | None:
    """Return what gives the masks of a model's outputs, or None if nothing is padded."""
    network = innermost(model)
    graph = functional_graph(network)
    if graph is None:
        if any(_makes_a_mask(layer) for layer in keras_internals.nested_layers(network)):
            return _MasksOfCalls(network)
        return None
    names = output_names(network) or [""]
    outputs = dict(zip(names, graph.outputs, strict=True))
    symbolic_masks = _of_positions(outputs)
    if not symbolic_masks:
        return None
    masks_of = keras.Function(graph.inputs, symbolic_masks)
    return lambda inputs: masks_of(keras_internals.graph_inputs(graph, inputs))


class _MasksOfCalls:
    """The masks of a model without a graph: only a pass shows them.

    Args:
        network: a built model.
    """

    def __init__(self, network: keras.Model) -> None:
        self._network = network

    def __call__(self, inputs: Any) -> dict[str, Tensor]:
        with noise.scope(off=True, losses=False) as forward_pass:
            inside.draw_ahead(inside.called_inside(self._network), forward_pass, 1)
            outputs = self._network(inputs, training=False)
        if ops.is_tensor(outputs):
            outputs = {"": outputs}
        elif not isinstance(outputs, Mapping):
            outputs = {str(number): output for number, output in enumerate(outputs)}
        return _of_positions(outputs)


def _of_positions(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the masks of those outputs that have one for their positions."""
    masks = {name: keras_internals.mask_of(x) for name, x in outputs.items()}
    return {
        name: mask
        for name, mask in masks.items()
        if mask is not None and len(mask.shape) < len(outputs[name].shape)
    }


def _makes_a_mask(layer: keras.layers.Layer) -> bool:
    """Whether a layer makes a mask from its inputs, or may do so by code of its own."""
    if isinstance(layer, layers.Masking) or getattr(layer, "mask_zero", False):
        return True
    package = type(layer).compute_mask.__module__.split(".")[0]
    return package not in ("keras", "tfp_ibnn")


def mask_of_arrays(masks: Masks, x: Any) -> np.ndarray | None:
    """Return the mask of a model's one output.

    Args:
        masks: those of the model.
        x: inputs, arrays of equal length in any structure.

    Returns:
        A boolean array (N, ...), False for padding; None without padding, and for several outputs.
    """
    count = len(keras.tree.flatten(x)[0])
    mask_by_batch = []
    for start in range(0, count, _BATCH):
        batch = slice(start, start + _BATCH)
        inputs = keras.tree.map_structure(lambda array, batch=batch: array[batch], x)
        mask = masks(inputs).get("")
        if mask is None:
            return None
        mask_by_batch.append(ops.convert_to_numpy(mask))
    return np.concatenate(mask_by_batch)


def weight_of_positions(
    weight: Any, mask: np.ndarray | None, positions: tuple[int, ...]
) -> np.ndarray:
    """Return how much each position counts, 0 for padding.

    Args:
        weight: of the examples, or of the positions; None is 1 for all.
        mask: False for padding; None without padding.
        positions: the shape (N, ...) of the outputs without their last axis.

    Returns:
        An array of that shape.
    """
    weight = np.asarray(np.ones(positions[0]) if weight is None else weight)
    weight = spread(np, weight, positions, "sample_weight")
    if mask is None:
        return weight
    mask = spread(np, mask, positions, "mask")
    return np.where(mask, weight, 0.0)


def without_padding(mask: Tensor, weight: Any, scaled: bool) -> Tensor:
    """Return weights that are 0 for padding.

    Args:
        mask: (N, ...), False for padding.
        weight: of the positions, or of the examples alone; None is 1 for all.
        scaled: scale the weights up, as Keras's losses do, so that a weighted mean over all
            positions is the mean over those that are not padded.

    Returns:
        Weights in `keras.config.floatx()`, one for each position.
    """
    mask = ops.cast(mask, keras.config.floatx())
    if scaled:
        positions = ops.cast(ops.size(mask), mask.dtype)
        unpadded = ops.maximum(ops.sum(mask), 1)
        mask = mask * positions / unpadded
    if weight is None:
        return mask
    weight = ops.cast(weight, mask.dtype)
    rank = len(mask.shape)
    if weight.shape[-1] != 1:  # a position with several answers may have a weight for each
        rank = max(rank, len(weight.shape))
    return with_rank(mask, rank) * with_rank(weight, rank)
