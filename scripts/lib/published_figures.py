"""Figures of the experiments that repeat published tables."""

import numpy as np
import pandas as pd
from matplotlib.offsetbox import AnnotationBbox, OffsetImage
from matplotlib.ticker import LogLocator, PercentFormatter

from lib import data
from lib.figures import NAMES, draw_means, facets, look, methods_of, scores
from lib.pruning import DECIBELS, EDGES
from lib.shifts import rotate, to_bytes
from lib.store import METHODS, evaluated, is_shown, stored_entropies
from tfp_ibnn.plots.style import COLORS


def mnist_mlp(records, runs, folder):
    rows = pd.DataFrame(filter(is_shown, records))
    widest = rows[rows["budget"] == "width_1200"].dropna(subset="weights")
    more = {"weights.png": weights(widest)} if len(widest) else {}
    return {"errors.png": errors(rows[rows["budget"].str.startswith("width")]), **more}


def errors(rows):
    """Draw the test error of every method and width: a point per seed, mean and standard error."""

    def draw(ax, budget):
        part = rows[rows["budget"] == budget]
        values = 100 * (1 - part.set_index("method")["accuracy"])
        methods = methods_of(part)
        draw_means(ax, "test error (%)", methods, lambda method: values[[method]])
        published = METHODS["published"].get(budget, {})
        known = {methods.index(m): float(error) for m, error in published.items() if m in methods}
        style = {"marker": "D", "color": "0.35", "facecolor": "white", "zorder": 3}
        ax.scatter(known.values(), known.keys(), 28, label="published", **style)
        ax.set_title(budget.replace("_", " "), loc="left", fontsize=10)

    grid = [[(budget,) for budget in rows["budget"].unique()]]
    size = (1.6 + 3.0 * len(grid[0]), 1.2 + 0.3 * rows["method"].nunique())
    return facets(grid, draw, size, sharey=True, legend=1, grid_lines="x")


def weights(rows):
    """Draw what the weights are, how certain they are, and what pruning costs; means of seeds."""
    found = {m: rows["weights"][rows["method"] == m].to_list() for m in methods_of(rows)}

    def density(ax, key, edges, label):
        for method, runs in found.items():
            if all(key in run for run in runs) and method in METHODS["weights"]:
                counts = np.mean([run[key] for run in runs], axis=0)
                share = counts / counts.sum() / (edges[1] - edges[0])
                middle = (edges[1:] + edges[:-1]) / 2
                inside = slice(1, -1)  # the outer bins have all that lies beyond
                ax.plot(middle[inside], share[inside], **{**look(method), "marker": None})
        ax.set(xlabel=label, ylabel="density", yscale="log" if key == "histogram" else "linear")

    def pruned(ax, *_):
        for method, runs in found.items():
            if all("pruned" in run for run in runs):
                error = [[100 * (1 - r["accuracy"]) for r in run["pruned"]] for run in runs]
                shares = [100 * row["removed"] for row in runs[0]["pruned"]]
                ends = np.min(error, axis=0), np.max(error, axis=0)
                ax.plot(range(len(shares)), np.mean(error, axis=0), **look(method))
                ax.fill_between(range(len(shares)), *ends, color=look(method)["color"], alpha=0.2)
                ax.set_xticks(range(len(shares)), [f"{share:g}" for share in shares])
        ax.set(xlabel="weights removed (%)", ylabel="test error (%)", yscale="log")
        ax.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("{x:g}")

    grid = [[(density, "histogram", EDGES, "weight"), (pruned,)]]
    grid[0].insert(1, (density, "snr", DECIBELS, "10 log10(|mean| / scale)"))
    return facets(grid, lambda ax, draw, *rest: draw(ax, *rest), (10.5, 3.6), legend=4)


def lenet5(records, runs, folder):
    rows, shifted = pd.DataFrame(filter(is_shown, records)), evaluated(records)
    more = {"rotation.png": rotation(shifted)} if "shown" in shifted else {}
    return {"scores.png": scores(rows), **more}


def rotation(rows):
    """Draw the class probabilities of a digit that is turned, and the mean entropy of many.

    Thick lines are means of the first seed's draws, thin ones single draws; classes that are never
    likely are grey.
    """
    first = rows[rows["seed"] == rows["seed"].min()].sort_values("level")
    means = {m: first[first["method"] == m] for m in methods_of(first)}
    likely = np.max([np.stack(part["shown"]).max(axis=0) for part in means.values()], axis=0)
    colors = dict(zip(np.flatnonzero(likely > 0.25), COLORS * 2, strict=False))
    level = np.sort(first["level"].unique())

    def turned(ax, method):
        part = means[method]
        draws = np.stack(part["draws"])  # (angles, draws, classes)
        for kind in range(draws.shape[2]):
            style = {"color": colors.get(kind, "0.75"), "zorder": 3 if kind in colors else 2}
            if draws.shape[1] > 1:
                ax.plot(level, draws[:, :, kind], lw=0.6, alpha=0.35, **style)
            label = str(kind) if kind in colors else None
            ax.plot(level, np.stack(part["shown"])[:, kind], lw=2.2, label=label, **style)
        ax.set_title(NAMES[method], loc="left", fontsize=10, pad=26)
        ax.set(
            ylim=(-0.02, 1.02),
            xticks=range(0, 181, 45),
            xlabel="rotation (degrees)",
            ylabel="probability",
        )
        for degrees in range(0, 181, 30):
            picture = OffsetImage(rotate(image, degrees)[0, :, :, 0], zoom=0.75, cmap="gray_r")
            at = {"xycoords": ("data", "axes fraction"), "box_alignment": (0.5, 0)}
            ax.add_artist(AnnotationBbox(picture, (degrees, 1.0), frameon=False, **at))

    def entropy(ax):
        for method in means:
            part = rows[rows["method"] == method].pivot(
                index="seed", columns="level", values="entropy"
            )
            ax.plot(level, part.mean(), **{**look(method), "ms": 4})
            ax.fill_between(level, part.min(), part.max(), color=look(method)["color"], alpha=0.2)
        ax.set_title("1,000 digits", loc="left", fontsize=10, pad=26)
        ax.set(
            xticks=range(0, 181, 45),
            xlabel="rotation (degrees)",
            ylabel="mean entropy (nats)",
            ylim=(0, None),
        )
        ax.legend(fontsize=8, frameon=False)

    _, (images, _) = data.load("mnist")
    image = to_bytes(images[METHODS["shown"]][None], "mnist")
    cells = [(turned, method) for method in means] + [(entropy,)]
    cells += [None] * (-len(cells) % 3)
    grid = [cells[place : place + 3] for place in range(0, len(cells), 3)]
    figure = facets(grid, lambda ax, draw, *rest: draw(ax, *rest), (10.5, 0.6 + 3.3 * len(grid)))
    handles, labels = figure.axes[0].get_legend_handles_labels()
    beside = {"loc": "outside right upper", "fontsize": 9}
    figure.legend(handles, labels, title="class", **beside)
    return figure


def cifar5(records, runs, folder):
    rows = pd.DataFrame(filter(is_shown, records))
    figures = {"scores.png": scores(rows)}
    equal = rows[rows["budget"] == "equal"]
    if equal["evaluations"].map(bool).all() if "evaluations" in rows else False:
        figures["unknown.png"] = entropies(equal, folder)
    return figures


def entropies(rows, folder):
    """Draw the cumulative distributions of the entropy on unseen and on known classes."""
    found = {}
    for method in methods_of(rows):
        records = rows[rows["method"] == method].to_dict("records")
        found[method] = [stored_entropies(record, folder) for record in records]
        if method == "deterministic" and len(records) > 1:
            together = {**records[0], "seeds": [record["seed"] for record in records]}
            found["ensemble"] = [stored_entropies(together, folder)]
    grid = np.linspace(0, np.log(5), 200)

    def draw(ax, place, title):
        for method in filter(found.__contains__, NAMES):
            below = [
                np.searchsorted(np.sort(run[place]), grid) / len(run[place])
                for run in found[method]
            ]
            ax.plot(grid, np.mean(below, axis=0), **{**look(method), "marker": None})
        ax.set_title(title, loc="left", fontsize=10)
        ax.set(
            xlabel="entropy (nats)", ylabel="share of images below", xlim=(0, grid[-1]), ylim=(0, 1)
        )
        ax.yaxis.set_major_formatter(PercentFormatter(1))

    cells = [[(1, "five unseen classes"), (0, "five known classes")]]
    return facets(cells, draw, (9, 4.2), legend=4, grid_lines="both", sharey=True)


FIGURES = {"mnist_mlp": mnist_mlp, "lenet5": lenet5, "cifar5": cifar5}
