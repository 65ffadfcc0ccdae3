# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Densities: how flows bend noise into data
#
# A normalizing flow is a map with an inverse, from noise to data. Where it stretches space the density gets thinner,
# where it squeezes space it gets denser, and the determinant of its Jacobian says by how much.
#
# 1. Change of variables, by hand: the density of z².
# 2. A film: two moons grow out of a Gaussian.
# 3. Four densities with gaps, curves and edges.
# 4. Which flow draws what?

# %%
import logging
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
FAST = bool(os.environ.get("TFP_IBNN_FAST"))  # short trainings, for tests
sys.path += ["scripts", "../scripts"]  # for the data of this repository's experiments

import keras
import matplotlib.pyplot as plt
import numpy as np

import tfp_ibnn as ibnn
from studies.density import run as density_study
from tfp_ibnn import flows, plots

plt.rcParams["figure.dpi"] = 80
BLUE, ORANGE = plots.COLORS[:2]
logging.getLogger("tensorflow").setLevel("ERROR")  # each density is traced anew
STEPS, BATCH, COUNT = (4, 50, 200) if FAST else (2000, 500, 10_000)

# %% [markdown]
# ## Change of variables
#
# Let z be a standard normal number and x = z². The map has no inverse, but it has one on each side of 0: both
# z = √x and z = -√x lead to x. Each of them brings its density, divided by the slope |dx/dz| = 2√x:
#
# $$p(x) = \frac{p(\sqrt{x}) + p(-\sqrt{x})}{2\sqrt{x}}$$

# %%
z = np.random.default_rng(0).normal(size=20_000)
grid = np.linspace(0.02, 4, 400)
normal = np.exp(-grid / 2) / np.sqrt(2 * np.pi)  # p(z) at z = √x, and at -√x
density = 2 * normal / (2 * np.sqrt(grid))
figure, ax = plt.subplots(figsize=(5, 2.6), layout="constrained")
edges = np.linspace(0, 4, 81)
heights = np.histogram(z**2, edges)[0] / (len(z) * np.diff(edges))
ax.stairs(heights, edges, fill=True, color=BLUE, alpha=0.35, label="20,000 draws of z²")
ax.plot(grid, density, color=ORANGE, label="the formula")
ax.set(xlabel="x", ylabel="density", ylim=(0, 2.5))
ax.legend(frameon=False)
ax.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## A film
#
# `ibnn.FlowDensity` is a Keras model: `compile`, `fit`, callbacks. Six couplings by splines start as the identity, so
# that the density starts as a Gaussian of the mean and the deviation of the data. A callback keeps frames.


# %%
def trained(layers, x, callbacks=()):
    """Return a density that is fitted to points x."""
    keras.utils.set_random_seed(0)
    density = ibnn.FlowDensity(layers)
    schedule = keras.optimizers.schedules.CosineDecay(5e-3, STEPS)
    density.compile(keras.optimizers.Adam(schedule), jit_compile=not FAST)  # splines gain by XLA
    density.adapt(x)
    epochs = STEPS * BATCH // len(x)
    density.fit(x, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=[*callbacks])
    return density


def heights(density, x, size=120):
    """Return the density on a grid around points x, and the sides of that grid."""
    (left, low), (right, high) = x.min(axis=0) - 0.3, x.max(axis=0) + 0.3
    ticks = np.linspace(left, right, size), np.linspace(low, high, size)
    points = np.stack(np.meshgrid(*ticks), axis=-1).reshape(-1, 2)
    log_p = density.log_prob(points, batch_size=5000)
    return np.exp(log_p).reshape(size, size), (left, right, low, high)


def show(ax, density, x, title):
    values, sides = heights(density, x)
    ax.imshow(values, extent=sides, origin="lower", cmap="Blues", aspect="auto")
    ax.set(title=title, xticks=[], yticks=[])


def splines():
    return [flows.SplineCoupling(bins=12, interval=4.0, swap=swap) for swap in (False, True) * 3]


class Film(keras.callbacks.Callback):
    """Draws the density after some of the epochs."""

    def __init__(self, frames, x):
        super().__init__()
        self.frames, self.x = frames, x

    def on_epoch_begin(self, epoch, logs=None):
        if epoch in self.frames:
            show(self.frames[epoch], self.model, self.x, f"{epoch * len(x) // BATCH} steps")


rng = np.random.default_rng(0)
x = density_study.draw("moons", COUNT, rng).astype("float32")
figure, axes = plt.subplots(1, 5, figsize=(10, 2.2), layout="constrained")
epochs = STEPS * BATCH // len(x)
at = [0, 1, 2, 3, epochs - 1] if FAST else [0, 1, 4, 12, epochs - 1]
moons = trained(splines(), x, [Film(dict(zip(at, axes, strict=False)), x)])

# %% [markdown]
# ## Four densities
#
# The same flows on two moons, rings, a pinwheel and a checkerboard: the data, draws of the density, and its values. A
# flow is continuous, so that it cannot tear a Gaussian into parts: bridges are left between moons, rings and fields. And
# it is smooth, so that edges are blurred.

# %%
figure, axes = plt.subplots(4, 3, figsize=(7.5, 9.6), layout="constrained")
for row, (name, (title,)) in zip(axes, density_study.PAIRS.items(), strict=True):
    x = density_study.draw(name, COUNT, rng).astype("float32")
    density = moons if name == "moons" else trained(splines(), x)
    for ax, points in zip(row, (x[:3000], density.sample(min(3000, COUNT), seed=0)), strict=False):
        ax.scatter(*points.T, s=1, color=BLUE, lw=0)
    show(row[2], density, x, "density")
    row[0].set_title(title)
    row[1].set_title("draws")
    for ax in row[:2]:
        ax.set(xticks=[], yticks=[], xlim=row[2].get_xlim(), ylim=row[2].get_ylim())
    test = density_study.draw(name, COUNT, rng).astype("float32")
    truth = density_study.log_density(name, test)
    known = "" if truth is None else f", the true density {truth.mean():.3f}"
    print(f"{title}: {density.log_prob(test).mean():.3f} nats{known}")

# %% [markdown]
# ## Which flow draws what?
#
# The checkerboard, by four kinds of flows. Planar flows fold space along lines, affine couplings shift and stretch one
# axis by the other, autoregressive flows do so for both axes in turn, and splines bend each axis as the other says.
# `results/density/README.md` has the numbers, over three seeds.

# %%
kinds = {
    "16 planar": [flows.Inverse(flows.Planar()) for _ in range(16)],
    "8 affine couplings": [flows.AffineCoupling(swap=bool(i % 2)) for i in range(8)],
    "8 autoregressive": [flows.MaskedAutoregressive(reverse=bool(i % 2)) for i in range(8)],
}
figure, axes = plt.subplots(1, 4, figsize=(10, 2.7), layout="constrained")
for ax, (title, layers) in zip(axes, kinds.items(), strict=False):
    show(ax, trained(layers, x), x, title)
show(axes[3], density, x, "6 spline couplings")

# %% [markdown]
# ## Is this point unusual?
#
# The density answers in the same words as any other score of this library: rows of another set are found by their low
# log-density.

# %%
others = np.random.default_rng(1).uniform(-3, 3, size=(1000, 2)).astype("float32")
score = ibnn.metrics.auroc(-density.log_prob(test[:1000]), -density.log_prob(others))
print(f"checkerboard or uniform? AUROC {score:.2f}")
