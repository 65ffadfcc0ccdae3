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
# You have a trained Keras classifier and want probabilities that you can act on. One call,
# `ibnn.calibrate`, compares the usual remedies on validation data and returns the cheapest one that is
# as good as the best, with the evidence. This notebook
#
# 1. trains a small network for too long, as happens;
# 2. calibrates it, and reads the table and the figure;
# 3. checks the result on test images, and on classes that the network has never seen;
# 4. lets the network abstain where it is not certain;
# 5. saves the result, and loads it again.
#
# It runs on a laptop in a few minutes.

# %%
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
FAST = bool(os.environ.get("TFP_IBNN_FAST"))  # short trainings, for tests
sys.path += ["scripts", "../scripts"]  # for the figures of this repository's experiments

import tempfile
from pathlib import Path

import keras
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfp_ibnn as ibnn
from lib.panels import extreme_images
from tfp_ibnn import metrics, plots

keras.utils.set_random_seed(0)
plt.rcParams["figure.dpi"] = 80

# %% [markdown]
# ## The data
#
# Scikit-learn's digits: 8 by 8 pixels, ten classes. The digits 8 and 9 are held out, as classes that the
# network does not know. Of the others, 400 images are for training and 300 for validation.
#
# In practice many training labels are cheap, and some are wrong. Here one in ten is. The validation and test labels
# are right, as if somebody had checked them. A network that is trained for long learns the wrong labels by heart, and
# becomes overconfident.

# %%
images, digits = load_digits(return_X_y=True)
images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
known = digits < 8
x_unknown = images[~known]
x_train, x_rest, y_train, y_rest = train_test_split(
    images[known], digits[known], train_size=400, stratify=digits[known], random_state=0
)
x_val, x_test, y_val, y_test = train_test_split(
    x_rest, y_rest, train_size=300, stratify=y_rest, random_state=0
)
random = np.random.default_rng(0)
is_wrong = random.random(len(y_train)) < 0.1
y_train = np.where(is_wrong, (y_train + random.integers(1, 8, len(y_train))) % 8, y_train)
print(f"{is_wrong.sum()} of the training labels are wrong")
print(f"{len(x_train)} training, {len(x_val)} validation, {len(x_test)} test images")
print(f"{len(x_unknown)} images of the unknown classes 8 and 9")

# %% [markdown]
# ## A trained model
#
# Any Functional or Sequential classifier will do, or a regression. This one has dropout, so MC dropout will be
# among the candidates.

# %%
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.1),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(8, activation="softmax"),
    ],
    name="digits",
)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(x_train, y_train, batch_size=32, epochs=100, verbose=0)
accuracy = model.evaluate(x_test, y_test, verbose=0, return_dict=True)["accuracy"]
print(f"test accuracy {accuracy:.4f}")

# %% [markdown]
# ## Calibrate it
#
# Your model is not changed. By default nothing is trained, and the answer takes seconds; with `effort="minutes"`
# copies of the model are trained on for a few epochs, with and without noise. Each candidate is also tried with
# a temperature. Validation images that the model was not trained on decide.

# %%
report = ibnn.calibrate(
    model,
    (x_train, y_train),
    validation=(x_val, y_val),
    effort="minutes",
    epochs=1 if FAST else None,
    samples=4 if FAST else 32,
)

# %% [markdown]
# The table has the candidates that no other one matches at its cost; the chosen one is bold. `T` is the temperature that divides the logits: above 1
# the model was overconfident. `behind best` is the difference in NLL from the best candidate, with its standard
# error. `ECE floor` is what a perfectly calibrated model would have on so few images: an ECE near it means
# nothing.

# %%
print(report.table())

# %% [markdown]
# The figure shows the accuracy at each confidence before and after. Bars below the dashed line are
# overconfidence; pale bars hold fewer than ten images.

# %%
figure = report.plot()
plt.show()

# %% [markdown]
# ## Does it hold on test images?
#
# The choice was made on the validation images, so their table flatters the winner a little. The test images
# have served for nothing so far.

# %%
test = report.evaluate((x_test, y_test))
print(test)

# %%
before, after = test["as it is"], test[report.chosen.name]
for score in ("accuracy", "NLL", "Brier", "ECE"):
    print(f"{score:9}{before[score]:9.4f} before {after[score]:9.4f} after")

# %% [markdown]
# The NLL falls from 0.41 to 0.34 and the ECE from 0.051 to 0.028; its floor is 0.025. A temperature alone reaches an
# NLL of 0.36; a scale and a bias for each class do better here. A little more training at a low rate comes close, with
# a temperature. So do Laplace and the Gaussian, which take more passes for a prediction. This is one seed:
# `results/calibrate` has other data and networks, with five seeds.

# %% [markdown]
# ## What it predicts
#
# `report.model` is a `MonteCarlo` whatever was chosen: `predict` returns the class probabilities as `mean`,
# their entropy, and, with more than one draw, the part of it that the draws disagree about. The images of
# which it is most and least certain, with their labels:

# %%
prediction = report.model.predict(x_test, verbose=0)
print({name: value.shape for name, value in prediction.items()})
figure = extreme_images(
    x_test,
    prediction["entropy"],
    labels=y_test,
    predictions=prediction["mean"].argmax(-1),
    count=8,
)
plt.show()

# %% [markdown]
# ## Classes that it does not know
#
# The model can only answer 0 to 7. Shown an 8 or a 9, it should at least be uncertain. AUROC is the chance that
# an unknown image has a higher entropy than a known one: 0.5 is guessing, 1 is perfect.

# %%
untreated = report.model_of("as it is")
figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.4), sharey=True, layout="constrained")
for ax, (name, candidate) in zip(
    axes, {"before": untreated, "after": report.model}.items(), strict=True
):
    pair = [candidate.predict(x, verbose=0)["entropy"] for x in (x_test, x_unknown)]
    plots.entropy_histograms(*pair, auroc=metrics.auroc(*pair), title=name, bins=20, ax=ax)
    ax.label_outer()
plt.show()

# %% [markdown]
# Before, the model is certain of a quarter of the unknown images (the first bar); after, of less than a tenth. As a
# detector of unknown classes it is hardly better, though: the AUROC changes little, since the scaling changes the
# order of the images little.

# %% [markdown]
# ## Abstain where it is not certain
#
# Let the model answer only the test images of which it is most certain, and hand the others to a human. The curve is
# the share of errors among its answers.

# %%
curves = {}
for name, candidate in {"before": untreated, "after": report.model}.items():
    answer = candidate.predict(x_test, verbose=0)
    wrong = answer["mean"].argmax(-1) != y_test
    curves[name] = metrics.risk_coverage(answer["entropy"], wrong)
figure, ax = plt.subplots(figsize=(5.6, 4), layout="constrained")
plots.risk_coverage(curves, label="share of errors", ax=ax)
plt.show()

# %% [markdown]
# ## Save it
#
# `save` writes the model, the table, the figure and a model card that says what was compared and how. To load the
# model, `import tfp_ibnn` first. `ibnn.export` writes a SavedModel that needs only TensorFlow.

# %%
with tempfile.TemporaryDirectory() as folder:
    report.save(folder)
    print(sorted(path.name for path in Path(folder).iterdir()))
    loaded = keras.models.load_model(Path(folder) / "model.keras")
again = loaded.predict(x_test, verbose=0)["mean"]
print("largest difference after loading:", np.abs(again - prediction["mean"]).max())
