"""Models with several outputs, each with a name and a kind of its own."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.prediction.predictive import Predictive


class Several(Predictive):
    """Several outputs by name, each with what it predicts; all else is dicts by these names."""

    def __init__(self, heads: dict[str, Predictive]) -> None:
        self.heads = heads

    def keeps_draws(self, options: Any) -> bool:
        return any(head.keeps_draws(options) for head in self.heads.values())

    def checked_draws(self, outputs: Any) -> tuple[Any, Any]:
        names = sorted(outputs) if isinstance(outputs, dict) else "one without a name"
        if names != sorted(self.heads):
            raise ValueError(f"The outputs are {names}, but `head` has {sorted(self.heads)}.")
        found = {name: head.draws(outputs[name]) for name, head in self.heads.items()}
        return tuple({name: pair[i] for name, pair in found.items()} for i in range(2))

    def summarize(self, draws: Any, within: Any, weights: Tensor) -> Any:
        return {n: x.summarize(draws[n], within[n], weights) for n, x in self.heads.items()}

    def merge(self, one: Any, other: Any) -> Any:
        return {name: head.merge(one[name], other[name]) for name, head in self.heads.items()}

    def result(self, summary: Any, options: Any, *kept: Any) -> dict[str, Any]:
        return {
            name: head.result(summary[name], options, *(part[name] for part in kept))
            for name, head in self.heads.items()
        }

    def of_one(self, outputs: Any) -> dict[str, Any]:
        return {name: head.of_one(outputs[name]) for name, head in self.heads.items()}

    def scores(self) -> dict[str, list[keras.metrics.Metric]]:
        """Return the metrics of each output, which begin with its name."""
        found = {name: head.scores() for name, head in self.heads.items()}
        for name, scores in found.items():
            for score in scores:
                score.name = f"{name}_{score.name}"
        return found

    def update(self, scores: Any, y_true: Any, prediction: Any, sample_weight: Any) -> None:
        for name, (head, y, weight) in self._parts(y_true, sample_weight).items():
            head.update(scores[name], y, prediction[name], weight)

    def mean_loss(self, y_true: Any, prediction: Any, sample_weight: Any) -> Tensor:
        """Return the sum of the outputs' losses."""
        parts = self._parts(y_true, sample_weight).items()
        return sum(head.mean_loss(y, prediction[n], weight) for n, (head, y, weight) in parts)

    def _parts(self, y_true: Any, sample_weight: Any) -> dict[str, tuple[Predictive, Any, Any]]:
        """Return what predicts each output, its targets and their weights."""
        y_true = by_name("y", y_true, [*self.heads])
        weights = by_name("sample_weight", sample_weight, [*self.heads], for_all=True)
        return {name: (head, y_true[name], weights[name]) for name, head in self.heads.items()}


def by_name(what: str, given: Any, names: Sequence[str], for_all: bool = False) -> dict[str, Any]:
    """Return what is given in a dict or list for outputs of these names, or for all of them."""
    if isinstance(given, Mapping) and set(given) == set(names):
        return dict(given)
    if isinstance(given, (list, tuple)) and len(given) == len(names):
        return dict(zip(names, given, strict=True))
    if for_all and not isinstance(given, (Mapping, list, tuple)):
        return dict.fromkeys(names, given)
    got = sorted(given) if isinstance(given, Mapping) else type(given).__name__
    raise ValueError(f"`{what}` must be a dict with an entry for each of {[*names]}; got {got}.")
