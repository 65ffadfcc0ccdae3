"""Models with several outputs, each with its name and kind."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.conversion.wrappers import unscaled
from tfp_ibnn.likelihoods.base import Likelihood


class Several(Likelihood):
    """Several outputs by name; all that belongs to them is in dicts by these names.

    Args:
        parts: the likelihood of each output.
    """

    def __init__(self, parts: dict[str, Likelihood]) -> None:
        super().__init__()
        self._parts = parts

    @property
    def parts(self) -> dict[str, Likelihood]:
        return self._parts

    def split(self, values: Any) -> dict[str, Any]:
        return values

    def split_given(self, what: str, values: Any, for_all: bool = False) -> dict[str, Any]:
        return by_name(what, values, [*self.parts], for_all)

    def join(self, values: dict[str, Any]) -> Any:
        return values

    def check_outputs(self, outputs: Any) -> None:
        names = sorted(self.parts)
        if not isinstance(outputs, dict):
            raise ValueError(f"The model has one output without a name, but `head` has {names}.")
        if sorted(outputs) != names:
            raise ValueError(f"The outputs are {sorted(outputs)}, but `head` has {names}.")

    def scores(self) -> dict[str, list[keras.metrics.Metric]]:
        """Return the metrics of each output, which begin with its name."""
        scores = {name: part.scores() for name, part in self.parts.items()}
        for name, of_part in scores.items():
            for score in of_part:
                score.name = f"{name}_{score.name}"
        return scores


def by_name(what: str, values: Any, names: Sequence[str], for_all: bool = False) -> dict[str, Any]:
    """Return what a user gives for outputs of these names, by name, or raise.

    Args:
        what: name of the argument.
        values: a dict by these names, or a list in their order.
        names: of the outputs.
        for_all: whether a single value may count for all of them.
    """
    names = list(names)
    if isinstance(values, Mapping):
        if set(values) != set(names):
            raise ValueError(
                f"`{what}` must be a dict with an entry for each of {names}; got {sorted(values)}."
            )
        return dict(values)
    is_list = isinstance(values, (list, tuple))
    if is_list and len(values) == len(names):
        return dict(zip(names, values, strict=True))
    if for_all and not is_list:
        return dict.fromkeys(names, values)
    raise ValueError(
        f"`{what}` must be a dict with an entry for each of {names}; got {type(values).__name__}."
    )


def output_names(model: keras.Model) -> list[str]:
    """Return the names of a model's outputs, in order, if there are several and they are known."""
    graph = functional_graph(unscaled(model))
    if graph is None or len(graph.outputs) == 1:
        return []
    structure = graph.output
    if isinstance(structure, dict) and len(structure) == len(graph.outputs):
        return _names_of_dict(model.name, structure)
    names = graph.output_names
    if len(set(names)) == len(names):
        return names
    return [f"{number}" for number in range(len(names))]


def _names_of_dict(model: str, outputs: dict[str, Any]) -> list[str]:
    """Return the names of outputs in the order in which Keras flattens them."""
    if any(isinstance(part, (dict, list, tuple)) for part in outputs.values()):
        raise ValueError(f"The outputs of {model!r} are nested: give them as one flat dict.")
    paths = [path for path, _ in keras.tree.flatten_with_path(outputs)]
    return [name for (name,) in paths]


def named_outputs(model: keras.Model, outputs: Any) -> Any:
    """Return a network's output in full precision; of several, a dict by their names.

    Args:
        model: the network.
        outputs: what it has returned: a tensor, or a list or dict of them.
    """
    if ops.is_tensor(outputs):
        dtype = keras.backend.standardize_dtype(outputs.dtype)
        dtype = checks.full_precision(dtype)
        return ops.cast(outputs, dtype)
    if not isinstance(outputs, Mapping):
        numbers = map(str, range(len(outputs)))
        names = output_names(model) or numbers
        outputs = dict(zip(names, outputs, strict=True))
    return {name: named_outputs(model, outputs[name]) for name in outputs}
