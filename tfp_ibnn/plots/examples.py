"""Single examples: how predictions vary between draws, and which images are most uncertain."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tfp_ibnn._core import checks
from tfp_ibnn.plots import _inputs
from tfp_ibnn.plots.style import COLORS, new_axes, pale, tidy

__all__ = ["class_distributions", "extreme_images"]

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

    The line across is the mean, the prediction. A narrow shape between 0 and 1 is noise in the data
    (aleatoric); a wide or split one, draws that disagree (epistemic). The true class is hatched.

    Args:
        samples: (draws, classes) probabilities of one example.
        class_names: one per class; their numbers by default.
        kind: "violin", or "histogram" for bars that lie on their side.
        label: the true class.
        image: (height, width), or that with a last axis of 1 or 3; drawn right of the axis.
        ax: where to draw; a new figure by default.

    Example:
        >>> import numpy as np, tfp_ibnn.plots as plots
        >>> samples = np.random.default_rng(0).dirichlet([5, 2, 1], size=100)
        >>> ax = plots.class_distributions(samples, class_names=["cat", "dog", "cow"], label=0)
        >>> [tick.get_text() for tick in ax.get_xticklabels()]
        ['cat', 'dog', 'cow']
    """
    samples = _inputs.probabilities("samples", samples, "draws")
    checks.one_of("kind", kind, ("violin", "histogram"))
    classes = samples.shape[1]
    names = _inputs.names("class_names", class_names, classes)
    if label is not None and label not in range(classes):
        raise ValueError(f"`label` must be a class from 0 to {classes - 1}; got {label!r}.")
    picture = None if image is None else _inputs.images("image", image, "height", "width")

    wide = 0.5 * classes + 1 + 1.4 * (image is not None)
    ax = new_axes(ax, (min(max(wide, 3.6), 9), 2.9))

    def look(k: int) -> dict[str, Any]:
        color, hatch = (COLORS[1], "////") if k == label else (COLORS[0], None)
        return {"facecolor": pale(color, 0.55), "edgecolor": color, "lw": 0.9, "hatch": hatch}

    if kind == "violin":
        shapes = {"widths": 0.8, "showextrema": False, "points": 200}
        bodies = ax.violinplot(samples, range(classes), **shapes)["bodies"]
        for k, body in enumerate(bodies):
            body.set(alpha=1, **look(k))
    else:
        edges = np.linspace(0, 1, _BINS + 1)
        for k in range(classes):
            count = np.histogram(np.clip(samples[:, k], 0, 1), edges)[0]
            filled = count > 0
            length = 0.8 * count[filled] / count.max()
            ax.barh(edges[:-1][filled], length, 1 / _BINS, left=k - 0.4, align="edge", **look(k))
    places = np.arange(classes)
    ax.hlines(samples.mean(axis=0), places - 0.4, places + 0.4, color="black", lw=1.6)
    slanted = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"}
    ax.set_xticks(places, names, **(slanted if max(map(len, names)) > 4 else {}))
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


def extreme_images(
    images: Any,
    uncertainty: Any,
    *,
    count: int = 8,
    labels: Any = None,
    predictions: Any = None,
    class_names: Sequence[str] | None = None,
    name: str = "entropy",
) -> Figure:
    """Draw the images of least and of greatest uncertainty, in two rows.

    Good uncertainty puts plain images above and odd, mislabelled or ambiguous ones below. A wrong
    prediction has a frame, and its caption gives the true class after it.

    Args:
        images: (examples, height, width), or that with a last axis of 1 or 3; on any scale.
        uncertainty: (examples,).
        count: images in a row, at most half of all.
        labels: (examples,) true classes, or one-hot.
        predictions: (examples,) predicted classes, or (examples, classes) probabilities.
        class_names: one per class; their numbers by default.
        name: of the uncertainty.

    Example:
        >>> import numpy as np, tfp_ibnn.plots as plots
        >>> noise = np.random.default_rng(0).random((20, 8, 8))
        >>> figure = plots.extreme_images(noise, np.arange(20.0), count=4)
        >>> [ax.get_title() for ax in figure.axes[:4]]
        ['0.00', '1.00', '2.00', '3.00']
    """
    pictures = _inputs.images("images", images, "images", "height", "width")
    total = len(pictures)
    doubt = _inputs.vector("uncertainty", uncertainty, total)
    if 2 * checks.positive_integer("count", count) > total:
        most = f"{total // 2}, half of the {total} images"
        raise ValueError(f"`count` must be at most {most}, for rows that differ; got {count}.")
    given = {"predictions": predictions, "labels": labels}
    found = [_inputs.classes(key, x, total) for key, x in given.items() if x is not None]
    classes = max((1 + int(value.max()) for value in found), default=1)
    words = _inputs.names("class_names", class_names, max(classes, len(class_names or ())))

    order = np.argsort(doubt, kind="stable")
    rows = {"most certain": order[:count], "least certain": order[::-1][:count]}
    # Wide enough for "not NAME" in bold.
    side = max(0.95, 0.085 * (max(map(len, words)) + 4))
    size = (max(side * count + 0.3, 3.0), 2 * side + 0.9 + 0.2 * len(found))
    figure, grid = plt.subplots(2, count, figsize=size, layout="constrained", squeeze=False)
    for axes, (row, chosen) in zip(grid, rows.items(), strict=True):
        axes[0].set_ylabel(row, fontsize=10)
        for ax, i in zip(axes, chosen, strict=True):
            ax.imshow(pictures[i], cmap="gray", vmin=0, vmax=1)
            ax.set(xticks=[], yticks=[])
            ax.set_title(f"{doubt[i]:.2f}", fontsize=9, pad=3)
            own = dict.fromkeys(value[i] for value in found)
            ax.set_xlabel("\nnot ".join(words[k] for k in own), fontsize=9)
            ax.spines[:].set_visible(len(own) > 1)
            if len(own) > 1:
                ax.spines[:].set(color=COLORS[1], linewidth=2.5)
                ax.xaxis.label.set(color=COLORS[1], fontweight="bold")
    below = "predicted class" if predictions is not None else "true class"
    below += " (not: true class)" if len(found) == 2 else ""
    figure.supxlabel(f"above: {name}" + (f"\nbelow: {below}" if found else ""), fontsize=8)
    return figure
