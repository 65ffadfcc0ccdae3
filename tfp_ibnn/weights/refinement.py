"""A Gaussian posterior over weights with normalizing flows on top."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor, matmul, mean, tfb, tfd
from tfp_ibnn.flows import AffineBijector, Flow, FlowBijector
from tfp_ibnn.flows.chain import through
from tfp_ibnn.posteriors.base import diagonal_normal, log_normal
from tfp_ibnn.posteriors.flow import Pushforward, copied
from tfp_ibnn.weights.flat import FlatPosterior
from tfp_ibnn.weights.vectors import mirrored


class _MatrixBijector(FlowBijector):
    """y = loc + x M', for one invertible matrix M; its log-determinant is given."""

    parameter_ndims = {"loc": 1, "matrix": 2, "log_det": 0}  # noqa: RUF012
    constant_jacobian = True

    def _forward(self, x: Tensor) -> Tensor:
        return self.loc + matmul(x, ops.transpose(self.matrix))

    def _inverse(self, y: Tensor) -> Tensor:
        size = self.loc.shape[0]
        centered = ops.reshape(y - self.loc, (-1, size))
        columns = ops.solve(self.matrix, ops.transpose(centered))
        rows = ops.transpose(columns)
        return ops.reshape(rows, y.shape)

    def _forward_log_det_jacobian(self, x: Tensor) -> Tensor:
        return self.log_det


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class RefinedPosterior(FlatPosterior):
    """w = loc + M NF(eps), eps standard normal: a Gaussian refined by flows; made by `refine`.

    Args:
        model: a built Keras model; it is not copied.
        flows: flows, applied in order; they are copied.
        places: which of `model.weights` are sampled, by position.
        diagonal: whether M is a diagonal matrix.
        **kwargs: those of `keras.layers.Layer`.
    """

    def __init__(
        self,
        model: keras.Model,
        flows: Sequence[Flow],
        places: Sequence[int],
        diagonal: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, places, **kwargs)
        size = self.size
        self.diagonal = bool(diagonal)
        self.flows = copied(flows, self.variable_dtype)
        for flow in self.flows:
            flow.build((None, size))
        self.loc = self._add("loc", (size,))
        self.matrix = self._add("matrix", (size,) if diagonal else (size, size))
        self._log_det = self._add("log_det", ())
        self.history: list[float] = []

    @property
    def trained(self) -> list[keras.Variable]:
        """The variables of the flows that `refine` trains."""
        return [v for flow in self.flows for v in flow.trainable_variables]

    def draw(self, key: Tensor, number: int | Tensor) -> Tensor:
        """Return draw `number` of those a key gives.

        Args:
            key: two integers.
            number: number of the draw, from 0 on.

        Returns:
            A vector (size,).
        """
        eps = self._standard_normal(key, number)
        w, _ = self.transform(eps[None])
        return w[0]

    def center(self) -> Tensor:
        """Return the mean, over a fixed set of mirrored draws."""
        rng = np.random.default_rng(0)
        eps = mirrored(rng, 64, self.size).astype(self.variable_dtype)
        w, _ = self.transform(ops.convert_to_tensor(eps))
        return mean(w, axis=0)

    def distribution(self) -> tfd.Distribution:
        """Return q over the flat vector; its `log_prob` takes the inverses of the flows."""
        zeros = ops.zeros((self.size,), dtype=self.variable_dtype)
        ones = ops.ones_like(zeros)
        flows = [flow.bijector() for flow in self.flows]
        last_first = [self._affine(), *reversed(flows)]
        return Pushforward(diagonal_normal(zeros, ones), tfb.Chain(last_first))

    def transform(self, eps: Tensor) -> tuple[Tensor, Tensor]:
        """Turn standard normal rows (S, size) into draws and their log-densities (S,)."""
        white, log_det = through(self.flows, eps, None, "forward")
        log_q = log_normal(eps) - log_det - ops.convert_to_tensor(self._log_det)
        draws = self._affine().forward(white)
        return draws, log_q

    def log_prob(self, w: Tensor) -> Tensor:
        """Return the log-densities (S,) of vectors (S, size), by the inverses of the flows."""
        return self.distribution().log_prob(w)

    def set_base(self, loc: np.ndarray, matrix: np.ndarray) -> None:
        """Set the Gaussian.

        Args:
            loc: its mean (size,).
            matrix: M (size, size), or its diagonal (size,) if it is a diagonal matrix.
        """
        if self.diagonal:
            log_det = np.log(np.abs(matrix)).sum()
        else:
            _, log_det = np.linalg.slogdet(matrix)
        self.loc.assign(loc)
        self.matrix.assign(matrix)
        self._log_det.assign(log_det)

    def _affine(self) -> FlowBijector:
        loc = ops.convert_to_tensor(self.loc)
        matrix = ops.convert_to_tensor(self.matrix)
        if self.diagonal:
            return AffineBijector(shift=loc, scale=matrix)
        log_det = ops.convert_to_tensor(self._log_det)
        return _MatrixBijector(loc=loc, matrix=matrix, log_det=log_det)
