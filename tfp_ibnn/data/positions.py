"""Positions of outputs, such as pixels and time steps, as examples of their own."""

from typing import Any

import keras
import numpy as np

MOST_POSITIONS = 100_000
"""How many positions a fit keeps."""


class PositionSample:
    """A random sample of positions in bounded memory, each position as likely as any other.

    Each draws a number, and those of the smallest numbers are kept, in the order in which they
    came. The same positions in batches of another size give the same sample.

    Args:
        size: how many are kept, at most.
        seed: of the numbers.

    Attributes:
        total: how many positions were added.

    Example:
        >>> import numpy as np
        >>> sample = PositionSample(3)
        >>> sample.add({"features": np.arange(12.0).reshape(6, 2), "label": np.arange(6)})
        >>> len(sample.rows()["label"]), sample.factor
        (3, 2.0)
    """

    def __init__(self, size: int = MOST_POSITIONS, seed: int = 0) -> None:
        self._size = size
        self._rng = np.random.default_rng(seed)
        self._limit = 1.0  # positions of larger numbers are not among those kept
        self._numbers: list[np.ndarray] = []
        self._parts: list[Any] = []
        self._waiting = 0
        self.total = 0

    def add(self, rows: Any) -> None:
        """Add positions.

        Args:
            rows: arrays (positions, ...) in any nested structure, the same for all calls.
        """
        count = len(keras.tree.flatten(rows)[0])
        numbers = self._rng.random(count)
        is_small = numbers <= self._limit
        self.total += count
        self._numbers.append(numbers[is_small])
        self._parts.append(keras.tree.map_structure(lambda array: array[is_small], rows))
        self._waiting += int(is_small.sum())
        most_waiting = 2 * self._size
        if self._waiting > most_waiting:
            self._shrink()

    def rows(self) -> Any:
        """Return the positions that are kept, in the structure in which they were added."""
        self._shrink()
        return self._parts[0]

    @property
    def factor(self) -> float:
        """How many positions each of those kept stands for."""
        kept = min(self.total, self._size)
        return self.total / kept

    def _shrink(self) -> None:
        """Join the parts, and drop the positions of the largest numbers."""
        numbers = np.concatenate(self._numbers)
        rows = keras.tree.map_structure(lambda *arrays: np.concatenate(arrays), *self._parts)
        if len(numbers) > self._size:
            smallest = np.argpartition(numbers, self._size)[: self._size]
            kept = np.sort(smallest)
            numbers = numbers[kept]
            rows = keras.tree.map_structure(lambda array: array[kept], rows)
            self._limit = float(numbers.max())
        self._numbers = [numbers]
        self._parts = [rows]
        self._waiting = len(numbers)


def rows_of_labels(y: Any, positions: tuple[int, ...], what: str = "`y`") -> np.ndarray:
    """Return the labels of each position.

    Args:
        y: labels (examples, ...), or with one more axis, such as that of one-hot labels.
        positions: (examples, ...), the shape of the outputs without their last axis.
        what: what the user calls the labels, for errors.

    Returns:
        Labels (rows,), or (rows, ...) with that axis.
    """
    y = np.asarray(y)
    rank = len(positions)
    if y.shape[:rank] != positions or y.ndim > rank + 1:
        raise ValueError(
            f"{what} must have a label at each position of the outputs, {positions}, or one-hot "
            f"labels with one more axis; got the shape {y.shape}."
        )
    return y.reshape(-1, *y.shape[rank:])
