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
# # Is the posterior right?
#
# A posterior that is learned is an approximation. How good is it? This notebook takes a model so small that the true
# posterior can be drawn from, and measures three approximations against it: Laplace, the best Gaussian, and that Gaussian
# refined by a normalizing flow. It shows a case where the flow is clearly right, and how you would find out on a model of your own.
# It takes about two minutes.

# %%
import logging
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
FAST = bool(os.environ.get("TFP_IBNN_FAST"))  # short runs, for tests

import warnings

import keras
import matplotlib.pyplot as plt
import numpy as np

import tfp_ibnn as ibnn
from tfp_ibnn import diagnostics, plots

plt.rcParams["figure.dpi"] = 80
logging.getLogger("tensorflow").setLevel("ERROR")  # that many functions are traced
keras.utils.set_random_seed(0)

# %% [markdown]
# ## Twelve points, and a noise level to learn
#
# A line with noise that grows to the right. The model is one Dense layer with two outputs, the mean and the (raw) standard deviation of y: four
# weights. With twelve points the data bound the noise well from below, since residuals must be explained, but badly from above. So the
# posterior of the weights behind it is skewed, and no Gaussian can have its shape.

# %%
rng = np.random.default_rng(1)
x = rng.uniform(-1, 1, size=(12, 1)).astype("float32")
y = (0.5 + x + (0.15 + 0.2 * (x + 1)) * rng.normal(size=x.shape)).astype("float32")

model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2), ibnn.layers.GaussianHead()])
model.compile(keras.optimizers.Adam(0.05), ibnn.layers.GaussianNLL())
history = model.fit(x, y, epochs=200, verbose=0)
PRIOR = 3.0  # standard deviation of each weight, for all posteriors below

# %% [markdown]
# ## The truth, by NUTS
#
# `diagnostics.hmc` draws from the exact posterior: several chains, with their diagnostics. R-hat near 1 says that the chains agree; without that,
# nothing below would mean anything. The few
# steps that diverge lie where the noise vanishes and the density is steep.

# %%
chains = {"draws": 50, "warmup": 50} if FAST else {"draws": 2000, "warmup": 500}
options = {"over": "last_layer", "prior_scale": PRIOR, "verbose": 0, **chains}
with warnings.catch_warnings(action="ignore"):  # of steps that diverge; they are counted below
    reference = diagnostics.hmc(model, (x, y), **options)
print(reference)

# %% [markdown]
# The evidence, log p(y | x), makes the ELBO of any posterior readable: what is missing is its distance from the truth, KL[q || p], in nats. Bridge sampling takes it
# from the reference.

# %%
evidence = diagnostics.bridge(reference)
print(f"log evidence {evidence.value:.3f} ± {1.96 * evidence.error:.3f}")

# %% [markdown]
# ## Three approximations
#
# All have the same prior and the same data. Laplace bends a Gaussian to the mode; `GaussianVI` finds the best Gaussian; `refine` puts flows on top of it.

# %%
laplace = ibnn.Laplace(model, "last_layer", "full", prior_precision=PRIOR**-2, pred_type="nn")
gaussian = ibnn.GaussianVI(model, prior_scale=PRIOR)
posteriors = {
    "Laplace": laplace.fit(x, y, verbose=0),
    "best Gaussian": gaussian.fit(x, y, verbose=0),
}
flows = [ibnn.flows.SplineCoupling(swap=bool(number % 2)) for number in range(4)]
steps = 20 if FAST else 1500
posteriors["with flows"] = ibnn.refine(gaussian, flows, x, y, steps=steps, draws=32, verbose=0)

reports = {
    name: diagnostics.report(posterior, reference, evidence=evidence)
    for name, posterior in posteriors.items()
}
for name, report in reports.items():
    print(f"--- {name}\n{report}\n")

# %% [markdown]
# The second column is what one half of the reference scores against the other: nothing can be better than that. Read from the top: the gap to the evidence is the KL in
# nats; k-hat says whether importance weights could still repair the posterior (below 0.7 they can); the distances say how far draws lie apart.
#
# ## Seen
#
# Marginals and pairs of all four weights: the posterior over the reference; contours hold 50 and 90 % of the draws. First the best Gaussian.

# %%
figure = reports["best Gaussian"].plot()
plt.show()

# %% [markdown]
# It is too narrow where the truth has its long tails, in the two weights of the noise. With flows:

# %%
figure = reports["with flows"].plot()
plt.show()

# %% [markdown]
# ## Does it matter?
#
# For predictions, less than the figures suggest: what they average over is the middle of the posterior. Below, the band that holds 95 % of new y, by each of them.

# %%
line = np.linspace(-1.5, 1.5, 61, dtype="float32")[:, None]


def band(draws):
    """Return the ends of 95 % of y at each x, for weight vectors of the last layer."""
    random = np.random.default_rng(0)
    draws = np.repeat(draws, 20_000 // len(draws), axis=0)
    kernel, bias = draws[:, None, :2], draws[:, None, 2:]
    outputs = line * kernel + bias
    scale = np.logaddexp(0, outputs[..., 1])
    values = outputs[..., 0] + scale * random.normal(size=scale.shape)
    return np.quantile(values, (0.025, 0.975), axis=0)


fig, ax = plt.subplots(figsize=(7, 3.2))
truth = band(reference.samples.reshape(-1, 4))
ax.fill_between(line[:, 0], *truth, color="0.85", label="reference")
for color, (name, report) in zip(plots.COLORS, reports.items(), strict=False):
    for end, values in enumerate(band(report.draws)):
        ax.plot(line, values, color=color, label=name if end else None)
ax.plot(x, y, "k.", label="data")
ax.set(xlabel="x", ylabel="y", ylim=(-4, 5))
ax.legend(ncols=3, frameon=False, loc="upper left")
plt.show()
for name, report in reports.items():
    wrong = np.abs(band(report.draws) - truth).mean()
    print(f"{name:<16} ends of the band off by {wrong:.3f} on average")

# %% [markdown]
# ## How many modes?
#
# `diagnostics.modes` lets draws climb and counts where they arrive. The posterior here has one mode, of the flow and in truth. A mixture with two shows what it looks like
# otherwise.

# %%
starts = reference.samples.reshape(-1, 4)[:: 10 if FAST else 40][:200]
true_modes = diagnostics.modes(reference.target, starts=starts)
print("in truth:", len(true_modes.masses), "mode; log-density", true_modes.log_probs.round(2))

mixture = ibnn.MixturePosterior(components=2)
mixture.build((4,))
mixture.loc.assign(np.outer([0.5, 1.5], np.ones(4)))
found = diagnostics.modes(mixture)
print("of a mixture:", len(found.masses), "modes with masses", found.masses)

# %% [markdown]
# ## On a model of your own
#
# - A last layer of up to a few thousand weights, or the z of a model with noise (`over="z"`), can be drawn from like this. For all weights of a small network:
#   `over="weights"`. `hmc` refuses what would take longer than its `time_limit`.
# - If `report` says that a Gaussian is good enough, a flow has nothing to add. If k-hat is above 0.7 or the marginals are skewed, try `ibnn.refine`, and measure again.
# - Better than any approximation is not to approximate: `ibnn.MonteCarlo(ibnn.LastLayerHMC(model).fit(x, y))` predicts with the chains themselves.
