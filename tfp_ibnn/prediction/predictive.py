"""What a network's output means, and how draws of it are summed up."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from keras import ops

from tfp_ibnn._core.backend import Tensor, fori_loop, mean
from tfp_ibnn._core.protocols import Chunks
from tfp_ibnn.layers.heads import gaussian_nll, log_prob, matched
from tfp_ibnn.metrics import BrierScore, ExpectedCalibrationError, NegativeLogLikelihood
from tfp_ibnn.metrics._base import TOLERANCE
from tfp_ibnn.metrics._mean import RootMeanSquaredError, RunningMean
from tfp_ibnn.metrics.scoring import Accuracy, negative_log_prob


class Summary(NamedTuple):
    """Sums over draws, from which all statistics follow; two of them merge exactly."""

    count: Tensor
    mean: Tensor
    squares: Tensor  # summed squared distances from the mean
    within: Tensor  # summed uncertainty of each draw (entropy, or variance)
    between: Tensor  # summed divergence of each draw from the mean


class Predictive:
    """What a kind of output predicts; the base of all kinds.

    A draw is one sampled network's prediction for an example, in a form that can be averaged. Draws
    have the shape (draws, examples, ...). A kind defines `draws`, which also gives the uncertainty
    within each, `divergence`, `statistics`, `scores`, `pair` (targets and predictions that go
    together) and `loss` (of each example, or of each of its positions).
    """

    def public(self, draws: Tensor) -> Tensor:
        """Return draws, or their mean or spread, in the form the user sees."""
        return draws

    def interval(self, draws: Tensor, within: Tensor, level: float) -> tuple[Tensor, Tensor]:
        """Return the bounds of the central interval that holds the given probability."""
        ends = ops.convert_to_tensor([(1 - level) / 2, (1 + level) / 2], dtype=draws.dtype)
        bounds = ops.quantile(self.public(draws), ends, axis=0)
        return bounds[0], bounds[1]

    def update(
        self, scores: list[Any], y_true: Any, prediction: dict[str, Tensor], sample_weight: Any
    ) -> None:
        """Count a batch in the metrics that `scores` gave; a plain mean is one of losses."""
        for score in scores:
            if type(score) is RunningMean:
                score.update_state(self.loss(y_true, prediction), sample_weight=sample_weight)
            else:
                score.update_state(*self.pair(y_true, prediction), sample_weight=sample_weight)

    def mean_loss(self, y_true: Any, prediction: dict[str, Tensor], sample_weight: Any) -> Tensor:
        """Return the loss of a batch, averaged over examples and positions."""
        loss = self.loss(y_true, prediction)
        if sample_weight is not None:
            loss = loss * with_rank(ops.cast(sample_weight, loss.dtype), len(loss.shape))
        # A replica may have no example.
        return ops.sum(loss) / ops.cast(ops.maximum(ops.size(loss), 1), loss.dtype)

    def average(self, chunks: Chunks, options: Any) -> dict[str, Any]:
        """Return the prediction of one batch; the options are the attributes of a `MonteCarlo`."""
        if not self.keeps_draws(options):
            return self.result(self._streamed(chunks, options.samples), options)
        if chunks.is_one:
            outputs = chunks.run(0)
        else:
            starts = chunks.size * ops.arange(chunks.count, dtype="int32")
            outputs = keras.tree.map_structure(
                lambda x: ops.reshape(x, (-1, *ops.shape(x)[2:]))[: options.samples],
                ops.map(chunks.run, starts),
            )
        draws, within = self.checked_draws(outputs)
        summary = self.summarize(draws, within, ops.ones((options.samples,)))
        return self.result(summary, options, draws, within, outputs)

    def keeps_draws(self, options: Any) -> bool:
        """Whether a prediction needs all draws at once."""
        return options.return_samples or options.interval is not None

    def result(self, summary: Summary, options: Any, *kept: Tensor) -> dict[str, Tensor]:
        """Return the prediction from a summary, and from draws, `within` and outputs if kept."""
        result, samples = self.statistics(summary), options.samples
        draws, within, _ = kept or (None, None, None)
        if options.return_samples:
            result["samples"] = ops.moveaxis(self.public(draws), 0, 1)
        if options.interval is not None:
            result["lower"], result["upper"] = self.interval(draws, within, options.interval)
        if options.standard_error:
            # One sample is all that a model without noise has; its squares are 0.
            variance = summary.squares / max(1, samples * (samples - 1))
            result["standard_error"] = self.public(ops.sqrt(variance))
        return result

    def checked_draws(self, outputs: Any) -> tuple[Any, Any]:
        """Return what `draws` does, or raise if there are several outputs."""
        if isinstance(outputs, dict):
            like = dict.fromkeys(outputs, "softmax")
            raise ValueError(f"The model has several outputs: give `head` for each, like {like}.")
        return self.draws(outputs)

    def of_one(self, outputs: Tensor) -> dict[str, Any]:
        """Return `mean` and `aleatoric` of the outputs (1, examples, ...) of one network."""
        draws, within = self.checked_draws(outputs)
        return {"mean": self.public(draws)[0], "aleatoric": within[0]}

    def _streamed(self, chunks: Chunks, samples: int) -> Summary:
        """Sum up draws chunk by chunk."""

        def summarize(number: int | Tensor) -> Summary:
            first = number * chunks.size
            draws, within = self.checked_draws(chunks.run(first))
            counted = first + ops.arange(chunks.size, dtype="int32") < samples
            return self.summarize(draws, within, counted)

        start = summarize(0)
        if chunks.is_one:
            return start
        return fori_loop(1, chunks.count, lambda i, sums: self.merge(sums, summarize(i)), start)

    def summarize(self, draws: Tensor, within: Tensor, weights: Tensor) -> Summary:
        """Sum up draws, each counted with its weight, 0 or 1."""
        weights = ops.cast(weights, draws.dtype)

        def total(values: Tensor) -> Tensor:
            shape = (-1, *(1,) * (len(values.shape) - 1))
            return ops.sum(ops.reshape(weights, shape) * values, axis=0)

        count = ops.sum(weights)
        center = total(draws) / count
        squares, between = total(ops.square(draws - center)), total(self.divergence(draws, center))
        return Summary(count, center, squares, total(within), between)

    def merge(self, one: Summary, other: Summary) -> Summary:
        """Return the summary of the draws of both; `other` is not empty.

        The divergence of a draw from the common mean is, on average, that from its part's mean
        plus that of its part's mean from the common one: true of squared distances and of KL.
        """
        count = one.count + other.count
        step = other.mean - one.mean
        center = one.mean + step * (other.count / count)
        moved = one.count * self.divergence(one.mean, center)
        moved = moved + other.count * self.divergence(other.mean, center)
        return Summary(
            count,
            center,
            one.squares + other.squares + ops.square(step) * (one.count * other.count / count),
            one.within + other.within,
            one.between + other.between + moved,
        )


class Categorical(Predictive):
    """One of several classes, on the last axis."""

    def __init__(self, from_logits: bool) -> None:
        self.from_logits = from_logits

    def draws(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return class probabilities, and their entropies."""
        if outputs.shape[-1] == 1:
            raise ValueError("One number is not a distribution over classes: give head='sigmoid'.")
        if self.from_logits:
            probabilities = ops.softmax(outputs, axis=-1)
        else:
            is_one = ops.abs(ops.sum(outputs, axis=-1, keepdims=True) - 1) < TOLERANCE
            positive = ops.all(outputs >= 0, axis=-1, keepdims=True)
            probabilities = _or_nan(outputs, ops.logical_and(positive, is_one))
        return probabilities, _entropy(probabilities)

    def divergence(self, draw: Tensor, mean: Tensor) -> Tensor:
        """Return KL[draw || mean] in nats; of a product with 0 the logarithm does not matter."""
        inside = ops.logical_and(draw > 0, mean > 0)
        ratio = ops.where(inside, draw, 1) / ops.where(inside, mean, 1)
        return ops.sum(draw * ops.log(ratio), axis=-1)

    def statistics(self, summary: Summary) -> dict[str, Tensor]:
        """Return mean, variance, and the entropies."""
        variance = self.public(summary.squares / summary.count)
        return {
            "mean": self.public(summary.mean),
            "variance": variance,
            "entropy": _entropy(summary.mean),
            "aleatoric": summary.within / summary.count,
            "epistemic": summary.between / summary.count,
            "total_variance": ops.sum(variance, axis=-1),
        }

    def scores(self) -> list[keras.metrics.Metric]:
        """Return accuracy, NLL, Brier score and ECE."""
        return [Accuracy(), NegativeLogLikelihood(), BrierScore(), ExpectedCalibrationError()]

    def pair(self, y_true: Any, prediction: dict[str, Tensor]) -> tuple[Any, Tensor]:
        """Return labels and class probabilities."""
        return y_true, prediction["mean"]

    def loss(self, y_true: Any, prediction: dict[str, Tensor]) -> Tensor:
        """Return minus the log-probability of the label."""
        target, probabilities = self.pair(y_true, prediction)
        loss = negative_log_prob(target, probabilities)
        return ops.reshape(loss, ops.shape(probabilities)[:-1])


class Labels(Categorical):
    """Yes or no, for each entry of the last axis; a draw has [no, yes] on an axis of its own."""

    def draws(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probabilities of no and yes, and their entropies."""
        if self.from_logits:
            yes, no = ops.sigmoid(outputs), ops.sigmoid(-outputs)
        else:
            yes = _or_nan(outputs, ops.logical_and(outputs >= 0, outputs <= 1))
            no = 1 - yes
        both = ops.stack([no, yes], axis=-1)
        return both, _entropy(both)

    def public(self, draws: Tensor) -> Tensor:
        return draws[..., 1]

    def statistics(self, summary: Summary) -> dict[str, Tensor]:
        result = super().statistics(summary)
        return {**result, "total_variance": result["variance"]}

    def pair(self, y_true: Any, prediction: dict[str, Tensor]) -> tuple[Any, Tensor]:
        yes = prediction["mean"]
        return matched(y_true, yes), ops.stack([1 - yes, yes], axis=-1)


class Point(Predictive):
    """A number; its own uncertainty is not predicted."""

    has_density = False

    def draws(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs."""
        return outputs, ops.zeros_like(outputs)

    def divergence(self, draw: Tensor, mean: Tensor) -> Tensor:
        """Return the squared distance."""
        return ops.square(draw - mean)

    def statistics(self, summary: Summary) -> dict[str, Tensor]:
        """Return the mean and the variances."""
        aleatoric, epistemic = summary.within / summary.count, summary.between / summary.count
        return {
            "mean": summary.mean,
            "aleatoric": aleatoric,
            "epistemic": epistemic,
            "total_variance": aleatoric + epistemic,
        }

    def scores(self) -> list[keras.metrics.Metric]:
        """Return the root of the mean squared error, and the NLL where there is a density."""
        scores = [RootMeanSquaredError("rmse")]
        return [*scores, RunningMean("nll")] if self.has_density else scores

    def pair(self, y_true: Any, prediction: dict[str, Tensor]) -> tuple[Any, Tensor]:
        """Return targets and means."""
        return matched(y_true, prediction["mean"]), prediction["mean"]

    def loss(self, y_true: Any, prediction: dict[str, Tensor]) -> Tensor:
        """Return the squared error."""
        target, predicted = self.pair(y_true, prediction)
        return ops.mean(ops.square(target - predicted), axis=-1)


class Gaussian(Point):
    """A number with a standard deviation: the output of a `GaussianHead`."""

    has_density = True

    def draws(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        if outputs.shape[-1] % 2:
            raise ValueError(f"A gaussian output has an even size; got {outputs.shape[-1]}.")
        loc, scale = ops.split(outputs, 2, axis=-1)
        return loc, ops.square(_or_nan(scale, scale >= 0))

    def interval(self, draws: Tensor, within: Tensor, level: float) -> tuple[Tensor, Tensor]:
        """Return the bounds for new observations: quantiles of the draws' mixture, by bisection."""
        scale = ops.sqrt(within)
        # Each Gaussian holds all but 1e-15 of its mass within 8 standard deviations.
        start = ops.min(draws - 8 * scale, axis=0), ops.max(draws + 8 * scale, axis=0)

        def quantile(probability: float) -> Tensor:
            def halve(_: Any, ends: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
                lower, upper = ends
                middle = (lower + upper) / 2
                cdf = 0.5 * (1 + ops.erf((middle - draws) / scale * 2.0**-0.5))
                below = mean(cdf, axis=0) < probability
                return ops.where(below, middle, lower), ops.where(below, upper, middle)

            lower, upper = ops.fori_loop(0, 40, halve, start)
            return (lower + upper) / 2

        return quantile((1 - level) / 2), quantile((1 + level) / 2)

    def loss(self, y_true: Any, prediction: dict[str, Tensor]) -> Tensor:
        target, predicted = self.pair(y_true, prediction)
        return gaussian_nll(target, predicted, prediction["total_variance"])


class Distribution(Point):
    """What a function makes of the output: a TFP distribution of the targets, with its moments."""

    has_density = True

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        self.make = make

    def keeps_draws(self, options: Any) -> bool:
        return True

    def draws(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means and the variances."""
        sizes = ops.shape(outputs)
        # As in training, there is one axis before the positions.
        found = self.make(ops.reshape(outputs, (-1, *sizes[2:])))
        try:
            moments = found.mean(), found.variance()
        except NotImplementedError:
            kind = type(found).__name__
            raise ValueError(f"A {kind} has no mean and variance that TFP knows.") from None
        return tuple(ops.reshape(x, (*sizes[:2], *ops.shape(x)[1:])) for x in moments)

    def interval(self, draws: Tensor, within: Tensor, level: float) -> tuple[Tensor, Tensor]:
        raise ValueError("An `interval` is not for TFP distributions: use their `parameters`.")

    def result(self, summary: Summary, options: Any, *kept: Any) -> dict[str, Tensor]:
        result = super().result(summary, options, *kept)
        return {**result, "parameters": ops.moveaxis(kept[-1], 0, 1)}

    def loss(self, y_true: Any, prediction: dict[str, Tensor]) -> Tensor:
        """Return minus the log-density of the targets under the mixture of all draws."""
        target, _ = self.pair(y_true, prediction)
        outputs, sizes = ops.moveaxis(prediction["parameters"], 1, 0), ops.shape(target)
        count, _, *rest = ops.shape(outputs)
        outputs = ops.reshape(outputs, (-1, *rest))
        targets = ops.reshape(ops.broadcast_to(target, (count, *sizes)), (-1, *sizes[1:]))
        densities = log_prob(self.make(outputs), targets, outputs)
        densities = ops.reshape(densities, (count, -1, *ops.shape(densities)[1:]))
        return ops.log(ops.cast(count, densities.dtype)) - ops.logsumexp(densities, axis=0)


def with_rank(weight: Tensor, rank: int) -> Tensor:
    """Return weights with a last axis of size 1 removed, or axes added, to be of that rank."""
    weight = weight[..., 0] if len(weight.shape) > rank else weight
    return ops.reshape(weight, (*ops.shape(weight), *(1,) * (rank - len(weight.shape))))


def _entropy(probabilities: Tensor) -> Tensor:
    """Return the entropy over the last axis, in nats."""
    logarithm = ops.log(ops.where(probabilities > 0, probabilities, 1))
    return -ops.sum(probabilities * logarithm, axis=-1)


def _or_nan(values: Tensor, valid: Tensor) -> Tensor:
    """Return values, and NaN for what is not valid, so that nothing false comes out later."""
    return ops.where(valid, values, ops.full_like(values, float("nan")))
