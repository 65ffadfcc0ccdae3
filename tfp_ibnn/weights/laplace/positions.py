"""The last layer of a network with an output at each position, as a model of positions."""

import math
from typing import Any, NamedTuple, Self

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor, compiled
from tfp_ibnn.data.examples import labelled_examples
from tfp_ibnn.data.positions import PositionSample, rows_of_labels
from tfp_ibnn.likelihoods import Likelihood
from tfp_ibnn.prediction.padding import mask_of_arrays, output_masks, weight_of_positions
from tfp_ibnn.weights.features import LastLayer

ROWS = 1024
"""How many positions a Hessian, or a variance, is computed for at a time."""

_MOST_NUMBERS = 2**18  # of an example's outputs, for as many draws as run at once
_MOST_DRAWS = 64


class Rows(NamedTuple):
    """Positions as examples: features (rows, F), targets, and how often each counts."""

    x: np.ndarray
    y: np.ndarray
    weight: np.ndarray


class OfPositions:
    """What `Laplace` does for outputs with positions: it fits the last layer to rows of features.

    So a fit is the same as that of a Dense layer on the features of all positions as examples.
    """

    def fit_rows(self, rows: Rows, validation_data: Any) -> Self:
        """Fit to positions, and return itself.

        Args:
            rows: those of the training data.
            validation_data: features and targets of other positions, or None.
        """
        head = self._of_head()
        head.fit(
            rows.x,
            rows.y,
            sample_weight=rows.weight,
            validation_data=validation_data,
            batch_size=ROWS,
            verbose=0,
        )
        return self._take(head)

    def optimize_for_rows(self, method: str, validation_data: Any) -> float:
        """Set and return the prior precision that suits positions.

        Args:
            method: as for `optimize_prior_precision`.
            validation_data: features and targets of positions.
        """
        head = self._of_head()
        head.optimize_prior_precision(method, validation_data, ROWS)
        return float(self._take(head).prior_precision)

    def rows_of_pair(self, data: Any, batch_size: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return features and targets of the positions of validation data, if there is some.

        Args:
            data: (x, y), or a dataset of such batches, or None.
            batch_size: examples at a time.
        """
        if data is None:
            return None
        x, y = data if isinstance(data, (tuple, list)) else (data, None)
        rows = rows_of(self, x, y, batch_size=batch_size, verbose=0)
        return rows.x, rows.y

    def _of_head(self) -> Self:
        """Return the same for the last layer alone, on features of positions."""
        head, likelihood = head_of(self)
        options = self._options._replace(head=likelihood, from_logits=None)
        return type(self)(head, **options._asdict())._take(self)

    def _take(self, other: Any) -> Self:
        """Take what another one, of as many weights, has been fitted to, and return itself."""
        own = [*self.structure.variables, self.prior_precision, self.noise_scale]
        found = [*other.structure.variables, other.prior_precision, other.noise_scale]
        for variable, value in zip(own, found, strict=True):
            variable.assign(value)
        self._fit = dict(other._fit)
        return self


def draws_at_once(network: LastLayer) -> int:
    """Return how many draws of a last layer to run at once."""
    if not network.has_positions:
        return _MOST_DRAWS
    # The width too, so that a size that is unknown counts as 1,024.
    sizes = [size or 1024 for size in network.output_positions]
    numbers = math.prod(sizes) * network.width
    return min(max(_MOST_NUMBERS // numbers, 1), _MOST_DRAWS)


def head_of(posterior: Any) -> tuple[keras.Model, Likelihood]:
    """Return the last layer of a network, and what follows it, as a model of rows of features.

    Args:
        posterior: a Laplace approximation of a last layer.

    Returns:
        A model with copies of the weights, and its likelihood.
    """
    network = posterior.logit_network
    (block,) = posterior.structure.blocks
    likelihood = network.likelihood
    layer = block.layer
    is_gaussian = likelihood.end == "gaussian"
    dense = keras.layers.Dense(
        block.outputs,
        activation=None if is_gaussian else likelihood.end,
        use_bias=layer.use_bias,
        dtype=layer.variable_dtype,
    )
    inputs = block.inputs - bool(layer.use_bias)
    head = keras.Sequential([keras.Input((inputs,), dtype=layer.variable_dtype), dense])
    if is_gaussian:
        end = likelihood.layer
        head.add(type(end).from_config(end.get_config()))
    kernel, *bias = [ops.convert_to_numpy(v) for v in block.variables]
    matrix = kernel.reshape(inputs, block.outputs)
    dense.set_weights([matrix, *bias])
    return head, likelihood


def rows_of(
    posterior: Any,
    x: Any,
    y: Any,
    sample_weight: Any = None,
    *,
    batch_size: int,
    verbose: Any,
) -> Rows:
    """Return the positions of data as rows, a random sample of them if there are too many.

    Positions that are masked, or of weight 0, are left out, and their targets are not read.

    Args:
        posterior: a Laplace approximation of a last layer.
        x: inputs, or a dataset of batches (x, y) or (x, y, sample_weight).
        y: targets (N, ...); None with a dataset.
        sample_weight: how often each example or position counts; None counts each once.
        batch_size: examples at a time.
        verbose: 0 shows no progress.

    Returns:
        Features, targets and weights; of a sample, the weights make up for the rest.
    """
    network = posterior.logit_network
    (block,) = posterior.structure.blocks

    def features(inputs: Any) -> tuple[Tensor, Tensor]:
        given = network.features(network.prefix(inputs))
        sizes = ops.stack([ops.cast(size, "int32") for size in network.positions(given)])
        return block.kernel_inputs(given), sizes

    run = compiled(features, network.model.weights)
    masks = output_masks(network.model)
    sample = PositionSample()
    for batch in labelled_examples(x, y, sample_weight, batch_size, verbose):
        rows, sizes = run(batch.x)
        positions = (len(batch.y), *ops.convert_to_numpy(sizes).tolist())
        mask = None if masks is None else mask_of_arrays(masks, batch.x)
        weight = weight_of_positions(batch.weight, mask, positions)
        weight = weight.reshape(-1)
        rows = network.wide(rows)
        width = rows.shape[-1]
        rows = rows.reshape(weight.size, width)
        labels = rows_of_labels(batch.y, positions)
        counts = weight > 0
        sample.add((rows[counts], labels[counts], weight[counts]))
    if not sample.total:
        raise ValueError("There are no positions: all are masked, or have the weight 0.")
    rows, labels, weight = sample.rows()
    return Rows(rows, labels, sample.factor * weight)
