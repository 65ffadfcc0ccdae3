"""Figures of a benchmark: ratios beside their targets, and how cost grows."""

import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator
from PIL import Image

from lib.benchmark.networks import CASES
from lib.benchmark.record import verdict
from lib.figures import facets, marked
from tfp_ibnn.plots.style import COLORS

_TICKS = [0.05, 0.1, 0.2, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 10, 20]
_VERDICTS = {"": ("0.45", "s"), "met": (COLORS[0], "o"), "missed": (COLORS[1], "D")}
_VERDICTS["unresolved"] = (COLORS[3], "^")
_PLAIN = FuncFormatter(lambda value, _: f"{value:g}")


def ratios(rows):
    """Draw each ratio and its target; return None if there is nothing to draw.

    A target is a black bar. What meets it is a blue dot, what misses it an orange diamond, and what
    is as near to it as the noise a triangle; other methods are hollow squares.
    """
    # Those to the ensemble have another reference.
    rows = [row for row in rows if "to_ensemble" not in row["id"]]
    cells = []
    for title, (groups, repeated) in CASES["panels"].items():
        if shown := [row for row in rows if row["group"] in groups]:
            cells.append((title, repeated, shown))
    if not cells:
        return None
    heights = [len(shown) + 1.4 for *_, shown in cells]
    size = 8.4, 0.27 * sum(heights) + 0.3 * len(cells)
    options = {"grid_lines": "x", "height_ratios": heights}
    figure = facets([[cell] for cell in cells], _panel, size, **options)
    figure.axes[-1].set_xlabel("ratio, logarithmic; 1 costs nothing extra")
    return figure


def _panel(ax, title, repeated, rows):
    for place, row in enumerate(rows):
        target, ratio = row["target"], row["ratio"]
        ours = target is not None
        color, mark = _VERDICTS[verdict(row)]
        if ours:
            ax.plot([target] * 2, [place - 0.36, place + 0.36], color="0.15", lw=2.2, zorder=2)
        ax.plot([1, ratio], [place] * 2, color=color, lw=1.2, alpha=0.5, zorder=1)
        style = {"fmt": mark, "mfc": color if ours else "white"}
        noise = min(row["noise"], 0.9 * ratio)
        ax.errorbar(ratio, place, xerr=noise, color=color, ms=6, lw=1.2, zorder=3, **style)
        edge = {"transform": ax.get_yaxis_transform(), "va": "center", "fontsize": 9}
        ax.text(1.01, place, f"{ratio:.2f}", color=color, **edge)
    ax.axvline(1, color="0.6", lw=0.8, zorder=0)
    labels = [row["label"].replace(repeated, "") for row in rows]
    ax.set_yticks(range(len(rows)), labels, fontsize=9)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_title(title, loc="left", fontsize=10)
    ax.tick_params(axis="y", length=0)
    values = [row["ratio"] for row in rows]
    ax.set(xscale="log", xlim=(0.9 * min(0.95, *values), 1.2 * max(2.5, *values)))
    ax.xaxis.set_major_locator(FixedLocator(_TICKS))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(_PLAIN)


def growths(rows):
    """Draw cost against size on logarithmic axes, the deterministic network's beside it."""
    if not any("growth" in row for row in rows):
        return None
    found = {
        axis: [r for r in rows if r.get("growth", {}).get("axis") == axis] for axis in CASES["axes"]
    }
    cells = [(axis, found[axis]) if found[axis] else None for axis in CASES["axes"]]
    return facets([cells[:2], cells[2:]], _curves, (8.4, 6.4), grid_lines="both")


def _curves(ax, axis, rows):
    below, title, own = CASES["axes"][axis]
    growth = rows[0]["growth"]
    sizes = growth["sizes"]
    label = own if axis == "depth" else f"{own}: {growth['own_exponent']:.2f}"
    ax.loglog(sizes, [1000 * t for t in growth["own"]], color="0.5", ls=":", lw=2, label=label)
    for row in rows:
        name, number = CASES["curves"][row["id"].rpartition(".")[2]]
        look = {**marked(number), "label": f"{name}: {row['ratio']:.2f}"}
        ax.loglog(sizes, [1000 * t for t in row["growth"]["seconds"]], **look)
    ax.set(xlabel=below, ylabel="milliseconds")
    ax.set_title(title, loc="left", fontsize=10)
    ax.set_xticks(sizes, [str(size) for size in sizes])
    ax.xaxis.set_minor_locator(NullLocator())
    low, high = ax.get_ylim()
    # Room for the legend; a flat curve should look flat.
    room = (low / 2, 8 * high) if high < 10 * low else (low, high * (high / low) ** 0.35)
    ax.set_ylim(*room)
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(_PLAIN)
    small = {"fontsize": 8.5, "title_fontsize": 8.5}
    ax.legend(loc="upper left", frameon=False, title="exponent", **small)


def save(figure, path):
    if figure is not None:
        figure.savefig(path, dpi=100)
        plt.close(figure)
        with Image.open(path) as picture:  # a few colours are enough, and a third of the size
            picture.convert("RGB").quantize(128).save(path, optimize=True)
