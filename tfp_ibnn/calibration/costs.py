"""The cost of a prediction: multiply-adds, counted in passes of a network, and memory."""

import functools
import math
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from tfp_ibnn._core.protocols import WeightPosterior
from tfp_ibnn.calibration.engine import Engine
from tfp_ibnn.conversion.graph import Graph
from tfp_ibnn.layers import StochasticLayer, stochastic_layers
from tfp_ibnn.layers.base import TRANSPOSED
from tfp_ibnn.prediction.dropout import DROPOUTS
from tfp_ibnn.weights import Laplace, WeightMixture
from tfp_ibnn.weights.laplace.samplers import NetworkSampler, ProbitSampler

_RECURRENT = (keras.layers.RNN, keras.layers.Bidirectional)


def passes(engine: Engine, network: keras.Model | None = None) -> float:
    """Return how many passes of a network take as many multiply-adds as a prediction.

    Only products with matrices and kernels count. Layers before the first noise, or before the
    uncertain layers of a `Laplace`, run once for all draws; the rest runs once per draw, and twice
    if it is linearized. Other posteriors over weights run the whole network for each draw.

    Args:
        engine: what predicts.
        network: the network whose pass is the unit; None takes the one that predicts.

    Returns:
        The number of passes; the number of draws for models whose layers cannot be seen.
    """
    if network is None:
        network = getattr(engine.network, "network", engine.network)
    unit = _multiply_adds(Graph(network, lambda _: False).nodes)
    dropout = engine.options.get("dropout", False)
    work = _work(engine.network, engine.samples, dropout)
    if not unit or not work:
        return float(engine.samples)
    return work / unit


def megabytes(predictor: Any) -> float:
    """Return the memory of a network's weights, or of everything a posterior holds, in MB."""
    total = 0
    for weight in predictor.weights:
        total += math.prod(weight.shape) * np.dtype(weight.dtype).itemsize
    return total / 1e6


def _work(predictor: Any, samples: int, dropout: bool = False) -> int:
    """Return the multiply-adds of a prediction for one example; 0 if they cannot be counted.

    Args:
        predictor: a network, or a posterior over weights.
        samples: number of draws.
        dropout: whether the dropout of a network stays on.
    """
    if isinstance(predictor, WeightMixture):
        draws = samples // len(predictor.members)
        return sum(_work(member, draws) for member in predictor.members)
    runs = samples
    if isinstance(predictor, Laplace):
        graph = predictor.logit_network.graph
        runs = samples * _runs_per_draw(predictor)
    elif isinstance(predictor, WeightPosterior):
        graph = Graph(predictor.network, lambda _: True)
    else:
        graph = Graph(predictor, functools.partial(_is_noisy, dropout=dropout))
    noisy = _multiply_adds(graph.noisy_nodes)
    quiet = _multiply_adds(graph.nodes) - noisy
    return quiet + runs * noisy


def _runs_per_draw(posterior: Laplace) -> int:
    """Return about how many passes through the uncertain layers a draw takes."""
    sampler = posterior.sampler(1)
    if posterior.is_last_layer:
        return 1
    if isinstance(sampler, ProbitSampler):  # back from each output
        return 1 + posterior.logit_network.width
    return 1 if isinstance(sampler, NetworkSampler) else 2


def _is_noisy(layer: Any, dropout: bool) -> bool:
    if dropout and isinstance(layer, DROPOUTS):
        return True
    return isinstance(layer, keras.layers.Layer) and bool(stochastic_layers(layer))


def _multiply_adds(nodes: Iterable[Any]) -> int:
    """Return the multiply-adds of calls of layers, for one example."""
    return sum(_multiply_adds_of_call(node) for node in nodes)


def _multiply_adds_of_call(node: Any) -> int:
    layer = node.operation
    if isinstance(layer, StochasticLayer):
        layer = layer.layer
    if isinstance(layer, keras.layers.Embedding):  # it looks rows up
        return 0
    shapes = [variable.shape for variable in getattr(layer, "weights", ())]
    entries = sum(math.prod(shape) for shape in shapes if len(shape) > 1)
    return entries * _positions(layer, node)


def _positions(layer: Any, node: Any) -> int:
    """Return how often a call multiplies by the layer's matrices; unknown sizes count as 1."""
    if isinstance(layer, _RECURRENT):
        return node.input_tensors[0].shape[1] or 1
    # A transposed convolution spreads each position of its input.
    is_transposed = isinstance(layer, TRANSPOSED)
    tensor = node.input_tensors[0] if is_transposed else node.outputs[0]
    sizes = tensor.shape[1:-1]
    if getattr(layer, "data_format", None) == "channels_first":
        sizes = tensor.shape[2:]
    return math.prod(size or 1 for size in sizes)
