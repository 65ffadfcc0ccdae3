"""Figures of the experiments. Import it late: Matplotlib takes long to import."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator, MultipleLocator

from experiments import files
from experiments.report import history
from experiments.study import folder_of, stored
from tfp_ibnn import plots
from tfp_ibnn.plots.style import COLORS, MARKERS, epochs_below, marked, tidy

NAMES = {
    "deterministic": "deterministic",
    "deterministic_continued": "deterministic, continued",
    "mc_dropout": "MC dropout",
    "gaussian": "Gaussian",
    "mixture": "mixture",
    "mixture_4": "mixture of 4",
    "mixture_16": "mixture of 16",
    "mixture_16_ibnn": "mixture of 16, iBNN's recipe",
    "flow": "flow",
    "flow_first": "flow, affine first",
    "flow_last": "flow, affine last",
    "flow_over_mixture": "flow over mixture of 4",
    "flow_planar": "planar flows",
    "flow_iaf": "autoregressive flow",
    "flow_sylvester": "Sylvester flows",
    "gaussian_inner": "Gaussian, none in conv1",
    "fixed_inner": "fixed noise, none in conv1",
    "gaussian_elbo": "Gaussian, ELBO",
    "flow_elbo": "flow, ELBO",
}
"""What methods are called in figures, in the order in which they stand there."""

_TITLES = {"cifar10": "CIFAR-10", "fashion_mnist": "Fashion-MNIST"}
_SCORES = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE"}
_AXES = {
    "corruption": "severity of the corruption",
    "rotation": "rotation (degrees)",
    "fgsm": "FGSM, epsilon (of 255)",
}
_UNCERTAINTIES = {"entropy": "entropy (nats)", "epistemic": "epistemic uncertainty (nats)"}
_BINS = 12
# Of curves that lie upon each other two are enough.
_DRAWN = "deterministic mc_dropout gaussian mixture_16_ibnn flow_last gaussian_elbo".split()
# With the same prior; iBNN's mixture has means that lie far apart.
_POSTERIORS = "gaussian mixture_16 flow_last gaussian_elbo flow_elbo".split()


def look(method):
    """Return colour, line and marker of a method: the same in all figures."""
    return {**marked(list(NAMES).index(method)), "label": NAMES[method]}


def facets(grid, draw, size, *, legend=0, grid_lines="y", **options):
    """Return a figure with an axis for each cell of a grid.

    Args:
        grid: rows of cells; a cell is a tuple, or None for an empty place.
        draw: called with an axis and the parts of its cell.
        size: of the figure, in inches.
        legend: columns of a legend below; 0 is none.
        grid_lines: along "x", "y" or "both".
        **options: of `plt.subplots`.
    """
    shape = len(grid), len(grid[0])
    figure, axes = plt.subplots(
        *shape, figsize=size, layout="constrained", squeeze=False, **options
    )
    labelled = {}
    for place, cell in enumerate(cell for row in grid for cell in row):
        ax = axes.flat[place]
        if cell is None:
            ax.set_visible(False)
            axes.flat[place - shape[1]].tick_params(labelbottom=True)
            continue
        draw(ax, *cell)
        tidy(ax, grid_lines)
        handles, labels = ax.get_legend_handles_labels()
        labelled |= dict(zip(labels, handles, strict=True))
    if legend:
        below = {"loc": "outside lower center", "ncols": legend, "fontsize": 9}
        figure.legend(labelled.values(), labelled, **below)
    return figure


def save(figures, folder):
    """Write figures, by name, into a folder, and return their paths."""
    paths = [Path(folder) / name for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        with files.replacing(path) as temporary:
            figure.savefig(temporary, dpi=150)
        plt.close(figure)
    return paths


def methods_of(rows):
    """Return the methods that there are rows of, in the order of `NAMES`."""
    return [name for name in NAMES if any(row["method"] == name for row in rows)]


def standard_error(values):
    """Return the standard error of a mean, or None if there is but one value."""
    return float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else None


def _by_method(ax, methods, values_of):
    """Draw the values of the seeds of each method, their mean, and its standard error."""
    for place, method in enumerate(methods):
        values, color = values_of(method), look(method)["color"]
        mean = np.mean(values)
        ax.plot(values, [place] * len(values), "o", ms=4, color=color, alpha=0.5)
        ax.plot([mean] * 2, [place - 0.3, place + 0.3], lw=2, color=color)
        ax.errorbar(mean, place, xerr=standard_error(values), color=color, capsize=3)
    ax.set_ylim(len(methods) - 0.5, -0.5)
    ax.set_yticks(range(len(methods)), [NAMES[method] for method in methods])
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.label_outer(remove_inner_ticks=True)
    ax.xaxis.label.set_visible(True)
    ax.tick_params(labelbottom=True)


# The comparisons of methods.


def lenet(rows, runs):
    """Return the figures of the comparison on LeNet, by name."""
    return {"curves.png": curves(rows, runs), "scores.png": scores(rows)}


def vgg16(results, runs, folder):
    """Return the figures of the comparison on VGG16, by name, of what there are results of.

    Figures from logs are not drawn if folders of their runs are gone.
    """
    equal, reported = (
        [row for row in results.rows if row["budget"] == budget] for budget in ("equal", "report")
    )
    drawn = [row for row in equal if row["method"] in _DRAWN]
    figures = {}
    if equal:
        shifted = [row for row in results.robustness if row["budget"] == "equal"]
        figures |= {"scores.png": scores(equal), "robustness.png": robustness(shifted)}
    if drawn:
        figures["reliability.png"] = reliability(drawn, folder)
    if drawn and all(folder_of(row, runs).exists() for row in drawn):
        figures["training.png"] = training(drawn, runs)
    if any(row["method"] in _POSTERIORS for row in equal):
        figures["posteriors.png"] = posteriors(equal)
    if any(row["shift"] == "foreign" for row in results.robustness):
        figures["foreign.png"] = ood(results.robustness)
    if reported and all(folder_of(row, runs).exists() for row in reported):
        figures["curves.png"] = curves(reported, runs)
    return figures


def curves(rows, runs):
    """Draw test scores over the epochs with the report's budget (the report's figures 5 and 6).

    Of each method the mean over the seeds, as averaged predictions have it, every five epochs.
    """
    rows = [row for row in rows if row["budget"] == "report" and row["method"] != "deterministic"]
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    logged = {}
    for row in rows:
        key = row["dataset"], row["method"]
        logged.setdefault(key, []).append(history(folder_of(row, runs)))

    def draw(ax, dataset, key):
        for method in methods_of(rows):
            found = logged[dataset, method]
            values = np.mean([one[f"test_{key}"] for one in found], axis=0)
            every = len(found[0]["loss"]) // len(values)
            ax.plot(every * np.arange(1, len(values) + 1), values, **look(method))
        ax.set(xlabel="epochs after the baseline", ylabel=_SCORES[key])
        epochs_below(ax)
        if key == "accuracy":
            ax.set_title(_TITLES[dataset], loc="left", fontsize=10)

    grid = [[(dataset, key) for key in _SCORES] for dataset in datasets]
    return facets(grid, draw, (10.5, 0.5 + 3.0 * len(datasets)), legend=5)


def scores(rows):
    """Draw accuracy, NLL and ECE of every method: a point per seed, mean and standard error."""
    parts = {}
    for row in rows:
        parts.setdefault((row["dataset"], row["budget"]), []).append(row)
    heights = [0.8 + 0.28 * len(methods_of(part)) for part in parts.values()]

    def draw(ax, of, key):
        dataset, budget = of
        ax.set_xlabel(_SCORES[key])
        _by_method(
            ax,
            methods_of(parts[of]),
            lambda method: [row[key] for row in parts[of] if row["method"] == method],
        )
        if key == "accuracy":
            ax.set_title(f"{_TITLES[dataset]}, budget: {budget}", loc="left", fontsize=10)

    grid = [[(of, key) for key in _SCORES] for of in parts]
    size = 10.5, 0.3 + sum(heights)
    return facets(grid, draw, size, height_ratios=heights, grid_lines="x")


def reliability(rows, folder):
    """Draw by how much accuracy exceeds confidence, in bins of equally many test images.

    The images of all seeds are taken together. Of images that are nearly certain there are many:
    the axis of confidence shows the share of doubt, 1 - confidence, on a logarithmic scale.
    """

    def draw(ax, method):
        found = [stored(row, folder) for row in rows if row["method"] == method]
        mean, labels = (np.concatenate(part) for part in zip(*found, strict=True))
        # The sum of the others has all digits, where 1 - confidence has none left in float16.
        doubt = np.sort(mean, axis=1)[:, :-1].sum(axis=1)
        wrong = (mean.argmax(axis=1) != labels).astype("float64")
        parts = np.array_split(np.argsort(-doubt), _BINS)
        gap = [doubt[part].mean() - wrong[part].mean() for part in parts]
        images = len(doubt) / len(found)  # the seeds share their images, which count once
        error = [max(wrong[part].std(), 1e-3) / (images / _BINS) ** 0.5 for part in parts]
        ax.axhline(0, color="0.6", lw=1)
        x = [max(doubt[part].mean(), 1e-4) for part in parts]
        color = look(method)["color"]
        ax.errorbar(x, gap, error, color=color, marker="o", ms=3, lw=1.2, capsize=2)
        ax.set_title(NAMES[method], fontsize=9)
        ax.set_xscale("log")

    methods = [(method,) for method in methods_of(rows)]
    columns = min(3, len(methods))
    methods += [None] * (-len(methods) % columns)
    grid = [methods[i : i + columns] for i in range(0, len(methods), columns)]
    size = 0.5 + 2.9 * columns, 0.4 + 2.2 * len(grid)
    figure = facets(grid, draw, size, sharex=True, sharey=True, grid_lines="both")
    figure.axes[0].invert_xaxis()
    figure.supxlabel("1 - confidence (more certain to the right)", fontsize=10)
    figure.supylabel("accuracy - confidence", fontsize=10)
    return figure


def training(rows, runs):
    """Draw NLL and accuracy on training images, and the KL, over the epochs; means of the seeds."""
    logged = {}
    for row in rows:
        logged.setdefault(row["method"], []).append(history(folder_of(row, runs)))

    def draw(ax, key, label):
        for method in methods_of(rows):
            # A deterministic network's loss is its NLL, and it has no KL.
            found = [one.get(key, one["loss"] if key == "nll" else None) for one in logged[method]]
            if found[0] is not None:
                values = np.mean(found, axis=0)
                style = {**look(method), "marker": None}
                ax.plot(np.arange(1, len(values) + 1), values, **style)
        ax.set(xlabel="epoch", ylabel=label)
        epochs_below(ax)
        if key != "accuracy":
            ax.set_yscale("log")
        if key == "kl":
            ax.set_ylim(bottom=1)

    keys = {"nll": "NLL in training", "accuracy": "accuracy in training", "kl": "KL (nats)"}
    return facets([list(keys.items())], draw, (10.5, 3.9), legend=3)


def posteriors(rows):
    """Draw the standard deviation of z that each layer ends with; means of the seeds."""
    rows = [row for row in rows if row["method"] in _POSTERIORS]

    def draw(ax):
        for method in methods_of(rows):
            values = pd.DataFrame(row["z_std"] for row in rows if row["method"] == method).mean()
            ax.plot(values.index, values, **look(method))
        ax.set(ylabel="standard deviation of z", ylim=(0, None))
        ax.tick_params(axis="x", rotation=45)

    return facets([[()]], draw, (8, 3.6), legend=3)


def robustness(rows):
    """Draw accuracy, NLL and ECE against the strength of corruptions and rotations.

    Means over the seeds and, of corruptions, over their kinds.
    """
    rows = pd.DataFrame(row for row in rows if row["method"] in _DRAWN)

    def draw(ax, kind, key):
        chosen = rows[rows["shift"].isin(("clean", kind))]
        means = chosen.groupby(["method", "level"])[key].mean()
        for method in (name for name in NAMES if name in means):
            ax.plot(means[method].index, means[method], **look(method))
        levels = sorted(chosen["level"].unique())
        ax.set(xlabel=_AXES[kind], ylabel=_SCORES[key], xticks=levels)

    grid = [[(kind, key) for key in _SCORES] for kind in ("corruption", "rotation")]
    return facets(grid, draw, (10.5, 6.6), legend=3)


def ood(rows):
    """Draw how well each uncertainty detects OOD images, by AUROC: means and standard errors.

    Models that know half of the classes are shown only for the images that the others know: their
    other classes.
    """
    rows = [row for row in rows if row["shift"] == "foreign"]
    equal = {row["name"] for row in rows if row["budget"] == "equal"}
    rows = [row for row in rows if row["budget"] == "equal" or row["name"] not in equal]
    names, methods = list(dict.fromkeys(row["name"] for row in rows)), methods_of(rows)

    def draw(ax, name):
        for position, kind in enumerate(_UNCERTAINTIES):
            for place, method in enumerate(methods):
                found = [row for row in rows if (row["method"], row["name"]) == (method, name)]
                values = [row[f"{kind}_auroc"] for row in found]
                if values and None not in values:
                    style = {"fmt": MARKERS[position], "ms": 4, "capsize": 2}
                    style |= {"color": COLORS[position], "xerr": standard_error(values)}
                    height = place + 0.14 * (2 * position - 1)
                    ax.errorbar(np.mean(values), height, **style, label=kind)
        ax.set_title(name.replace("_", "-"), fontsize=10)
        ax.set(xlabel="AUROC", ylim=(len(methods) - 0.5, -0.5))
        ax.set_yticks(range(len(methods)), [NAMES[method] for method in methods])

    size = 1.8 + 3.0 * len(names), 1.2 + 0.32 * len(methods)
    grid = [[(name,) for name in names]]
    return facets(grid, draw, size, legend=2, sharey=True, grid_lines="x")


def frozen(rows):
    """Draw by how much flows differ from the Gaussian: every seed, the mean, its standard error."""
    found = {(row["budget"], row["method"], row["seed"]): row for row in rows}
    flows = [method for method in methods_of(rows) if method.startswith("flow")]
    titles = {"frozen": "network as it was", "joint": "network trained as well"}

    def draw(ax, key, label, budget):
        ax.axvline(0, color="0.6", lw=1, zorder=0)
        ax.set_xlabel(f"{label}, minus the Gaussian's")
        ax.set_title(titles[budget], fontsize=10)
        _by_method(
            ax,
            flows,
            lambda method: [
                row[key] - found[budget, "gaussian", seed][key]
                for (where, what, seed), row in found.items()
                if (where, what) == (budget, method)
            ],
        )

    keys = {"negative_elbo": "negative ELBO (nats)", "nll": "NLL of the test images"}
    grid = [[(key, label, budget) for budget in titles] for key, label in keys.items()]
    return {"differences.png": facets(grid, draw, (8.5, 4.6), sharex="row", grid_lines="x")}


# Two dimensions.


def toy2d(results):
    """Return the figures of the experiment in two dimensions, by name; one result per seed."""
    if not results:
        raise ValueError("`results` must hold at least one result; got none.")
    first, length = results[0], results[0].settings.flow_length
    titles = {}
    for budget, known, start in (
        ("report", "stopped early", "early"),
        ("equal", "converged", "converged"),
    ):
        titles[budget, "deterministic"] = f"deterministic, {known}"
        titles[budget, "gaussian"] = f"Gaussian, from {start}"
        titles[budget, f"flow_{length}"] = f"flow of length {length}, from {start}"
    cells = list(titles.items())
    grid = [cells[:3], cells[3:]]
    shared = {"sharex": True, "sharey": True, "grid_lines": None}

    def boundary(ax, name, title):
        shown = slice(min(300, len(first.x)))
        style = {"limits": ((-5.0, 5.0), (-4.0, 5.0)), "resolution": 30}
        last = (name, title) == cells[2]
        points = first.x[shown], first.y[shown]
        plots.decision_boundary(
            first.predict[name], *points, ax=ax, title=title, legend=last, **style
        )

    def calibration(ax, name, title):
        plots.reliability_diagram(first.probabilities[name], first.labels, title=title, ax=ax)
        ax.set_xticks([0.2, 0.4, 0.6, 0.8])
        ax.label_outer()

    return {
        "boundaries.png": facets(grid, boundary, (11, 6.6), **shared),
        "calibration.png": facets(grid, calibration, (11, 7.4), **shared),
        "curves.png": _toy_curves(results),
        "lengths.png": _toy_lengths(results),
    }


def _toy_curves(results):
    """Draw the training from the early network for all lengths (the report's figure 4)."""
    keys, histories = ("loss", "nll", "kl"), {}
    for length in results[0].settings.lengths:
        method = f"flow_{length}" if length else "gaussian"
        runs = [result.histories["report", method] for result in results]
        histories[f"length {length}"] = {
            key: np.mean([run[key] for run in runs], axis=0) for key in keys
        }
    return plots.training_panel(histories, keys)


def _toy_lengths(results):
    """Draw the end of the training and the test ECE against the length, from the early network.

    The blue points are means over the seeds and the bars standard deviations. Each grey line is a
    seed: seeds have other training points, which moves all their lengths together.
    """
    numbers = results[0].settings.lengths
    methods = [f"flow_{length}" if length else "gaussian" for length in numbers]
    rows = pd.DataFrame(row for result in results for row in result.rows)
    rows = rows[rows["budget"] == "report"]

    def draw(ax, key, label, sign):
        values = sign * rows.pivot(index="seed", columns="method", values=key)[methods]
        ax.plot(numbers, values.T, "o-", color="0.7", lw=1, ms=3, zorder=2)
        deviation = values.std() if len(values) > 1 else None
        style = {"color": COLORS[0], "marker": "o", "lw": 1.5, "capsize": 3, "zorder": 3}
        ax.errorbar(numbers, values.mean(), deviation, **style)
        ax.set(xlabel="length (planar flows)", ylabel=label, xticks=numbers)

    quantities = [
        ("train_loss", "negative ELBO\n(training, last epochs)", 1),
        ("train_nll", "log-likelihood\n(training, last epochs)", -1),
        ("ece", "ECE (test)", 1),
    ]
    return facets([quantities], draw, (10, 3.2))


# One model on shifted and OOD images.


def evaluation(found, dataset):
    """Return the figures of an evaluation, by name, of what was measured.

    Args:
        found: see `robustness.Measured`.
        dataset: of the clean images.
    """
    figures = {}
    if any(row["shift"] in _AXES for row in found.rows):
        figures["robustness.png"] = shifts(found.rows)
    if found.ood:
        figures["foreign.png"] = histograms(found, dataset)
    return figures


def shifts(rows):
    """Draw accuracy, NLL and ECE against the strength of each kind of shift, 0 for clean images.

    Of the corruptions, the mean is strong and each single one faint.
    """
    rows = pd.DataFrame(rows)
    kinds = [kind for kind in _AXES if (rows["shift"] == kind).any()]
    clean = rows[rows["shift"] == "clean"]

    def draw(ax, kind, key):
        found = rows[rows["shift"] == kind]
        names = found["name"].unique()
        all_ = pd.concat([found, *(clean.assign(name=name) for name in names)])
        values = all_.pivot_table(index="level", columns="name", values=key)
        levels, several = list(values.index), len(names) > 1
        if several:
            faint = ax.plot(levels, values, color="0.75", lw=1, zorder=2)
            faint[0].set_label("single ones")
        label = f"mean of {len(names)} corruptions" if several else names[0]
        style = {"color": COLORS[0], "ms": 4, "zorder": 3}
        ax.plot(levels, values.mean(axis=1), "o-", **style, label=label)
        ax.set(xlabel=_AXES[kind], ylabel=_SCORES[key])
        ax.set_ylim(0, 1 if key == "accuracy" else 1.08 * values.max().max())
        if len(levels) < 8:
            ax.set_xticks(levels, [f"{level:g}" for level in levels])
        elif kind == "rotation" and max(levels) - min(levels) >= 90:
            ax.xaxis.set_major_locator(MultipleLocator(45))
        if names[0] and key == "accuracy":
            ax.legend(frameon=False, fontsize=9, loc="lower left")

    grid = [[(kind, key) for key in _SCORES] for kind in kinds]
    return facets(grid, draw, (10, 0.4 + 2.7 * len(kinds)))


def histograms(found, dataset):
    """Draw the uncertainties of known against those of OOD images, a row for each dataset."""
    rows = {row["name"]: row for row in found.rows if row["shift"] == "foreign"}
    # A single network has no epistemic uncertainty.
    kinds = [kind for kind in _UNCERTAINTIES if kind == "entropy" or found.clean.samples > 1]

    def draw(ax, name, kind):
        plots.entropy_histograms(
            getattr(found.clean, kind),
            getattr(found.ood[name], kind),
            auroc=rows[name][f"{kind}_auroc"],
            names=(dataset, name),
            label=_UNCERTAINTIES[kind],
            ax=ax,
        )

    grid = [[(name, kind) for kind in kinds] for name in found.ood]
    return facets(grid, draw, (4.6 * len(kinds), 3.2 * len(grid)), grid_lines=None)
