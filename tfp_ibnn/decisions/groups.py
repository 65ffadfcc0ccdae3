"""The groups of examples that `Conformal` covers separately."""

from typing import Any

import numpy as np

_MOST_LISTED = 8


def group_ids(groups: Any, count: int) -> np.ndarray:
    """Return the group of each example as an integer: 0 without groups.

    Args:
        groups: whole numbers (N,), or None.
        count: how many there must be.

    Returns:
        Ids (N,) in int64.

    Raises:
        ValueError: if there are more or fewer, or they are not whole numbers.
    """
    if groups is None:
        return np.zeros(count, "int64")
    ids = np.ravel(np.asarray(groups))
    if len(ids) != count:
        raise ValueError(f"`groups` must be {count} ids, one per example; got {len(ids)}.")
    if not _are_whole(ids):
        raise ValueError(
            "`groups` must be whole numbers, such as np.unique(names, return_inverse=True)[1]; "
            f"got {_listed(ids)}."
        )
    return ids.astype("int64")


def _are_whole(ids: np.ndarray) -> bool:
    """Return whether numbers are whole, and fit into int64."""
    if ids.dtype.kind == "f":
        is_whole = np.floor(ids) == ids
        return bool(np.all(is_whole & (np.abs(ids) < 2.0**63)))
    return ids.dtype.kind in "biu"


def places_of_groups(groups: Any, known: np.ndarray, count: int) -> np.ndarray:
    """Return the place of each example's group among known ones.

    Args:
        groups: whole numbers (N,), or None if there is one group.
        known: the ids of all groups, ascending.
        count: how many examples there are.

    Returns:
        Places (N,) in `known`.

    Raises:
        ValueError: if groups are missing, or one is not known.
    """
    if groups is None and len(known) == 1:
        return np.zeros(count, int)
    if groups is None:
        raise ValueError("`groups` must be given, as they were to `fit`; got None.")
    ids = group_ids(groups, count)
    unknown = np.setdiff1d(ids, known)
    if len(unknown):
        raise ValueError(
            f"`groups` has {_listed(unknown)}, of which `fit` saw no example; it saw "
            f"{_listed(known)}."
        )
    return np.searchsorted(known, ids)


def _listed(values: np.ndarray) -> str:
    """Return the first of some values as text."""
    text = ", ".join(map(str, values[:_MOST_LISTED].tolist()))
    if len(values) > _MOST_LISTED:
        text += ", ..."
    return text
