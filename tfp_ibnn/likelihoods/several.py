"""Models with several outputs, each with its name and kind."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.conversion.wrappers import unscaled
from tfp_ibnn.likelihoods.base import Likelihood


class Several(Likelihood):
    """Several outputs by name; all that belongs to them is in dicts by these names.

    In `calibrate` each row belongs to one output. The arrays of all rows begin with a column that
    holds the place of that output, and have as many further columns as the widest output needs. The
    NLL of a row is weighted so that the mean over all rows is the sum of the outputs' means.

    Args:
        parts: the likelihood of each output.
    """

    column = "parameters"

    def __init__(self, parts: dict[str, Likelihood]) -> None:
        widths = [part.width for part in parts.values()]
        super().__init__(None if None in widths else max(widths))
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

    # Calibration

    @property
    def variants(self) -> dict[str, bool]:
        """What a fitted parameter adds to a name, of the outputs that can do without one."""
        suffixes = {}
        for part in self.parts.values():
            if all(part.variants.values()):
                continue
            for suffix, fitted in part.variants.items():
                suffixes[suffix] = fitted
        if not suffixes:
            return {"": True}
        fitted_suffix = "".join(suffixes)
        return {"": False, fitted_suffix: True}

    @property
    def head(self) -> dict[str, Any]:
        return _joined_heads({name: part.head for name, part in self.parts.items()})

    @property
    def scaled_head(self) -> dict[str, Any]:
        return _joined_heads({name: part.scaled_head for name, part in self.parts.items()})

    def split_rows(self, **arrays: Any) -> dict[str, dict[str, Any]]:
        """Return the arrays of each output, and the indices of its `rows`."""
        packed = next(arrays[kind] for kind in _PACKED if kind in arrays)
        columns = packed.reshape(len(packed), -1)
        numbers = columns[:, 0]
        split = {}
        for number, (name, part) in enumerate(self.parts.items()):
            rows = np.flatnonzero(numbers == number)
            of_part = {"rows": rows}
            for kind, values in arrays.items():
                of_part[kind] = _of_rows(part, kind, values, rows)
            split[name] = of_part
        return split

    def join_rows(
        self, kind: str, values: dict[str, np.ndarray], numbers: np.ndarray
    ) -> np.ndarray:
        sizes = {}
        for name, part in self.parts.items():
            sizes[name] = math.prod(part.row_shapes[kind])
        draws = ()
        dtype = "float64"
        if kind == "outputs":
            first, *_ = values.values()
            draws = first.shape[1:2]
            dtype = "float32"
        widest = max(sizes.values())
        joined = np.zeros((len(numbers), *draws, 1 + widest), dtype)
        for number, (name, size) in enumerate(sizes.items()):
            rows = np.flatnonzero(numbers == number)
            stop = 1 + size
            joined[rows, ..., 0] = number
            joined[rows, ..., 1:stop] = values[name].reshape(len(rows), *draws, size)
        return joined

    def fit(
        self, outputs: np.ndarray, y: np.ndarray, weight: np.ndarray | None = None
    ) -> dict[str, Any]:
        """Return the parameter of each output, fitted to its own rows.

        Args:
            outputs: the rows of all outputs, as `join_rows` puts them together.
            y: their targets.
            weight: how often each row counts; None is once.
        """
        return self.parameter(outputs, y, True, weight)

    def parameter(
        self, outputs: np.ndarray, y: np.ndarray, fitted: bool, weight: np.ndarray | None = None
    ) -> dict[str, Any]:
        rows = self.split_rows(outputs=outputs, y=y, weight=weight)
        parameters = {}
        for name, part in self.parts.items():
            of_part = rows[name]
            is_fitted = fitted or all(part.variants.values())
            parameters[name] = part.parameter(
                of_part["outputs"],
                of_part["y"],
                is_fitted,
                of_part["weight"],
            )
        return parameters

    def predict(self, outputs: np.ndarray, parameter: dict[str, Any]) -> np.ndarray:
        rows = self.split_rows(outputs=outputs)
        predictions = {}
        for name, part in self.parts.items():
            own = rows[name]["outputs"]
            if len(own):
                predictions[name] = part.predict(own, parameter[name])
            else:
                predictions[name] = np.zeros((0, *part.row_shapes["prediction"]))
        return self.join_rows("prediction", predictions, outputs[:, 0, 0])

    def nll(self, prediction: np.ndarray, y: np.ndarray) -> np.ndarray:
        nll = np.empty(len(y))
        for name, of_part in self.split_rows(prediction=prediction, y=y).items():
            rows = of_part["rows"]
            own = self.parts[name].nll(of_part["prediction"], of_part["y"])
            times = len(y) / max(1, len(rows))
            nll[rows] = times * own
        return nll

    def evidence(
        self,
        prediction: np.ndarray,
        y: np.ndarray,
        seed: int,
        weight: np.ndarray | None = None,
    ) -> dict[str, float]:
        """Return the sum of the NLLs, and each output's scores, which begin with its name.

        Args:
            prediction: the rows of all outputs.
            y: their targets.
            seed: of what is drawn for a score.
            weight: how often each row counts; None is once.
        """
        nll = self.nll(prediction, y)
        evidence = {"NLL": float(np.average(nll, weights=weight))}
        rows = self.split_rows(prediction=prediction, y=y, weight=weight)
        for name, part in self.parts.items():
            of_part = rows[name]
            scores = part.evidence(
                of_part["prediction"],
                of_part["y"],
                seed,
                of_part["weight"],
            )
            for score, value in scores.items():
                evidence[f"{name} {score}"] = value
        return evidence

    def scores(self) -> dict[str, list[keras.metrics.Metric]]:
        """Return the metrics of each output, which begin with its name."""
        scores = {name: part.scores() for name, part in self.parts.items()}
        for name, of_part in scores.items():
            for score in of_part:
                score.name = f"{name}_{score.name}"
        return scores


_PACKED = ("outputs", "y", "prediction")


def _of_rows(part: Likelihood, kind: str, values: Any, rows: np.ndarray) -> Any:
    """Return some rows of an array in the form that the likelihood of one output takes.

    Args:
        part: of the output.
        kind: of array: "outputs", "y" and "prediction" begin with a column of their own.
        values: the array of all rows, or None.
        rows: indices of those that belong to the output.
    """
    if values is None:
        return None
    values = values[rows]
    if kind not in _PACKED:
        return values
    shape = part.row_shapes[kind]
    stop = 1 + math.prod(shape)
    columns = values[..., 1:stop]
    values = columns.reshape(*values.shape[:-1], *shape)
    if shape == ():  # classes
        return values.astype(int)
    return values


def _joined_heads(heads: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the arguments of `MonteCarlo` for all outputs, of those for each."""
    return {
        "head": {name: head["head"] for name, head in heads.items()},
        "from_logits": {name: head.get("from_logits") for name, head in heads.items()},
    }


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


def symbolic_outputs(model: keras.Model) -> Any:
    """Return the symbolic output of a model with a graph; of several, a dict by name."""
    names = output_names(model)
    outputs = functional_graph(model).outputs
    return dict(zip(names, outputs, strict=True)) if names else outputs[0]


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
