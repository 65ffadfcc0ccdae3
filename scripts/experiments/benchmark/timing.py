"""How times become a ratio: the minimum over interleaved repeats, and how far it can be trusted.

What else a machine does only adds time, so the minimum over repeats is the steadiest estimate of
what a piece of work costs. The repeats of all cases take turns, so that a slow minute meets all of
them alike.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["Action", "interleave", "ratio", "seconds_of", "slope", "smallest", "spread"]

Action = Callable[[], float]
"""Does a piece of work and returns how many seconds it took."""

PARTS = 4
"""In how many parts the rounds are taken to see how much the estimate changes."""


def interleave(
    actions: Mapping[str, Action], rounds: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Return the seconds of each action, one number a round.

    Args:
        actions: by name; in each round all of them have their turn.
        rounds: how many count.
        warmup: rounds before them, in which everything is compiled.

    Example:
        >>> interleave({"a": lambda: 1.0, "b": lambda: 2.0}, rounds=2)
        {'a': [1.0, 1.0], 'b': [2.0, 2.0]}
    """
    times: dict[str, list[float]] = {name: [] for name in actions}
    names = list(actions)
    for number in range(warmup + rounds):
        # Each round begins with another one, lest it matter what comes before.
        start = number % len(names)
        for name in names[start:] + names[:start]:
            seconds = actions[name]()
            if number >= warmup:
                times[name].append(seconds)
    return times


def ratio(times: Sequence[float], reference: Sequence[float]) -> dict[str, float]:
    """Return `ratio` of the minima, `median` of the rounds' ratios, and `noise` of the first.

    Args:
        times: one number a round.
        reference: the same, of what it is compared with.

    Example:
        >>> ratio([2.0, 2.2, 2.0, 2.2], [1.0, 1.0, 1.0, 1.0])["ratio"]
        2.0
    """
    pairs = list(zip(times, reference, strict=True))
    return {
        "ratio": min(times) / min(reference),
        "median": statistics.median(first / second for first, second in pairs),
        "noise": spread(
            pairs, lambda part: min(first for first, _ in part) / min(other for _, other in part)
        ),
    }


def smallest(times: Sequence[float]) -> dict[str, float]:
    """Return the minimum itself as `ratio` does, for what has nothing to be compared with."""
    return {
        "ratio": min(times),
        "median": statistics.median(times),
        "noise": spread(times, min),
    }


def spread(rounds: Sequence[Any], estimate: Callable[[Sequence[Any]], float]) -> float:
    """Return the standard deviation of an estimate over four interleaved parts of the rounds.

    A part has a quarter of the rounds, so the estimate from all of them is steadier than this says.
    """
    count = min(PARTS, len(rounds))
    if count < 2:
        return 0.0
    return statistics.stdev(estimate(rounds[start::count]) for start in range(count))


def slope(sizes: Sequence[float], times: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the exponent with which the minimum of `times` grows with the sizes, as `ratio` does.

    Args:
        sizes: one a case.
        times: for each case, one number a round.

    Example:
        >>> slope([1, 2, 4], [[1.0, 1.1], [2.0, 2.2], [4.0, 4.4]])["ratio"]
        1.0
    """
    logarithms = [math.log(size) for size in sizes]

    def exponent(rounds: Sequence[Sequence[float]], best: Callable = min) -> float:
        costs = [math.log(best(case)) for case in zip(*rounds, strict=True)]
        return statistics.linear_regression(logarithms, costs).slope

    rounds = list(zip(*times, strict=True))
    return {
        "ratio": exponent(rounds),
        "median": exponent(rounds, statistics.median),
        "noise": spread(rounds, exponent),
    }


def seconds_of(work: Callable[[], Any]) -> float:
    """Return how long a piece of work takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
