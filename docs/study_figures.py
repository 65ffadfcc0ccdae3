"""The figures of studies, drawn from stored results."""

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from tfp_ibnn.plots import COLORS

BLUE, ORANGE, GREEN = COLORS[:3]
RESULTS = Path(__file__).parents[1] / "results"


def stored(study: str) -> list:
    """Return the runs of a study."""
    lines = (RESULTS / study / "runs.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def novelty() -> Figure:
    """Draw how well classes are noticed that were left out, and accuracy by share answered."""
    from studies.novelty.run import SHARES
    from studies.novelty.tables import CLOTHES, METHODS

    runs = [
        json.loads(line) for line in (RESULTS / "novelty" / "runs.jsonl").read_text().splitlines()
    ]
    found: dict[str, dict[int, list]] = {name: {} for name in METHODS}
    curves: dict[str, list] = {name: [] for name in METHODS}
    for run in (run for run in runs if run["pair"].startswith("fashion")):
        left_out = int(run["pair"][-1])
        for name, row in run["methods"].items():
            auroc = row["OOD"]["entropy"]["left out"][0]
            found[name].setdefault(left_out, []).append(auroc)
            if left_out == 7:
                curves[name].append(row["decisions"]["entropy"]["answered"])
    sizes = {"figsize": (11, 4), "layout": "constrained", "width_ratios": (1.9, 1)}
    figure, (left, right) = plt.subplots(1, 2, **sizes)
    order = sorted(found["deterministic"], key=lambda c: np.mean(found["deterministic"][c]))
    for place, name in enumerate(METHODS):
        look = {"marker": "osD^vPX*"[place], "color": [*COLORS, "0.55"][place]}
        means = [np.mean(found[name][c]) for c in order]
        spots = np.arange(len(order)) + 0.09 * (place - 3.5)
        left.plot(spots, means, ls="", ms=5.5, label=name, **look)
        right.plot(SHARES, np.mean(curves[name], axis=0), lw=1.2, ms=4, **look)
    left.set_xticks(range(len(order)), [CLOTHES[c] for c in order], rotation=25)
    left.set(ylabel="AUROC of the entropy", title="The class that was left out")
    left.set(xlim=(-0.6, len(order) - 0.4))
    right.set(xlabel="share answered", ylabel="accuracy", title="Without sneakers")
    left.legend(frameon=False, ncols=2, fontsize=9, loc="lower right")
    for ax in (left, right):
        ax.grid(color="0.92", axis="y")
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    return figure


def elephant() -> Figure:
    """Draw what a VGG16 of CIFAR-10 says of things out of place, from stored predictions."""
    from lib.data import load
    from studies.novelty.run import HELD_OUT, INSIDE, UNKNOWN, out_of_place

    names = np.array("airplane car bird cat deer dog frog horse ship truck".split())
    names = np.delete(names, HELD_OUT)
    runs = [
        json.loads(line) for line in (RESULTS / "novelty" / "runs.jsonl").read_text().splitlines()
    ]
    rows = {"deterministic": BLUE, "Gaussian": GREEN, "flow": COLORS[3], "ensemble of 3": ORANGE}
    said = {
        name: run["methods"][name]["shown"]
        for run in runs
        for name in rows
        if (run["pair"], run["seed"]) == ("cifar_vgg16", 0) and name in run["methods"]
    }
    x, y = load("cifar10")[1]
    x = (x[~np.isin(y, HELD_OUT)] / 255).astype("float32")
    pictures, count = out_of_place(x[:UNKNOWN], x[-UNKNOWN:]), 4
    figure, axes = plt.subplots(
        3, 2 * count, figsize=(9.2, 3.9), layout="constrained", height_ratios=(1, 1, 1)
    )
    for column, (alone, inside, bars) in enumerate(axes.T):
        number, kind = column % count, INSIDE[column // count]
        number += count * (column // count)  # other backgrounds for the other kind
        for ax, image in ((alone, x[number]), (inside, pictures[kind][number])):
            ax.imshow(image, interpolation="nearest")
            ax.set(xticks=[], yticks=[])
        before = np.array(said["deterministic"]["known"][number])
        alone.set_title(f"{names[before.argmax()]} {before.max():.0%}", fontsize=9)
        for place, (name, color) in enumerate(rows.items()):
            p = np.array(said[name][kind][number])
            bars.barh(place, p.max(), 0.8, color=color, alpha=0.55)
            label = f"{names[p.argmax()]} {p.max():.0%}"
            bars.text(0.03, place, label, va="center", fontsize=8)
        bars.set(xlim=(0, 1), xticks=[], yticks=[])
        bars.invert_yaxis()
        bars.spines[["top", "right", "bottom"]].set_visible(False)
    axes[0, 0].set_ylabel("as it was")
    axes[1, 0].set_ylabel("something in it")
    axes[2, 0].set_yticks(range(len(rows)), rows)
    return figure


def places() -> Figure:
    """Draw what noise in a place changes in the NLL at a temperature, a dot per seed."""
    from studies.places.run import PAIRS, tasks

    scores = {
        (run["pair"], name, run["seed"]): row["NLL, T"]
        for run in stored("places")
        for name, row in run.get("methods", {}).items()
    }
    figure, axes = plt.subplots(1, 3, figsize=(9.8, 2.6), layout="constrained")
    titles = ("ViT, Fashion-MNIST", "transformer, mails", "LSTM, Fashion-MNIST")
    for ax, pair, title in zip(axes, PAIRS, titles, strict=True):
        names = [*tasks(pair)[3:-2], "ensemble of 3"]
        for place, name in enumerate(names):
            values = [scores[pair, name, i] - scores[pair, "network", i] for i in range(3)]
            color = {"G": BLUE, "f": ORANGE}.get(name[0], GREEN)
            ax.plot(values, [place] * 3, "o", color=color, alpha=0.55, markersize=5)
            ax.plot(np.mean(values), place, "|", color=color, markersize=14, markeredgewidth=2)
        ax.axvline(0, color="0.6", linewidth=0.8)
        ax.set(yticks=range(len(names)), yticklabels=names, xlabel="change of NLL")
        ax.set_title(title)
        ax.locator_params(axis="x", nbins=2)
        ax.invert_yaxis()
        ax.spines[["top", "right"]].set_visible(False)
    return figure


def when_flows_pay() -> Figure:
    """Draw four answers: gaps to true posteriors, few data, and the distance to HMC."""
    from studies.quality.run import AGAIN

    figure, axes = plt.subplots(2, 2, figsize=(8.6, 5.8), layout="constrained")
    titles = {
        "diabetes_40": "Last layer, learned noise, N = 40",
        "z_digits": "z of a fixed MLP, digits",
    }
    for ax, (pair, title) in zip(axes[0], titles.items(), strict=True):
        runs = [run for run in stored("quality") if run["pair"] == pair]
        names = [name for name in runs[0]["methods"] if name != AGAIN]
        for place, name in enumerate(names):
            gaps = [run["methods"][name]["log evidence - ELBO"] for run in runs]
            _dots(ax, place, gaps, _color(name))
        ax.set_yticks(range(len(names)), names)
        ax.set(title=title, xlabel="log evidence - ELBO (nats)", xscale="log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(NullFormatter())
    _few_data(axes[1, 0])
    _agreement(axes[1, 1])
    for ax in axes.flat:
        ax.invert_yaxis()
        ax.tick_params(axis="y", labelsize=8.5)
        ax.grid(color="0.93", axis="x")
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    return figure


def _color(name: str) -> str:
    """Return orange for flows, blue for Gaussians, green for all else."""
    flows = ("+", "flow", "joint flow", "planar", "Sylvester", "IAF", "coupling", "spline", "mix")
    if name.removeprefix("joint ").startswith(flows) or name.startswith("joint flow"):
        return ORANGE
    return BLUE if "Gaussian" in name or "covariance" in name else GREEN


def _dots(ax: Axes, place: float, values: list, color: str, marker: str = "o") -> Any:
    ax.plot(np.mean(values), place, "|", color=color, markersize=12, markeredgewidth=2)
    return ax.plot(values, [place] * len(values), marker, color=color, alpha=0.5, markersize=3.5)[0]


def _few_data(ax: Axes) -> None:
    """Draw the test NLL of two networks at a temperature, less that of the network alone."""
    found: dict[tuple, dict] = {}
    for run in stored("few"):
        if run["trial"] is None and "member" not in run["method"]:
            own = found.setdefault((run["pair"], run["method"]), {})
            own[run["seed"]] = run["scores"]["NLL, T"]
    pairs = {"few_lenet": ("o", "LeNet"), "few_vgg16": ("^", "VGG16")}
    less = {
        (pair, name): [values[seed] - found[pair, "deterministic"][seed] for seed in sorted(values)]
        for (pair, name), values in found.items()
    }
    names = {name for _, name in found} - {"deterministic"}
    names = sorted(names, key=lambda name: sum(np.mean(less[pair, name]) for pair in pairs))
    for shift, (pair, (marker, label)) in zip((-0.17, 0.17), pairs.items(), strict=True):
        for place, name in enumerate(names):
            drawn = _dots(ax, place + shift, less[pair, name], _color(name), marker)
        drawn.set_label(label)
    ax.axvline(0, color="0.6", linewidth=0.8)
    ax.set_yticks(range(len(names)), names)
    ax.legend(loc="lower left", fontsize=8, frameon=False)
    label = "test NLL less the network's, at a temperature"
    ax.set(title="LeNet and VGG16 on 5,000 images", xlabel=label)


def _agreement(ax: Axes) -> None:
    """Draw which share of test images has the same class as under HMC."""
    from studies.distance.run import LONG, PAIRS, best

    runs, rows = stored("distance"), {}
    for pair, (title, _) in PAIRS.items():
        own = [x for x in runs if x["pair"] == pair and x["group"] == best(runs, pair)]
        if own:
            rows[title] = [run["scores"]["agreement"] for run in own]
    rows |= {
        f"{PAIRS[x['pair']][0]}, {LONG}": [x["scores"]["agreement"]]
        for x in runs
        if x["group"] == LONG
    }
    for run in (run for run in runs if run["pair"] == "average"):
        count, title = len(run["of"][2]), PAIRS[run["of"][0]][0]
        if count == 3 and f"5 of {run['of'][0]}" in {x["group"] for x in runs}:
            continue
        rows[f"{title}, {count} averaged"] = [run["scores"]["agreement"]]
    names = sorted(rows, key=lambda name: -np.mean(rows[name]))
    for place, name in enumerate(names):
        color = ORANGE if "flow" in name else BLUE if "Gaussian" in name else GREEN
        _dots(ax, place, rows[name], color)
    ax.axvline(0.928, color="0.5", linewidth=1, linestyle="--")
    ax.text(
        0.926, len(names) - 2, "published,\ncyclical SGHMC", ha="right", fontsize=8, color="0.4"
    )
    ax.set_yticks(range(len(names)), names)
    ax.set(title="ResNet-20 on CIFAR-10", xlabel="agreement with HMC")


def vae_flows() -> Figure:
    """Draw the bound of binarised MNIST by the number of planar flows, beside the published."""
    from studies.vae.tables import PUBLISHED

    methods, found = list(PUBLISHED["mlp"]), {}
    for run in (run for run in stored("vae") if run["pair"] == "mlp"):
        found.setdefault(run["group"], []).append(run["scores"])
    places = {name: place for place, name in enumerate(methods) if name in found}
    figure, ax = plt.subplots(figsize=(5.6, 3.4), layout="constrained")
    published = [PUBLISHED["mlp"][name][0] for name in methods]
    ax.plot(published, "s--", color="0.55", label="-ELBO, published")
    for score, color in (("-ELBO", BLUE), ("NLL", ORANGE)):
        means = [np.mean([s[score] for s in found[name]]) for name in places]
        ax.plot(list(places.values()), means, "o-", color=color, label=f"{score}, here")
    counts = [name.split()[0].replace("Gaussian", "0") for name in methods]
    for name, place in places.items():
        counts[place] += f"\n{np.mean([s['epochs'] for s in found[name]]):.0f} epochs"
    ax.set_xticks(range(len(methods)), counts)
    ax.set(xlabel="planar flows", ylabel="nats per image", title="Binarised MNIST, z of 40")
    ax.grid(color="0.92", axis="y")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    return figure
