"""A Gaussian over weights under normalizing flows."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor, matmul, mean, tfb, tfd
from tfp_ibnn.flows import AffineBijector, Flow, FlowBijector
from tfp_ibnn.posteriors.base import diagonal_normal, log_normal
from tfp_ibnn.posteriors.flow import copied
from tfp_ibnn.weights.flat import FlatPosterior

_FIXED_PAIRS = 64


class _MatrixBijector(FlowBijector):
    """y = loc + x M', for one invertible matrix M; its log-determinant is given."""

    parameter_ndims = {"loc": 1, "matrix": 2, "log_det": 0}  # noqa: RUF012
    constant_jacobian = True

    def _forward(self, x: Tensor) -> Tensor:
        return self.loc + matmul(x, ops.transpose(self.matrix))

    def _inverse(self, y: Tensor) -> Tensor:
        rows = ops.reshape(y - self.loc, (-1, self.loc.shape[0]))
        return ops.reshape(ops.transpose(ops.solve(self.matrix, ops.transpose(rows))), y.shape)

    def _forward_log_det_jacobian(self, x: Tensor) -> Tensor:
        return self.log_det


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class RefinedPosterior(FlatPosterior):
    """w = loc + M NF(eps), eps standard normal: a Gaussian refined by flows; made by `refine`.

    Args:
        model: the network.
        flows: flows, applied in order; they are copied.
        places: which of `model.weights` are sampled, by position.
        diagonal: whether M is a diagonal matrix.
        **kwargs: those of `keras.layers.Layer`.
    """

    arguments = ("flows", "diagonal")

    def __init__(
        self,
        model: keras.Model,
        flows: Sequence[Flow],
        places: Sequence[int],
        diagonal: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, places, **kwargs)
        self.diagonal = bool(diagonal)
        self.flows = copied(flows, self.variable_dtype)
        for flow in self.flows:
            flow.build((None, self.size))
        self.loc = self._add("loc", (self.size,))
        shape = (self.size,) if diagonal else (self.size, self.size)
        self.matrix = self._add("matrix", shape)
        self._log_det = self._add("log_det", ())
        self.history: list[float] = []

    def draw(self, key: Tensor, number: int | Tensor) -> Tensor:
        """Return draw `number` of those a key gives, (size,)."""
        return self.transform(self._standard_normal(key, number)[None])[0][0]

    def center(self) -> Tensor:
        """Return the mean, over a fixed set of mirrored draws."""
        half = np.random.default_rng(0).standard_normal((_FIXED_PAIRS, self.size))
        fixed = np.concatenate([half, -half]).astype(self.variable_dtype)
        return mean(self.transform(ops.convert_to_tensor(fixed))[0], axis=0)

    def distribution(self) -> tfd.Distribution:
        """Return q over the flat vector; its `log_prob` takes the inverses of the flows."""
        zeros = ops.zeros((self.size,), dtype=self.variable_dtype)
        chain = [self._affine(), *(flow.bijector() for flow in reversed(self.flows))]
        return tfd.TransformedDistribution(
            diagonal_normal(zeros, ops.ones_like(zeros)), tfb.Chain(chain)
        )

    def transform(self, eps: Tensor) -> tuple[Tensor, Tensor]:
        """Turn standard normal rows (S, size) into draws and their log-densities (S,)."""
        white, log_q = eps, log_normal(eps)
        for flow in self.flows:
            white, log_det = flow.forward_and_log_det(white)
            log_q = log_q - log_det
        return self._affine().forward(white), log_q - ops.convert_to_tensor(self._log_det)

    def log_prob(self, w: Tensor) -> Tensor:
        """Return the log-densities (S,) of vectors (S, size), by the inverses of the flows."""
        x, log_q = self._affine().inverse(w), -ops.convert_to_tensor(self._log_det)
        for flow in reversed(self.flows):
            y, bijector = x, flow.bijector()
            x = bijector.inverse(y)
            log_q = log_q + bijector.inverse_log_det_jacobian(y, 1)
        return log_q + log_normal(x)

    def set_base(self, loc: np.ndarray, matrix: np.ndarray) -> None:
        """Set mean and factor of the Gaussian."""
        size = np.log(np.abs(matrix)).sum() if self.diagonal else np.linalg.slogdet(matrix)[1]
        for weight, value in ((self.loc, loc), (self.matrix, matrix), (self._log_det, size)):
            weight.assign(value)

    def _affine(self) -> FlowBijector:
        loc, matrix = ops.convert_to_tensor(self.loc), ops.convert_to_tensor(self.matrix)
        if self.diagonal:
            return AffineBijector(shift=loc, scale=matrix)
        return _MatrixBijector(loc=loc, matrix=matrix, log_det=ops.convert_to_tensor(self._log_det))
