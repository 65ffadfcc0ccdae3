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
# # What a flow learns
#
# A normalizing flow moves simple noise to where it is wanted, and keeps account of the density on
# the way. This notebook shows that account in one dimension, fits flows to densities and to samples
# in two, and then looks at the posterior of a trained network.

# %%
import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import matplotlib.pyplot as plt
import numpy as np
from keras import ops
from scipy.stats import norm

import tfp_ibnn as ibnn
from tfp_ibnn import plots

FAST = bool(os.environ.get("TFP_IBNN_FAST"))
keras.utils.set_random_seed(0)
plt.rcParams["figure.dpi"] = 80

# %% [markdown]
# ## The change of variables
#
# One planar flow in one dimension, with weights set by hand. `forward_and_log_det` maps points
# forward and returns the logarithm of the slope beside them. The density of the output is the
# density of the input divided by the slope.

# %%
planar = ibnn.flows.Planar()
planar.build((1,))
planar.u.assign([2.5])
planar.w.assign([2.0])
planar.b.assign(0.5)

noise = np.linspace(-4, 4, 801, dtype="float32")
moved, log_slope = map(ops.convert_to_numpy, planar.forward_and_log_det(noise[:, None]))
moved = moved[:, 0]
density = norm.pdf(noise) / np.exp(log_slope)

# %% [markdown]
# Left, the map and the noise below it. Where the curve is steep the points are drawn apart and the
# density falls; middle, the logarithm of the slope says by how much. One bump becomes two. Right, the
# density by the formula and a histogram of noise that was really pushed through: they agree.

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 3), layout="constrained")
axes[0].plot(noise, moved, color=plots.COLORS[0], lw=2, label="map")
axes[0].fill_between(
    noise, -7, -7 + 6 * norm.pdf(noise), color="0.75", label="density of the noise"
)
axes[0].set(xlabel="noise", ylabel="z", xlim=(-4, 4), ylim=(-7, 7))
axes[0].legend(frameon=False, fontsize=9, loc="upper left")
axes[1].plot(noise, log_slope, color=plots.COLORS[1], lw=2)
axes[1].set(xlabel="noise", ylabel="log of the slope", xlim=(-4, 4))
drawn = np.random.default_rng(0).standard_normal((50_000, 1)).astype("float32")
pushed = ops.convert_to_numpy(planar(drawn))[:, 0]
axes[2].hist(pushed, 100, density=True, color="0.8", label="pushed noise")
axes[2].plot(moved, density, color=plots.COLORS[0], lw=2, label="formula")
axes[2].set(xlabel="z", ylabel="density", xlim=(-7, 7))
axes[2].legend(frameon=False, fontsize=9)
plt.show()
print(f"area under the formula: {np.trapezoid(density, moved):.4f}")

# %% [markdown]
# ## Fitting a flow to a density
#
# Take two densities in the plane that are known up to a constant: a banana and a ring. A flow is
# fitted by making the reverse KL divergence small, E[log q(z) - log p(z)], with z drawn from the
# flow. This is the ELBO: it is how the posteriors of a network are trained. Only draws are needed,
# never the inverse.


# %%
def banana(z):
    """Return the log-density, up to a constant."""
    return -0.5 * (z[..., 0] ** 2 + ((z[..., 1] - 0.5 * z[..., 0] ** 2 + 1) / 0.4) ** 2)


def ring(z):
    """Return the log-density, up to a constant."""
    radius = ops.sqrt(ops.sum(z**2, axis=-1) + 1e-6)
    return -0.5 * ((radius - 2) / 0.3) ** 2


TARGETS = {"banana": banana, "ring": ring}

# %% [markdown]
# Keras can train this with plain `fit`. The model below has no target and no loss but the one that it
# adds itself. Its input is the noise, so one epoch is one pass through a fixed set of noise, in
# batches. Nothing here depends on the backend.
#
# `posterior.transform` turns noise into draws; the entropy it returns is -log q of each draw.


# %%
class ToDensity(keras.Model):
    """Fit a posterior to a log-density by the reverse KL divergence."""

    def __init__(self, posterior, log_density):
        super().__init__()
        self.posterior, self.log_density = posterior, log_density

    def build(self, input_shape):
        self.posterior.build(input_shape[-1:])
        self.built = True

    def call(self, noise):
        draw = self.posterior.transform(noise)
        self.add_loss(ops.mean(-draw.entropy - self.log_density(draw.z)))
        return draw.z

    def compute_output_shape(self, input_shape):
        return input_shape


def fit(model, data, epochs):
    """Train a model on its own loss; return the losses."""
    model.build(data.shape)
    optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(5e-3, 32 * epochs))
    model.compile(optimizer)
    optimizer.build(model.trainable_variables)
    return model.fit(data, epochs=epochs, batch_size=256, verbose=0).history["loss"]


FLOWS = {
    "Gaussian": lambda: [],
    "8 planar flows": lambda: [ibnn.flows.Planar() for _ in range(1 if FAST else 8)],
    "4 autoregressive flows": lambda: [
        ibnn.flows.InverseAutoregressive(hidden=32, reverse=bool(i % 2))
        for i in range(1 if FAST else 4)
    ],
}
STANDARD = {"prior_loc": 0.0, "prior_scale": 1.0, "initial_scale": None}
EPOCHS = 2 if FAST else 60
NOISE = np.random.default_rng(0).standard_normal((8192, 2)).astype("float32")

fitted, final = {}, {}
for target, log_density in TARGETS.items():
    for name, flows in FLOWS.items():
        keras.utils.set_random_seed(0)
        posterior = ibnn.FlowPosterior(flows(), **STANDARD)
        losses = fit(ToDensity(posterior, log_density), NOISE, EPOCHS)
        fitted[target, name], final[target, name] = posterior, losses[-1]

# %% [markdown]
# The density of a fitted flow at any point comes from `distribution().log_prob`. That does need the
# inverse, which every flow of this library has.


# %%
def grid(extent=4.0, count=80):
    """Return the axis and the points (count, count, 2) of a square grid."""
    axis = np.linspace(-extent, extent, count, dtype="float32")
    return axis, np.stack(np.meshgrid(axis, axis), axis=-1)


def draw_density(ax, log_density, title):
    """Draw a density, scaled to a maximum of 1."""
    axis, points = grid()
    values = ops.convert_to_numpy(log_density(points.reshape(-1, 2)))
    values = np.exp(values - values.max()).reshape(len(axis), len(axis))
    ax.contourf(axis, axis, values, levels=np.linspace(0, 1, 11), cmap="Blues")
    ax.set_title(title, fontsize=10)
    ax.set(aspect="equal", xticks=[-3, 0, 3], yticks=[-3, 0, 3])


def log_normaliser(log_density):
    """Return the log of the integral of a density over the grid."""
    axis, points = grid(6.0, 400)
    values = ops.convert_to_numpy(log_density(points.reshape(-1, 2)))
    return np.log(np.sum(np.exp(values)) * (axis[1] - axis[0]) ** 2)


figure, axes = plt.subplots(2, 4, figsize=(11, 5.6), layout="constrained", sharex=True, sharey=True)
for row, (target, log_density) in zip(axes, TARGETS.items(), strict=True):
    draw_density(row[0], log_density, f"{target}: the target")
    for ax, name in zip(row[1:], FLOWS, strict=True):
        draw_density(ax, fitted[target, name].distribution().log_prob, name)
plt.show()

# %% [markdown]
# How far is each flow from its target? The normalising constant can be integrated on a grid, so the
# KL divergence is known in full, and not only up to a constant. It is 0 for a perfect fit.

# %%
print(f"{'KL in nats':24}" + "".join(f"{target:>10}" for target in TARGETS))
for name in FLOWS:
    gaps = [final[t, name] + log_normaliser(log_density) for t, log_density in TARGETS.items()]
    print(f"{name:24}" + "".join(f"{gap:10.3f}" for gap in gaps))

# %% [markdown]
# The banana is a Gaussian that has been bent, and bending is what flows do: the autoregressive flows
# have it almost exactly. The ring has a hole and the noise has none. A continuous map with a
# continuous inverse cannot make a hole, but it can thin the middle out until next to nothing is
# left. Eight planar flows do that well: each pushes the noise apart along one direction. The
# autoregressive flows move one coordinate at a time. They leave the ring open, and are the worse
# ones here. No flow is best for everything.
#
# The log-determinant shows where the work is done. Below, the noise is coloured by the log-determinant
# of the autoregressive flow (left) and the same points where they end up (right). Red points were
# pulled apart; blue ones were pressed together.

# %%
shown = NOISE[:3000]
figure, axes = plt.subplots(1, 4, figsize=(12, 3.2), layout="constrained")
for pair, target in zip(axes.reshape(2, 2), TARGETS, strict=True):
    draw = fitted[target, "4 autoregressive flows"].transform(shown)
    log_q = -ops.convert_to_numpy(draw.entropy)
    log_det = norm.logpdf(shown).sum(axis=-1) - log_q
    for ax, points, title in zip(
        pair, (shown, ops.convert_to_numpy(draw.z)), ("noise", target), strict=True
    ):
        dots = ax.scatter(*points.T, c=log_det, s=4, cmap="coolwarm", vmin=-3, vmax=3)
        ax.set_title(title, fontsize=10)
        ax.set(aspect="equal", xlim=(-4, 4), ylim=(-4, 4))
figure.colorbar(dots, ax=axes, label="log-determinant", shrink=0.8)
plt.show()

# %% [markdown]
# ## Fitting a flow to samples
#
# The other direction: there are samples, and the density is wanted. Maximum likelihood is the forward
# KL divergence. Now each training step needs the density at given points, so it needs the inverse.
# The samples are two half moons.

# %%
random = np.random.default_rng(0)
angle = np.pi * random.random(4096)
upper = random.integers(2, size=4096).astype(bool)
moons = np.stack(
    [np.where(upper, 2 * np.cos(angle) - 1, 1 - 2 * np.cos(angle)), np.sin(angle) * 2], axis=-1
)
moons[:, 1] = np.where(upper, moons[:, 1] - 0.5, 0.5 - moons[:, 1])
moons = (moons + 0.15 * random.standard_normal(moons.shape)).astype("float32")


class ToSamples(ToDensity):
    """Fit a posterior to samples by maximum likelihood."""

    def __init__(self, posterior):
        super().__init__(posterior, None)

    def call(self, samples):
        self.add_loss(-ops.mean(self.posterior.distribution().log_prob(samples)))
        return samples


def maximum_likelihood(**options):
    """Return a posterior fitted to the moons, and its loss on the last epoch."""
    keras.utils.set_random_seed(0)
    flows = [
        ibnn.flows.AffineCoupling(hidden=32, swap=bool(i % 2)) for i in range(1 if FAST else 6)
    ]
    posterior = ibnn.FlowPosterior(flows, **STANDARD, **options)
    return posterior, fit(ToSamples(posterior), moons, EPOCHS)[-1]


one, one_loss = maximum_likelihood()
two, two_loss = maximum_likelihood(components=2)

# %% [markdown]
# Left, the samples; middle, a flow over one Gaussian; right, the same flow over two. One Gaussian
# under a continuous map stays in one piece, and here much of it lies between the moons. Two Gaussians
# come apart, one for each moon. The loss is the negative log-likelihood per sample; less is better.

# %%
figure, axes = plt.subplots(1, 3, figsize=(9.5, 3.3), layout="constrained", sharey=True)
axes[0].scatter(*moons[:1500].T, s=3, color=plots.COLORS[0], linewidths=0)
axes[0].set(aspect="equal", xlim=(-4, 4), ylim=(-4, 4), xticks=[-3, 0, 3], title="samples")
axes[0].title.set_fontsize(10)
draw_density(axes[1], one.distribution().log_prob, f"one Gaussian, loss {one_loss:.3f}")
draw_density(axes[2], two.distribution().log_prob, f"two Gaussians, loss {two_loss:.3f}")
plt.show()

# %% [markdown]
# ## The posterior of a network
#
# What do the flows inside a network learn? A small network classifies two overlapping rings of
# points. Each layer's z multiplies its input; the output layer has 8 of them, one for each hidden
# unit. The same network is trained with three posteriors.

# %%
SIZE = 400
label = np.arange(SIZE) % 2
turn = 2 * np.pi * random.random(SIZE)
radius = 1 + label + 0.3 * random.standard_normal(SIZE)
x = np.stack([radius * np.cos(turn), radius * np.sin(turn)], axis=-1).astype("float32")


def train(posterior):
    """Return a network with this posterior in both layers, trained, and its negative ELBO."""
    keras.utils.set_random_seed(0)
    layers = [
        keras.Input((2,)),
        keras.layers.Dense(8, "tanh", name="hidden"),
        keras.layers.Dense(2, "softmax", name="output"),
    ]
    model = ibnn.to_stochastic(keras.Sequential(layers), posterior, train_size=SIZE, seed=0)
    model.compile(keras.optimizers.Adam(0.02), "sparse_categorical_crossentropy")
    model.optimizer.build(model.trainable_variables)
    history = model.fit(x, label, epochs=2 if FAST else 100, batch_size=50, verbose=0).history
    return model, np.mean(history["loss"][-10:])


EXACT = {"prior_scale": 0.5, "initial_scale": None, "beta": 1.0}  # from the prior, by the ELBO
POSTERIORS = {
    "Gaussian": ibnn.NormalAffine(**EXACT),
    "planar flows": ibnn.NormalPlanar1d(depth=1 if FAST else 4, **EXACT),
    "mixture base": ibnn.FlowPosterior([ibnn.flows.Planar()], components=2, **EXACT),
}
networks = {name: train(posterior) for name, posterior in POSTERIORS.items()}
print("negative ELBO, mean of the last ten epochs")
for name, (_, loss) in networks.items():
    print(f"{name:16}{loss:.3f}")

# %% [markdown]
# The flow over a mixture of two Gaussians has the most freedom, so look at that. Each panel is a
# channel of z, those farthest from a Gaussian first. W says how far that is; a Gaussian has about
# 0.03 by chance.

# %%
plots.posterior_marginals(networks["mixture base"][0].get_layer("output"), count=6)
plt.show()

# %% [markdown]
# Is it multimodal? No. The channels have moved away from the prior, and most have become narrow. Some
# leave the dotted Gaussian a little: flatter, or leaning. But each has one mode, though the base had
# two to offer. The weights are trained together with the posterior. They settle on one solution,
# and z only has to say how sure it is.
#
# ## When there are many modes
#
# For several modes the data must leave several answers open, and the weights must not choose among
# them. Here is such a case, chosen for it (with squares in place of the absolute values, two of the
# posteriors did not converge): the network is |z1 x1| + |z2 x2|, and its weights are frozen. The signs of
# z1 and z2 cannot be seen in the data, so there are four answers, equally good. The prior is
# N(0, 1.5²).

# %%
random = np.random.default_rng(1)
inputs = random.standard_normal((60, 2)).astype("float32")
NOISE_SCALE = 0.5
targets = np.abs(inputs) @ [[1.0], [1.5]] + NOISE_SCALE * random.standard_normal((60, 1))


def gaussian_nll(target, mean):
    """Return the negative log-likelihood, up to a constant."""
    return ops.square(target - mean) / (2 * NOISE_SCALE**2)


def train_signs(posterior):
    """Return the stochastic layer of that network, trained, and its negative ELBO."""
    keras.utils.set_random_seed(0)
    layer = ibnn.StochasticDense(
        2, posterior=posterior, train_size=60, use_bias=False, kernel_initializer="identity"
    )
    x = keras.Input((2,))
    model = ibnn.StochasticModel(x, ops.sum(ops.abs(layer(x)), axis=-1, keepdims=True))
    ibnn.freeze(model, "deterministic")
    model.compile(keras.optimizers.Adam(0.03), gaussian_nll)
    model.optimizer.build(model.trainable_variables)
    epochs = 2 if FAST else 200
    history = model.fit(inputs, targets, epochs=epochs, batch_size=12, verbose=0).history
    return layer, np.mean(history["loss"][-20:])


PRIOR = {"prior_loc": 0.0, "prior_scale": 1.5, "beta": 1.0}
signs = {
    "Gaussian": train_signs(ibnn.NormalAffine(initial_scale=1.5, **PRIOR)),
    "mixture base, 8": train_signs(ibnn.FlowPosterior(components=8, initial_scale=1.5, **PRIOR)),
    "MixturePosterior, 8": train_signs(ibnn.MixturePosterior(components=8, **PRIOR)),
}

# %% [markdown]
# The crosses are the four answers that made the data, and the dots are draws of z. The Gaussian can have
# one of them, and describes that one. The mixture base starts with broad components that overlap. They
# have found two of the answers, with a thread of draws between them, and its ELBO is the worst.
# `MixturePosterior` starts with narrow components that are far apart, and has all four.
#
# Its ELBO is no better than the Gaussian's. All four answers predict the same, so there is nothing to
# gain for the likelihood. The KL would be smaller by up to log 4 nats, but the bound that this
# posterior is trained with does not count that.

# %%
figure, axes = plt.subplots(1, 3, figsize=(10, 3.5), layout="constrained", sharey=True)
for ax, (name, (layer, loss)) in zip(axes, signs.items(), strict=True):
    z = ops.convert_to_numpy(layer.posterior.sample_and_kl((2000,))[0])
    ax.scatter(*z.T, s=4, color=plots.COLORS[0], alpha=0.3, linewidths=0)
    ax.scatter([1, 1, -1, -1], [1.5, -1.5, 1.5, -1.5], marker="x", color=plots.COLORS[1], s=70)
    ax.set_title(f"{name}\nnegative ELBO {loss:.2f}", fontsize=10)
    ax.set(aspect="equal", xlim=(-3, 3), ylim=(-3, 3), xlabel="z1", ylabel="z2")
    ax.label_outer()
plt.show()

# %% [markdown]
# The same posterior in the library's own figure: two bumps in each marginal, and four clouds. The
# dotted Gaussian of the same mean and deviation lies over the gap, where there is nothing.

# %%
plots.posterior_pairs(signs["MixturePosterior, 8"][0], channels=(0, 1))
plt.show()

# %% [markdown]
# ## What to take away
#
# - A flow can be fitted to a density with draws alone, or to samples with its inverse. Both are a few
#   lines of plain Keras.
# - Flows over one Gaussian bend, squeeze and thin out; over several Gaussians they come apart.
# - The posterior of a trained network need not have many modes just because it could. Where the
#   weights are free to choose one answer, they do.
# - Whether a mixture finds the modes that are there depends on where its components start.
