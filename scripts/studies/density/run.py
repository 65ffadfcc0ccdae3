"""Densities in the plane by every flow of the library, trained alike.

A task is data, a seed and a flow. The data are drawn anew for every seed; two moons, rings and the
checkerboard have densities that are known. Every task has a process of its own, and `runs.jsonl` a
line for each.
"""

import time

import keras
import numpy as np
from scipy.special import logsumexp

import tfp_ibnn as ibnn
from lib import provenance
from lib.tasks import run_tasks

flows = ibnn.flows
PAIRS = {  # titles
    "moons": ("two moons",),
    "rings": ("rings",),
    "pinwheel": ("pinwheel",),
    "checkerboard": ("checkerboard",),
}
TRAIN, TEST, VALIDATION, BATCH, STEPS = 10_000, 10_000, 10_000, 500, 3000
RATES = (2e-3, 6e-3, 2e-2)  # of which each task takes the best on validation points
QUICK = 2  # steps
NOISE = {"moons": 0.1, "rings": 0.08}
RADII = (0.5, 1.0, 1.5, 2.0)


def turns(kind, count, name="swap", **options):
    """Return flows of which every second one is turned round."""
    return [kind(**{name: bool(number % 2)}, **options) for number in range(count)]


FLOWS = {
    "16 planar": lambda: [flows.Inverse(flows.Planar()) for _ in range(16)],
    "8 additive couplings": lambda: [*turns(flows.AdditiveCoupling, 8), flows.Affine()],
    "8 affine couplings": lambda: turns(flows.AffineCoupling, 8),
    "8 Glow steps": lambda: turns(flows.GlowStep, 8),
    "6 spline couplings": lambda: turns(flows.SplineCoupling, 6, interval=4.0),
    "8 autoregressive (MAF)": lambda: turns(flows.MaskedAutoregressive, 8, "reverse"),
    "4 autoregressive splines": lambda: [
        flows.Inverse(flow)
        for flow in turns(flows.SplineAutoregressive, 4, "reverse", interval=4.0)
    ],
    "16 radial": lambda: [flows.Inverse(flows.Radial()) for _ in range(16)],
    "8 Sylvester": lambda: [flows.Inverse(flows.Sylvester()) for _ in range(8)],
    "1 continuous": lambda: [flows.Continuous(hidden=64)],
    "8 residual": lambda: [flows.Inverse(flows.Residual()) for _ in range(8)],
}


def draw(name, count, rng):
    """Return points (count, 2)."""
    normal, uniform = rng.normal(size=(count, 2)), rng.uniform(size=(count, 2))
    if name == "moons":
        upper = rng.uniform(size=count) < 0.5
        return _moon(np.pi * uniform[:, 0], upper[:, None]) + NOISE[name] * normal
    if name == "rings":
        angle, radius = 2 * np.pi * uniform[:, 0], rng.choice(RADII, count)
        center = radius[:, None] * np.column_stack([np.cos(angle), np.sin(angle)])
        return center + NOISE[name] * normal
    if name == "pinwheel":
        along, across = 1 + 0.3 * normal[:, 0], 0.1 * normal[:, 1]
        angle = 2 * np.pi * rng.integers(5, size=count) / 5 + 0.25 * np.exp(along)
        cos, sin = np.cos(angle), np.sin(angle)
        return 2 * np.column_stack([along * cos - across * sin, along * sin + across * cos])
    column = np.floor(4 * uniform[:, 0])
    row = 2 * rng.integers(2, size=count) + column % 2
    return np.column_stack([4 * uniform[:, 0] - 2, row + uniform[:, 1] - 2])


def log_density(name, x):
    """Return the true log-density of points (count, 2), or None where it has no simple form.

    Moons and rings are integrals over an angle, which 2,000 midpoints give to many digits.
    """
    middles = (np.arange(2000) + 0.5) / 2000
    if name == "checkerboard":
        return np.full(len(x), -np.log(8.0))
    if name == "moons":
        parts = [_moon(np.pi * middles, np.full((2000, 1), upper)) for upper in (True, False)]
    elif name == "rings":
        circle = np.column_stack([np.cos(2 * np.pi * middles), np.sin(2 * np.pi * middles)])
        parts = [radius * circle for radius in RADII]
    else:
        return None
    centers, scale = np.concatenate(parts), NOISE[name]
    found = []
    for part in np.array_split(x, max(1, len(x) // 250)):
        square = np.sum((part[:, None] - centers) ** 2, axis=-1)
        found.append(logsumexp(-square / (2 * scale**2), axis=-1))
    return np.concatenate(found) - np.log(len(centers) * 2 * np.pi * scale**2)


def _moon(angle, upper):
    x = np.column_stack([np.cos(angle), np.sin(angle)])
    return np.where(upper, x, np.array([1.0, 0.5]) - x)


class Seconds(keras.callbacks.Callback):
    """The seconds of each epoch."""

    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_epoch_begin(self, epoch, logs=None):
        self.begun = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(time.perf_counter() - self.begun)


def milliseconds(epochs, examples):
    """Return the median milliseconds of a step, by the seconds of epochs; the first compiles."""
    median = np.median(epochs[1:] or epochs)
    return round(1000 * float(median) / max(1, examples // BATCH), 3)


def points(pair, seed, quick=False):
    """Return training, test and validation points of a task."""
    rng, counts = np.random.default_rng(seed), (TRAIN, TEST, VALIDATION)
    return [draw(pair, 200 if quick else n, rng).astype("float32") for n in counts]


def trial(flow, seed, rate, train, quick=False):
    """Return a density that is trained at a rate, and the seconds and milliseconds it took."""
    begun, clock = time.perf_counter(), Seconds()
    keras.utils.set_random_seed(seed)
    steps = QUICK if quick else STEPS
    density = ibnn.FlowDensity(FLOWS[flow]())
    density.compile(keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(rate, steps)))
    epochs = max(1, steps * BATCH // len(train))
    density.fit(train, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=[clock])
    return density, time.perf_counter() - begun, milliseconds(clock.epochs, len(train))


def run(pair, seed, flow, quick=False):
    """Run one task; return the record. Quick runs only show that it works."""
    train, test, held_out = points(pair, seed, quick)
    trials = [trial(flow, seed, rate, train, quick) for rate in (RATES[:1] if quick else RATES)]
    # NaN counts as the worst.
    tried = [float(np.mean(density.log_prob(held_out), dtype="float64")) for density, *_ in trials]
    tried = [value if np.isfinite(value) else None for value in tried]
    best = int(np.argmax([-np.inf if value is None else value for value in tried]))
    density, seconds, step = trials[best]
    found, truth = density.log_prob(test).astype("float64"), log_density(pair, test)
    scores = {
        "log-likelihood": float(found.mean()),
        "true": None if truth is None else float(truth.mean()),
        "gap": None if truth is None else float(np.mean(truth - found)),
        "validation": tried,
        "rate": RATES[best],
        "parameters": density.count_params(),
        "seconds": round(seconds, 1),
        "milliseconds": step,
    }
    about = {"pair": pair, "seed": seed, "group": flow, **provenance({"quick": quick})}
    return {**about, "scores": scores}


def run_all(pairs, seeds, folder, *, quick=False, jobs=1, data_dir=None):
    """Run what `runs.jsonl` in the folder lacks; return how many failed."""
    every = [(pair, seed, flow) for pair in pairs for flow in FLOWS for seed in seeds]

    def shown(record):
        return f"{record['scores']['log-likelihood']:.4f} nats"

    return run_tasks(run, every, (quick,), folder, jobs, shown)
