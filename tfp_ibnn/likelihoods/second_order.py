"""What networks that predict their own epistemic uncertainty have in common."""

from typing import Any, ClassVar, Self

from keras import ops

from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.likelihoods.base import Likelihood


class SecondOrder(Likelihood):
    """A likelihood of one network that says how much the draws of a posterior would disagree.

    One pass of such a network has the `mean`, `aleatoric` and `epistemic` of a `MonteCarlo`, in
    closed form; several draws are averaged, and what they disagree about adds to `epistemic`. Its
    network has two heads: the first returns what a network without `epistemic` does, the second
    `head_size` numbers. `joined` makes the outputs of both.
    """

    predicts_epistemic = True
    outputs_per_value: ClassVar[int] = 1
    """How many outputs there are for each class, label or number."""

    @classmethod
    def of_size(cls, size: int) -> Self:
        """Return the likelihood of so many classes, labels or numbers."""
        return cls(cls.outputs_per_value * size)

    @property
    def size(self) -> int | None:
        """How many classes, labels or numbers an example has."""
        return None if self.width is None else self.width // self.outputs_per_value

    @property
    def first_size(self) -> int:
        """How many numbers the first head returns."""
        return self.size

    @property
    def head_size(self) -> int:
        """How many numbers the second head returns."""
        return self.size

    def joined(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the outputs of a network with two heads, by layers of Keras.

        Args:
            first: what the first head returns, (..., first_size), logits for classes and labels.
            second: what the second head returns, (..., head_size).
        """
        raise self._missing("joined")

    def start(self, teacher: dict[str, Tensor]) -> Tensor:
        """Return the constants (head_size,) of the second head that fit a teacher best.

        Args:
            teacher: the dict of `MonteCarlo` for some examples.
        """
        raise self._missing("start")

    def distillation_loss(self, outputs: Tensor, teacher: dict[str, Tensor]) -> Tensor:
        """Return how far outputs are from a teacher's prediction, for each example or position.

        It is lowest where mean, aleatoric and epistemic uncertainty are the teacher's.

        Args:
            outputs: (examples, ..., width).
            teacher: the dict of `MonteCarlo` for these examples.
        """
        raise self._missing("distillation_loss")

    def sample_loss(self, outputs: Tensor, samples: Tensor, temperature: Any) -> Tensor:
        """Return minus the mean log-density of sampled probabilities, for each example or position.

        The logits of both are divided by a temperature.

        Args:
            outputs: (examples, ..., width).
            samples: of a `MonteCarlo`, (examples, draws, ..., size).
            temperature: above 0; 1 is the likelihood itself.
        """
        raise self._missing("sample_loss")


def mean_of_examples(values: Tensor) -> Tensor:
    """Return the mean (size,) of values (examples, ..., size) over all but the last axis."""
    axes = tuple(range(len(values.shape) - 1))
    return ops.mean(values, axis=axes)
