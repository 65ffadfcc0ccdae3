"""A table of scores that prints as Markdown."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

_SHORT = ("passes", "trainings", "MB")
"""Columns that show three significant digits."""


@dataclasses.dataclass(repr=False)
class Table:
    """Scores of all candidates; the main ones print as Markdown, with the chosen one in bold.

    Args:
        caption: the line above the table.
        rows: the scores of each candidate, by its name; every row has the same columns.
        chosen: the name of the chosen candidate.
        shown: the names of the rows that are printed; None prints all.
        call: what to write for a table that prints all rows.

    Example:
        >>> from tfp_ibnn.calibration import Table
        >>> rows = {"as it is": {"NLL": 0.5}, "as it is + temperature": {"NLL": 0.25}}
        >>> table = Table("500 examples", rows, chosen="as it is + temperature")
        >>> table["as it is"]["NLL"]
        0.5
        >>> print(table)
        500 examples
        <BLANKLINE>
        | candidate                  |    NLL |
        | -------------------------- | -----: |
        | as it is                   | 0.5000 |
        | **as it is + temperature** | 0.2500 |
    """

    caption: str
    rows: dict[str, dict[str, Any]]
    chosen: str
    shown: Collection[str] | None = None
    call: str = "table.all()"

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self.rows[name]

    def all(self) -> "Table":
        """Return the table that prints all rows."""
        return dataclasses.replace(self, shown=None)

    def __str__(self) -> str:
        lines = self._cells()
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rule = ["-" * widths[0]]
        for width in widths[1:]:
            # A colon at the end aligns a column to the right.
            dashes = "-" * (width - 1)
            rule.append(f"{dashes}:")
        lines.insert(1, rule)
        markdown = [_line(cells, widths) for cells in lines]
        return "\n".join([self.caption, "", *markdown, *self._footer()])

    def _cells(self) -> list[list[str]]:
        """Return the cells of the heading and of each row that is shown, as text."""
        columns = next(iter(self.rows.values()))
        lines = [["candidate", *columns]]
        for name, row in self._shown_rows().items():
            label = f"**{name}**" if name == self.chosen else name
            cells = [_text(value, column) for column, value in row.items()]
            lines.append([label, *cells])
        return lines

    def _shown_rows(self) -> dict[str, dict[str, Any]]:
        if self.shown is None:
            return self.rows
        return {name: row for name, row in self.rows.items() if name in self.shown}

    def _footer(self) -> list[str]:
        """Return the lines below the table: how many rows are not shown."""
        hidden = len(self.rows) - len(self._shown_rows())
        if not hidden:
            return []
        return [
            "",
            f"Not shown: {hidden} of {len(self.rows)} candidates; for each, a row above is as good "
            f"at no higher cost. `{self.call}` has every row.",
        ]

    __repr__ = _repr_markdown_ = __str__


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return a line of the table: the first cell aligned left, the others right."""
    padded = [cells[0].ljust(widths[0])]
    for cell, width in zip(cells[1:], widths[1:], strict=True):
        padded.append(cell.rjust(width))
    return f"| {' | '.join(padded)} |"


def _text(value: Any, column: str) -> str:
    if isinstance(value, float) and column in _SHORT:
        return _three_digits(value)
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 100 else f"{value:.5g}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


def _three_digits(value: float) -> str:
    """Return a number rounded to three digits, and to a whole one from 100 on."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return np.format_float_positional(value, precision=3, fractional=False, trim="-")
