"""The statistics of many sampled networks, chunk by chunk."""

from keras import ops

from tfp_ibnn._core.backend import Tensor, fori_loop
from tfp_ibnn._core.protocols import Chunks
from tfp_ibnn.prediction.predictive import Predictive, Summary

__all__ = ["Averaging"]


class Averaging:
    """Turns the outputs of sampled networks into what `MonteCarlo` returns.

    Args:
        predictive: what an output means.
        samples: number of networks.
        sampling: how they were drawn; a standard error depends on it.
        return_samples: keep the draws.
        interval: probability of a central interval.
        standard_error: of the Monte Carlo mean.
    """

    def __init__(
        self,
        predictive: Predictive,
        samples: int,
        sampling: str,
        return_samples: bool,
        interval: float | None,
        standard_error: bool,
    ) -> None:
        self._predictive = predictive
        self._samples, self._sampling = samples, sampling
        self._return_samples, self._interval = return_samples, interval
        self._standard_error = standard_error

    def __call__(self, chunks: Chunks) -> dict[str, Tensor]:
        """Return the statistics of one batch."""
        paired = self._standard_error and self._sampling == "antithetic"
        keeps_draws = self._return_samples or self._interval is not None or paired
        return self._from_all_draws(chunks) if keeps_draws else self._from_stream(chunks)

    def _from_all_draws(self, chunks: Chunks) -> dict[str, Tensor]:
        """Return the statistics, and what else was asked for, of draws that are all kept."""
        if chunks.is_one:
            outputs = chunks.run(0)
        else:
            starts = chunks.size * ops.arange(chunks.count, dtype="int32")
            outputs = ops.map(chunks.run, starts)
            outputs = ops.reshape(outputs, (-1, *ops.shape(outputs)[2:]))[: self._samples]
        predictive = self._predictive
        draws, within = predictive.draws(outputs)
        summary = predictive.summarize(draws, within, ops.ones((self._samples,), draws.dtype))
        result = self._statistics(summary)
        if self._return_samples:
            result["samples"] = ops.moveaxis(predictive.public(draws), 0, 1)
        if self._interval is not None:
            result["lower"], result["upper"] = predictive.interval(draws, within, self._interval)
        if self._standard_error and self._sampling == "antithetic" and self._samples > 1:
            pairs = (draws[::2] + draws[1::2]) / 2
            spread = ops.sum(ops.square(pairs - summary.mean), axis=0)
            half = self._samples // 2
            result["standard_error"] = predictive.public(ops.sqrt(spread / (half * (half - 1))))
        return result

    def _from_stream(self, chunks: Chunks) -> dict[str, Tensor]:
        """Return the statistics of draws that are summed up chunk by chunk."""
        predictive = self._predictive

        def summarize(number: int | Tensor) -> Summary:
            first = number * chunks.size
            draws, within = predictive.draws(chunks.run(first))
            counted = first + ops.arange(chunks.size, dtype="int32") < self._samples
            return predictive.summarize(draws, within, ops.cast(counted, draws.dtype))

        def add(number: Tensor, so_far: Summary) -> Summary:
            return predictive.merge(so_far, summarize(number))

        summary = summarize(0)
        if not chunks.is_one:
            summary = fori_loop(1, chunks.count, add, summary)
        return self._statistics(summary)

    def _statistics(self, summary: Summary) -> dict[str, Tensor]:
        result = self._predictive.statistics(summary)
        if self._standard_error and self._samples == 1:  # a model without noise
            result["standard_error"] = ops.zeros_like(result["mean"])
        elif self._standard_error and self._sampling == "iid":
            variance = summary.squares / (self._samples * (self._samples - 1))
            result["standard_error"] = self._predictive.public(ops.sqrt(variance))
        return result
