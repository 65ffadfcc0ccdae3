"""Makes a failing case smaller while it still fails, and prints it as a few lines of Python."""

import dataclasses
import time
from collections.abc import Callable, Iterator

from lib.legal_models.draw import Case, Line, is_legal, trimmed

__all__ = ["program", "shrunk"]

_DEFAULTS = {"form": "list", "weighted": False, "policy": "float64"}


def shrunk(case: Case, fails: Callable[[Case], bool], end: float) -> Case:
    """Return the smallest case found that still fails, until a time by `time.monotonic`."""
    is_smaller = True
    while is_smaller and time.monotonic() < end:
        is_smaller = False
        for candidate in _smaller(case):
            if time.monotonic() > end:
                break
            if is_legal(candidate) and fails(candidate):
                case, is_smaller = candidate, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    if len(case.heads) > 1:
        for head in case.heads:
            yield trimmed(dataclasses.replace(case, heads=(head,)))
    for line in reversed(case.lines):
        for stand_in in line.uses:
            yield from _without(case, line, stand_in)
    for name in ("convert", "predict"):
        options = getattr(case, name)
        for key in (key for key in options if key not in ("samples", "seed") or name == "convert"):
            rest = {other: value for other, value in options.items() if other != key}
            yield dataclasses.replace(case, **{name: rest})
    for name, value in _DEFAULTS.items():
        if getattr(case, name) != value:
            yield dataclasses.replace(case, **{name: value})
    for posterior in ("ibnn.NormalAffine()", "ibnn.MeanField()"):
        if len(case.posterior) > len(posterior):
            yield dataclasses.replace(case, posterior=posterior)
    if case.batch > 2:
        yield dataclasses.replace(case, batch=2)


def _without(case: Case, line: Line, stand_in: str) -> Iterator[Case]:
    """Yield a case in which another tensor stands in for that of a line, if the line has one."""
    if line.name in {head.name for head in case.heads} or stand_in.startswith("shared"):
        return
    lines = tuple(
        Line(other.name, other.source, tuple(stand_in if x == line.name else x for x in other.uses))
        for other in case.lines
        if other is not line
    )
    smaller = trimmed(dataclasses.replace(case, lines=lines))
    if smaller.inputs:
        yield smaller


def program(case: Case, check: str) -> str:
    """Return a case as Python that runs in the folder `scripts`, and fails as the case does."""
    options = "".join(f", {name}={value!r}" for name, value in case.convert.items())
    floatx = "float64" if case.policy == "float64" else "float32"
    return "\n".join(
        [
            "import keras, tfp_ibnn as ibnn",
            "from keras import layers, ops",
            "from lib.legal_models import draw, parts",
            f"keras.config.set_floatx({floatx!r}), keras.config.set_dtype_policy({case.policy!r})",
            *case.model_code(),
            f"draw.fill(model, {case.seed}, {case.size})",
            f"sto = ibnn.to_stochastic(model, {case.posterior}, 50{options})",
            f"# {check}, batch of {case.batch}, MonteCarlo(sto, {case.predict})",
        ]
    )
