"""Predictions for one example: how the probability of each class varies between draws."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from tfp_ibnn._core import checks
from tfp_ibnn.plots import _inputs
from tfp_ibnn.plots.style import COLORS, new_axes, pale, tidy

__all__ = ["class_distributions"]

_BINS = 20


def class_distributions(
    samples: Any,
    *,
    class_names: Sequence[str] | None = None,
    kind: str = "violin",
    label: int | None = None,
    image: Any = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw how the probability of each class varies between draws of the posterior.

    The line across is the mean over the draws, the prediction. A narrow shape between 0 and 1 is
    noise in the data (aleatoric); a wide or split one means that the draws disagree (epistemic).
    The true class is hatched, in a second colour.

    Args:
        samples: (draws, classes) probabilities of one example.
        class_names: one per class; their numbers by default.
        kind: "violin", or "histogram" for bars that lie on their side. Either way the shapes of all
            classes are equally wide.
        label: the true class.
        image: (height, width), or that with a last axis of 1 or 3; drawn right of the axis.
        ax: where to draw; a new figure by default.

    Example:
        >>> import numpy as np
        >>> from tfp_ibnn import plots
        >>> samples = np.random.default_rng(0).dirichlet([5, 2, 1], size=100)
        >>> ax = plots.class_distributions(samples, class_names=["cat", "dog", "cow"], label=0)
        >>> [tick.get_text() for tick in ax.get_xticklabels()]
        ['cat', 'dog', 'cow']
    """
    samples = _inputs.probabilities("samples", samples, "draws")
    kind = checks.one_of("kind", kind, ("violin", "histogram"))
    classes = samples.shape[1]
    names = _inputs.names("class_names", class_names, classes)
    if label is not None and label not in range(classes):
        raise ValueError(f"`label` must be a class from 0 to {classes - 1}; got {label!r}.")
    picture = None if image is None else _inputs.images("image", image, ("height", "width"))

    wide = 0.5 * classes + 1 + 1.4 * (image is not None)
    ax = new_axes(ax, (min(max(wide, 3.6), 9), 2.9))
    looks = [_look(k == label) for k in range(classes)]
    if kind == "violin":
        shapes = {"widths": 0.8, "showextrema": False, "points": 200}
        bodies = ax.violinplot(samples, range(classes), **shapes)["bodies"]
        for body, look in zip(bodies, looks, strict=True):
            body.set(alpha=1, **look)
    else:
        edges = np.linspace(0, 1, _BINS + 1)
        for k, look in enumerate(looks):
            count = np.histogram(np.clip(samples[:, k], 0, 1), edges)[0]
            filled = count > 0
            length = 0.8 * count[filled] / count.max()
            ax.barh(edges[:-1][filled], length, 1 / _BINS, left=k - 0.4, align="edge", **look)
    mean = samples.mean(axis=0)
    ax.hlines(mean, np.arange(classes) - 0.4, np.arange(classes) + 0.4, color="black", lw=1.6)
    ax.set_xticks(range(classes), names)
    if max(map(len, names)) > 4:
        ax.tick_params(axis="x", rotation=35)
        for tick in ax.get_xticklabels():
            tick.set(ha="right", rotation_mode="anchor")
    if label is not None:
        ax.get_xticklabels()[label].set_fontweight("bold")
    ax.set(xlim=(-0.6, classes - 0.4), ylim=(-0.02, 1.02), ylabel="probability")
    if picture is not None:
        inset = ax.inset_axes((1.02, 0.2, 1.6 / wide, 0.6))
        inset.imshow(picture, cmap="gray", vmin=0, vmax=1)
        inset.set(xticks=[], yticks=[], anchor="W")
        if label is not None:
            inset.set_title(names[label], fontsize=10, loc="left")
    return tidy(ax, "y")


def _look(true: bool) -> dict[str, Any]:
    color = COLORS[1] if true else COLORS[0]
    hatch = "////" if true else None
    return {"facecolor": pale(color, 0.55), "edgecolor": color, "lw": 0.9, "hatch": hatch}
