"""A report as JSON."""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfp_ibnn.calibration.candidates import Standing


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
