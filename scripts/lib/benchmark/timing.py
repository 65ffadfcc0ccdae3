"""How times become a ratio: the minimum over interleaved repeats, and how far it can be trusted.

What else a machine does only adds time, so the minimum over repeats is the steadiest estimate of
what a piece of work costs. The repeats of all cases take turns, so that a slow minute meets all of
them alike. An action does a piece of work and returns how many seconds it took.
"""

import math
import statistics


def interleave(actions, rounds, warmup=1):
    """Return the seconds of each action by name, per round, after rounds that compile all."""
    times, names = {name: [] for name in actions}, list(actions)
    for number in range(warmup + rounds):
        # Each round begins with another one, lest it matter what comes before.
        start = number % len(names)
        for name in names[start:] + names[:start]:
            seconds = actions[name]()
            if number >= warmup:
                times[name].append(seconds)
    return times


def ratio(times, reference):
    """Return `ratio` of the minima, `median` of the rounds' ratios, and `noise` of the first."""

    def of_minima(part):
        first, second = zip(*part, strict=True)
        return min(first) / min(second)

    pairs = list(zip(times, reference, strict=True))
    median = statistics.median(first / second for first, second in pairs)
    return {"ratio": of_minima(pairs), "median": median, "noise": spread(pairs, of_minima)}


def smallest(times):
    """Return the minimum itself as `ratio` does, for what has nothing to be compared with."""
    return {"ratio": min(times), "median": statistics.median(times), "noise": spread(times, min)}


def spread(rounds, estimate):
    """Return the standard deviation of an estimate over four parts of the rounds: a high guess."""
    count = min(4, len(rounds))
    parts = [estimate(rounds[start::count]) for start in range(count)]
    return statistics.stdev(parts) if count > 1 else 0.0


def slope(sizes, times):
    """Return the exponent with which the minimum of `times` grows with sizes, as `ratio` does."""
    logarithms, rounds = [math.log(size) for size in sizes], list(zip(*times, strict=True))

    def exponent(rounds, best=min):
        costs = [math.log(best(case)) for case in zip(*rounds, strict=True)]
        return statistics.linear_regression(logarithms, costs).slope

    median = exponent(rounds, statistics.median)
    return {"ratio": exponent(rounds), "median": median, "noise": spread(rounds, exponent)}
