"""The scores of `OODDetector`, one class each, that need the prediction alone."""

from typing import Any

from keras import ops


class OutputScore:
    """How unusual inputs are, by their prediction; higher is more unusual.

    A new score is a subclass with `of_prediction`, and an entry in `OUTPUT_SCORES`.
    """

    def check(self, likelihood: Any, samples: int) -> None:
        """Raise if a model does not have the score.

        Args:
            likelihood: what its outputs mean, a `Likelihood`.
            samples: how many draws its predictions are from.
        """

    def of_prediction(self, prediction: dict[str, Any]) -> Any:
        """Return the score of each position of an output, (N, ...)."""
        raise NotImplementedError


class MaxProbability(OutputScore):
    """Minus the largest probability of the averaged prediction."""

    def check(self, likelihood: Any, samples: int) -> None:
        check_softmax("max_probability", likelihood)

    def of_prediction(self, prediction: dict[str, Any]) -> Any:
        return -ops.max(prediction["mean"], axis=-1)


class Entropy(OutputScore):
    """The entropy of the averaged prediction, in nats."""

    def check(self, likelihood: Any, samples: int) -> None:
        if not likelihood.is_classifier:
            raise ValueError("score='entropy' is for classes; 'epistemic' is for numbers too.")

    def of_prediction(self, prediction: dict[str, Any]) -> Any:
        return prediction["entropy"]


class Epistemic(OutputScore):
    """What the draws of a posterior disagree about."""

    def check(self, likelihood: Any, samples: int) -> None:
        if samples == 1 and not likelihood.predicts_epistemic:
            raise ValueError("score='epistemic' needs a posterior; `model` has none.")

    def of_prediction(self, prediction: dict[str, Any]) -> Any:
        return prediction["epistemic"]


def check_softmax(score: str, likelihood: Any) -> None:
    """Raise if a model's outputs are not a softmax over classes.

    Args:
        score: name of the score that needs it.
        likelihood: what the outputs mean, a `Likelihood`.
    """
    if not likelihood.is_softmax:
        raise ValueError(f"score={score!r} is for models with a softmax over classes.")


OUTPUT_SCORES: dict[str, type[OutputScore]] = {
    "max_probability": MaxProbability,
    "entropy": Entropy,
    "epistemic": Epistemic,
}
