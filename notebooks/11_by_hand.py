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
# # Bayesian inference, by hand
#
# Seven short experiments for a course on Bayesian deep learning. Each one writes the method in a few lines and checks it
# against something known. Every claim in the text is an assertion in the code: if a claim were wrong, the notebook would fail.
#
# 1. Bayes' rule on a coin, and its Gaussian limit.
# 2. Metropolis-Hastings in ten lines.
# 3. Bayesian linear regression: closed form, variational inference, HMC.
# 4. Change of variables.
# 5. Sampling by the inverse CDF.
# 6. A Bayesian neural network outside its data.
# 7. A misspecified model, and the check that exposes it.
#
# The library enters in part 3. All of it takes about a minute on one CPU core.

# %%
import logging
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
FAST = bool(os.environ.get("TFP_IBNN_FAST"))  # short trainings, for tests

import keras
import matplotlib.pyplot as plt
import numpy as np
from keras import ops
from scipy import stats

import tfp_ibnn as ibnn
from tfp_ibnn import diagnostics, plots

if keras.backend.backend() == "jax":
    from tensorflow_probability.substrates import jax as tfp
else:
    import tensorflow_probability as tfp

tfb, tfd = tfp.bijectors, tfp.distributions
BLUE, ORANGE, GREEN = plots.COLORS[:3]
plt.rcParams.update({"figure.dpi": 80, "legend.frameon": False, "legend.fontsize": 9})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
logging.getLogger("tensorflow").setLevel("ERROR")  # that many functions are traced


def panels(count, **options):
    """Return the axes of a figure, side by side."""
    return plt.subplots(1, count, figsize=(9.6, 2.9), layout="constrained", **options)[1]


def histogram(ax, draws, edges, **look):
    """Draw the density of draws. Those outside the edges count, too."""
    heights = np.histogram(draws, edges)[0] / (len(draws) * np.diff(edges))
    ax.stairs(heights, edges, fill=True, color="0.82", **look)


# %% [markdown]
# ## 1. Bayes' rule on a coin
#
# A coin shows heads with probability θ. Bayes' rule multiplies the prior by the likelihood and divides by the evidence;
# with a flat prior, the result is a Beta distribution. The Bernstein-von Mises theorem says that the posterior tends to
# a Gaussian around the maximum likelihood estimate, with the inverse Fisher information as its variance, for any prior that is
# positive there. The distance between the two (total variation, TV) falls like $1 / \sqrt{n}$: it lies
# between $0.1 / \sqrt{n}$ and $0.5 / \sqrt{n}$ in all three cases.

# %%
flips = np.random.default_rng(3).random(500) < 0.7
theta = np.linspace(0, 1, 2001)
distance = {}
for ax, n in zip(panels(3), (5, 50, 500), strict=True):
    heads = flips[:n].sum()
    joint = theta**heads * (1 - theta) ** (n - heads)  # the likelihood times a flat prior
    posterior = joint / np.trapezoid(joint, theta)  # divided by the evidence
    exact = stats.beta(1 + heads, 1 + n - heads).pdf(theta)
    assert np.allclose(posterior, exact, atol=1e-3)

    rate = heads / n
    gaussian = stats.norm(rate, np.sqrt(rate * (1 - rate) / n)).pdf(theta)
    distance[n] = 1 - np.trapezoid(np.minimum(posterior, gaussian), theta)
    ax.fill_between(theta, posterior, color="0.82", label="posterior")
    ax.plot(theta, gaussian, color=ORANGE, ls="--", label="Gaussian")
    ax.axvline(0.7, color="black", lw=1, ls=":", label="true θ")
    ax.set(title=f"{heads} heads in {n}: TV {distance[n]:.3f}", xlabel="θ", xlim=(0, 1))
    ax.set_ylim(0, 1.1 * max(posterior.max(), gaussian.max()))
    if n == 5:
        ax.legend(loc="upper left")
plt.show()
assert all(0.1 < tv * np.sqrt(n) < 0.5 for n, tv in distance.items())

# %% [markdown]
# ## 2. Metropolis-Hastings in ten lines
#
# The sampler proposes a step and accepts it with probability min(1, p(proposal) / p(here)). It needs only ratios of p, so
# the evidence cancels. The proposal is symmetric, so its own density cancels, too. The target is the posterior of five flips,
# which is known. The step must fit: with steps that are too short or too long, 20,000 draws are worth far fewer
# independent ones (effective sample size, ESS).


# %%
def metropolis(log_p, start, step, count, rng):
    """Return a Markov chain whose draws have the density p in the long run."""
    chain = [start]
    while len(chain) < count:
        here = chain[-1]
        proposal = here + step * rng.normal()
        is_accepted = np.log(rng.random()) < log_p(proposal) - log_p(here)
        chain.append(proposal if is_accepted else here)
    return np.array(chain)


heads = flips[:5].sum()
exact = stats.beta(1 + heads, 6 - heads)


def log_p(theta):
    """Return the log-likelihood of the flips; the flat prior is 0 outside of (0, 1)."""
    return heads * np.log(theta) + (5 - heads) * np.log1p(-theta) if 0 < theta < 1 else -np.inf


left, right = panels(2)
ess, error = {}, {}
for step, color in zip((0.5, 0.02, 20.0), (BLUE, ORANGE, GREEN), strict=True):
    chain = metropolis(log_p, 0.5, step, 20_000, np.random.default_rng(0))
    ess[step] = float(tfp.mcmc.effective_sample_size(chain.astype("float32")))
    error[step] = abs(chain.mean() - exact.mean()) / (exact.std() / np.sqrt(ess[step]))
    assert error[step] < 3
    left.plot(chain[:400], color=color, lw=1 if step == 0.5 else 1.8, label=f"step {step}")
    if step == 0.5:
        histogram(right, chain, np.linspace(0, 1, 31), label="draws, step 0.5")
        assert stats.ks_1samp(chain, exact.cdf).statistic < 0.02
left.set(xlabel="iteration", ylabel="θ", ylim=(0, 1.3))
left.legend(ncols=3, loc="upper center")
right.plot(theta, exact.pdf(theta), color=BLUE, label="exact posterior")
right.set(xlabel="θ", ylabel="density", xlim=(0, 1))
right.legend(loc="upper left")
plt.show()
for step in ess:
    print(f"step {step:<5} ESS {ess[step]:5.0f}, error of the mean {error[step]:.1f} standard errors")
assert ess[0.5] > 5 * max(ess[0.02], ess[20.0])

# %% [markdown]
# ## 3. Bayesian linear regression
#
# With Gaussian noise and a Gaussian prior, the posterior of intercept and slope is a Gaussian in closed form.
# Variational inference climbs the ELBO by the reparameterization $w = m + L \epsilon$: with a triangular L it finds this Gaussian.
# A diagonal L (mean field) cannot. It keeps the variance of each weight *given the other*, which is the true one times
# $1 - \rho^2$, where ρ is the correlation. HMC, here by `diagnostics.hmc`, needs only the log-density.
# The library's `GaussianVI` finds the same mean field for the last layer of any network.

# %%
NOISE, PRIOR = 0.5, 3.0  # standard deviations, which are known here


def closed_form(features, y, noise=NOISE):
    """Return the mean and the covariance of the weights."""
    precision = features.T @ features / noise**2 + np.eye(features.shape[1]) / PRIOR**2
    covariance = np.linalg.inv(precision)
    return covariance @ features.T @ y / noise**2, covariance


def variational(features, y, shape, steps=6000, rate=2e-3, draws=32):
    """Return the same of the best Gaussian whose factor L is 0 where `shape` is."""
    rng = np.random.default_rng(0)
    mean, factor = np.zeros(2), 0.1 * np.eye(2)
    for step in range(steps):
        noise = rng.normal(size=(draws, 2))
        w = mean + noise @ factor.T
        slope = (y - w @ features.T) @ features / NOISE**2 - w / PRIOR**2  # of log p(y, w)
        entropy_slope = np.diag(1 / np.diag(factor))
        size = rate * (1 - step / steps)
        mean = mean + size * slope.mean(axis=0)
        factor = factor + size * shape * (slope.T @ noise / draws + entropy_slope)
    return mean, factor @ factor.T


rng = np.random.default_rng(0)
x = rng.uniform(1, 3, size=12)
features = np.stack([np.ones_like(x), x], axis=1)
y = features @ [0.5, 1.0] + NOISE * rng.normal(size=12)


# %%
def log_joint(w):
    """Return log p(y, w) of rows of weights, up to a constant."""
    residuals = ops.cast(y, w.dtype) - w @ ops.cast(features.T, w.dtype)
    return -ops.sum(residuals**2, -1) / (2 * NOISE**2) - ops.sum(w**2, -1) / (2 * PRIOR**2)


density = diagnostics.Density(log_joint, np.zeros(2, "float32"), prior_scale=PRIOR)
length = {"draws": 100, "warmup": 100} if FAST else {"draws": 1000, "warmup": 200}
reference = diagnostics.hmc(density, sampler="hmc", verbose=0, **length)
samples = reference.samples.reshape(-1, 2)

mean, covariance = closed_form(features, y)
fits = {
    "full covariance": variational(features, y, shape=np.tril(np.ones((2, 2)))),
    "mean field": variational(features, y, shape=np.eye(2)),
}
for center, _ in fits.values():
    assert np.allclose(center, mean, atol=0.05)
correlation = covariance[0, 1] / np.sqrt(covariance[0, 0] * covariance[1, 1])
kept = 1 - correlation**2
print(f"correlation {correlation:.2f}: mean field keeps {kept:.1%} of the variances")
variances = np.diag(fits["mean field"][1])
assert np.allclose(variances, kept * np.diag(covariance), rtol=0.05)
assert np.allclose(fits["full covariance"][1], covariance, rtol=0.1)
assert FAST or np.allclose(np.cov(samples.T), covariance, rtol=0.1)

network = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
network.compile("sgd", "mse")
library = ibnn.GaussianVI(network, covariance="diag", prior_scale=PRIOR, noise_scale=NOISE)
library.fit(x[:, None], y[:, None], verbose=0)
slope_first = ops.convert_to_numpy(library.distribution().variance())
assert np.allclose(slope_first[::-1], variances, rtol=0.05)

# %% [markdown]
# Left, the 95% regions of the weights. Right, what it means for the line: where x = 0, mean field is overconfident; among the
# data it is even too wide, since it has lost the fact that errors of intercept and slope cancel there.

# %%
fits = {"closed form": (mean, covariance), **fits}
looks = [{"color": "black", "lw": 4, "alpha": 0.3}, {"color": BLUE, "ls": "--"}, {"color": ORANGE}]
left, right = panels(2)
angle = np.linspace(0, 2 * np.pi, 200)
circle = np.stack([np.cos(angle), np.sin(angle)]) * np.sqrt(stats.chi2(2).ppf(0.95))
line = np.linspace(0, 4, 101)
deviations = {}
left.plot(*samples[::4].T, ".", color="0.7", ms=2, label="HMC")
for (name, (center, matrix)), look in zip(fits.items(), looks, strict=True):
    left.plot(*(center[:, None] + np.linalg.cholesky(matrix) @ circle), **look, label=name)
    rows = np.stack([np.ones_like(line), line], axis=1)
    deviations[name] = np.sqrt(np.sum((rows @ matrix) * rows, axis=1))
    right.plot(line, deviations[name], **look, label=name)
ratio = deviations["mean field"] / deviations["closed form"]
middle = np.argmin(abs(line - x.mean()))
print(f"mean field: {ratio[0]:.2f} of the deviation at x = 0, {ratio[middle]:.2f} among the data")
assert ratio[0] < 0.5
assert ratio[middle] > 1.2
right.plot(x, np.full_like(x, 0.03), "k|", ms=8, label="data")
left.set(xlabel="intercept", ylabel="slope")
right.set(xlabel="x", ylabel="standard deviation of the line", ylim=(0, 0.62))
left.legend(loc="upper right")
right.legend(ncols=2, loc="upper center")
plt.show()

# %% [markdown]
# ## 4. Change of variables
#
# Let z be half-normal and x = z². On z > 0 this map has an inverse, so the density of x is that of z divided by the slope:
# $p(x) = p(\sqrt{x}) / (2 \sqrt{x})$, which is the χ² density. A bijector packs the map, its inverse and its
# log-det, the logarithm of the slope; a normalizing flow is a chain of them. Autodiff checks the log-det.


# %%
class Square(tfb.Bijector):
    """x = z^2, for z > 0."""

    def __init__(self):
        super().__init__(forward_min_event_ndims=0, name="square")

    def _forward(self, z):
        return z**2

    def _inverse(self, x):
        return ops.sqrt(x)

    def _forward_log_det_jacobian(self, z):
        return ops.log(2 * z)


base = tfd.HalfNormal(1.0)
mine = tfd.TransformedDistribution(base, Square())
theirs = tfd.TransformedDistribution(base, tfb.Square())
grid = np.linspace(0.02, 4, 200, dtype="float32")
log_p = ops.convert_to_numpy(mine.log_prob(grid))
assert np.allclose(log_p, ops.convert_to_numpy(theirs.log_prob(grid)), atol=1e-5)
assert np.allclose(log_p, stats.chi2(1).logpdf(grid), atol=1e-5)

z = np.linspace(0.05, 3, 20, dtype="float32")
_, slope = tfp.math.value_and_gradient(Square().forward, ops.convert_to_tensor(z))
by_autodiff = np.log(ops.convert_to_numpy(slope))
log_det = ops.convert_to_numpy(Square().forward_log_det_jacobian(z))
assert np.allclose(log_det, by_autodiff, atol=1e-5)

draws = abs(np.random.default_rng(0).normal(size=50_000))
left, middle, right = panels(3)
histogram(left, draws, np.linspace(0, 4, 61), label="draws of z")
left.plot(grid, 2 * stats.norm.pdf(grid), color=BLUE, label="half-normal")
histogram(middle, draws**2, np.linspace(0, 4, 61), label="their squares")
middle.plot(grid, np.exp(log_p), color=ORANGE, label="change of variables")
middle.set_ylim(0, 2)
fine = np.linspace(0.05, 3, 200)
right.plot(fine, np.log(2 * fine), color=ORANGE, label="log 2z")
right.plot(z, by_autodiff, "k.", label="autodiff")
for ax, name, title in zip((left, middle, right), "zxz", ("p(z)", "p(x)", "log-det"), strict=True):
    ax.set(xlabel=name, title=title)
    ax.legend()
plt.show()

# %% [markdown]
# ## 5. Sampling by the inverse CDF
#
# If u is uniform, $F^{-1}(u)$ has the CDF F: a uniform height, read off the curve. The exponential distribution has its inverse in closed form.
# A mixture of Gaussians has not, but bisection inverts any CDF. A Kolmogorov-Smirnov test sees no difference
# between 20,000 draws and the target.


# %%
def inverse_cdf(cdf, u, low, high):
    """Return the x between two ends where cdf(x) = u, by bisection."""
    low, high = np.full_like(u, low), np.full_like(u, high)
    for _ in range(50):
        middle = (low + high) / 2
        is_below = cdf(middle) < u
        low = np.where(is_below, middle, low)
        high = np.where(is_below, high, middle)
    return middle


def mixture(function):
    """Return a function (cdf or pdf) of the mixture, by those of its components."""
    return lambda x: 0.3 * function(x, -2, 0.5) + 0.7 * function(x, 1, 1)


mixture_cdf, mixture_pdf = mixture(stats.norm.cdf), mixture(stats.norm.pdf)
exponential = stats.expon(scale=1 / 1.5)
u = np.random.default_rng(0).random((2, 20_000))
waits = -np.log1p(-u[0]) / 1.5
mixed = inverse_cdf(mixture_cdf, u[1], -10, 10)
assert np.allclose(waits, inverse_cdf(exponential.cdf, u[0], 0, 50))
for name, draws, cdf in (("exponential", waits, exponential.cdf), ("mixture", mixed, mixture_cdf)):
    p_value = stats.kstest(draws, cdf).pvalue
    print(f"{name}: p-value {p_value:.2f}")
    assert p_value > 0.01

left, middle, right = panels(3)
grid = np.linspace(-4, 4, 401)
left.plot(grid, mixture_cdf(grid), color=BLUE)
heights = np.linspace(0.05, 0.95, 10)
for height, place in zip(heights, inverse_cdf(mixture_cdf, heights, -10, 10), strict=True):
    left.plot([-4, place, place], [height, height, 0], color=ORANGE, lw=0.9)
histogram(middle, waits, np.linspace(0, 4, 61), label="draws")
middle.plot(grid[200:], exponential.pdf(grid[200:]), color=BLUE, label="density")
histogram(right, mixed, np.linspace(-4, 4, 61), label="draws")
right.plot(grid, mixture_pdf(grid), color=BLUE, label="density")
left.set(title="from u to x", xlabel="x", ylabel="u", xlim=(-4, 4), ylim=(0, 1))
middle.set(title="exponential", xlabel="x", ylabel="density", xlim=(0, 4))
right.set(title="mixture", xlabel="x", ylabel="density", ylim=(0, 0.36))
middle.legend()
right.legend(loc="upper left")
plt.show()

# %% [markdown]
# ## 6. A Bayesian neural network outside its data
#
# The toy regression of Bayes by Backprop (arXiv 1505.05424) has 500 points between 0 and 0.5:
# $y = x + 0.3 \sin(2 \pi (x + \epsilon)) + 0.3 \sin(4 \pi (x + \epsilon)) + \epsilon$, where ε has the standard deviation 0.02.
# A network is trained first, and its residuals give the noise. `to_stochastic` with `MeanField` then gives each weight a
# Gaussian of its own, with the prior N(0, 1), and `fit` maximizes the ELBO.


# %%
def toy(x, e=0.0):
    """Return y at the points x, for noise e."""
    waves = np.sin(2 * np.pi * (x + e)) + np.sin(4 * np.pi * (x + e))
    return (x + 0.3 * waves + e).astype("float32")


keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
x = rng.uniform(0, 0.5, size=(500, 1)).astype("float32")
y = toy(x, rng.normal(0, 0.02, size=(500, 1)))

spread = keras.initializers.RandomUniform(-1, 1)  # of the kinks
hidden = [keras.layers.Dense(50, "relu", bias_initializer=spread) for _ in range(2)]
rescaling = keras.layers.Rescaling(4, offset=-1)  # from [0, 0.5] to [-1, 1]
det = keras.Sequential([keras.Input((1,)), rescaling, *hidden, keras.layers.Dense(1)])
det.compile(keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.01, 500)), "mse")
det.fit(x, y, batch_size=100, epochs=100, verbose=0)
noise = float(np.std(y - det.predict(x, verbose=0)))

posterior = ibnn.MeanField(initial_scale=0.05, estimator="local", bias="stochastic")
bayes = ibnn.to_stochastic(det, posterior, train_size=len(x), seed=0)
schedule = keras.optimizers.schedules.CosineDecay(0.01, 1500)
bayes.compile(keras.optimizers.Adam(schedule), "mse", noise_scale=noise)
bayes.fit(x, y, batch_size=100, epochs=300, verbose=0)
mc = ibnn.MonteCarlo(bayes, 300, seed=0, return_samples=True)

# %% [markdown]
# The bands hold 50% and 90% of new observations, by the model. Those of the deterministic network are as wide as the
# noise everywhere. Those of the Bayesian network are more than three times as wide outside the data as inside. They hold more of the
# observations there, but fewer than inside: outside the data, the width comes from the prior and the network, and nothing
# guarantees 90%.

# %%
line = np.linspace(-0.4, 1.2, 321, dtype="float32")[:, None]
new = toy(line, rng.normal(0, 0.02, size=line.shape))[:, 0]
is_inside = (line[:, 0] > 0) & (line[:, 0] < 0.5)
functions = {
    "deterministic": np.repeat(det.predict(line, verbose=0), mc.samples, axis=1),
    "mean field": mc.predict(line, verbose=0)["samples"][..., 0],
}
growth, inside, outside = {}, {}, {}
axes = panels(2, sharey=True)
for ax, (name, values) in zip(axes, functions.items(), strict=True):
    draws = values + noise * rng.normal(size=values.shape)
    low, lower, median, upper, high = np.quantile(draws, (0.05, 0.25, 0.5, 0.75, 0.95), axis=1)
    is_covered = (low < new) & (new < high)
    inside[name] = is_covered[is_inside].mean()
    outside[name] = is_covered[~is_inside].mean()
    growth[name] = (high - low)[~is_inside].mean() / (high - low)[is_inside].mean()
    ax.fill_between(line[:, 0], low, high, color=BLUE, alpha=0.2, lw=0, label="90%")
    ax.fill_between(line[:, 0], lower, upper, color=BLUE, alpha=0.35, lw=0, label="50%")
    ax.plot(line, median, color=BLUE, label="median")
    ax.plot(line, toy(line), color="black", ls=":", label="truth")
    ax.plot(x[::4], y[::4], "k.", ms=2, label="data")
    ax.set(title=name, xlabel="x", ylabel="y", xlim=(-0.4, 1.2), ylim=(-1.4, 2.4))
    ax.label_outer()
axes[0].legend(ncols=3, loc="upper left")
plt.show()
for name in functions:
    print(f"{name:13} the 90% band holds {inside[name]:.0%} of new points inside the data", end=", ")
    print(f"{outside[name]:.0%} outside, where it is {growth[name]:.1f} times as wide")
assert FAST or growth["deterministic"] < 1.1
assert FAST or growth["mean field"] > 3
assert FAST or inside["mean field"] > 0.85
assert FAST or outside["deterministic"] < outside["mean field"] < inside["mean field"]

# %% [markdown]
# ## 7. A misspecified model
#
# The truth is a parabola, $x + x^2$ with noise 0.2; the model is a straight line. The posterior of part 3 is exact here, so
# better inference cannot help. With more data it contracts around the best line, whose height at x = 0 is 1/3, not 0.
# The probability integral transform (PIT) exposes it: the predictive CDF at new observations, which is uniform for a
# correct model. For the line the PIT piles up at both ends, and the 90% interval holds fewer than 70% of new points.


# %%
def curve(n, rng):
    """Return n points of the truth."""
    x = rng.uniform(-1, 1, n)
    return x, x + x**2 + 0.2 * rng.normal(size=n)


def powers(x, degree):
    """Return the features of a polynomial."""
    return np.stack([x**power for power in range(degree + 1)], axis=-1)


rng = np.random.default_rng(0)
data = {n: curve(n, rng) for n in (20, 200, 2000)}
fits = {n: closed_form(powers(x, 1), y, noise=0.2) for n, (x, y) in data.items()}
heights = {n: stats.norm(mean[0], matrix[0, 0] ** 0.5) for n, (mean, matrix) in fits.items()}
for n, height in heights.items():
    print(f"n = {n:4}: the height at 0 is {height.mean():.3f} ± {1.96 * height.std():.3f}")
    assert height.cdf(0) < 1e-6  # the posterior excludes the truth
assert abs(heights[2000].mean() - 1 / 3) < 0.02
assert heights[20].std() > 2 * heights[200].std() > 4 * heights[2000].std()

x, y = data[2000]
x_new, y_new = curve(2000, rng)
pit, held = {}, {}
for name, degree in {"line": 1, "parabola": 2}.items():
    mean, covariance = closed_form(powers(x, degree), y, noise=0.2)
    rows = powers(x_new, degree)
    variance = 0.2**2 + np.sum((rows @ covariance) * rows, axis=1)
    pit[name] = stats.norm(rows @ mean, np.sqrt(variance)).cdf(y_new)
    held[name] = np.mean((pit[name] > 0.05) & (pit[name] < 0.95))
    p_value = stats.kstest(pit[name], "uniform").pvalue
    print(f"{name:8} the 90% interval holds {held[name]:.1%}; is the PIT uniform? p = {p_value:.2g}")
    assert (p_value > 0.01) == (name == "parabola")
assert held["line"] < 0.7
assert abs(held["parabola"] - 0.9) < 0.02

# %%
left, middle, right = panels(3)
line = np.linspace(-1, 1, 101)
left.plot(x[::10], y[::10], ".", color="0.75", ms=3, label="data")
left.plot(line, line + line**2, "k:", label="truth")
left.plot(line, powers(line, 1) @ fits[2000][0], color=BLUE, label="posterior mean")
places = np.linspace(-0.05, 0.55, 601)
for (n, height), look in zip(heights.items(), (GREEN, ORANGE, BLUE), strict=True):
    middle.plot(places, height.pdf(places), color=look, label=f"n = {n}")
middle.axvline(0, color="black", ls=":", label="truth")
edges = np.linspace(0, 1, 21)
histogram(right, pit["line"], edges, label="line")
right.stairs(np.histogram(pit["parabola"], edges)[0] / 100, edges, color=BLUE, label="parabola")
left.set(title="data", xlabel="x", ylabel="y")
middle.set(title="posterior of the height at 0", xlabel="height", ylabel="density")
right.set(title="PIT of new observations", xlabel="PIT", ylabel="density")
left.legend(loc="upper left")
middle.legend(loc="upper left", bbox_to_anchor=(0.14, 1))
right.legend(loc="upper center")
plt.show()

# %% [markdown]
# ## Where to go from here
#
# - `02_what_a_flow_learns` and `06_densities` chain bijectors into flows.
# - `04_regression` puts a gap into the data, and `05_is_it_right` measures posteriors against HMC and finds where mean field fails.
# - `01_two_dimensions` and `09_after_training` turn to classification, and compare the methods.
