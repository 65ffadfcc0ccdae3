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
# # Your own model
#
# You have a trained Keras model and want to know when to trust it. This notebook takes such a model
# through all the steps:
#
# 1. convert it, without losing its accuracy;
# 2. fine-tune the posterior;
# 3. compare its calibration with the usual remedies;
# 4. see what it does with classes that it has never seen;
# 5. save and export it.
#
# The model here is small and the images are tiny, so that all of it runs on a laptop in a few
# minutes.

# %%
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
FAST = bool(os.environ.get("TFP_IBNN_FAST"))  # short trainings, for tests

import tempfile
from pathlib import Path

import keras
import matplotlib.pyplot as plt
import numpy as np
from scipy.stats import entropy
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfp_ibnn as ibnn
from tfp_ibnn import metrics, plots

keras.utils.set_random_seed(0)
plt.rcParams["figure.dpi"] = 80

EPOCHS = 2 if FAST else 30
SAMPLES = 16 if FAST else 128

# %% [markdown]
# ## The data
#
# Scikit-learn's digits: 8 by 8 pixels, ten classes. The digits 8 and 9 are held out. The model never
# sees them; later they play the unknown. The others are split into training, validation and test
# images.

# %%
images, digits = load_digits(return_X_y=True)
images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
known = digits < 8
x_unknown, y_unknown = images[~known], digits[~known]
x_train, x_rest, y_train, y_rest = train_test_split(
    images[known], digits[known], train_size=500, stratify=digits[known], random_state=0
)
x_val, x_test, y_val, y_test = train_test_split(
    x_rest, y_rest, train_size=300, stratify=y_rest, random_state=0
)
print(f"{len(x_train)} training, {len(x_val)} validation, {len(x_test)} test images")
print(f"{len(x_unknown)} images of the unknown classes 8 and 9")

# %% [markdown]
# ## A trained model
#
# Any Functional or Sequential model will do. This one has dropout, so that MC dropout can be compared
# later.

# %%
det = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, activation="relu", name="conv1"),
        keras.layers.Conv2D(32, 3, activation="relu", name="conv2"),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.25),
        keras.layers.Dense(64, activation="relu", name="fc1"),
        keras.layers.Dropout(0.25),
        keras.layers.Dense(8, activation="softmax", name="fc2"),
    ],
    name="digits",
)
LOSS = "sparse_categorical_crossentropy"
det.compile(keras.optimizers.Adam(1e-3), LOSS, metrics=["accuracy"])
det.fit(x_train, y_train, batch_size=32, epochs=EPOCHS, verbose=0)
accuracy = det.evaluate(x_test, y_test, verbose=0, return_dict=True)["accuracy"]
print(f"test accuracy {accuracy:.4f}")

# %% [markdown]
# With published weights, the cell above is one line:
#
# ```python
# det = keras.applications.MobileNetV2(weights="imagenet")
# ```
#
# A network that deep wants less noise in each layer, for example
# `ibnn.NormalAffine(prior_scale=0.1, initial_scale=0.02)`.

# %% [markdown]
# ## Convert it
#
# `to_stochastic` returns a copy in which each chosen layer computes `layer(z * x)`. The prior of z is
# N(1, 0.5²). If the posterior starts there, the noise is strong at once. `initial_scale` starts it
# close to z = 1 instead. The prior stays as it is.
#
# The first convolution sees one channel, the grey image. It is left as it is.

# %%
LAYERS = "conv2|fc1|fc2"
for scale in (0.5, 0.1):
    day_one = ibnn.to_stochastic(
        det, {LAYERS: ibnn.NormalAffine(initial_scale=scale)}, train_size=len(x_train)
    )
    day_one.compile(loss=LOSS, metrics=["accuracy"])
    one = day_one.evaluate(x_test, y_test, verbose=0, return_dict=True)["accuracy"]
    print(f"initial scale {scale}: accuracy {one:.4f} by single draws")
print(f"deterministic:     accuracy {accuracy:.4f}")

# %% [markdown]
# With the small scale, a single draw is about as accurate as the model it came from, before any
# training.

# %% [markdown]
# ## Fine-tune it
#
# Two posteriors: a Gaussian in each layer, and planar flows in two of the layers. `two_speed` gives the
# posteriors a higher learning rate than the weights. `KLAnnealing` lets the likelihood lead at first.
# `MonteCarloEvaluation` scores the averaged prediction on the validation images every few epochs.

# %%
START = {"initial_scale": 0.1}
posteriors = {
    "Gaussian posterior": {LAYERS: ibnn.NormalAffine(**START)},
    "flow posterior": {
        "conv2|fc1": ibnn.NormalPlanar1d(**START),
        "fc2": ibnn.NormalAffine(**START),
    },
}
EVERY = 1 if FAST else 5


def fine_tune(posterior):
    sto = ibnn.to_stochastic(det, posterior, train_size=len(x_train))
    optimizer = ibnn.two_speed(keras.optimizers.Adam(1e-3), stochastic_lr=1e-2)
    sto.compile(optimizer, LOSS, metrics=["accuracy"])
    callbacks = [
        ibnn.KLAnnealing(epochs=max(1, EPOCHS // 3)),
        ibnn.MonteCarloEvaluation((x_val, y_val), samples=16, every=EVERY),
    ]
    history = sto.fit(
        x_train, y_train, batch_size=32, epochs=EPOCHS, verbose=0, callbacks=callbacks
    )
    return sto, history.history


models, histories = {}, {}
for name, posterior in posteriors.items():
    models[name], histories[name] = fine_tune(posterior)

# %% [markdown]
# The KL starts high, because the posterior starts narrower than the prior. It falls as its weight grows
# and the posteriors widen: the noise comes in gradually. The likelihood and the accuracy should not
# suffer from it. Solid curves are of single draws, with dropout on, on the training images; dotted ones
# are of the averaged prediction on the validation images.

# %%
figure = plots.training_panel(histories, ["kl", "nll", "accuracy"], mc_every=EVERY)
figure.axes[0].set_yscale("log")
plt.show()

# %% [markdown]
# For a fair comparison the deterministic model is trained for as many more epochs.

# %%
longer = keras.models.clone_model(det)
longer.set_weights(det.get_weights())
longer.compile(keras.optimizers.Adam(1e-3), LOSS, metrics=["accuracy"])
history = longer.fit(x_train, y_train, batch_size=32, epochs=EPOCHS, verbose=0)

# %% [markdown]
# ## Is its confidence right?
#
# Four ways to get probabilities, besides the plain one:
#
# - **temperature scaling**: one number, fitted to the validation images;
# - **MC dropout**: dropout left on in prediction, many draws averaged;
# - **a posterior**, Gaussian or flow, many draws averaged.
#
# `MonteCarlo` averages the draws, and returns the uncertainty with them. A seed makes them repeatable,
# and `return_samples=True` keeps every draw, for a figure further down.

# %%
scaled = ibnn.TemperatureScaling(longer).fit(x_val, y_val)
print(f"temperature {float(scaled.temperature):.2f}")

averaged = {
    "MC dropout": ibnn.MonteCarlo(longer, SAMPLES, dropout=True, seed=0),
    "Gaussian posterior": ibnn.MonteCarlo(models["Gaussian posterior"], SAMPLES, seed=0),
    "flow posterior": ibnn.MonteCarlo(
        models["flow posterior"], SAMPLES, seed=0, return_samples=True
    ),
}


def single(model, x):
    """One draw has no epistemic part: the entropy is all there is."""
    mean = model.predict(x, verbose=0)
    return {"mean": mean, "entropy": entropy(mean, axis=-1)}


def predict_all(x):
    return {
        "deterministic": single(longer, x),
        "temperature scaling": single(scaled, x),
        **{name: mc.predict(x, verbose=0) for name, mc in averaged.items()},
    }


test, unknown = predict_all(x_test), predict_all(x_unknown)

# %%
SCORES = {
    "NLL": metrics.negative_log_likelihood,
    "Brier": metrics.brier_score,
    "ECE": metrics.expected_calibration_error,
}
print(f"{'':20}{'accuracy':>10}" + "".join(f"{key:>9}" for key in SCORES))
for name, prediction in test.items():
    mean = prediction["mean"]
    row = [np.mean(mean.argmax(-1) == y_test), *(score(mean, y_test) for score in SCORES.values())]
    print(f"{name:20}{row[0]:>10.4f}" + "".join(f"{value:>9.4f}" for value in row[1:]))
error = np.sqrt(accuracy * (1 - accuracy) / len(y_test))
print(f"standard error of an accuracy: about {error:.4f}")

# %% [markdown]
# NLL, Brier score and ECE are better when lower. No method is best by a clear margin. A small network
# on easy images is not very over-confident to begin with, and the accuracies differ by about a
# standard error. Do not read a ranking off this table: it is one seed, and another changes the order.
# (The flow was made a simpler one, to save time, after a first table had been seen.)
# Repeat it with several seeds on your own data before you choose.
#
# In the diagrams, bars below the dashed line are over-confidence, bars above it are caution. Pale
# bars hold fewer than ten images. Most images are in the last bar, where all methods are sure and
# right.

# %%
figure, axes = plt.subplots(1, len(test), figsize=(13, 3.4), sharey=True, layout="constrained")
for ax, (name, prediction) in zip(axes, test.items(), strict=True):
    plots.reliability_diagram(prediction["mean"], y_test, title=name, ax=ax)
    ax.label_outer()
plt.show()

# %% [markdown]
# ## What it does not know
#
# The model can only answer 0 to 7. Shown an 8 or a 9, it should at least be unsure. AUROC is the chance
# that an unknown image is less certain than a known one: 0.5 is guessing, 1 is perfect. FPR95 is the
# share of known images that are flagged along with 95 % of the unknown ones; lower is better.

# %%
print(f"{'':20}{'uncertainty':>12}{'AUROC':>9}{'FPR95':>9}")
for name in test:
    for key in ("entropy", "epistemic"):
        if key in test[name]:
            pair = test[name][key], unknown[name][key]
            print(
                f"{name:20}{key:>12}{metrics.auroc(*pair):>9.4f}{metrics.fpr_at_95_tpr(*pair):>9.4f}"
            )

# %% [markdown]
# All methods find most of the unknown images. The differences are again no larger than those between
# runs: with other random numbers, the posteriors were once ahead of the deterministic model. Temperature
# scaling hardly changes the order of the images. It mends calibration, not the detection of the unknown.
#
# By the epistemic part alone the unknown are found no better than by the whole entropy.
#
# The histograms show the entropies behind those numbers. The less the two overlap, the better. Look at
# the left end: there the model is sure of an image of a class that it does not know.

# %%
figure, axes = plt.subplots(1, 4, figsize=(14, 3.2), sharey=True, layout="constrained")
shown = ("deterministic", "MC dropout", "Gaussian posterior", "flow posterior")
for ax, name in zip(axes, shown, strict=True):
    pair = test[name]["entropy"], unknown[name]["entropy"]
    plots.entropy_histograms(*pair, auroc=metrics.auroc(*pair), title=name, bins=20, ax=ax)
    ax.label_outer()
axes[0].set_ylim(0, 1.3)
plt.show()

# %% [markdown]
# ### Handing the doubtful ones on
#
# Put known and unknown images together, and count every answer to an unknown one as an error. Now let
# the model answer only those that it is surest of. The curve is the share of errors among the
# answers; it should stay low for as long as possible. The dotted vertical line is the share of known
# images: further right, errors cannot be avoided.

# %%
share = len(x_test) / (len(x_test) + len(x_unknown))
curves = {}
for name in test:
    wrong = test[name]["mean"].argmax(-1) != y_test
    errors = np.concatenate([wrong, np.ones(len(x_unknown))])
    doubt = np.concatenate([test[name]["entropy"], unknown[name]["entropy"]])
    curves[name] = metrics.risk_coverage(doubt, errors)
figure, ax = plt.subplots(figsize=(6, 4.6), layout="constrained")
plots.risk_coverage(curves, label="share of errors", ax=ax)
ax.axvline(share, color="0.4", ls=":")
plt.show()

# %% [markdown]
# ### The most and the least certain images
#
# Known and unknown images together again, by the flow posterior. A frame marks a wrong answer; every
# answer to an 8 or a 9 is wrong. Good uncertainty has the frames in the lower row only.

# %%
flow, flow_unknown = test["flow posterior"], unknown["flow posterior"]
both = {key: np.concatenate([flow[key], flow_unknown[key]]) for key in ("mean", "entropy")}
figure = plots.extreme_images(
    np.concatenate([x_test, x_unknown]),
    both["entropy"],
    labels=np.concatenate([y_test, y_unknown]),
    predictions=both["mean"].argmax(-1),
    count=8,
)
plt.show()

# %% [markdown]
# ### Single images
#
# Each draw is a network of its own; a shape shows what all of them say of one class, and the line across
# is their mean. If the draws are of one
# mind, the shapes are flat lines. If they contradict each other, the shapes are long: the data do not
# settle the answer.

# %%
surest, doubtful = np.argmin(flow["entropy"]), np.argmax(flow["entropy"])
strangest = np.argmax(flow_unknown["epistemic"])
picks = {
    "known, the most certain": (flow["samples"], x_test, y_test, surest),
    "known, the least certain": (flow["samples"], x_test, y_test, doubtful),
    "unknown, the most epistemic": (flow_unknown["samples"], x_unknown, None, strangest),
}
figure, axes = plt.subplots(3, 1, figsize=(6.4, 7.5), layout="constrained")
for ax, (title, (samples, x, y, i)) in zip(axes, picks.items(), strict=True):
    label = None if y is None else int(y[i])
    plots.class_distributions(samples[i], label=label, image=x[i], ax=ax)
    ax.set_title(title, loc="left", fontsize=10)
plt.show()

# %% [markdown]
# The true class is hatched. The last image has none: no answer is right.

# %% [markdown]
# ## Save it, export it
#
# A stochastic model is a Keras model. It is saved and loaded like any other; with the same seed, the
# loaded one predicts the same.

# %%
sto = models["flow posterior"]
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "model.keras"
    sto.save(path)
    loaded = keras.models.load_model(path)
again = ibnn.MonteCarlo(loaded, SAMPLES, seed=0).predict(x_test, verbose=0)
print("largest difference after loading:", np.abs(again["mean"] - flow["mean"]).max())

# %% [markdown]
# `to_deterministic` folds the means of the posteriors into the weights. The result is a plain Keras
# model without a class of this library. It can be exported for TensorFlow Serving. It has the accuracy
# of the fine-tuned weights, but no longer their uncertainty.

# %%
plain = ibnn.to_deterministic(sto)
probabilities = plain.predict(x_test, verbose=0)
print(f"accuracy {np.mean(probabilities.argmax(-1) == y_test):.4f}")
print(f"ECE {metrics.expected_calibration_error(probabilities, y_test):.4f}")
if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")  # it would report the temporary folder
    with tempfile.TemporaryDirectory() as folder:
        plain.export(folder, verbose=False)
        service = tf.saved_model.load(folder)
        served = service.serve(x_test).numpy()
    print("largest difference after export:", np.abs(served - probabilities).max())
