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
# # One network, every method
#
# You have a trained network and want to know how certain it is. This library has more than a dozen ways to find
# out. This notebook takes one network through all of them, twice:
#
# 1. in the plane, where uncertainty can be seen;
# 2. on images of digits, where it can be scored.
#
# Every method ends in `ibnn.MonteCarlo`, so the same code predicts and scores for all. It takes about three minutes.

# %%
import logging
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
FAST = bool(os.environ.get("TFP_IBNN_FAST"))  # short trainings, for tests

import time
import warnings
from functools import partial

import keras
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits, make_moons

import tfp_ibnn as ibnn
from tfp_ibnn import metrics, plots

plt.rcParams["figure.dpi"] = 80
logging.getLogger("tensorflow").setLevel("ERROR")  # that many functions are traced
DRAWS = 4 if FAST else 50

# %% [markdown]
# ## The methods
#
# `train` is plain Keras: Adam, cross-entropy. `methods` trains one network, then yields the name of each method with a
# function that makes its posterior. Three kinds:
#
# - **nothing is trained** (from "temperature" to "MC dropout"): seconds, and the network's weights stay;
# - **the network is trained on** (SWAG, and the noise z that `to_stochastic` adds to its layers);
# - **more networks are trained** (the ensemble, MultiSWAG and cyclical SGHMC).

# %%
BATCH, LOSS = 16, keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def train(model, data, epochs, optimizer=None, callbacks=()):
    """Return the model, trained."""
    model.compile(optimizer or keras.optimizers.Adam(0.01), LOSS)
    model.fit(*data, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=list(callbacks))
    return model


def methods(build, data, validation, epochs):
    """Train a network; yield the name of each method and a function that makes its posterior."""
    fit, made = {"batch_size": 200, "verbose": 0}, {}
    trained = train(build(seed=0), data, epochs)
    # Those of the last layer take the prior that the Laplace approximation finds.
    first = ibnn.Laplace(trained, "last_layer", "full", prior_precision="marglik")
    first.fit(*data, **fit)
    prior = {"prior_scale": float(first.prior_precision) ** -0.5}

    def laplace(*options, **more):
        found = ibnn.Laplace(trained, *options, prior_precision="validation", **more)
        return found.fit(*data, validation_data=validation, **fit)

    def gaussian():
        made["gaussian"] = ibnn.GaussianVI(trained, **prior)
        made["gaussian"].fit(*data, steps=5 if FAST else 30, seed=0, verbose=0)
        return made["gaussian"]

    def hmc():
        steps = {"draws": 10, "warmup": 10} if FAST else {"draws": 50, "warmup": 100}
        return ibnn.LastLayerHMC(trained, **steps, **prior).fit(*data, seed=0, verbose=0)

    def refined():
        flows = [ibnn.flows.AffineCoupling(swap=i % 2 == 1) for i in range(4)]
        few = {"steps": 5 if FAST else 150, "seed": 0, "verbose": 0}
        return ibnn.refine(made["gaussian"], flows, *data, **few)

    def member(seed):
        if seed not in made:
            made[seed] = train(build(seed), data, epochs) if seed else trained
        return made[seed]

    def swag(seed):
        copy, callback = keras.models.clone_model(member(seed)), ibnn.SWAG(rank=10)
        copy.set_weights(member(seed).get_weights())
        optimizer = keras.optimizers.SGD(0.02, momentum=0.9)
        train(copy, data, max(2, epochs // 4), optimizer, [callback])
        return callback.posterior()

    def sghmc():
        size, cycle = len(data[1]), epochs * -(-len(data[1]) // BATCH)
        rate = ibnn.CosineCycles(0.1, cycle, exploration=0.0 if FAST else 0.6)
        optimizer = ibnn.SGHMC(rate, train_size=size, prior_scale=1.0, seed=0)
        samples = ibnn.Snapshots(every=max(1, epochs // 20))
        train(build(seed=0, dropout=0.0), data, 2 * epochs, optimizer, [samples])
        return samples.posterior()

    def noisy():
        model = ibnn.to_stochastic(trained, ibnn.NormalAffine(), len(data[1]), seed=0)
        return train(model, data, epochs)

    yield "as it is", lambda: ibnn.DeepEnsemble([trained])
    yield "temperature", lambda: ibnn.TemperatureScaling(trained).fit(*validation)
    yield "Laplace, last layer", laplace
    yield "Laplace, all layers", lambda: laplace("all", "kron")
    yield "Laplace, all, sampled", lambda: laplace("all", "kron", pred_type="nn")
    yield "GaussianVI, last layer", gaussian
    yield "HMC, last layer", hmc
    yield "refined by flows", refined
    yield "MC dropout", lambda: trained
    yield "SWAG", lambda: swag(0)
    yield "noise z, NormalAffine", noisy
    yield "ensemble of 3", lambda: ibnn.DeepEnsemble([member(seed) for seed in range(3)])
    yield "MultiSWAG of 3", lambda: ibnn.WeightMixture([swag(seed) for seed in range(3)])
    yield "cyclical SGHMC", sghmc


def run(build, data, validation, epochs):
    """Return for each method what predicts, and how many seconds it took to make."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as that a temperature has only one draw
        for name, make in methods(build, data, validation, epochs):
            begun = time.perf_counter()
            posterior = make()
            averaged = ibnn.MonteCarlo(posterior, DRAWS, seed=0, dropout=name == "MC dropout")
            found[name] = averaged, time.perf_counter() - begun
    return found


# %% [markdown]
# ## In the plane
#
# Two classes that interlock, 100 points, and a network of two hidden layers.


# %%
def network(inputs, outputs, seed, dropout=0.1):
    """Return a network of two hidden layers that gives logits."""
    keras.utils.set_random_seed(seed)
    dense, drop = keras.layers.Dense, keras.layers.Dropout
    body = [dense(32, "relu"), drop(dropout), dense(32, "relu"), drop(dropout), dense(outputs)]
    return keras.Sequential([keras.Input((inputs,)), *body])


points, classes = make_moons(200, noise=0.2, random_state=0)
points = points.astype("float32")
data, validation = (points[:100], classes[:100]), (points[100:], classes[100:])
in_plane = run(partial(network, 2, 2), data, validation, epochs=5 if FAST else 40)

# %% [markdown]
# Colour is the class, and pale is uncertain (the entropy of the prediction); classes are even on the black line. Far from
# the points nothing is known: a network as it is does not show that, nor does a temperature, which only widens the
# border a little.

# %%
figure, axes = plt.subplots(3, 5, figsize=(13, 7.6), layout="constrained", sharex=True, sharey=True)
options = {"style": "shade", "limits": ((-3, 4), (-2.6, 3.1)), "legend": False}
options["resolution"] = 20 if FAST else 60
for ax, (name, (model, _)) in zip(axes.flat, in_plane.items(), strict=False):
    predict = partial(model.predict, batch_size=4000, verbose=0)
    plots.decision_boundary(predict, *data, title=name, ax=ax, **options)
    ax.label_outer()
axes[-1, -1].remove()
plt.show()

# %% [markdown]
# ## On images
#
# Scikit-learn's digits, 8 by 8 pixels. 300 images of the digits 0 to 7 train the network; 200 others fit the temperature
# and choose the prior of Laplace; the digits 8 and 9 are unknown to it.

# %%
images, digits = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
order = np.random.default_rng(0).permutation(np.flatnonzero(digits < 8))
parts = np.split(order, [300, 500])  # to train, to validate, to test
train_data, val_data, (x_test, y_test) = [(images[part], digits[part]) for part in parts]
unknown = images[digits >= 8]
on_digits = run(partial(network, 64, 8), train_data, val_data, epochs=5 if FAST else 40)

# %% [markdown]
# The scores are those of the test images. AUROC is the chance that an image of an unknown digit has a higher
# entropy than a known one. "fit" is what the method takes on top of the trained network; MultiSWAG starts from the members
# of the ensemble. "draws" is of how many distributions a prediction is the mean.

# %%
table = {}
print(f"{'':24}accuracy     NLL     ECE   AUROC   fit (s)   draws")
for name, (model, seconds) in on_digits.items():
    found, other = (model.predict(x, batch_size=2000, verbose=0) for x in (x_test, unknown))
    table[name] = {
        "accuracy": np.mean(found["mean"].argmax(-1) == y_test),
        "NLL": metrics.negative_log_likelihood(found["mean"], y_test),
        "ECE": metrics.expected_calibration_error(found["mean"], y_test),
        "AUROC": metrics.auroc(found["entropy"], other["entropy"]),
    }
    cells = "".join(f"{value:8.3f}" for value in table[name].values())
    print(f"{name:24}{cells}{seconds:10.1f}{model.samples:8}")

# %% [markdown]
# The same as a picture. Circles: nothing is trained. Triangles: this network is trained on. Squares: more networks
# are trained. The grey line is the network as it is.

# %%
names, kinds = list(table), "o" * 9 + "^" * 2 + "s" * 3
figure, axes = plt.subplots(1, 3, figsize=(11, 4.4), layout="constrained", sharey=True)
for ax, score in zip(axes, ("NLL", "ECE", "AUROC"), strict=True):
    first = table["as it is"][score]
    ax.axvline(first, color="0.7", lw=1, zorder=0)
    for place, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        value, color = table[name][score], plots.COLORS["o^s".index(kind)]
        ax.plot([first, value], [place, place], color=color, lw=1.2, alpha=0.5)
        ax.plot(value, place, kind, color=color, ms=6)
    better = "higher" if score == "AUROC" else "lower"
    ax.set_title(f"{score}, {better} is better", fontsize=10, loc="left")
    ax.grid(axis="x", color="0.92")
axes[0].set_yticks(range(len(names)), names)
axes[0].invert_yaxis()
plt.show()

# %% [markdown]
# ## What this shows
#
# - All but two methods improve the NLL of the network as it is. A temperature does so in a second, and changes the order of
#   inputs little. The ECE of so few test images says less.
# - Methods of the last layer cost seconds. Unknown digits are detected best by what trains on or trains several networks: MultiSWAG,
#   SGHMC, noise z and SWAG.
# - In the plane SGHMC, which samples the posterior of all weights under a prior, is the least certain far away.
#
# One network and one seed are an example, not evidence: `results/methods/README.md` has three seeds of three larger problems.
