"""How long and how carefully to measure."""

import dataclasses

from tfp_ibnn._core import checks

__all__ = ["Settings"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How long and how carefully to measure.

    Args:
        rounds: of the short cases; long ones have fewer.
        seed: of weights, images and noise.
        short: the few cases that continuous integration runs.
    """

    rounds: int = 24
    seed: int = 0
    short: bool = False

    def __post_init__(self) -> None:
        checks.positive_integer("rounds", self.rounds)
        checks.whole("seed", self.seed)
        if self.rounds < 2:
            raise ValueError(
                "`rounds` must be at least 2, or there is no telling the noise; got 1."
            )
