"""What an experiment leaves in its folder of results."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfp_ibnn._core import files
from tfp_ibnn.experiments import summary
from tfp_ibnn.experiments.provenance import provenance

__all__ = ["write_results"]


def write_results(
    folder: str | os.PathLike,
    rows: Sequence[dict[str, Any]],
    options: dict[str, Any],
    **more: Any,
) -> list[dict[str, Any]]:
    """Write `summary.json` and `runs.json`; return the rows of the summary.

    Args:
        folder: of the results; it must exist.
        rows: one a run, see `summary.summarise`.
        options: of the command.
        **more: further entries of `runs.json`.
    """
    record = provenance(options)
    # A run that tells where it was made was made there, not where the table is.
    known = rows[0] if rows else {}
    record = {key: value for key, value in record.items() if key not in known}
    common = {key: record[key] for key in ("command", "backend", "hardware") if key in record}
    table = summary.summarise(rows, **common)
    files.write_json(Path(folder) / "summary.json", table)
    files.write_json(Path(folder) / "runs.json", {"runs": list(rows), **more, **record})
    return table
