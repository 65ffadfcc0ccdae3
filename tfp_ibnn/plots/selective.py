"""Selective prediction: the risk that is left if uncertain examples are handed on."""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes

from tfp_ibnn import metrics
from tfp_ibnn.plots import _inputs
from tfp_ibnn.plots.style import line, new_axes, tidy

__all__ = ["risk_coverage"]


def risk_coverage(
    curves: Mapping[str, Any],
    *,
    label: str = "risk",
    ax: Axes | None = None,
) -> Axes:
    """Draw the mean loss of the examples kept against the share that is kept, surest first.

    A curve that falls to the left belongs to an uncertainty that knows the errors; a flat one, to
    one that does not. The area under the curve (AURC) is in the legend; less is better.

    Args:
        curves: name to a pair of uncertainty (examples,) and loss (examples,), or to what
            `metrics.risk_coverage` returns: an object with `coverage`, `risk` and `area`. With a
            loss of 1 for an error and 0 otherwise, the risk is the error rate.
        label: of the vertical axis.
        ax: where to draw; a new figure by default.

    Example:
        >>> from tfp_ibnn import plots
        >>> ax = plots.risk_coverage({"flow": ([0.1, 0.2, 0.9, 0.3], [0, 0, 1, 0])})
        >>> ax.get_xlabel()
        'coverage'
    """
    if not isinstance(curves, Mapping) or not curves:
        raise ValueError(
            "`curves` must map at least one name to (uncertainty, loss), as in "
            f"{{'flow': (entropy, errors)}}; got {curves!r:.80}."
        )
    found = {name: _curve(name, curve) for name, curve in curves.items()}
    ax = new_axes(ax, (4.6, 3.4))
    for i, (name, (coverage, risk, area)) in enumerate(found.items()):
        ax.plot(coverage, risk, lw=1.8, label=f"{name} (AURC {area:#.3g})", **line(i))
    ax.set(xlim=(0, 1), xlabel="coverage", ylabel=label)
    ax.set_ylim(bottom=min(0, ax.get_ylim()[0]))
    # Above the axis: curves of risk may pass anywhere inside.
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=9)
    return tidy(ax, "both")


def _curve(name: str, curve: Any) -> tuple[Any, Any, float]:
    """Return coverage, risk and area."""
    if not all(hasattr(curve, part) for part in ("coverage", "risk", "area")):
        if not isinstance(curve, tuple | list) or len(curve) != 2:
            raise ValueError(
                f"`curves[{name!r}]` must be a pair of uncertainty and loss; got {curve!r:.80}."
            )
        uncertainty = _inputs.vector(f"curves[{name!r}][0]", curve[0])
        loss = _inputs.vector(f"curves[{name!r}][1]", curve[1], len(uncertainty))
        curve = metrics.risk_coverage(uncertainty, loss)
    coverage = _inputs.vector(f"curves[{name!r}].coverage", curve.coverage, "points")
    risk = _inputs.vector(f"curves[{name!r}].risk", curve.risk, len(coverage))
    return coverage, risk, float(curve.area)
