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

# # A transformer that knows what it does not know
#
# A small vision transformer reads handwritten digits as 16 patches. Its attention and its MLPs are layers like any others:
# `to_stochastic` finds them wherever they are.
#
# 1. Train it, and put a posterior into its attention, its MLPs, or both.
# 2. Turn the digits, and see which networks notice.
# 3. Ask two questions at once: which digit, and how much ink. Each answer has its own kind of uncertainty.
# 4. Freeze the network, and learn digits that are turned by adapters of rank 4, with a posterior on the adapters alone.
#
# All of it takes a few minutes on two CPU cores. It shows how things are used. One seed and 500 test images decide nothing about
# which place is best.

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
from scipy import ndimage

import tfp_ibnn as ibnn
from lib import data
from tfp_ibnn import plots

layers = keras.layers
plt.rcParams["figure.dpi"] = 80
logging.getLogger("tensorflow").setLevel("ERROR")  # that many functions are traced
EPOCHS, DRAWS = (1, 4) if FAST else (40, 32)

(x, y), (x_test, y_test) = data.load("digits")
x, x_test = ((pixels / 16).astype("float32") for pixels in (x, x_test))
size = len(x)
print(f"{size} images of 8 x 8 pixels to train, {len(x_test)} to test")


# %% [markdown]
# ## The transformer
#
# Patches of 2 x 2 pixels become 16 tokens of width 32; two blocks of attention and MLP follow. The names matter: patterns of
# names choose where posteriors go.


# %%
def body(inputs, width=32, blocks=2):
    x = layers.Conv2D(width, 2, strides=2, name="patches")(inputs)
    x = layers.Reshape((16, width))(x)
    places = keras.ops.arange(16)
    x = x + layers.Embedding(16, width, name="positions")(places)
    for number in range(blocks):
        attention = layers.MultiHeadAttention(4, width // 4, name=f"attention{number}")
        y = layers.LayerNormalization()(x)
        x = x + attention(y, y)
        y = layers.Dense(2 * width, "gelu", name=f"up{number}")(layers.LayerNormalization()(x))
        x = x + layers.Dense(width, name=f"down{number}")(y)
    return layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))


def network():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 1))
    return keras.Model(inputs, layers.Dense(10, "softmax", name="head")(body(inputs)))


def trained(model):
    model.compile(keras.optimizers.Adam(2e-3), "sparse_categorical_crossentropy")
    model.fit(x, y, batch_size=64, epochs=EPOCHS, verbose=0)
    return model


det = trained(network())
accuracy = np.mean(det.predict(x_test, verbose=0).argmax(-1) == y_test)
print(f"{det.count_params():,} parameters; accuracy {accuracy:.3f}")

# %% [markdown]
# ## Where the noise sits
#
# A pattern is matched with a layer's name or its path: `attention0/query` is the projection of the queries of the first block.
# Each network is trained from the same start.

# %%
PLACES = {"attention": "attention.*", "MLPs": "(up|down).*", "both": "(attention|up|down).*"}
models = {"no noise": ibnn.MonteCarlo(ibnn.DeepEnsemble([det]))}
for place, pattern in PLACES.items():
    sto = ibnn.to_stochastic(network(), {pattern: ibnn.NormalAffine()}, size, seed=0)
    models[place] = ibnn.MonteCarlo(trained(sto), DRAWS, seed=0)
    names = [layer.name for layer in ibnn.stochastic_layers(sto)]
    print(f"{place}: {len(names)} stochastic layers, {', '.join(names[:5])}, ...")
for place, mc in models.items():
    scores = mc.evaluate(x_test, y_test, batch_size=250, verbose=0, return_dict=True)
    print(f"{place:10}" + "".join(f"  {key} {scores[key]:.3f}" for key in ("accuracy", "nll", "ece")))

# %% [markdown]
# ## Turned digits
#
# The further a digit is turned, the less it is one. A good network loses its confidence along with its accuracy. Solid lines are the accuracy,
# dashed lines the mean confidence: where the dashed line lies above the solid one, the network is overconfident. In this run all four are, by far; noise in
# attention narrows the gap by a fifth.

# %%
ANGLES = range(0, 181, 90 if FAST else 20)
turned = {
    angle: np.stack([ndimage.rotate(image, angle, reshape=False, order=1) for image in x_test])
    for angle in ANGLES
}
figure, axes = plt.subplots(1, 4, figsize=(13, 3.2), layout="constrained", sharey=True)
for number, (ax, (place, mc)) in enumerate(zip(axes, models.items(), strict=True)):
    means = [mc.predict(images, batch_size=250, verbose=0)["mean"] for images in turned.values()]
    accuracy = [np.mean(mean.argmax(-1) == y_test) for mean in means]
    confidence = [mean.max(-1).mean() for mean in means]
    ax.plot(ANGLES, accuracy, color=plots.COLORS[number], label="accuracy")
    ax.plot(ANGLES, confidence, "--", color=plots.COLORS[number], label="confidence")
    ax.fill_between(ANGLES, accuracy, confidence, color=plots.COLORS[number], alpha=0.12)
    gap = np.mean(np.subtract(confidence, accuracy)[1:])
    ax.set(title=f"{place}: mean gap {gap:.2f}", xlabel="degrees", ylim=(0, 1))
    plots.style.tidy(ax, "y")
axes[0].legend(frameon=False)
plt.show()

# %% [markdown]
# ## Two answers
#
# Which digit is it, and how much ink does it hold (the sum of its grey levels, a count)? The second head gives the logarithm of a
# Poisson distribution's mean: `DistributionNLL` takes any distribution of TensorFlow Probability. `MonteCarlo` answers by name, and
# splits each uncertainty by its own kind: nats for the digit, a variance for the ink.

# %%
ink, ink_test = (np.round(16 * images.sum((1, 2, 3))).astype("float32") for images in (x, x_test))


@keras.saving.register_keras_serializable(package="notebook")
def counts(outputs):
    return ibnn.tfd.Poisson(log_rate=outputs + 5.7)  # about the mean of all


keras.utils.set_random_seed(0)
inputs = keras.Input((8, 8, 1))
features = body(inputs)
heads = {"digit": layers.Dense(10, "softmax")(features), "ink": layers.Dense(1)(features)}
two = keras.Model(inputs, heads)
sto = ibnn.to_stochastic(two, {PLACES["MLPs"]: ibnn.NormalAffine()}, size, seed=0)
losses = {"digit": "sparse_categorical_crossentropy", "ink": ibnn.layers.DistributionNLL(counts)}
weights = {"digit": 1.0, "ink": 0.1}  # else the large counts take over
sto.compile(keras.optimizers.Adam(2e-3), losses, weights)
sto.fit(x, {"digit": y, "ink": ink}, batch_size=64, epochs=EPOCHS, verbose=0)
mc = ibnn.MonteCarlo(sto, DRAWS, seed=0)
scores = mc.evaluate(
    x_test, {"digit": y_test, "ink": ink_test}, batch_size=250, verbose=0, return_dict=True
)
print({key: round(value, 3) for key, value in scores.items()})
found = mc.predict(x_test, batch_size=250, verbose=0)

figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
order = np.argsort(found["ink"]["mean"][:, 0])
mean, spread = found["ink"]["mean"][order, 0], np.sqrt(found["ink"]["total_variance"][order, 0])
axes[0].fill_between(
    range(len(order)), mean - 2 * spread, mean + 2 * spread, color=plots.COLORS[5], alpha=0.4,
    label="two standard deviations",
)  # fmt: skip
axes[0].plot(ink_test[order], ".", markersize=3, color="black", label="counted")
axes[0].plot(mean, color=plots.COLORS[0], label="predicted")
axes[0].set(xlabel="test images, by predicted ink", ylabel="ink")
axes[0].legend(frameon=False)
right = found["digit"]["mean"].argmax(-1) == y_test
for label, chosen, color in (("right", right, plots.COLORS[0]), ("wrong", ~right, plots.COLORS[1])):
    values = found["digit"]["entropy"][chosen]
    axes[1].hist(values, np.linspace(0, 2, 25), density=True, alpha=0.6, color=color, label=label)
axes[1].set(xlabel="entropy of the digit (nats)", ylabel="frequency")
axes[1].legend(frameon=False)
for ax in axes:
    plots.style.tidy(ax)
plt.show()

# %% [markdown]
# ## An adapter that knows
#
# The page lies on its side: all digits are turned by a quarter. The network stays as it is; adapters (LoRA) of rank 4 in the projections
# of its attention, and the last layer, learn from 300 turned images. The z of an adapter sits between its two small
# kernels, so only what the adapters add is uncertain.

# %%
few = 50 if FAST else 300
turned, turned_test = (np.rot90(images, axes=(1, 2)).copy() for images in (x[:few], x_test))
plain = np.mean(det.predict(turned_test, verbose=0).argmax(-1) == y_test)
adapted = keras.models.clone_model(det)
adapted.set_weights(det.get_weights())
adapted.trainable = False
adapted.get_layer("head").trainable = True
for number in range(2):
    attention = adapted.get_layer(f"attention{number}")
    projections = "query_dense", "key_dense", "value_dense", "output_dense"
    for layer in (getattr(attention, name) for name in projections):
        layer.trainable = True
        layer.enable_lora(4)
        layer.bias.trainable = False
sto = ibnn.to_stochastic(adapted, {"attention./.*": ibnn.NormalAffine()}, few, seed=0)
sizes = {weight.path: np.prod(weight.shape) for weight in sto.trainable_weights}
posterior = sum(size for path, size in sizes.items() if "posterior" in path)
print(f"{sum(sizes.values()):,} parameters are trained, {posterior} of them the posterior's")
sto.compile(keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy")
sto.fit(turned, y[:few], batch_size=50, epochs=1 if FAST else 60, verbose=0)
mc = ibnn.MonteCarlo(sto, DRAWS, seed=0)
scores = mc.evaluate(turned_test, y_test, batch_size=250, verbose=0, return_dict=True)
print(f"turned digits: accuracy {plain:.3f} before, {scores['accuracy']:.3f} after")
print(f"nll {scores['nll']:.3f}, ece {scores['ece']:.3f}")

# %%
found = mc.predict(turned_test, batch_size=250, verbose=0)
figure, axes = plt.subplots(2, 8, figsize=(11, 3.4), layout="constrained")
order = np.argsort(found["epistemic"])
for line, numbers in zip(axes, (order[:8], order[-8:]), strict=True):
    for ax, number in zip(line, numbers, strict=True):
        ax.imshow(turned_test[number, ..., 0], cmap="gray_r", vmin=0, vmax=1)
        guess = found["mean"][number].argmax()
        color = "black" if guess == y_test[number] else plots.COLORS[1]
        ax.set_title(f"{guess}, {found['mean'][number].max():.0%}", fontsize=10, color=color)
        ax.axis("off")
figure.suptitle("Draws agree most (above) and least (below); wrong answers in orange", fontsize=11)
plt.show()
