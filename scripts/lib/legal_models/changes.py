"""What users do to layers in place: quantize them, or add LoRA to them."""

import keras
import numpy as np

import tfp_ibnn as ibnn
from lib.legal_models.draw import build
from lib.legal_models.trial import Inapplicable, Trial, Wrong
from lib.legal_models.uses import check_means

__all__ = ["quantized"]

ALLOWED = 0.2
"""By how much of the outputs' range int8 may be off; random networks amplify its rounding."""


def quantized(trial: Trial) -> None:
    """A quantized model stays near what it was, converted before or after, or is refused."""
    if any("TimeDistributed" in line.source for line in trial.case.lines):
        raise Inapplicable("a wrapper in which Keras takes int8 kernels for numbers")
    plain = build(trial.case)
    folded = ibnn.to_deterministic(trial.sto)
    folded(trial.x)
    try:
        plain.quantize("int8")
        folded.quantize("int8")
        found = trial.outputs(plain(trial.x))
    except Exception as error:  # whatever Keras has against it
        raise Inapplicable("a model that Keras does not quantize") from error
    converted = _converted(trial, plain)
    check_means(converted)
    _near("the quantized model converted", trial.quiet(converted), found)
    before = trial.quiet()
    error = _distance(trial.outputs(folded(trial.x)), before)
    trial.sto.quantize("int8")
    after = trial.quiet()
    if _distance(after, before) > ALLOWED + 5 * error:
        raise Wrong(f"int8 is off by {_distance(after, before):.2g} of the outputs' range")


def _converted(trial: Trial, plain: keras.Model) -> keras.Model:
    posterior = eval(trial.case.posterior, {"ibnn": ibnn})
    return ibnn.to_stochastic(plain, posterior, train_size=50)


def _distance(found: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    pairs = zip(found, wanted, strict=True)
    return max(np.abs(x - y).max() / (1e-6 + np.abs(y).max()) for x, y in pairs)


def _near(what: str, found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    if _distance(found, wanted) > 1e-3:
        raise Wrong(f"{what} is off by {_distance(found, wanted):.2g} of the outputs' range")
