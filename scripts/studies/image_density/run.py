"""Densities of MNIST images by flows, in bits per dimension, at equal minutes of training.

A task is a method and a seed. Pixels are dequantized uniformly and pass a logit, as in the papers
that the figures are compared with; both are part of the density, so bits are those of the grey
levels. Every task has a process of its own, and `runs.jsonl` a line for each.
"""

import functools
import math
import time

import keras
import numpy as np
from keras import ops

import tfp_ibnn as ibnn
from lib import data, provenance
from lib.tasks import run_tasks

flows, layers = ibnn.flows, keras.layers
PAIRS = {"mnist": ("MNIST",)}
VALIDATION, LEVELS, MARGIN = 10_000, 256, 1e-6


class LogitBijector(flows.FlowBijector):
    """y = (sigmoid(x) - margin) / (1 - 2 margin), which inverts a logit of y in [0, 1]."""

    def forward_and_log_det(self, x):
        slopes = ops.log_sigmoid(x) + ops.log_sigmoid(-x) - math.log1p(-2 * MARGIN)
        return (ops.sigmoid(x) - MARGIN) / (1 - 2 * MARGIN), ops.sum(slopes, axis=-1)

    def _inverse(self, y):
        below, above = (MARGIN + (1 - 2 * MARGIN) * part for part in (y, 1 - y))
        return ops.log(below) - ops.log(above)


class Logit(flows.Flow):
    """Map logits to [0, 1], with a margin at both ends."""

    def bijector(self, condition=None):
        return LogitBijector(dtype=self.dtype)


def convolutions(channels, filters, blocks=2, dtype="mixed_bfloat16"):
    """Return a residual network of images with so many channels.

    A coupling is invertible, and its log-determinant exact, whatever its network computes in.
    """
    layer = {"dtype": dtype}
    convolve = functools.partial(layers.Conv2D, filters, padding="same", **layer)
    inputs = keras.Input((None, None, channels))
    x = convolve(kernel_size=3)(inputs)
    for _ in range(blocks):
        change = convolve(kernel_size=3, activation="elu")(layers.Activation("elu", **layer)(x))
        x = layers.Add(**layer)([x, convolve(kernel_size=1)(change)])
        x = layers.LayerNormalization(**layer)(x)
    return keras.Model(inputs, layers.Activation("elu", dtype="float32")(x))


def masks(channels):
    """Return which channels of 2 x 2 blocks a coupling keeps: a checkerboard, rows, columns."""
    patterns = [True, False, False, True], [True, True, False, False], [True, False, True, False]
    return [np.repeat(pattern, channels // 4).tolist() for pattern in patterns]


def realnvp(steps=8, filters=64, channels=4):
    """Return couplings of 2 x 2 blocks, each half of every mask moved in turn."""
    options = {"network": convolutions(channels // 2, filters), "event_ndims": 3}
    found = []
    for step in range(steps):
        mask = masks(channels)[step // 2 % 3]
        coupling = flows.AffineCoupling(mask=mask, swap=bool(step % 2), **options)
        found += [coupling, flows.ActNorm()]
    return found


def glow(kind=flows.AffineCoupling, steps=8, filters=64, channels=4, **options):
    """Return steps of Glow, with couplings of a kind; data pass ActNorm first."""
    options |= {"network": convolutions(channels // 2, filters), "event_ndims": 3}
    found = []
    for _ in range(steps):
        found += [kind(**options), flows.Inverse(flows.InvertibleConv1x1()), flows.ActNorm()]
    return found


def continuous(steps=4, filters=64, channels=4):
    """Return a continuous flow of images."""
    options = {"trace": "hutchinson", "event_ndims": 3, "steps": steps}
    options["network"] = convolutions(channels + 1, filters, dtype="float32")
    return [flows.Continuous(**options)]


def scales(level, **options):
    """Return flows of images of 28 x 28: of blocks of 2 x 2, and of half of those again."""
    coarser = flows.Squeeze(level(channels=8, **options))
    return [flows.Squeeze(level(channels=4, **options), [coarser])]


def stacked(make, count, **options):
    """Return flows of vectors with ActNorm between them, every second one turned round."""
    return [f for i in range(count) for f in (make(bool(i % 2), **options), flows.ActNorm())]


def masked(reverse, hidden):
    return flows.MaskedAutoregressive(hidden, reverse, limit=3.0)


def masked_splines(reverse, hidden):
    return flows.Inverse(flows.SplineAutoregressive(hidden, reverse, interval=4.0, limit=3.0))


def residual(_, hidden):
    return flows.Inverse(flows.Residual(hidden, log_det="unbiased"))


SPLINES = {"level": glow, "kind": flows.SplineCoupling, "interval": 4.0}
AUTOREGRESSIVE = {"make": masked_splines, "count": 1, "hidden": 512}
METHODS = {  # whether of images or of vectors; flows; their options; learning rate
    "MADE": (False, stacked, {"make": masked, "count": 1, "hidden": 1024}, 1e-3),
    "MAF": (False, stacked, {"make": masked, "count": 5, "hidden": 1024}, 1e-3),
    "RealNVP": (True, scales, {"level": realnvp}, 2e-3),
    "RealNVP, 128 filters": (True, scales, {"level": realnvp, "filters": 128}, 2e-3),
    "Glow": (True, scales, {"level": glow}, 2e-3),
    "splines": (True, scales, SPLINES, 2e-3),
    "autoregressive splines": (False, stacked, AUTOREGRESSIVE, 3e-3),
    "continuous": (True, scales, {"level": continuous}, 2e-3),
    "residual": (False, stacked, {"make": residual, "count": 8, "hidden": 512}, 3e-3),
}
QUICK = {"count": 1, "hidden": 8, "steps": 2, "filters": 4}


def load(seed, data_dir=None, quick=False):
    """Return training, validation and test images (count, 28, 28, 1) of whole numbers."""
    if quick:  # made up, so that no data are needed
        rng = np.random.default_rng(seed)
        shade = rng.integers(LEVELS, size=(96, 28, 28, 1)) * (rng.uniform(size=(96, 1, 1, 1)) < 0.5)
        return np.split(shade.astype("float32"), 3)
    (x, _), (test, _) = data.load("mnist", data_dir)
    order = np.random.default_rng(seed).permutation(len(x))
    held_out, rest = order[:VALIDATION], order[VALIDATION:]
    return [part.astype("float32") for part in (x[rest], x[held_out], test)]


def density(method, train, quick=False):
    """Return the model, ready to be compiled, and begun where the logits have mean 0, scale 1."""
    _, make, options, *_ = METHODS[method]
    if quick:
        options = options | {key: QUICK[key] for key in _names(options)}
    model = ibnn.FlowDensity(
        [*make(**options), flows.Inverse(flows.ActNorm()), Logit(), flows.Dequantize(LEVELS)]
    )
    model.build((None, *train.shape[1:]))
    model.scale.assign([LEVELS] * train.shape[-1])  # to [0, 1], for the logit
    model.adapted.assign(1.0)
    some = train[:5000]
    uniform = np.random.default_rng(0).uniform(size=some.shape)
    *_, standardize, logit = model.flows
    logits = logit.inverse_and_log_det(((some + uniform) / LEVELS).astype("float32"))[0]
    standardize.flow.adapt(logits)
    return model


def _names(options):
    return ("steps", "filters") if "level" in options else ("count", "hidden")


class Clock(keras.callbacks.Callback):
    """Let the learning rate fall by a cosine over some minutes, and stop before they are over."""

    def __init__(self, rate, begun, minutes):
        super().__init__()
        self.rate, self.begun, self.seconds = rate, begun, 60 * minutes
        self.last = self.longest = 0.0

    def on_epoch_begin(self, epoch, logs=None):
        self.last = time.perf_counter()
        part = min(1.0, (self.last + self.longest / 2 - self.begun) / self.seconds)
        warm = min(1.0, (epoch + 1) / 3)
        self.model.optimizer.learning_rate = warm * self.rate * math.cos(math.pi / 2 * part) ** 2

    def on_epoch_end(self, epoch, logs=None):
        now = time.perf_counter()
        # The first epoch compiles, and tells little of the others.
        self.longest = max(self.longest, now - self.last) if epoch else 0.0
        if now + self.longest - self.begun > self.seconds:
            self.model.stop_training = True


def run(pair, seed, method, quick=False, data_dir=None, minutes=10.0):
    """Run one task; return the record. Quick runs only show that it works."""
    begun = time.perf_counter()
    of_images, *_, rate = METHODS[method]
    batch = 16 if quick else 512 if of_images else 128
    parts = load(seed, data_dir, quick)
    train, held_out, test = parts if of_images else (x.reshape(len(x), -1) for x in parts)
    keras.utils.set_random_seed(seed)
    model = density(method, train, quick)
    model.compile(keras.optimizers.Adam(rate))
    best = keras.callbacks.EarlyStopping(
        "val_bits_per_dimension", patience=10**6, mode="min", restore_best_weights=True
    )
    history = model.fit(
        train,
        validation_data=(held_out,),
        batch_size=batch,
        epochs=2 if quick else 10**6,
        verbose=0,
        callbacks=[Clock(rate, begun, minutes), best, keras.callbacks.TerminateOnNaN()],
    ).history
    seconds = time.perf_counter() - begun
    # As in validation, which is compiled; `log_prob` would not be.
    bits = model.evaluate(test, batch_size=batch, verbose=0, return_dict=True)
    scores = {
        "bits": float(bits["bits_per_dimension"]),
        "validation": float(best.best),
        "training": float(history["bits_per_dimension"][best.best_epoch]),
        "parameters": model.count_params(),
        "epochs": len(history["loss"]),
        "best epoch": best.best_epoch + 1,
        "seconds": round(seconds, 1),
    }
    curve = [round(float(value), 4) for value in history["val_bits_per_dimension"]]
    made = provenance({"quick": quick, "minutes": minutes})
    return {"pair": pair, "seed": seed, "group": method, **made, "scores": scores, "curve": curve}


def run_all(pairs, seeds, folder, *, quick=False, jobs=1, data_dir=None, minutes, methods):
    """Run what `runs.jsonl` in the folder lacks; return how many failed."""
    methods = methods or list(METHODS)
    if unknown := set(methods) - METHODS.keys():
        raise SystemExit(f"--methods must be some of {', '.join(METHODS)}; got {unknown.pop()}")
    every = [(pair, seed, method) for pair in pairs for seed in seeds for method in methods]

    def shown(record):
        scores = record["scores"]
        return f"{scores['bits']:.4f} bits, {scores['epochs']} epochs, {scores['seconds']:.0f} s"

    return run_tasks(run, every, (quick, data_dir, minutes), folder, jobs, shown)
