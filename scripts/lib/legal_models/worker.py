"""Tries the models of a block of seeds: prints a line of JSON for each."""

import contextlib
import gc
import json
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import keras

from lib.legal_models import changes, training, uses
from lib.legal_models.draw import Case, draw, precision
from lib.legal_models.shrink import program, shrunk
from lib.legal_models.trial import JAX, Inapplicable, Trial, Wrong

__all__ = ["add_programs", "examine", "refusal"]

SECONDS = 60.0
"""How long to shrink what failed of one seed."""

# Each with the share of models that it is tried on: some take long.
SHARES: dict[str, tuple[Callable[[Trial], None], float]] = {
    "noise off": (uses.noise_off, 1.0),
    "folded": (uses.folded, 0.7),
    "divergence": (training.divergence, 0.7),
    "draws": (uses.monte_carlo, 0.7),
    "batches": (uses.batches, 0.25),
    "scores": (uses.scores, 0.35),
    "moments": (training.moments, 0.3),
    "loss": (uses.plain_loss, 0.25),
    "file": (uses.file, 0.2),
    "export": (uses.exported, 0.03),
    "step": (training.step, 0.2),
    "quantized": (changes.quantized, 0.08),
}


COMPILED = ("draws", "batches", "scores", "step")
"""Checks that are tried on fewer models on JAX, which compiles their loops anew each time."""


def refusal(error: Exception) -> str | None:
    """Return the reason in general words if an error is a refusal of this library's, else None."""
    place = traceback.extract_tb(error.__traceback__)[-1].filename
    if not isinstance(error, ValueError) or f"tfp_ibnn{os.sep}" not in place or not str(error):
        return None
    reason = re.sub(r"'[^']*'|\"[^\"]*\"|\d+|\([^)]*\)", "_", " ".join(str(error).split()))
    return reason[:100]


def _chosen(case: Case) -> list[str]:
    rng = Random(f"checks {case.seed}")
    fewer = dict.fromkeys(COMPILED, 0.4 if JAX else 1.0)
    shares = {name: share * fewer.get(name, 1.0) for name, (_, share) in SHARES.items()}
    return [name for name, share in shares.items() if rng.random() < share]


def examine(case: Case, checks: list[str], folder: Path) -> dict[str, Any]:
    """Return what came of each check of a case: outcomes, refusals and faults."""
    outcomes, refused, faults = {}, [], []

    def attempt(name: str, function: Callable[[], Any]) -> Any:
        try:
            value = function()
            outcomes[name] = "passed"
            return value
        except Inapplicable:
            outcomes[name] = "inapplicable"
        except Exception as error:
            reason = refusal(error)
            outcomes[name] = "refused" if reason else "failed"
            if reason:
                refused.append(reason)
            else:
                faults.append(_fault(name, error))
        return None

    with precision(case.policy), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trial = attempt("convert", lambda: Trial(case, folder))
        for name in checks if trial is not None else ():
            attempt(name, lambda name=name: SHARES[name][0](trial))
            if name == "noise off":
                trial.stir()
    return {"outcomes": outcomes, "refused": refused, "faults": faults}


def _fault(name: str, error: Exception) -> dict[str, str]:
    text = " ".join(str(error).split())[:300]
    if isinstance(error, Wrong):
        return {"check": name, "kind": "wrong", "text": text}
    place = traceback.extract_tb(error.__traceback__)[-1]
    ours = [x for x in traceback.extract_tb(error.__traceback__) if "tfp_ibnn" in x.filename]
    where = " < ".join(f"{Path(x.filename).name}:{x.lineno}" for x in [place, *ours[-2:]])
    return {"check": name, "kind": type(error).__name__, "text": f"{text} ({where})"}


def add_programs(case: Case, faults: list[dict[str, str]], folder: Path) -> None:
    """Add to each fault a small program that shows it."""
    end, known = time.monotonic() + SECONDS, {}
    for fault in faults:
        name, kind, start = fault["check"], fault["kind"], fault["text"][:60]
        if start in known:  # one cause shows in many checks
            fault["program"] = known[start]
            continue
        checks = [] if name == "convert" else [*dict.fromkeys(["noise off", name])]

        def fails(smaller: Case, name: str = name, kind: str = kind, checks: Any = checks) -> bool:
            found = examine(smaller, checks, folder)["faults"]
            return any((x["check"], x["kind"]) == (name, kind) for x in found)

        small = shrunk(case, fails, end) if fails(case) else case
        fault["program"] = known[start] = program(small, name)


def main(first: int, last: int) -> None:
    """Examine the models of some seeds."""
    if JAX:
        import jax

        jax.config.update("jax_enable_x64", True)
    gc.freeze()  # Keras collects garbage after each model: not in what is imported
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    with tempfile.TemporaryDirectory(prefix="legal-") as folder:
        for seed in range(first, last):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                case = draw(seed)
                report = examine(case, _chosen(case), Path(folder))
                add_programs(case, report["faults"], Path(folder))
            results.write(json.dumps({"seed": seed, **report}) + "\n")
            results.flush()
            with contextlib.suppress(Exception):
                keras.backend.clear_session()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
