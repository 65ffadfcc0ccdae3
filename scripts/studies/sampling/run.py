"""Errors of averages over independent, antithetic and quasi-random draws."""

import json
from pathlib import Path

from train_digits import convert, fit, load, network, posteriors, save  # isort: skip
import keras
import matplotlib.pyplot as plt
import numpy as np

import tfp_ibnn as ibnn
from lib import provenance
from tfp_ibnn.noise import SAMPLINGS
from tfp_ibnn.plots import COLORS

IMAGES = 200


def execute(options):
    """Do what the command line says."""
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(options.seed)
    x_train, x_test, y_train, _ = load()
    start, half = network(), options.epochs // 2
    fit(start, "deterministic, first half", keras.optimizers.Adam(1e-3), x_train, y_train, half)
    counts = [2**k for k in range(2, options.most.bit_length())]
    results = {}
    for name, posterior in posteriors().items():
        model = convert(start, posterior)
        optimizer = ibnn.two_speed(keras.optimizers.Adam(1e-3), stochastic_lr=5e-3)
        fit(model, name, optimizer, x_train, y_train, half)
        results[name] = measure(model, x_test[:IMAGES], counts, options.seeds)
        print_table(name, counts, results[name])
    record = {"samples": counts, "error": results, **provenance(vars(options))}
    path = output / "sampling.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    print("\nWritten:", path, save_figure(counts, results, output / "sampling.png"), sep="\n  ")


def measure(model, x, counts, seeds):
    """Return {sampling: [error for each number of samples]}."""
    reference = np.mean(means(model, x, 1024, "qmc", range(1000, 1032)), axis=0)
    return {
        sampling: [
            float(np.sqrt(np.mean((means(model, x, n, sampling, range(seeds)) - reference) ** 2)))
            for n in counts
        ]
        for sampling in SAMPLINGS
    }


def means(model, x, samples, sampling, seeds):
    """Return the averaged probabilities for each seed, (seeds, images, classes)."""
    monte_carlo = ibnn.MonteCarlo(model, samples, sampling=sampling, seed=0)
    found = []
    for seed in seeds:
        monte_carlo.seed = seed
        found.append(monte_carlo.predict(x, batch_size=len(x), verbose=0)["mean"])
    return np.stack(found)


def print_table(name, counts, errors):
    print(f"\n{name}: error of the mean\n{'samples':12}" + "".join(f"{n:>10}" for n in counts))
    for sampling, row in errors.items():
        print(f"{sampling:12}" + "".join(f"{error:>10.5f}" for error in row))


def save_figure(counts, results, path):
    figure, axes = plt.subplots(1, len(results), figsize=(9, 3.6), sharey=True)
    for ax, (name, errors) in zip(axes, results.items(), strict=True):
        for (sampling, row), color, marker in zip(errors.items(), COLORS, "osD", strict=False):
            ax.loglog(counts, row, color=color, marker=marker, label=sampling, lw=1.8, ms=5)
        slope = errors["iid"][0] * np.sqrt(counts[0] / np.array(counts))
        ax.loglog(counts, slope, color="0.6", ls=":", label="1 / sqrt(samples)")
        ax.set(xlabel="samples", title=name)
        ax.set_xticks(counts, [str(n) for n in counts])
        ticks = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05]
        ax.set_yticks(ticks, [str(tick) for tick in ticks])
        ax.set_ylim(0.9 * min(map(min, errors.values())), 1.2 * max(map(max, errors.values())))
        ax.minorticks_off()
        ax.grid(color="0.9")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("error of the mean probability")
    axes[0].legend(frameon=False, fontsize=9)
    return save(figure, path)
