"""The model card of a calibrated model, in Markdown."""

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from typing import Any

import keras

_CARD = """# Model card

{why}

`model.keras` is a `tfp_ibnn.MonteCarlo`: `predict` returns the averaged prediction and its
uncertainty. `import tfp_ibnn` before `keras.models.load_model("model.keras")`.

## Candidates

{table}

The choice was made on these examples: expect slightly worse scores on a test set. Differences
between ECEs near their floor mean nothing.

Dropped, and why (NLLs are at the best temperature or scale of each):

{dropped}

## Run

{run}
"""


def model_card(why: str, table: Any, dropped: Mapping[str, str], notes: Mapping[str, Any]) -> str:
    """Return a model card, which also names the versions of the packages and the machine.

    Args:
        why: the reason for the choice.
        table: the scores of all candidates, which prints as Markdown.
        dropped: why candidates were dropped, by name.
        notes: further facts about the run, by name.
    """
    run = {**notes, **environment()}
    return _CARD.format(why=why, table=table, dropped=_items(dropped), run=_items(run))


def environment() -> dict[str, str]:
    """Return the versions of the packages, the backend and the machine, by name."""
    machine = f"Python {platform.python_version()} on {platform.machine()}"
    return {
        "keras": importlib.metadata.version("keras"),
        "tfp_ibnn": importlib.metadata.version("tfp_ibnn"),
        "backend": keras.config.backend(),
        "machine": f"{machine}, {os.cpu_count()} cores",
    }


def _items(values: Mapping[str, Any]) -> str:
    lines = [f"- {name}: {value}" for name, value in values.items()]
    return "\n".join(lines) or "- none"
