"""Compare a posterior with a reference: distances, and a figure of marginals and pairs."""

import math
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import gaussian_kde

from tfp_ibnn._core.extras import needs
from tfp_ibnn.diagnostics.scores import (
    Estimate,
    bound_of,
    k_hat,
    log_weights,
    mmd,
    sliced_wasserstein,
)
from tfp_ibnn.diagnostics.targets import rows_of

_ROWS = 2000  # of each half of the reference
_WEIGHTS = 64  # averaged in the bound that is shown below the ELBO
_MESH = 50  # points along each axis of a contour
_DENSITY_ROWS = 1000  # from which contours are estimated
_NAMES = ("posterior", "reference")


class Comparison(NamedTuple):
    """What `report` returns: a table of scores, printed, and the rows that it compares.

    Attributes:
        scores: the table, by row: a score of the posterior, and of the reference's other half. A
            score is an `Estimate` or a number; "" where there is none. The rows are

            - "ELBO, nats", "bound by 64 weights" and "k-hat, good below 0.7", with a `target`;
            - "log evidence - ELBO", with `evidence` too: the KL of the posterior, in nats;
            - "MMD, squared" and "sliced Wasserstein distance";
            - "largest error of a mean" and "largest error of a deviation", over all numbers.
        draws: (N, size), draws of the posterior.
        reference: (N, size), the half of the reference that distances are measured from.
    """

    scores: dict[str, tuple[Any, Any]]
    draws: np.ndarray
    reference: np.ndarray

    def __str__(self) -> str:
        rows = {"": _NAMES, **self.scores}
        lines = []
        for name, (of_posterior, of_reference) in rows.items():
            lines.append(f"{name:<32}{of_posterior!s:>22}{of_reference!s:>22}")
        return "\n".join(lines)

    def plot(self, count: int = 4) -> Any:
        """Draw marginals and pairs of the first coordinates; contours hold 50 and 90 % of draws.

        Needs Matplotlib: `pip install tfp_ibnn[plots]`.
        """
        with needs("plots"):
            import matplotlib.pyplot as plt

            from tfp_ibnn.plots.style import LEGEND, tidy
        size = min(count, self.draws.shape[1])
        side = 1.8 * size + 0.8
        figure, grid = plt.subplots(
            size,
            size,
            figsize=(side, side),
            squeeze=False,
            sharex="col",
            layout="constrained",
        )
        for (row, column), ax in np.ndenumerate(grid):
            label = "density" if row == column else f"w[{row}]"
            tidy(ax).set(xlabel=f"w[{column}]", ylabel=label, visible=column <= row)
            if column == row:
                self._draw_marginal(ax, column)
            elif column < row:
                self._draw_pair(ax, column, row)
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper right", **LEGEND)
        return figure

    def _draw_marginal(self, ax: Any, coordinate: int) -> None:
        """Draw the histograms of a coordinate, the posterior's on top."""
        from tfp_ibnn.plots.style import line

        edges = self._axis(coordinate)[::2]
        for place in (1, 0):
            ax.hist(
                (self.draws, self.reference)[place][:, coordinate],
                bins=edges,
                density=True,
                histtype="step",
                label=_NAMES[place],
                **line(place),
            )

    def _draw_pair(self, ax: Any, first: int, second: int) -> None:
        """Draw contours of the joint density of two coordinates, the posterior's on top."""
        from tfp_ibnn.plots.style import COLORS, LINES

        x, y = np.meshgrid(self._axis(first), self._axis(second))
        points = np.stack([x.ravel(), y.ravel()])
        for place in (1, 0):
            rows = (self.draws, self.reference)[place]
            rows = rows[:_DENSITY_ROWS, [first, second]]
            density = gaussian_kde(rows.T)
            at_rows = density(density.dataset)
            heights = density(points)
            ax.contour(
                x,
                y,
                heights.reshape(x.shape),
                levels=np.quantile(at_rows, (0.1, 0.5)),
                colors=COLORS[place],
                linestyles=LINES[place],
            )

    def _axis(self, coordinate: int) -> np.ndarray:
        """Return points along a coordinate, over nearly all rows of both."""
        rows = np.concatenate([self.draws, self.reference])
        values = rows[:, coordinate]
        low, high = np.quantile(values, (0.001, 0.999))
        return np.linspace(low, high, _MESH)


def report(
    posterior: Any, reference: Any, target: Any = None, evidence: Any = None, seed: int = 0
) -> Comparison:
    """Compare a posterior with a reference: a table, and a figure by its `plot()`.

    Distances are measured from one half of the reference, in its standard deviations. Next to them
    are those of the other half: smaller differences mean nothing.

    Args:
        posterior: as for `log_weights`, or samples (..., size).
        reference: what `diagnostics.hmc` returns, which has a target; an `ibnn.LastLayerHMC`; or
            samples (..., size), of several chains (chains, draws, size).
        target: as for `log_weights`; None for that of the reference.
        evidence: log p(y) in nats, or a pair with its standard error, as `bridge` and `smc` return.
        seed: of the draws, and of the choice of samples.

    Returns:
        A `Comparison`: its `scores` by name, and the rows `draws` and `reference`.

    Raises:
        ValueError: if the two differ in size.

    Example:
        >>> import numpy as np, tfp_ibnn as ibnn
        >>> rng = np.random.default_rng(0)
        >>> reference = rng.normal(size=(2, 500, 3))
        >>> report = ibnn.diagnostics.report(rng.normal(0.5, 1.0, size=(500, 3)), reference)
        >>> print(report)
                                                     posterior             reference
        MMD, squared                            0.07548 ± 0.02     0.0001514 ± 0.003
        sliced Wasserstein distance                     0.5803                0.1155
        largest error of a mean                         0.6803                0.1075
        largest error of a deviation                    0.0623                0.0224
    """
    first_half, other_half = _halves(reference, seed + 1)
    draws = rows_of(posterior, len(first_half), seed)
    if draws.shape[1] != first_half.shape[1]:
        raise ValueError(
            f"`posterior` has {draws.shape[1]} numbers, `reference` {first_half.shape[1]}."
        )
    if target is None:
        # Of a posterior such as `LastLayerHMC`, `target` is a method, and has no values.
        target = getattr(getattr(reference, "target", None), "values", None)
    has_samples = hasattr(posterior, "samples") or isinstance(posterior, np.ndarray)
    scores = {}
    if target is not None and not has_samples:
        weights = log_weights(posterior, target, seed=seed)
        scores |= _evidence_scores(weights, evidence)
    loc = first_half.mean(axis=0)
    scale = first_half.std(axis=0)
    standard = (first_half - loc) / scale
    of_posterior = _distances((draws - loc) / scale, standard)
    of_reference = _distances((other_half - loc) / scale, standard)
    for name, distance in of_posterior.items():
        scores[name] = (distance, of_reference[name])
    return Comparison(scores, draws, first_half)


def _halves(reference: Any, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of the two halves of a reference, which share no chain if there are several."""
    samples = getattr(reference, "samples", reference)
    if isinstance(samples, np.ndarray) and samples.ndim == 3:
        first, second = np.array_split(samples, 2)
        first = rows_of(first, _ROWS, seed)
        second = rows_of(second, _ROWS, seed)
    else:
        rows = rows_of(reference, 2 * _ROWS, seed)
        first, second = np.array_split(rows, 2)
    return first, second


def _evidence_scores(weights: np.ndarray, evidence: Any) -> dict[str, tuple[Any, Any]]:
    """Return the scores by log-weights (draws,), and by the log evidence if it is known."""
    lower = Estimate.of_mean(weights)
    scores = {
        "ELBO, nats": (lower, ""),
        f"bound by {_WEIGHTS} weights": (bound_of(weights, _WEIGHTS), ""),
    }
    if evidence is not None:
        value, error = np.append(evidence, 0.0)[:2]
        gap = Estimate(value - lower.value, math.hypot(error, lower.error))
        scores["log evidence - ELBO"] = (gap, "")
    scores["k-hat, good below 0.7"] = (round(k_hat(weights), 3), "")
    return scores


def _distances(rows: np.ndarray, reference: np.ndarray) -> dict[str, Any]:
    """Return the distances of rows from a reference whose coordinates are standardized."""
    mean_errors = np.abs(rows.mean(axis=0))
    deviation_errors = np.abs(rows.std(axis=0) - 1)
    return {
        "MMD, squared": mmd(rows, reference),
        "sliced Wasserstein distance": round(sliced_wasserstein(rows, reference), 4),
        "largest error of a mean": round(float(mean_errors.max()), 4),
        "largest error of a deviation": round(float(deviation_errors.max()), 4),
    }
