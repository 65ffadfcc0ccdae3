"""Draw the figures of pages and of lab reports: python docs/figures.py [NAME ...].

Those of pages go to `docs/images/`, those of a study to its folder in `results/`.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch
from PIL import Image
from study_figures import elephant, novelty, places, vae_flows, when_flows_pay

import tfp_ibnn as ibnn
from tfp_ibnn.plots import COLORS

BLUE, ORANGE, GREEN = COLORS[:3]
IMAGES = Path(__file__).parent / "images"
RESULTS = Path(__file__).parents[1] / "results"
VGG16 = RESULTS / "vgg16"
STUDIES = {
    "novelty": "novelty",
    "elephant": "novelty",
    "places": "places",
    "when_flows_pay": "quality",
}
"""The study that a figure belongs to; other figures are those of pages."""
sys.path.append(str(Path(__file__).parents[1] / "scripts"))


def main() -> None:
    """Draw all figures, or those that are named."""
    plt.rcParams.update({"font.size": 10, "mathtext.fontset": "cm", "axes.titlesize": 10})
    figures = (reliability, layer, change_of_variables, flows, affine_order, uncertainty)
    figures += (novelty, elephant, places, when_flows_pay, densities, vae_flows)
    for draw in (f for f in figures if f.__name__ in sys.argv[1:] or not sys.argv[1:]):
        keras.utils.set_random_seed(0)
        figure = draw()
        name = draw.__name__
        folder = RESULTS / STUDIES[name] if name in STUDIES else IMAGES
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=130)
        with Image.open(path) as image:  # 256 colours are a third of the bytes
            image.convert("RGB").quantize(256).save(path, optimize=True)
        plt.close(figure)


def reliability() -> Figure:
    """Draw accuracy minus confidence of VGG16 on CIFAR-10, from the stored test probabilities.

    Twelve bins of as many images, all seeds together; bars are standard errors.
    """
    lines = (VGG16 / "runs.jsonl").read_text().splitlines()
    runs = {(r["budget"], r["method"], r["seed"]): r for r in map(json.loads, lines) if "seed" in r}

    def stored(method: str) -> list[tuple[np.ndarray, np.ndarray]]:
        found = (np.load(VGG16 / f"probabilities/equal-{method}-seed{i}.npz") for i in range(3))
        return [(f["probabilities"].astype("float64"), f["labels"]) for f in found]

    def at_its_temperature(seed: int, mean: np.ndarray) -> np.ndarray:
        powers = mean ** (1 / runs["equal", "deterministic", seed]["scaled"]["temperature"])
        return powers / powers.sum(axis=1, keepdims=True)

    from lib.store import cross_fit  # found once the path is set

    plain = stored("deterministic")
    labels = plain[0][1]
    averaged = cross_fit(np.mean([mean for mean, _ in plain], axis=0), labels)[0]
    scaled = [(at_its_temperature(seed, mean), y) for seed, (mean, y) in enumerate(plain)]
    panels = {
        "deterministic": (plain, BLUE),
        "+ temperature": (scaled, BLUE),
        "3 networks + temperature": ([(averaged, labels)], BLUE),
        "fixed noise": (stored("fixed_inner"), COLORS[6]),
        "Gaussian posterior": (stored("gaussian"), GREEN),
    }
    figure, axes = plt.subplots(
        1, len(panels), figsize=(11, 2.7), layout="constrained", sharex=True, sharey=True
    )
    for ax, (title, (predictions, color)) in zip(axes, panels.items(), strict=True):
        mean, y = (np.concatenate(part) for part in zip(*predictions, strict=True))
        doubt = np.sort(mean, axis=1)[:, :-1].sum(axis=1)  # 1 - confidence, with all its digits
        wrong = (mean.argmax(axis=1) != y).astype("float64")
        bins = np.array_split(np.argsort(-doubt), 12)
        gap = [doubt[part].mean() - wrong[part].mean() for part in bins]
        images = len(y) / len(predictions) / len(bins)  # the seeds share their test images
        error = [max(wrong[part].std(), 1e-3) / images**0.5 for part in bins]
        x = [max(doubt[part].mean(), 1e-4) for part in bins]
        ax.axhline(0, color="0.6", lw=1)
        ax.errorbar(x, gap, error, color=color, marker="o", ms=3, lw=1.2, capsize=2)
        ax.set_title(title, fontsize=9)
        ax.set_xscale("log")
        ax.grid(color="0.92")
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].invert_xaxis()
    axes[0].set_ylabel("accuracy - confidence")
    figure.supxlabel("1 - confidence (more certain to the right)", fontsize=10)
    return figure


def densities() -> Figure:
    """Draw two moons and a checkerboard: the data, draws of a trained density, and its values."""
    rng = np.random.default_rng(0)
    angle, upper = np.pi * rng.uniform(size=6000), rng.uniform(size=6000) < 0.5
    sign = np.where(upper, 1, -1)
    moons = np.column_stack([sign * np.cos(angle) + ~upper, sign * np.sin(angle) + 0.5 * ~upper])
    cells = rng.uniform(0, 4, size=(12_000, 2))
    board = cells[np.floor(cells).sum(axis=1) % 2 == 0]
    data = {"two moons": moons + 0.08 * rng.normal(size=moons.shape), "checkerboard": board}
    figure, axes = plt.subplots(2, 3, figsize=(6.6, 4.4), layout="constrained")
    for row, (name, x) in zip(axes, data.items(), strict=True):
        couplings = [ibnn.flows.SplineCoupling(bins=12, swap=swap) for swap in (False, True) * 3]
        density = ibnn.FlowDensity(couplings)
        density.compile(keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(5e-3, 1500)))
        density.fit(x, batch_size=400, epochs=100, verbose=0)
        (left, low), (right, high) = x.min(axis=0) - 0.3, x.max(axis=0) + 0.3
        ticks = [np.linspace(left, right, 150), np.linspace(low, high, 150)]
        points = np.stack(np.meshgrid(*ticks), axis=-1).reshape(-1, 2)
        heights = np.exp(density.log_prob(points, batch_size=5000)).reshape(150, 150)
        for ax, draws in zip(row, (x[:2000], density.sample(2000, seed=0)), strict=False):
            ax.scatter(*draws.T, s=0.6, color=BLUE, lw=0)
        row[2].imshow(heights, extent=(left, right, low, high), origin="lower", cmap="Blues")
        for ax, title in zip(row, (f"{name}: data", "draws", "density"), strict=True):
            ax.set(title=title, xticks=[], yticks=[], xlim=(left, right), ylim=(low, high))
            ax.set_aspect("auto")
    return figure


def layer() -> Figure:
    """Draw one stochastic layer: the way of x, of z and of the KL."""
    figure, ax = plt.subplots(figsize=(8, 2.7), layout="constrained")
    ax.set(xlim=(0, 16), ylim=(0.3, 5.7), aspect="equal")
    ax.axis("off")

    def box(x: float, y: float, width: float, text: str, color: str) -> None:
        style = {"fc": "white", "ec": color, "lw": 1.8, "zorder": 2}
        ax.add_patch(
            FancyBboxPatch(
                (x - width / 2, y - 0.6), width, 1.2, "round,pad=0,rounding_size=.2", **style
            )
        )
        ax.text(x, y, text, ha="center", va="center", zorder=3)

    def arrow(start: tuple[float, float], stop: tuple[float, float], color: str = "0.25") -> None:
        ax.annotate("", stop, start, arrowprops={"arrowstyle": "-|>", "color": color, "lw": 1.5})

    low, high = 1.2, 4.4
    ax.text(0.7, low, "$x$", ha="center", va="center", fontsize=15)
    arrow((1.1, low), (8.35, low))
    ax.add_patch(Circle((8.8, low), 0.45, fc="white", ec=BLUE, lw=1.8, zorder=2))
    ax.text(8.8, low, r"$\times$", ha="center", va="center", fontsize=14, zorder=3)
    arrow((9.25, low), (10.9, low))
    box(12.6, low, 3.4, "any layer\n(weights as before)", "0.25")
    arrow((14.3, low), (15.2, low))
    ax.text(15.5, low, "$y$", ha="center", va="center", fontsize=15)
    ax.text(10.05, low + 0.35, r"$z\,x$", ha="center")

    ax.text(0.9, high, r"$\epsilon$", ha="center", va="center", fontsize=15)
    ax.text(0.9, high - 0.75, r"$\mathcal{N}(0, 1)$", ha="center", va="center", color="0.3")
    arrow((1.3, high), (2.3, high), BLUE)
    box(3.6, high, 2.6, "flows\n$f_1, \\ldots, f_k$", BLUE)
    arrow((4.9, high), (5.7, high), BLUE)
    box(6.75, high, 2.1, "$m + s\\,(\\cdot)$", BLUE)
    arrow((7.8, high), (8.4, high), BLUE)
    ax.text(8.8, high, "$z$", ha="center", va="center", fontsize=15)
    arrow((8.8, high - 0.4), (8.8, low + 0.5), BLUE)
    arrow((9.2, high), (10.4, high), ORANGE)
    box(12.5, high, 4.2, r"$\mathrm{KL}[\,q(z)\,\|\,p(z)\,]\;/\;N$", ORANGE)
    ax.text(12.5, high - 0.95, "added to the loss", ha="center", va="center", color="0.3")
    ax.text(5.2, high + 0.95, "posterior $q(z)$, the new weights", ha="center", color=BLUE)
    return figure


def change_of_variables() -> Figure:
    """Draw how a map in one dimension carries probability from x to y."""
    flow = ibnn.flows.Planar()
    flow.build((1,))
    flow.set_weights([np.array([-0.8]), np.array([1.6]), np.array(0.3)])
    bijector = flow.bijector()
    x = np.linspace(-3.2, 3.2, 400, dtype="float32")
    y = _numpy(bijector.forward(x[:, None]))[:, 0]
    slope = np.exp(_numpy(bijector.forward_log_det_jacobian(x[:, None], event_ndims=1)))
    before = np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
    after = before / slope

    figure, axes = plt.subplots(
        2, 2, figsize=(5.2, 4.2), layout="constrained", width_ratios=(1, 2), height_ratios=(2, 1)
    )
    (left, center), (corner, below) = axes
    corner.axis("off")
    center.plot(x, y, color="0.25", lw=1.8)
    below.plot(x, before, color=BLUE, lw=1.8)
    left.plot(after, y, color=ORANGE, lw=1.8)
    for start, color in ((-1.6, GREEN), (-0.4, COLORS[3])):
        part = (x >= start) & (x <= start + 0.4)
        below.fill_between(x[part], before[part], color=color, alpha=0.6, lw=0)
        left.fill_betweenx(y[part], after[part], color=color, alpha=0.6, lw=0)
        for edge in (np.argmax(part), len(part) - 1 - np.argmax(part[::-1])):
            center.plot([x[edge]] * 2, [-3.2, y[edge]], color=color, lw=0.9)
            center.plot([-3.2, x[edge]], [y[edge]] * 2, color=color, lw=0.9)
    center.set(xlim=(-3.2, 3.2), ylim=(-3.2, 3.2), title="the map $y = f(x)$", xticklabels=[])
    center.set_yticklabels([])
    below.set(xlim=(-3.2, 3.2), ylim=(0, 0.45), xlabel="$x$", ylabel="$q(x)$", yticks=[])
    left.set(ylim=(-3.2, 3.2), xlim=(1.15 * after.max(), 0), ylabel="$y$", xticks=[])
    left.set_title("$q(y) = q(x) \\; / \\; |f'(x)|$")
    for ax in (left, center, below):
        ax.spines[["top", "right"]].set_visible(False)
    left.spines[["left", "right"]].set_visible([False, True])
    return figure


def flows() -> Figure:
    """Draw what planar and inverse autoregressive flows make of a Gaussian in two channels."""
    planar = ibnn.NormalPlanar1d(depth=2)
    planar.build((2,))
    for flow, (u, w, b) in zip(
        planar.flows, (([0.3, 1.6], [1.7, 0.4], 0.6), ([1.4, 0.2], [-0.5, 1.8], -0.4)), strict=True
    ):
        flow.set_weights([np.array(u), np.array(w), np.array(b)])
    # A network that adds a convex function of the first channel to the second.
    autoregressive = ibnn.FlowPosterior([ibnn.flows.InverseAutoregressive(hidden=8)])
    autoregressive.build((2,))
    kernel = np.array([[1, -1] * 4, [0] * 8])
    outputs = np.zeros((2, 8, 2))
    outputs[0, :, 1], outputs[1, :, 1] = 1.6, -0.1
    autoregressive.flows[0].network.set_weights(
        [kernel, np.repeat([0, -0.3, -0.6, -0.9], 2), outputs, np.array([[0, -1.2], [0, -0.5]])]
    )
    gaussian = ibnn.NormalAffine()
    gaussian.build((2,))

    figure, axes = plt.subplots(1, 3, figsize=(8, 3.1), layout="constrained")
    grid = np.linspace(-0.9, 3.1, 220, dtype="float32")
    points = np.stack(np.meshgrid(grid, grid), axis=-1)
    prior = np.exp(_numpy(gaussian.prior().log_prob(points)))
    rings = prior.max() * np.exp([-2, -0.5])  # two standard deviations, and one
    for ax, posterior, title in zip(
        axes,
        (gaussian, planar, autoregressive),
        ("Gaussian, at the prior", "two planar flows", "one autoregressive flow"),
        strict=True,
    ):
        density = np.exp(_numpy(posterior.distribution().log_prob(points)))
        levels = np.linspace(0.03, 1, 12) * density.max()
        ax.contourf(grid, grid, density, levels, cmap="Blues")
        ax.contour(grid, grid, prior, rings, colors=ORANGE, linestyles="--", linewidths=1)
        ax.set(title=title, xlabel="$z_1$", aspect="equal", xticks=range(4), yticks=range(4))
    axes[0].set_ylabel("$z_2$")
    return figure


def affine_order() -> Figure:
    """Draw where the mean of z starts under a random rotation, by the place of the affine map."""
    orders = {"affine map last": ("last", BLUE), "affine map first": ("first", ORANGE)}
    figure, (plane, channels) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for name, (order, color) in orders.items():
        keras.utils.set_random_seed(3)
        wide, pair = (
            ibnn.FlowPosterior([ibnn.flows.InvertibleConv1x1()], affine=order) for _ in range(2)
        )
        pair.build((2,))
        wide.build((512,))
        z = _numpy(pair.sample_and_kl((300,))[0])
        hatch = {"facecolor": color, "alpha": 0.8} if order == "last" else {"facecolor": "none"}
        plane.scatter(*z.T, s=10, edgecolor=color, linewidth=0.8, label=name, **hatch)
        channels.hist(
            _numpy(wide.mean()),
            np.arange(-3.5625, 3.6, 0.125),
            edgecolor=color,
            label=name,
            **hatch,
        )
    plane.plot(1, 1, "+", color="black", ms=12, mew=2)
    plane.axhline(0, color="0.8", lw=0.8, zorder=0)
    plane.axvline(0, color="0.8", lw=0.8, zorder=0)
    plane.set(xlabel="$z_1$", ylabel="$z_2$", aspect="equal", title="draws of $z$, two channels")
    channels.set(xlabel="$E[z]$", ylabel="channels (log)", yscale="log", ylim=(0.7, 1500))
    channels.set_title("mean of $z$ in each of 512 channels")
    channels.legend(frameon=False, loc="upper left")
    for ax in (plane, channels):
        ax.spines[["top", "right"]].set_visible(False)
    return figure


def uncertainty() -> Figure:
    """Draw three sets of draws, and their entropy split in two."""
    rng = np.random.default_rng(0)
    cases = {
        "sure": 0.04 + 0.02 * rng.standard_normal(24),
        "the draws agree\nthat it is open": 0.5 + 0.03 * rng.standard_normal(24),
        "each draw is sure,\nbut they disagree": np.tile([0.04, 0.96], 12),
    }
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(6, 3.9), layout="constrained", sharex=True, height_ratios=(3, 2)
    )
    for i, p in enumerate(cases.values()):
        p = np.clip(p, 0.01, 0.99)
        top.plot(i + np.linspace(-0.25, 0.25, len(p)), p, "o", ms=4, color="0.35")
        top.plot([i - 0.3, i + 0.3], [p.mean()] * 2, color=GREEN, lw=2.2)
        aleatoric = _entropy(p).mean()
        epistemic = _entropy(p.mean()) - aleatoric
        bottom.bar(i, aleatoric, 0.5, color=BLUE, label="aleatoric" if i == 0 else None)
        style = {"color": "white", "edgecolor": ORANGE, "hatch": "////", "linewidth": 1.5}
        label = "epistemic" if i == 0 else None
        bottom.bar(i, epistemic, 0.5, bottom=aleatoric, label=label, **style)
    top.set(ylim=(0, 1), ylabel="p(class 1), by draw")
    top.plot([], [], color=GREEN, lw=2.2, label="mean of the draws")
    top.legend(frameon=False, loc="upper left")
    bottom.axhline(np.log(2), color="0.6", lw=0.8, ls=":")
    bottom.set(ylim=(0, 0.95), ylabel="entropy (nats)", xticks=range(3), xticklabels=list(cases))
    bottom.legend(frameon=False, loc="upper left", ncols=2)
    for ax in (top, bottom):
        ax.spines[["top", "right"]].set_visible(False)
    return figure


def _entropy(p: np.ndarray) -> np.ndarray:
    return -p * np.log(p) - (1 - p) * np.log(1 - p)


def _numpy(tensor: object) -> np.ndarray:
    return keras.ops.convert_to_numpy(tensor)


if __name__ == "__main__":
    main()
