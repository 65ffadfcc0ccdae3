"""Figures of the experiments. Import it late: Matplotlib takes long to import."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from lib import files, toy
from lib.folder import read_record
from lib.panels import epochs_below, training_panel
from lib.scoring import Scorer, read_model
from lib.store import METHODS, evaluated, history, is_shown, predictions, stored
from tfp_ibnn import plots
from tfp_ibnn.plots.style import COLORS, MARKERS, dots, line, tidy

# What methods are called, in the order in which they stand in figures.
NAMES = {method: name for method, (name, _) in METHODS["names"].items()}
_TITLES, AXES, UNCERTAINTIES = (METHODS[name] for name in ("datasets", "axes", "uncertainties"))
SCORES = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE"}
_DRAWN, _POSTERIORS = METHODS["drawn"], METHODS["posteriors"]


def marked(position):
    """Return the look of one of several curves through few points."""
    return {**line(position), **dots(position), "ms": 4, "lw": 1.3}


def look(method):
    """Return colour, line and marker of a method: the same in all figures."""
    name, number = METHODS["names"][method]
    return {**marked(number), "label": name}


def facets(grid, draw, size, *, legend=0, grid_lines="y", **options):
    """Return a figure with an axis for each cell of a grid.

    The grid has rows of cells, which are tuples, or None for an empty place; `draw` is called with
    an axis and the parts of its cell. `legend` is the columns of a legend below, 0 is none;
    `grid_lines` are along "x", "y" or "both"; the options are those of `plt.subplots`.
    """
    shape, options = (len(grid), len(grid[0])), {"layout": "constrained", **options}
    figure, axes = plt.subplots(*shape, figsize=size, squeeze=False, **options)
    labelled = {}
    for place, (ax, cell) in enumerate(zip(axes.flat, sum(map(list, grid), []), strict=True)):
        if cell is None:
            ax.set_visible(False)
            axes.flat[place - shape[1]].tick_params(labelbottom=True)
            continue
        draw(ax, *cell)
        tidy(ax, grid_lines)
        labelled |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
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
    return [name for name in NAMES if (rows["method"] == name).any()]


def draw_means(ax, xlabel, methods, values, shift=0, **style):
    """Draw the mean of each method's values with its standard error, and the values faintly."""
    for place, method in enumerate(methods):
        found, color = values(method), look(method)["color"]
        if not len(found) or found.isna().any():
            continue
        error = found.sem() if len(found) > 1 else None
        mark = {"fmt": "|", "ms": 13, "mew": 2, "color": color, "capsize": 3, **style}
        ax.errorbar(found.mean(), place + shift, xerr=error, **mark)
        if not style:
            ax.plot(found, [place] * len(found), "o", ms=4, color=color, alpha=0.5)
    ax.set_ylim(len(methods) - 0.5, -0.5)
    ax.set_yticks(range(len(methods)), [NAMES[method] for method in methods])
    ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    ax.label_outer(remove_inner_ticks=True)
    ax.tick_params(bottom=True, labelbottom=True)
    ax.set_xlabel(xlabel, visible=True)


# The comparisons of methods. Those of logs are not drawn if folders of their runs are gone.


def lenet(records, runs, folder):
    rows = pd.DataFrame(filter(is_shown, records))
    return {"curves.png": curves(rows, runs), "scores.png": scores(rows)}


def vgg16(records, runs, folder):
    """Return the figures of the comparison on VGG16, by name, of what there are results of."""
    rows, shifted = pd.DataFrame(filter(is_shown, records)), evaluated(records)
    if rows.empty:
        return {}
    equal, reported = (rows[rows["budget"] == budget] for budget in ("equal", "report"))
    drawn = equal[equal["method"].isin(_DRAWN)]
    posterior = equal[equal["method"].isin(_POSTERIORS)]
    figures = {}
    if len(equal):
        figures["scores.png"] = scores(equal, METHODS["zoomed"])
        figures["robustness.png"] = robustness(shifted[shifted["budget"] == "equal"])
    if len(drawn):
        figures["reliability.png"] = reliability(drawn, folder)
    if len(posterior):
        figures["posteriors.png"] = posteriors(posterior)
    if len(shifted) and (shifted["shift"] == "foreign").any():
        figures["foreign.png"] = ood(shifted)
    for name, draw, part in (("training", training, drawn), ("curves", curves, reported)):
        if len(part) and all((Path(runs) / run).exists() for run in part["name"]):
            figures[f"{name}.png"] = draw(part, runs)
    return figures


def _logged(rows, runs):
    """Return what the runs of each dataset and method logged, the mean over the seeds."""
    found = {}
    for of, names in rows.groupby(["dataset", "method"])["name"]:
        logs = [history(Path(runs) / name) for name in names]
        found[of] = {key: np.mean([log[key] for log in logs], axis=0) for key in logs[0]}
    return found


def curves(rows, runs):
    """Draw test scores over the epochs, means over the seeds (the report's figures 5 and 6)."""
    rows = rows[(rows["budget"] == "report") & (rows["method"] != "deterministic")]
    logged = _logged(rows, runs)

    def draw(ax, dataset, key):
        for method in methods_of(rows):
            found = logged[dataset, method]
            values = found[f"test_{key}"]
            every = len(found["loss"]) // len(values)
            ax.plot(every * np.arange(1, len(values) + 1), values, **look(method))
        ax.set(xlabel="epochs after the baseline", ylabel=SCORES[key])
        epochs_below(ax)
        if key == "accuracy":
            ax.set_title(_TITLES[dataset], loc="left", fontsize=10)

    grid = [[(dataset, key) for key in SCORES] for dataset in rows["dataset"].unique()]
    return facets(grid, draw, (10.5, 0.5 + 3.0 * len(grid)), legend=5)


def scores(rows, zoomed=()):
    """Draw accuracy, NLL and ECE of every method: a point per seed, mean and standard error.

    The `zoomed` methods, which lie close together, are drawn once more. A dotted line is the ECE
    that perfect calibration with the first one's confidences has on so many images, if it is known.
    """
    parts = {}
    for (dataset, budget), part in rows.groupby(["dataset", "budget"], sort=False):
        title, close = f"{_TITLES[dataset]}, budget: {budget}", part[part["method"].isin(zoomed)]
        parts |= {(title, "all"): part} | ({(title, "zoomed"): close} if len(close) else {})

    def draw(ax, of, key):
        part = parts[of]
        values = part.set_index("method")[key]
        draw_means(ax, SCORES[key], methods_of(part), lambda method: values[[method]])
        floors = part.get("ece_floor", pd.Series(dtype="object")).dropna()
        if key == "ece" and len(floors):
            first = part.loc[floors.index, "method"].isin(zoomed or methods_of(part)[:1])
            floor = np.mean([found["as it is"] for found in floors[first]])
            ax.axvline(floor, color="0.3", ls=":", lw=1.2, zorder=0)
            at = {"xy": (floor, 1), "xycoords": ("data", "axes fraction"), "fontsize": 8}
            ax.annotate("floor", xytext=(3, 2), textcoords="offset points", **at)
        if key == "accuracy":
            zoom = ", without those far from the Gaussian" if of[1] == "zoomed" else ""
            ax.set_title(of[0] + zoom, loc="left", fontsize=10)

    heights = [0.8 + 0.28 * len(methods_of(part)) for part in parts.values()]
    grid = [[(of, key) for key in SCORES] for of in parts]
    return facets(grid, draw, (10.5, 0.3 + sum(heights)), height_ratios=heights, grid_lines="x")


def reliability(rows, folder):
    """Draw by how much accuracy exceeds confidence, in bins of as many test images of all seeds.

    Many are nearly certain: the axis shows the doubt, 1 - confidence, on a logarithmic scale.
    """

    def draw(ax, method):
        found = [stored(row, folder) for row in rows[rows["method"] == method].to_dict("records")]
        mean, labels = (np.concatenate(part) for part in zip(*found, strict=True))
        # The sum of the others has all digits, where 1 - confidence has none left in float16.
        doubt = np.sort(mean, axis=1)[:, :-1].sum(axis=1)
        wrong = (mean.argmax(axis=1) != labels).astype("float64")
        parts = np.array_split(np.argsort(-doubt), 12)
        gap = [doubt[part].mean() - wrong[part].mean() for part in parts]
        images = len(doubt) / len(found)  # the seeds share their images, which count once
        error = [max(wrong[part].std(), 1e-3) / (images / 12) ** 0.5 for part in parts]
        ax.axhline(0, color="0.6", lw=1)
        x = [max(doubt[part].mean(), 1e-4) for part in parts]
        color = look(method)["color"]
        ax.errorbar(x, gap, error, color=color, marker="o", ms=3, lw=1.2, capsize=2)
        ax.set_title(NAMES[method], fontsize=9)
        ax.set_xscale("log")

    methods = [(method,) for method in methods_of(rows)]
    columns = min(4 if len(methods) > 6 else 3, len(methods))
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
    logged = {method: found for (_, method), found in _logged(rows, runs).items()}

    def draw(ax, key, label):
        for method in methods_of(rows):
            # A deterministic network's loss is its NLL, and it has no KL.
            values = logged[method].get(key, logged[method]["loss"] if key == "nll" else ())
            if len(values):
                ax.plot(np.arange(1, len(values) + 1), values, **{**look(method), "marker": None})
        ax.set(xlabel="epoch", ylabel=label, yscale="linear" if key == "accuracy" else "log")
        epochs_below(ax)
        if key == "kl":
            ax.set_ylim(bottom=1)

    keys = {"nll": "NLL in training", "accuracy": "accuracy in training", "kl": "KL (nats)"}
    return facets([list(keys.items())], draw, (10.5, 3.9), legend=3)


def posteriors(rows):
    """Draw the standard deviation of z that each layer ends with; means of the seeds."""

    def draw(ax):
        for method in methods_of(rows):
            values = pd.DataFrame(rows["z_std"][rows["method"] == method].to_list()).mean()
            ax.plot(values.index, values, **look(method))
        ax.axhline(METHODS["prior_scale"], color="0.3", ls=":", lw=1.2, zorder=1, label="prior")
        ax.set(xlabel="layer", ylabel="standard deviation of z", ylim=(0, None))
        ax.tick_params(axis="x", rotation=45)

    return facets([[()]], draw, (8, 3.9), legend=3)


def robustness(rows):
    """Draw scores against the strength of corruptions and rotations: means over seeds and kinds."""
    rows = rows[rows["method"].isin(_DRAWN)]

    def draw(ax, kind, key):
        chosen = rows[rows["shift"].isin(("clean", kind))]
        means = chosen.pivot_table(index="level", columns="method", values=key)
        for method in methods_of(rows):
            ax.plot(means.index, means[method], **look(method))
        ax.set(xlabel=AXES[kind], ylabel=SCORES[key], xticks=means.index)

    grid = [[(kind, key) for key in SCORES] for kind in ("corruption", "rotation")]
    return facets(grid, draw, (10.5, 6.6), legend=3)


def ood(rows):
    """Draw how well each uncertainty detects OOD images, by AUROC: means and standard errors.

    Models that know half of the classes are shown only for their other classes.
    """
    rows = rows[rows["shift"] == "foreign"]
    is_equal = rows["budget"] == "equal"
    rows = rows[is_equal | ~rows["name"].isin(rows["name"][is_equal])]
    names, methods = rows["name"].unique(), methods_of(rows)

    def draw(ax, name):
        ax.set_title(name.replace("_", "-"), fontsize=10)
        found = rows[rows["name"] == name]
        for place, kind in enumerate(UNCERTAINTIES):
            style = {"fmt": MARKERS[place], "ms": 5, "mew": 1, "shift": 0.14 * (2 * place - 1)}
            style["mfc"] = "white" if place else None
            values = found.assign(value=found[f"{kind}_auroc"].astype("float64"))
            draw_means(
                ax, "AUROC", methods, lambda m, v=values: v["value"][v["method"] == m], **style
            )

    grid, size = [[(name,) for name in names]], (1.8 + 3.0 * len(names), 1.2 + 0.32 * len(methods))
    figure = facets(grid, draw, size, sharey=True, grid_lines="x")
    marks = [
        Line2D([], [], color="0.3", ls="", marker=MARKERS[place], mfc=fill, label=kind)
        for place, (kind, fill) in enumerate(zip(UNCERTAINTIES, ("0.3", "white"), strict=True))
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=2, fontsize=9)
    return figure


def frozen(records, runs, folder):
    """Draw by how much flows differ from the Gaussian: every seed, the mean, its standard error."""
    rows = pd.DataFrame(records)
    flows = [method for method in methods_of(rows) if method.startswith("flow")]
    titles = {"frozen": "network as it was", "joint": "network trained as well"}
    keys = {"negative_elbo": "negative ELBO (nats)", "nll": "NLL of the test images"}

    def draw(ax, key, label, budget):
        found = rows[rows["budget"] == budget]
        by_seed = found.pivot(index="seed", columns="method", values=key)
        ax.axvline(0, color="0.6", lw=1, zorder=0)
        ax.set_title(titles[budget], fontsize=10)
        change = by_seed.sub(by_seed["gaussian"], axis=0)
        draw_means(ax, f"{label}, minus the Gaussian's", flows, change.get)

    grid = [[(key, label, budget) for budget in titles] for key, label in keys.items()]
    return {"differences.png": facets(grid, draw, (8.5, 4.6), sharex="row", grid_lines="x")}


# The experiment in two dimensions; figures of single models are of the first seed.


def toy2d(records, runs, folder):
    rows = pd.DataFrame(records)
    first = rows[rows["seed"] == rows["seed"].iloc[0]].set_index(["budget", "method"])
    (flow,) = {m for budget, m in first.index if budget == "equal" and m.startswith("flow")}
    grid = []
    for budget, start in (("report", "early"), ("equal", "converged")):
        titles = {"deterministic": f"deterministic, {start.replace('early', 'stopped early')}"}
        titles["gaussian"] = f"Gaussian, from {start}"
        titles[flow] = f"flow of length {flow.removeprefix('flow_')}, from {start}"
        grid.append([(budget, *cell) for cell in titles.items()])
    shared = {"sharex": True, "sharey": True, "grid_lines": None}

    def boundary(ax, budget, method, title):
        row = first.loc[budget, method]
        path = Path(runs) / row["name"]
        model = read_model(path / "model.keras", "four_clusters")
        scorer = Scorer(model, row["samples"], row["seed"])
        points = read_record(path / "settings.json")["train_size"]
        x, y = (part[:300] for part in toy.sample(points, [1, row["seed"]]))
        style = {"limits": ((-5.0, 5.0), (-4.0, 5.0)), "resolution": 30, "title": title, "ax": ax}
        style["legend"] = (budget, method, title) == grid[0][2]
        plots.decision_boundary(lambda points: scorer.score(points, None).mean, x, y, **style)
        ax.label_outer()

    def calibration(ax, budget, method, title):
        found = predictions(Path(runs) / first.loc[budget, method]["name"])
        plots.reliability_diagram(*found, title=title, ax=ax)
        ax.set_xticks([0.2, 0.4, 0.6, 0.8])
        ax.label_outer()

    return {
        "boundaries.png": facets(grid, boundary, (11, 6.6), **shared),
        "calibration.png": facets(grid, calibration, (11, 7.4), **shared),
        "curves.png": _toy_curves(rows, runs),
        "lengths.png": _lengths(rows),
    }


def _by_length(rows):
    """Return the names of the stochastic methods that start from the early network, by length."""
    names = rows["method"][(rows["budget"] == "report") & ~rows["method"].str.startswith("det")]
    return {int(name.removeprefix("flow_").replace("gaussian", "0")): name for name in names}


def _toy_curves(rows, runs):
    """Draw the training from the early network for all lengths (the report's figure 4)."""
    logged = _logged(rows[rows["budget"] == "report"], runs)
    found = {method: log for (_, method), log in logged.items()}
    histories = {f"length {n}": found[method] for n, method in _by_length(rows).items()}
    return training_panel(histories, ("loss", "nll", "kl"))


def _lengths(rows):
    """Draw the end of the training and the test ECE against the length, from the early network.

    Points are means over the seeds, bars standard deviations. Each grey line is a seed, whose other
    training points move all lengths together.
    """
    lengths = _by_length(rows)
    rows, numbers = rows[rows["budget"] == "report"], list(lengths)

    def draw(ax, key, label, sign):
        values = sign * rows.pivot(index="seed", columns="method", values=key)
        values = values[list(lengths.values())]
        ax.plot(numbers, values.T, "o-", color="0.7", lw=1, ms=3, zorder=2)
        style = {"color": COLORS[0], "marker": "o", "lw": 1.5, "capsize": 3, "zorder": 3}
        ax.errorbar(numbers, values.mean(), values.std() if len(values) > 1 else None, **style)
        ax.set(xlabel="length (planar flows)", ylabel=label, xticks=numbers)

    quantities = [
        ("train_loss", "negative ELBO\n(training, last epochs)", 1),
        ("train_nll", "log-likelihood\n(training, last epochs)", -1),
        ("ece", "ECE (test)", 1),
    ]
    return facets([quantities], draw, (10, 3.2))


# Functions of records, the folder of the runs and that of the results, by experiment.
FIGURES = {"toy2d": toy2d, "frozen": frozen, "lenet": lenet, "vgg16": vgg16}
