"""A table of scores that prints as Markdown."""

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(repr=False)
class Table:
    """Scores of all candidates, which print as Markdown with the chosen one in bold.

    Args:
        caption: the line above the table.
        rows: the scores of each candidate, by its name; every row has the same columns.
        chosen: the name of the chosen candidate.

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

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self.rows[name]

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
        return "\n".join([self.caption, "", *markdown])

    def _cells(self) -> list[list[str]]:
        """Return the cells of the heading and of each row, as text."""
        columns = next(iter(self.rows.values()))
        lines = [["candidate", *columns]]
        for name, row in self.rows.items():
            label = f"**{name}**" if name == self.chosen else name
            lines.append([label, *map(_text, row.values())])
        return lines

    __repr__ = _repr_markdown_ = __str__


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return a line of the table: the first cell aligned left, the others right."""
    padded = [cells[0].ljust(widths[0])]
    for cell, width in zip(cells[1:], widths[1:], strict=True):
        padded.append(cell.rjust(width))
    return f"| {' | '.join(padded)} |"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 100 else f"{value:.5g}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
