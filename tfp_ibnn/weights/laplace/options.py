"""The arguments of `Laplace`, checked."""

from typing import NamedTuple

from tfp_ibnn._core import checks
from tfp_ibnn.weights.laplace.structures import STRUCTURES

METHODS = ("marglik", "validation")
"""How a prior precision is found again, without the training data."""


class Options(NamedTuple):
    """What `Laplace` was asked for; its docstring says what each means."""

    subset_of_weights: str
    hessian_structure: str
    prior_precision: str | float
    noise_scale: str | float
    temperature: float
    pred_type: str
    link_approx: str
    rank: int
    head: str | None
    from_logits: bool | None

    def check(self) -> None:
        """Raise for what is unknown or out of range; the weights are checked with the model."""
        checks.one_of("hessian_structure", self.hessian_structure, list(STRUCTURES))
        checks.one_of("pred_type", self.pred_type, ("glm", "nn"))
        checks.one_of("link_approx", self.link_approx, ("mc", "probit"))
        _check_number_or_word("prior_precision", self.prior_precision, ("guarded", *METHODS))
        _check_number_or_word("noise_scale", self.noise_scale, ("marglik",))
        checks.positive("temperature", self.temperature)
        checks.positive_integer("rank", self.rank)

    @property
    def is_probit(self) -> bool:
        """Whether a prediction is one distribution in closed form."""
        return self.pred_type == "glm" and self.link_approx == "probit"

    @property
    def known_noise_scale(self) -> float | None:
        """The noise scale, None if it is to be found."""
        return None if isinstance(self.noise_scale, str) else self.noise_scale


def _check_number_or_word(name: str, value: str | float, words: tuple[str, ...]) -> None:
    if isinstance(value, str):
        checks.one_of(name, value, words)
    else:
        checks.positive(name, value)
