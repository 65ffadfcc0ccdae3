"""Turns the rows of a table into the inputs of a model, and says which rows cannot be."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


class Inputs(NamedTuple):
    """What a model is called with for the rows of a shard."""

    groups: list[tuple[np.ndarray, dict[str, np.ndarray]]]
    """Rows of equal sizes: their places in the shard, and the arrays by the model's input."""
    bad: dict[int, str]
    """Reasons why rows cannot be scored, by their places in the shard."""


def check_columns(
    specs: Mapping[str, Any], columns: list[str], chosen: list[str] | None, path: str
) -> dict[str, list[str]]:
    """Return which columns each input is made of.

    Args:
        specs: the model's inputs by name, each with "shape" and "dtype".
        columns: those of the file.
        chosen: the columns of the single input, if they are not found by its name.
        path: of the file, for messages.

    Raises:
        ValueError: If a column is missing, or they are not as many as the input's numbers.
    """
    if chosen is not None:
        if len(specs) > 1:
            raise ValueError(
                f"The model has the inputs {', '.join(specs)}: name a column after each of them, "
                "and leave out --columns."
            )
        ((name, spec),) = specs.items()
        sizes = spec["shape"][1:]
        if None not in sizes and len(chosen) not in (1, math.prod(sizes)):
            raise ValueError(
                f"The model's input {name!r} holds {math.prod(sizes)} numbers, and --columns names "
                f"{len(chosen)}: name one column for each, or one of lists."
            )
        wanted = {name: chosen}
    else:
        wanted = {name: [name] for name in specs}
    missing = [x for names in wanted.values() for x in names if x not in columns]
    if missing:
        several = "Each input needs a column of its name."
        remedy = several if len(specs) > 1 else "Name those of the model's input by --columns."
        raise ValueError(
            f"{path} has no column {', '.join(missing)}; it has {', '.join(columns)}. {remedy}"
        )
    return wanted


def prepare(
    table: pa.Table, broken: Mapping[int, str], specs: Mapping[str, Any], wanted: Mapping[str, Any]
) -> Inputs:
    """Return the inputs of a model for the rows of a table.

    Args:
        table: the rows.
        broken: reasons why rows are bad already, by place.
        specs: the model's inputs by name, each with "shape" and "dtype".
        wanted: the columns of each input.
    """
    bad = dict(broken)
    arrays = {}
    for name, spec in specs.items():
        columns = {column: table[column] for column in wanted[name]}
        arrays[name] = _examples(columns, spec, bad)
    good = [row for row in range(table.num_rows) if row not in bad]
    by_shapes: dict[Any, list[int]] = {}
    for row in good:
        shapes = tuple(examples[row].shape for examples in arrays.values())
        by_shapes.setdefault(shapes, []).append(row)
    groups = []
    for rows in by_shapes.values():
        stacked = {name: _take(examples, rows) for name, examples in arrays.items()}
        groups.append((np.asarray(rows), stacked))
    return Inputs(groups, bad)


def _take(examples: Any, rows: list[int]) -> np.ndarray:
    if isinstance(examples, np.ndarray):
        return examples[rows]
    return np.stack([examples[row] for row in rows])


def _examples(columns: dict[str, pa.ChunkedArray], spec: Mapping[str, Any], bad: dict) -> Any:
    """Return the examples of all rows; add to `bad` why some have none.

    Args:
        columns: the columns of one input.
        spec: its "shape" and "dtype".
        bad: reasons by row.

    Returns:
        An array, or a list where sizes differ from row to row, with None for bad rows.
    """
    shape = tuple(spec["shape"][1:])
    dtype = np.dtype(object if spec["dtype"] == "string" else spec["dtype"])
    examples = _at_once(columns, shape, dtype)
    if examples is None:
        suspects = range(len(next(iter(columns.values()))))
        examples = [None] * len(suspects)
    else:
        flat = examples.reshape(len(examples), -1)
        suspects = np.flatnonzero(~np.isfinite(flat).all(axis=1)).tolist()
    for row in suspects:
        values = {name: column[row].as_py() for name, column in columns.items()}
        try:
            examples[row] = _example(values, shape, dtype)
        except ValueError as error:
            bad.setdefault(row, str(error))
    return examples


def _at_once(
    columns: dict[str, pa.ChunkedArray], shape: tuple[int | None, ...], dtype: np.dtype
) -> np.ndarray | None:
    """Return all examples in one array, with NaN for what is missing; None if that is not possible.

    Whole numbers and texts are looked at one by one.
    """
    if dtype.kind != "f" or None in shape:
        return None
    try:
        parts = [_numbers(column) for column in columns.values()]
        with np.errstate(over="ignore"):
            numbers = np.concatenate(parts, axis=1).astype(dtype)
        return numbers.reshape(len(numbers), *shape)
    except (ValueError, pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    """Return a column as an array (rows, numbers)."""
    rows = len(column)
    values = column.combine_chunks()
    while pa.types.is_nested(values.type):
        if values.null_count:
            raise ValueError("Rows without a list have no place in an array.")
        lengths = pc.list_value_length(values)
        if len(pc.unique(lengths)) > 1:
            raise ValueError("Lists of several lengths have no place in an array.")
        values = values.flatten()
    if pa.types.is_string(values.type):
        values = pc.if_else(pc.equal(values, ""), None, values)
    numbers = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
    return numbers.reshape(rows, -1)


def _example(values: dict[str, Any], shape: tuple[int | None, ...], dtype: np.dtype) -> np.ndarray:
    """Return the example of one row.

    Raises:
        ValueError: If it has none; the message is the reason.
    """
    parts = [_cell(name, value, dtype) for name, value in values.items()]
    example = parts[0] if len(parts) == 1 else np.concatenate([part.ravel() for part in parts])
    is_open = None in shape
    fits = len(shape) == example.ndim and all(
        wanted in (None, size) for wanted, size in zip(shape, example.shape, strict=True)
    )
    if not fits and (is_open or example.size != math.prod(shape)):
        name = next(iter(values))
        wanted = " x ".join("any" if size is None else str(size) for size in shape)
        found = " x ".join(map(str, example.shape))
        raise ValueError(f"{name} has {found or 1} values, not {wanted or 1}")
    return example if fits else example.reshape(shape)


def _cell(name: str, value: Any, dtype: np.dtype) -> np.ndarray:
    """Return what is in a cell."""
    if value is None or value == "" and dtype.kind != "O":
        raise ValueError(f"{name} is missing")
    if dtype.kind == "O":
        return np.asarray(value, object)
    try:
        numbers = np.asarray(value, "float64")
    except (TypeError, ValueError):
        raise ValueError(f"{name} is not a number: {str(value)[:40]!r}") from None
    if not np.isfinite(numbers).all():
        raise ValueError(f"{name} is not finite")
    with np.errstate(over="ignore", invalid="ignore"):
        cast = numbers.astype(dtype)
    is_kept = np.isfinite(cast) if dtype.kind == "f" else cast == numbers
    if not is_kept.all():
        raise ValueError(f"{name} does not fit {dtype}: {str(value)[:40]}")
    return cast
