"""The images that a model is surest of, and those that it is least sure of."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from tfp_ibnn._core import checks
from tfp_ibnn.plots import _inputs
from tfp_ibnn.plots.style import COLORS

__all__ = ["extreme_images"]


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
    prediction has a frame, and its caption gives the true class after it; one above is a model that
    is surely wrong.

    Args:
        images: (examples, height, width), or that with a last axis of 1 or 3. The least value of
            all is drawn black, the largest white.
        uncertainty: (examples,).
        count: images in a row, at most half of all.
        labels: (examples,) true classes, or one-hot.
        predictions: (examples,) predicted classes, or (examples, classes) probabilities.
        class_names: one per class; their numbers by default.
        name: of the uncertainty.

    Example:
        >>> import numpy as np
        >>> from tfp_ibnn import plots
        >>> noise = np.random.default_rng(0).random((20, 8, 8))
        >>> figure = plots.extreme_images(noise, np.arange(20.0), count=4)
        >>> [ax.get_title() for ax in figure.axes[:4]]
        ['0.00', '1.00', '2.00', '3.00']
    """
    pictures = _inputs.images("images", images)
    doubt = _inputs.vector("uncertainty", uncertainty, len(pictures))
    count = checks.positive_integer("count", count)
    if 2 * count > len(pictures):
        raise ValueError(
            f"`count` must be at most {len(pictures) // 2}, half of the {len(pictures)} images, "
            f"so that no image is in both rows; got {count}."
        )
    found = {}
    for key, value in (("predictions", predictions), ("labels", labels)):
        if value is not None:
            found[key] = _inputs.classes(key, value, len(pictures))
    classes = 1 + max((int(value.max()) for value in found.values()), default=0)
    if class_names is not None:
        classes = max(classes, len(class_names))
    words = _inputs.names("class_names", class_names, classes)

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
            own = [value[i] for value in found.values()]
            wrong = len(set(own)) > 1
            ax.set_xlabel("\nnot ".join(words[k] for k in dict.fromkeys(own)), fontsize=9)
            ax.spines[:].set_visible(wrong)
            if wrong:
                ax.spines[:].set(color=COLORS[1], linewidth=2.5)
                ax.xaxis.label.set(color=COLORS[1], fontweight="bold")
    below = "predicted class" if predictions is not None else "true class"
    below += " (not: true class)" if len(found) == 2 else ""
    figure.supxlabel(f"above: {name}" + (f"\nbelow: {below}" if found else ""), fontsize=8)
    return figure
