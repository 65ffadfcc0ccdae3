"""Whether chains agree: R-hat, effective sample sizes, and the table that shows them."""

import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor, tfp

MOST_R_HAT = 1.1
"""The R-hat below which chains are taken to agree."""

R_HAT = "R-hat, largest"


def agreement(draws: Tensor) -> dict[str, float]:
    """Return R-hat and effective sample sizes of draws (draws, chains, size) by name."""
    has_halves = draws.shape[0] % 2 == 0
    r_hat = tfp.mcmc.potential_scale_reduction(draws, split_chains=has_halves)
    sizes = tfp.mcmc.effective_sample_size(
        draws, filter_beyond_positive_pairs=True, cross_chain_dims=1
    )
    sizes = ops.convert_to_numpy(sizes)
    return {
        R_HAT: float(ops.convert_to_numpy(r_hat).max()),
        "effective draws, fewest": float(sizes.min()),
        "effective draws, median": float(np.median(sizes)),
    }


def table(shape: tuple[int, ...], diagnostics: dict[str, float], unit: str = "numbers") -> str:
    """Return the diagnostics of draws as a table.

    Args:
        shape: that of the draws, (draws, chains, size).
        diagnostics: numbers by name.
        unit: what a draw consists of, "numbers" by default.

    Returns:
        A head, and a line for each diagnostic.
    """
    draws, chains, size = shape
    lines = [f"{chains} chains of {draws} draws, {size} {unit}"]
    for name, number in diagnostics.items():
        lines.append(f"{name:<24} {number:10.3f}")
    return "\n".join(lines)
