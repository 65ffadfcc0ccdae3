"""The inputs of a model in a file: tensors by name."""

import keyword
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import numpy as np

from tfp_ibnn.conversion.graph import functional_graph


class Spec(NamedTuple):
    """Shape and dtype of an input of a signature."""

    shape: tuple[int | None, ...]
    dtype: str


class Inputs(NamedTuple):
    """The inputs of a model in a signature: tensors by name."""

    specs: dict[str, Spec]
    structure: Any  # how the model takes them

    def pack(self, tensors: Mapping[str, Any]) -> Any:
        """Return what the model is called with."""
        in_order = [tensors[name] for name in self.specs]
        return keras.tree.pack_sequence_as(self.structure, in_order)


def inputs_of(model: keras.Model, signature: Any) -> Inputs:
    """Return the inputs of a model, or those of a signature if it is given.

    Args:
        model: the network inside of all that wraps it.
        signature: `keras.InputSpec` or arrays, by name or in a list; None takes those of the
            model's graph.

    Raises:
        ValueError: If the inputs are unknown or cannot be named.
    """
    structure = _structure(model, signature)
    tensors = keras.tree.flatten(structure)
    if not tensors:
        raise ValueError(f"`input_signature` must hold InputSpec or arrays; got {signature!r}.")
    names = _names(structure, tensors)
    if "seed" in names or len(set(names)) < len(names):
        raise ValueError(
            "The inputs must have different names in a file, and none may be "
            f"called 'seed', which the file uses itself; got {names}."
        )
    specs = {name: _spec(tensor) for name, tensor in zip(names, tensors, strict=True)}
    if isinstance(signature, Mapping) and len(signature) == 1:  # a name, not a key
        structure = tensors[0]
    return Inputs(specs, structure)


def _structure(model: keras.Model, signature: Any) -> Any:
    """Return what the model is called with, of specs, arrays or symbolic tensors."""
    if signature is None:
        graph = functional_graph(model)
        if graph is None:
            raise ValueError(
                f"The inputs of model {model.name!r} are unknown: give them, such as "
                "input_signature={'x': keras.InputSpec(shape=(None, 3), dtype='float32')}."
            )
        return graph.input
    if isinstance(signature, (list, tuple)) and len(signature) == 1:
        return signature[0]  # Keras lists the arguments of `call`, of which there is one
    return signature


def _names(structure: Any, tensors: list) -> list[str]:
    """Return a name for each input, with a number if several would have the same name."""
    if isinstance(structure, Mapping) and len(structure) == len(tensors):
        paths = keras.tree.flatten_with_path(structure)
        names = [_name_in_file(path[0]) for path, _ in paths]
    else:
        names = [_name_in_file(getattr(x, "name", None) or "inputs") for x in tensors]
    numbered = []
    for place, name in enumerate(names):
        if names.count(name) > 1:
            earlier = names[:place].count(name)
            name = f"{name}_{earlier}"
        numbered.append(name)
    return numbered


def _spec(tensor: Any) -> Spec:
    """Return shape and dtype; the first axis of an array, that of the examples, is None."""
    if getattr(tensor, "shape", None) is None:
        raise ValueError(f"An input needs an InputSpec with a shape, or an array; got {tensor!r}.")
    shape = tuple(tensor.shape)
    if isinstance(tensor, np.ndarray) or keras.ops.is_tensor(tensor):
        shape = (None, *shape[1:])
    dtype = keras.backend.standardize_dtype(tensor.dtype or "float32")
    return Spec(shape, dtype)


def _name_in_file(name: str) -> str:
    """Return a name that TensorFlow accepts; Keras's default names all become "inputs"."""
    if re.fullmatch(r"(input_layer|keras_tensor)(_\d+)?", name):
        return "inputs"
    name = re.sub(r"\W", "_", name, flags=re.ASCII)
    is_valid = name[:1].isalpha() and name != "self" and not keyword.iskeyword(name)
    return name if is_valid else f"inputs_{name}"
