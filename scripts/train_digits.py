"""Train on scikit-learn's digits: a deterministic network, a Gaussian and a flow posterior.

A small convolutional network is trained on 600 images. Half way through it is copied three times:
one copy stays as it is, one gets a Gaussian posterior, one a normalizing-flow posterior, and each
is trained for the other half. Then all three are tested on the remaining 1,197 images.

Examples:
    python scripts/train_digits.py
    python scripts/train_digits.py --epochs 20 --samples 16 --output outputs/quick
    KERAS_BACKEND=jax python scripts/train_digits.py --seed 1
"""

import argparse
import json
import os
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=60, help="in all, both halves (default 60)")
    parser.add_argument("--samples", type=int, default=64, help="draws at test time (default 64)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, noise and order")
    parser.add_argument("--output", default="outputs/digits", help="folder for figures and numbers")
    options = parser.parse_args(argv)
    for name, least in (("epochs", 2), ("samples", 1), ("seed", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name} must be at least {least}; got {getattr(options, name)}")
    return options


if __name__ == "__main__":
    parse()  # --help need not wait for the imports below, which take seconds

import keras
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from scipy.special import softmax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfp_ibnn as ibnn
from lib import provenance
from tfp_ibnn import metrics, plots

TRAIN_SIZE = 600
# The ELBO, from the prior of the original report.
PRIOR = {"prior_scale": 0.5, "initial_scale": None, "beta": 1.0}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def main(argv=None):
    options = parse(argv)
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(options.seed)
    x_train, x_test, y_train, y_test = load()
    half = options.epochs // 2

    start = network()
    fit(start, "deterministic, first half", keras.optimizers.Adam(1e-3), x_train, y_train, half)
    models = {"deterministic": copy(start)}
    models |= {name: convert(start, posterior) for name, posterior in posteriors().items()}
    rows, histories, predictions = {}, {}, {}
    for name, model in models.items():
        optimizer = keras.optimizers.Adam(1e-3)
        if ibnn.stochastic_layers(model):
            optimizer = ibnn.two_speed(optimizer, stochastic_lr=5e-3)
        began = time.perf_counter()
        histories[name] = fit(model, name, optimizer, x_train, y_train, half)
        seconds = time.perf_counter() - began
        probabilities = predict(model, x_test, options.samples, options.seed)
        predictions[name] = probabilities
        rows[name] = {
            "accuracy": float(np.mean(probabilities.argmax(-1) == y_test)),
            "nll": metrics.negative_log_likelihood(probabilities, y_test),
            "brier": metrics.brier_score(probabilities, y_test),
            "ece": metrics.expected_calibration_error(probabilities, y_test),
            "parameters": model.count_params(),
            "training_seconds": round(seconds, 1),
        }

    print_table(rows, options.samples)
    files = [
        save_reliability(predictions, y_test, output / "reliability.png"),
        save_curves(histories, output / "training.png"),
        save_metrics(rows, options, output / "metrics.json"),
    ]
    print("\nWritten:", *files, sep="\n  ")


def load():
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32").reshape(-1, 8, 8, 1)
    # The same images in every run, whatever the seed.
    return train_test_split(x, y, train_size=TRAIN_SIZE, stratify=y, random_state=0)


def network():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu", name="conv1"),
            keras.layers.Conv2D(32, 3, activation="relu", name="conv2"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu", name="fc1"),
            keras.layers.Dense(10, name="fc2"),
        ],
        name="digits",
    )


def posteriors():
    return {
        "Gaussian posterior": ibnn.NormalAffine(**PRIOR),
        "flow posterior": {
            "conv2": ibnn.NormalInvConv(**PRIOR),
            "fc1": ibnn.NormalPlanar1d(**PRIOR),
            ".*": ibnn.NormalAffine(**PRIOR),
        },
    }


def copy(model):
    twin = keras.models.clone_model(model)
    twin.set_weights(model.get_weights())
    return twin


def convert(model, posterior):
    return ibnn.to_stochastic(model, posterior, train_size=TRAIN_SIZE)


def fit(model, name, optimizer, x, y, epochs):
    model.compile(optimizer, LOSS, metrics=["accuracy"])
    progress = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: print(
            f"\r{name}: epoch {epoch + 1}/{epochs}, loss {logs['loss']:.4f} ", end="", flush=True
        ),
        on_train_end=lambda logs: print(),
    )
    return model.fit(x, y, batch_size=32, epochs=epochs, verbose=0, callbacks=[progress]).history


def predict(model, x, samples, seed):
    """Return class probabilities, averaged over draws if the model is stochastic."""
    if not ibnn.stochastic_layers(model):
        return softmax(model.predict(x, batch_size=256, verbose=0), axis=-1)
    monte_carlo = ibnn.MonteCarlo(model, samples, seed=seed)
    return monte_carlo.predict(x, batch_size=256, verbose=0)["mean"]


def print_table(rows, samples):
    print(f"\n{'':20}{'accuracy':>10}{'NLL':>9}{'ECE':>9}{'parameters':>12}{'training':>10}")
    for name, row in rows.items():
        print(
            f"{name:20}{row['accuracy']:>10.4f}{row['nll']:>9.4f}{row['ece']:>9.4f}"
            f"{row['parameters']:>12,}{row['training_seconds']:>9.1f}s"
        )
    print(f"Posteriors: mean of the probabilities of {samples} draws.")


def save_reliability(predictions, labels, path):
    figure, axes = plt.subplots(1, len(predictions), figsize=(11, 3.9), sharey=True)
    for ax, (name, probabilities) in zip(axes, predictions.items(), strict=True):
        plots.reliability_diagram(probabilities, labels, title=name, ax=ax)
    for ax in axes[1:]:
        ax.set_ylabel("")
    return save(figure, path)


def save_curves(histories, path):
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    # Without a posterior the loss is the likelihood part alone.
    curves = {name: {"nll": history["loss"], **history} for name, history in histories.items()}
    labels = {"nll": "training NLL per example", "kl": "KL of all layers (nats)"}
    for ax, (key, label) in zip(axes, labels.items(), strict=True):
        for name, color in zip(curves, plots.COLORS, strict=False):
            values = curves[name].get(key, [])
            ax.plot(range(1, len(values) + 1), values, color=color, lw=1.8, label=name)
        ax.set(xlabel="epoch", ylabel=label)
    axes[0].set_yscale("log")
    axes[0].legend(frameon=False, fontsize=9)
    return save(figure, path)


def save(figure, path):
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def save_metrics(rows, options, path):
    path.write_text(json.dumps({"results": rows, **provenance(vars(options))}, indent=2) + "\n")
    return path


if __name__ == "__main__":
    main()
