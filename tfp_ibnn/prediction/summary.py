"""How draws are summed up, and what a prediction is made of."""

from typing import Any, NamedTuple

import keras
from keras import ops

from tfp_ibnn._core.backend import Tensor, fori_loop
from tfp_ibnn._core.protocols import Chunks
from tfp_ibnn.likelihoods import Likelihood


class Wanted(NamedTuple):
    """What a prediction holds; see `MonteCarlo`."""

    samples: int
    return_samples: bool = False
    interval: float | None = None
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

    draws: Tensor
    within: Tensor
    outputs: Tensor


def average(likelihood: Likelihood, chunks: Chunks, wanted: Wanted) -> dict[str, Any]:
    """Return the prediction of one batch.

    Args:
        likelihood: what the outputs mean.
        chunks: the sampled networks on the batch.
        wanted: what the prediction holds.

    Returns:
        The dict of `MonteCarlo`; of several outputs, one for each by name.
    """
    parts = likelihood.parts
    is_streamed = not wanted.return_samples and wanted.interval is None
    if is_streamed and not any(part.needs_all_draws for part in parts.values()):
        summaries = _streamed(likelihood, chunks, wanted.samples)
        kept = dict.fromkeys(parts)
    else:
        kept = _all_draws(likelihood, chunks, wanted.samples)
        is_counted = ops.ones((wanted.samples,))
        summaries = {
            name: summarize(part, kept[name].draws, kept[name].within, is_counted)
            for name, part in parts.items()
        }
    predictions = {
        name: _prediction(part, summaries[name], kept[name], wanted) for name, part in parts.items()
    }
    return likelihood.join(predictions)


def of_one(likelihood: Likelihood, outputs: Any) -> dict[str, Any]:
    """Return `mean` and `aleatoric` of one network.

    Args:
        likelihood: what the outputs mean.
        outputs: (1, examples, ...).
    """
    likelihood.check_outputs(outputs)
    outputs = likelihood.split(outputs)
    predictions = {}
    for name, part in likelihood.parts.items():
        draws, within = part.draws(outputs[name])
        mean = part.public(draws)[0]
        predictions[name] = {"mean": mean, "aleatoric": within[0]}
    return likelihood.join(predictions)


def summarize(likelihood: Likelihood, draws: Tensor, within: Tensor, weights: Tensor) -> Summary:
    """Sum up the draws of one output.

    Args:
        likelihood: what the output means.
        draws: (draws, examples, ...).
        within: the uncertainty within each.
        weights: of each draw, 0 or 1.
    """
    weights = ops.cast(weights, draws.dtype)

    def total(values: Tensor) -> Tensor:
        ones = (1,) * (len(values.shape) - 1)
        of_draws = ops.reshape(weights, (-1, *ones))
        return ops.sum(of_draws * values, axis=0)

    count = ops.sum(weights)
    center = total(draws) / count
    squares = ops.square(draws - center)
    between = likelihood.divergence(draws, center)
    return Summary(count, center, total(squares), total(within), total(between))


def merge(likelihood: Likelihood, one: Summary, other: Summary) -> Summary:
    """Return the summary of the draws of both.

    The divergence of a draw from the common mean is, on average, that from its part's mean
    plus that of its part's mean from the common one: true of squared distances and of KL.

    Args:
        likelihood: what the output means.
        one: a summary.
        other: a summary of at least one draw.
    """
    count = one.count + other.count
    step = other.mean - one.mean
    share = other.count / count
    center = one.mean + share * step
    moved = one.count * likelihood.divergence(one.mean, center)
    moved = moved + other.count * likelihood.divergence(other.mean, center)
    apart = ops.square(step) * (one.count * share)
    return Summary(
        count,
        center,
        one.squares + other.squares + apart,
        one.within + other.within,
        one.between + other.between + moved,
    )


def _streamed(likelihood: Likelihood, chunks: Chunks, samples: int) -> dict[str, Summary]:
    """Sum up draws chunk by chunk."""
    parts = likelihood.parts

    def of_chunk(number: int | Tensor) -> dict[str, Summary]:
        first = number * chunks.size
        outputs = chunks.run(first)
        likelihood.check_outputs(outputs)
        outputs = likelihood.split(outputs)
        is_counted = first + ops.arange(chunks.size, dtype="int32") < samples
        return {
            name: summarize(part, *part.draws(outputs[name]), is_counted)
            for name, part in parts.items()
        }

    def add(number: int | Tensor, sums: dict[str, Summary]) -> dict[str, Summary]:
        further = of_chunk(number)
        return {name: merge(part, sums[name], further[name]) for name, part in parts.items()}

    start = of_chunk(0)
    return start if chunks.is_one else fori_loop(1, chunks.count, add, start)


def _all_draws(likelihood: Likelihood, chunks: Chunks, samples: int) -> dict[str, Draws]:
    """Return the draws of each output."""
    if chunks.is_one:
        outputs = chunks.run(0)
    else:
        starts = chunks.size * ops.arange(chunks.count, dtype="int32")
        outputs = ops.map(chunks.run, starts)

        def of_chunks(values: Tensor) -> Tensor:
            sizes = ops.shape(values)[2:]
            draws = ops.reshape(values, (-1, *sizes))
            return draws[:samples]  # the last chunk may go beyond

        outputs = keras.tree.map_structure(of_chunks, outputs)
    likelihood.check_outputs(outputs)
    outputs = likelihood.split(outputs)
    return {
        name: Draws(*part.draws(outputs[name]), outputs[name])
        for name, part in likelihood.parts.items()
    }


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
