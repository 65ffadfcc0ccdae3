"""Run a network with one set of weights after the other."""

from typing import Any

import keras
from keras import ops

from tfp_ibnn._core import checks, keras_internals
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.protocols import Chunks, Sampler, WeightPosterior

__all__ = ["WeightSampler"]


class WeightSampler(Sampler):
    """The networks that a posterior over weights gives.

    They run one after the other, in one compiled loop.

    Args:
        posterior: over the weights of one network.
        samples: number of networks; of a posterior with fewer weight sets, all of them.
        chunk_size: of how many networks to keep the outputs at once; None keeps all.
    """

    def __init__(
        self, posterior: WeightPosterior, samples: int, chunk_size: int | None = None
    ) -> None:
        count = posterior.count
        self.samples = samples if count is None else min(samples, count)
        self.is_random = self.samples > 1
        self._posterior = posterior
        self._chunk_size = chunk_size

    def chunks(self, inputs: Any, key: Tensor) -> Chunks:
        """Prepare the networks that a key gives for a batch."""
        size = self.samples if self._chunk_size is None else min(self._chunk_size, self.samples)

        def run(first: int | Tensor) -> Tensor:
            numbers = ops.cast(first, "int32") + ops.arange(size, dtype="int32")
            return ops.map(lambda number: self._run(inputs, key, number), numbers)

        return Chunks(run, size, -(-self.samples // size))

    def draw(self, inputs: Any, key: Tensor, number: Tensor) -> Tensor:
        """Return the outputs (1, batch, ...) of one of the networks."""
        return self._run(inputs, key, ops.cast(number, "int32"))[None]

    def at_mean(self, inputs: Any) -> Tensor:
        """Return the outputs (1, batch, ...) of the network that stands for all."""
        return self._with(self._posterior.mean(), inputs)[None]

    def _run(self, inputs: Any, key: Tensor, number: Tensor) -> Tensor:
        return self._with(self._posterior.sample(key, number), inputs)

    def _with(self, values: list[Tensor], inputs: Any) -> Tensor:
        posterior = self._posterior
        with keras_internals.values_in_place(zip(posterior.sampled, values, strict=True)):
            outputs = posterior.network(inputs, training=False)
        if not ops.is_tensor(outputs):
            raise ValueError(
                f"Model {posterior.network.name!r} returns {type(outputs).__name__}; MonteCarlo "
                "needs one output, a tensor."
            )
        dtype = keras.backend.standardize_dtype(outputs.dtype)
        return ops.cast(outputs, checks.full_precision(dtype))
