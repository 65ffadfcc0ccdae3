"""A report as JSON, and the folder it is written to."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfp_ibnn.calibration.candidates import Standing


def folder_for_report(path: str | os.PathLike) -> Path:
    """Create a folder if needed and return it, or raise if a model in it is not of a report."""
    folder = Path(path)
    if (folder / "model.keras").exists() and not (folder / "report.json").exists():
        raise FileExistsError(
            f"{folder} has a model.keras that is not of a report, and it would be replaced: give "
            "another folder."
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def to_json(value: Any) -> str:
    """Return a value as standard JSON.

    Args:
        value: of numbers, arrays, strings, dicts and lists; NaN and infinity become null, and
            other objects become their text.
    """
    return json.dumps(_plain(value), indent=2, allow_nan=False)


def record_of(standing: Standing, scores: Mapping[str, float]) -> dict[str, Any]:
    """Return the entry of a candidate in the JSON of a report.

    Args:
        standing: how the candidate compares with the others.
        scores: its scores, by name.
    """
    candidate = standing.candidate
    return {
        "name": candidate.name,
        "scores": scores,
        "parameter": candidate.parameter,
        "behind best": {"mean": standing.distance, "standard error": standing.error},
        "undominated": standing.is_undominated,
        "cost": standing.cost._asdict(),
        "seconds": candidate.seconds,
    }


def _plain(value: Any) -> Any:
    """Return a value as JSON's own types."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)
