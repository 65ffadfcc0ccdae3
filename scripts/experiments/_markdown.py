"""Tables in Markdown."""

from collections.abc import Sequence

__all__ = ["markdown_table"]


def markdown_table(cells: Sequence[Sequence[str]], *, aligned: bool = False) -> str:
    """Return rows of cells, of which the first is the head, as a Markdown table.

    Args:
        cells: the same number in each row.
        aligned: pad the columns, for a terminal; the first is flush left, the others right.
    """
    rule = ["---"] * len(cells[0])
    if aligned:
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        rule = ["-" * (width + 2) for width in widths]
        cells = [
            [line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in cells
        ]
    head, *rest = ["| " + " | ".join(line) + " |" for line in cells]
    return "\n".join([head, "|" + "|".join(rule) + "|", *rest])
