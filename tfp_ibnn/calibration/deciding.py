"""The quality of decisions on examples that were used for nothing else."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tfp_ibnn.calibration.examples import Examples
from tfp_ibnn.decisions import Conformal, OODDetector, error_threshold
from tfp_ibnn.likelihoods import Likelihood
from tfp_ibnn.prediction import MonteCarlo


def decisions_of(
    model: MonteCarlo,
    output: Likelihood,
    examples: Examples,
    ood: Mapping[str, Any],
    seed: int,
) -> dict[str, Any]:
    """Return the scores of decisions that `Report.decide` lists.

    Args:
        model: what predicts.
        output: what its predictions mean.
        examples: those to decide about; half of them fits conformal sets.
        ood: out-of-distribution inputs by name.
        seed: of that split.
    """
    order = np.random.default_rng(seed).permutation(examples.size)
    fitted_half, new_half = np.array_split(order, 2)
    new = examples.take(new_half)
    decisions: dict[str, Any] = {}
    if not ood:
        decisions["OOD AUROC"] = "left out, as no set was given"
    try:
        coverage = _coverage(model, output, examples.take(fitted_half), new)
        decisions["coverage of 90 % sets"] = round(coverage, 4)
        means = model.predict(examples.x, verbose=0)["mean"]
        answered = error_threshold(means, examples.y)["answered"]
        decisions["share answered at 1 % error"] = round(answered, 4)
    except ValueError as error:  # there are too few examples, or no classes
        decisions["left out"] = str(error)
    score = "entropy" if output.is_classifier else "epistemic"
    for name, inputs in ood.items():
        auroc = OODDetector(model, score).evaluate(new.x, inputs)["auroc"]
        decisions[f"OOD AUROC against {name}"] = round(auroc, 4)
    return decisions


def _coverage(model: MonteCarlo, output: Likelihood, known: Examples, new: Examples) -> float:
    """Return how often 90 % sets, fitted to some examples, hold the truth of others."""
    method = "lac" if output.is_classifier else "split"
    conformal = Conformal(model, method).fit(known.x, known.y)
    return conformal.evaluate(new.x, new.y)["coverage"]
