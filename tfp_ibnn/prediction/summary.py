"""How draws are summed up, and what a prediction is made of."""

from typing import Any, NamedTuple

import keras
from keras import ops

from tfp_ibnn._core.backend import Tensor, fori_loop
from tfp_ibnn._core.protocols import Chunks
from tfp_ibnn.likelihoods import Likelihood


class Wanted(NamedTuple):
    """What a prediction holds; see `MonteCarlo`."""

    samples: int  # how many draws are averaged
    return_samples: bool = False
    interval: float | None = None  # its probability
    standard_error: bool = False


class Summary(NamedTuple):
    """Sums over draws, from which all statistics follow; two of them merge exactly."""

    count: Tensor
    mean: Tensor
    squares: Tensor  # summed squared distances from the mean
    within: Tensor  # summed uncertainty of each draw (entropy, or variance)
    between: Tensor  # summed divergence of each draw from the mean


class Draws(NamedTuple):
    """All draws of an output, where a prediction needs them."""

    draws: Tensor  # (draws, examples, ...)
    within: Tensor  # the uncertainty of each draw
    outputs: Tensor  # of the network, from which both follow


def average(likelihood: Likelihood, chunks: Chunks, wanted: Wanted) -> dict[str, Any]:
    """Return the prediction of one batch.

    Args:
        likelihood: what the outputs mean.
        chunks: the sampled networks on the batch.
        wanted: what the prediction holds.

    Returns:
        The dict of `MonteCarlo`; of several outputs, one for each by name.
    """
    needs_all_draws = wanted.return_samples or wanted.interval is not None
    if any(part.needs_all_draws for part in likelihood.parts.values()):
        needs_all_draws = True
    if needs_all_draws:
        draws = _all_draws(likelihood, chunks, wanted.samples)
        summaries = _summaries_of_all(likelihood, draws, wanted.samples)
    else:
        draws = dict.fromkeys(likelihood.parts)
        summaries = _streamed(likelihood, chunks, wanted.samples)
    predictions = {}
    for name, part in likelihood.parts.items():
        predictions[name] = _prediction(part, summaries[name], draws[name], wanted)
    return likelihood.join(predictions)


def of_one(likelihood: Likelihood, outputs: Any) -> dict[str, Any]:
    """Return the prediction of one network.

    Args:
        likelihood: what the outputs mean.
        outputs: (1, examples, ...).

    Returns:
        A dict with `mean` and `aleatoric`, or `quantiles`; of several outputs, one for each by
        name.
    """
    likelihood.check_outputs(outputs)
    outputs = likelihood.split(outputs)
    predictions = {}
    for name, part in likelihood.parts.items():
        draws, within = part.draws(outputs[name])
        predictions[name] = part.of_one(draws, within)
    return likelihood.join(predictions)


def summarize(likelihood: Likelihood, draws: Tensor, within: Tensor, weights: Tensor) -> Summary:
    """Sum up the draws of one output.

    Args:
        likelihood: what the output means.
        draws: (draws, examples, ...).
        within: the uncertainty within each.
        weights: of each draw, 0 or 1.

    Returns:
        The summary of the draws of weight 1.
    """
    weights = ops.cast(weights, draws.dtype)
    count = ops.sum(weights)
    center = _weighted_sum(weights, draws) / count
    squares = ops.square(draws - center)
    between = likelihood.divergence(draws, center)
    return Summary(
        count,
        center,
        _weighted_sum(weights, squares),
        _weighted_sum(weights, within),
        _weighted_sum(weights, between),
    )


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Return the sum over the first axis."""
    ones = (1,) * (len(values.shape) - 1)
    weights = ops.reshape(weights, (-1, *ones))
    return ops.sum(weights * values, axis=0)


def merge(likelihood: Likelihood, one: Summary, other: Summary) -> Summary:
    """Return the summary of the draws of both.

    The divergence of a draw from the common mean is, on average, that from its part's mean
    plus that of its part's mean from the common one: true of squared distances and of KL.

    Args:
        likelihood: what the output means.
        one: a summary.
        other: a summary of at least one draw.

    Returns:
        A summary, the same as if all draws had been summed up at once.
    """
    count = one.count + other.count
    step = other.mean - one.mean
    share = other.count / count
    center = one.mean + share * step
    # n1 * n2 / (n1 + n2) * (mean2 - mean1)^2, by the parallel axis theorem.
    squares_of_means = ops.square(step) * (one.count * share)
    divergence_of_one = one.count * likelihood.divergence(one.mean, center)
    divergence_of_other = other.count * likelihood.divergence(other.mean, center)
    divergence_of_means = divergence_of_one + divergence_of_other
    return Summary(
        count,
        center,
        one.squares + other.squares + squares_of_means,
        one.within + other.within,
        one.between + other.between + divergence_of_means,
    )


def _streamed(likelihood: Likelihood, chunks: Chunks, samples: int) -> dict[str, Summary]:
    """Sum up draws chunk by chunk."""

    def add_chunk(number: int | Tensor, sums: dict[str, Summary]) -> dict[str, Summary]:
        further = _summaries_of_chunk(likelihood, chunks, number, samples)
        merged = {}
        for name, part in likelihood.parts.items():
            merged[name] = merge(part, sums[name], further[name])
        return merged

    sums = _summaries_of_chunk(likelihood, chunks, 0, samples)
    if chunks.is_one:
        return sums
    return fori_loop(1, chunks.count, add_chunk, sums)


def _summaries_of_chunk(
    likelihood: Likelihood, chunks: Chunks, number: int | Tensor, samples: int
) -> dict[str, Summary]:
    """Run a chunk, and sum up each output's draws in it that are among the samples."""
    first = number * chunks.size
    outputs = chunks.run(first)
    likelihood.check_outputs(outputs)
    outputs = likelihood.split(outputs)
    numbers = first + ops.arange(chunks.size, dtype="int32")
    is_counted = numbers < samples
    summaries = {}
    for name, part in likelihood.parts.items():
        draws, within = part.draws(outputs[name])
        summaries[name] = summarize(part, draws, within, is_counted)
    return summaries


def _all_draws(likelihood: Likelihood, chunks: Chunks, samples: int) -> dict[str, Draws]:
    """Return the draws of each output."""
    outputs = chunks.run(0) if chunks.is_one else _outputs_of_all(chunks, samples)
    likelihood.check_outputs(outputs)
    outputs = likelihood.split(outputs)
    draws_by_name = {}
    for name, part in likelihood.parts.items():
        draws, within = part.draws(outputs[name])
        draws_by_name[name] = Draws(draws, within, outputs[name])
    return draws_by_name


def _outputs_of_all(chunks: Chunks, samples: int) -> Any:
    """Return the outputs (samples, examples, ...) of all chunks."""

    def join(of_chunks: Tensor) -> Tensor:
        sizes = ops.shape(of_chunks)[2:]
        outputs = ops.reshape(of_chunks, (-1, *sizes))
        return outputs[:samples]  # the last chunk may go beyond

    starts = chunks.size * ops.arange(chunks.count, dtype="int32")
    outputs = ops.map(chunks.run, starts)
    return keras.tree.map_structure(join, outputs)


def _summaries_of_all(
    likelihood: Likelihood, draws: dict[str, Draws], samples: int
) -> dict[str, Summary]:
    """Sum up draws that are all kept."""
    is_counted = ops.ones((samples,))
    summaries = {}
    for name, part in likelihood.parts.items():
        summaries[name] = summarize(part, draws[name].draws, draws[name].within, is_counted)
    return summaries


def _prediction(
    likelihood: Likelihood, summary: Summary, draws: Draws | None, wanted: Wanted
) -> dict[str, Tensor]:
    """Return the prediction of one output."""
    prediction = likelihood.statistics(summary)
    if wanted.return_samples:
        samples = likelihood.public(draws.draws)
        prediction["samples"] = ops.moveaxis(samples, 0, 1)
    if wanted.interval is not None:
        bounds = likelihood.interval(draws.draws, draws.within, wanted.interval)
        prediction["lower"], prediction["upper"] = bounds
    if wanted.standard_error:
        # One sample is all that a model without noise has; its squares are 0.
        pairs = max(1, wanted.samples * (wanted.samples - 1))
        standard_error = ops.sqrt(summary.squares / pairs)
        prediction["standard_error"] = likelihood.public(standard_error)
    if likelihood.needs_all_draws:
        prediction |= likelihood.of_all_draws(draws.outputs)
    return prediction
