"""Variational autoencoders of binarised MNIST with flow posteriors.

A task is a pair of networks, a seed and a posterior. The images are the same for all seeds, which
draw weights and noise. Every task has a process of its own, and `runs.jsonl` a line for each.
"""

import time

import keras
import numpy as np

import tfp_ibnn as ibnn
from lib import data, provenance
from lib.tasks import run_tasks

flows, layers = ibnn.flows, keras.layers
PAIRS = {  # titles, and the size of z
    "conv": ("gated convolutions", 64),
    "mlp": ("one layer of 400 maxout units", 40),
}
BATCH, EPOCHS, RATE = 100, 400, 5e-4
WARM_UP, FALL = 0.25, 0.4  # shares of the run: of the first beta rises, in the last the rate falls
DRAWS = 10  # of z for each test image, for the bound


def planar(count):
    return [flows.Planar() for _ in range(count)]


POSTERIORS = {
    "conv": {
        "Gaussian": lambda: [],
        "16 planar": lambda: planar(16),
        "4 IAF": lambda: [
            flows.InverseAutoregressive(hidden=1280, reverse=bool(i % 2)) for i in range(4)
        ],
        "16 Sylvester": lambda: [flows.Sylvester(units=32) for _ in range(16)],
    },
    "mlp": {
        "Gaussian": lambda: [],
        **{f"{count} planar": lambda count=count: planar(count) for count in (10, 20, 40, 80)},
    },
}


def load(data_dir=None):
    """Return 50,000 training, 10,000 validation and 10,000 test images (28, 28, 1) of 0 and 1.

    A pixel is 1 where a uniform number is below its grey level / 255. The numbers are those of
    numpy's `default_rng(0).random(dtype="float32")`, in the order of the files, training images
    first; of these the last 10,000 are for validation.
    """
    rng, found = np.random.default_rng(0), []
    for x, _ in data.load("mnist", data_dir):
        grey = x.reshape(-1, 28, 28, 1)
        found.append(255 * rng.random(grey.shape, dtype="float32") < grey)
    train, test = (x.astype("float32") for x in found)
    return train[:50_000], train[50_000:], test


def coders(pair, size):
    """Return encoder and decoder of a pair for z of a size."""
    x, z = keras.Input((28, 28, 1)), keras.Input((size,))
    if pair == "mlp":
        h, logits = maxout(layers.Flatten()(x)), layers.Dense(784)(maxout(z))
        return keras.Model(x, h), keras.Model(z, layers.Reshape((28, 28, 1))(logits))
    h, logits = x, layers.Reshape((1, 1, size))(z)
    for filters, strides in ((32, 1), (32, 2), (64, 1), (64, 2), (64, 1)):
        h = gated(layers.Conv2D, h, filters, strides=strides)
    h = gated(layers.Conv2D, h, 256, 7, padding="valid")
    logits = gated(layers.Conv2DTranspose, logits, 64, 7, padding="valid")
    for filters, strides in ((64, 1), (32, 2), (32, 1), (32, 2), (32, 1)):
        logits = gated(layers.Conv2DTranspose, logits, filters, strides=strides)
    logits = layers.Conv2D(1, 1)(logits)
    return keras.Model(x, layers.Flatten()(h)), keras.Model(z, logits)


def gated(kind, x, filters, size=5, padding="same", **options):
    """Return h * sigmoid(g), where a convolution gives h and g."""
    return keras.ops.glu(kind(2 * filters, size, padding=padding, **options)(x))


def maxout(x, units=400, window=4):
    """Return units, each the largest of some linear functions of x."""
    pieces = layers.Reshape((window, units))(layers.Dense(window * units)(x))
    return layers.GlobalMaxPooling1D()(pieces)


class Schedule(keras.callbacks.Callback):
    """Let beta rise, the rate fall and the run end in time; keep the best weights after warm-up.

    Args:
        epochs: of the run.
        minutes: None, or those after which it ends too.
        begun: when they began.
    """

    def __init__(self, epochs, minutes=None, begun=None):
        super().__init__()
        self.epochs, self.seconds = epochs, minutes and 60 * minutes
        self.begun = time.perf_counter() if begun is None else begun
        self.best, self.best_epoch, self.weights, self.done = np.inf, 0, None, 0

    def share(self, epoch):
        """Return which share of the run is over after some epochs."""
        elapsed = (time.perf_counter() - self.begun) / self.seconds if self.seconds else 0
        return max(epoch / self.epochs, elapsed)

    def on_epoch_begin(self, epoch, logs=None):
        over = self.share(epoch)
        self.model.beta.assign(min(1.0, over / WARM_UP))
        self.model.optimizer.learning_rate = RATE * float(np.clip((1 - over) / FALL, 0.01, 1))

    def on_epoch_end(self, epoch, logs=None):
        self.done = epoch + 1
        bound = logs["val_reconstruction"] + logs["val_kl"]
        if not np.isfinite(logs["loss"]):
            raise RuntimeError(f"The loss of epoch {epoch + 1} is {logs['loss']}.")
        over = self.share(epoch + 1)
        self.model.stop_training = over >= 1
        if bound < self.best and (over >= WARM_UP or self.model.stop_training):
            self.best, self.best_epoch, self.weights = bound, epoch + 1, self.model.get_weights()
        if (epoch + 1) % 10 == 0 or over >= 1:
            seconds = time.perf_counter() - self.begun
            print(f"{self.model.name} {epoch + 1}: {bound:.2f}, {seconds:.0f} s", flush=True)


def run(pair, seed, method, quick=False, data_dir=None, epochs=None, minutes=None, weights=500):
    """Run one task; return the record. Quick runs only show that it works."""
    begun, parts = time.perf_counter(), load(data_dir)
    epochs = epochs or (2 if quick else EPOCHS)
    if quick:
        parts, weights = [x[:100] for x in parts], min(weights, 10)
    keras.utils.set_random_seed(seed)
    size, made = PAIRS[pair][1], POSTERIORS[pair][method]()
    name = f"{pair}_{method}_{seed}".replace(" ", "_")
    vae = ibnn.VAE(*coders(pair, size), size, made, seed=seed, name=name)
    vae.compile(keras.optimizers.Adamax(RATE))
    schedule = Schedule(epochs, minutes, begun)
    vae.fit(
        parts[0],
        batch_size=BATCH,
        epochs=epochs,
        verbose=0,
        callbacks=[schedule],
        validation_data=(parts[1],),
        validation_batch_size=1000,
    )
    vae.set_weights(schedule.weights)
    trained = time.perf_counter()
    scores = score(vae, parts[2], weights)
    scores |= {
        "validation": float(schedule.best),
        "epochs": schedule.done,
        "best epoch": schedule.best_epoch,
        "parameters": sum(int(np.prod(v.shape)) for v in vae.trainable_variables),
        "seconds": round(trained - begun, 1),
        "seconds of scores": round(time.perf_counter() - trained, 1),
    }
    options = {"quick": quick, "epochs": epochs, "minutes": minutes, "weights": weights}
    return {"pair": pair, "seed": seed, "group": method, **provenance(options), "scores": scores}


def score(vae, x, weights):
    """Return the bound and its parts, the importance-weighted NLL, and the latents in use.

    A latent is in use if its z at eps = 0 varies by more than 0.01 over the images (Burda et al.,
    arXiv 1509.00519).
    """
    terms = [vae.predict(x, batch_size=1000, verbose=0) for _ in range(DRAWS)]
    means = {k: float(np.mean([t[k] for t in terms], dtype=float)) for k in terms[0]}
    nll = vae.negative_log_likelihood(x, weights, batch_size=500)
    return {
        "-ELBO": sum(means.values()),
        **means,
        "NLL": float(nll.mean()),
        "active": int(np.sum(vae.encode(x).var(axis=0) > 0.01)),
    }


def run_all(pairs, seeds, folder, *, quick=False, jobs=1, data_dir=None, methods=None, **options):
    """Run what `runs.jsonl` in the folder lacks; return how many failed."""
    known = {name for pair in pairs for name in POSTERIORS[pair]}
    if unknown := set(methods or ()) - known:
        raise SystemExit(f"--methods must be some of {', '.join(known)}; got {unknown.pop()}")
    # The slowest first, so that none of them is left alone in the end.
    every = [
        (pair, seed, method)
        for seed in seeds
        for pair in pairs
        for method in reversed(POSTERIORS[pair])
        if methods is None or method in methods
    ]
    settings = (quick, data_dir, *(options.get(key) for key in ("epochs", "minutes")))
    settings += (options.get("weights") or 500,)

    def shown(record):
        scores = record["scores"]
        return f"-ELBO {scores['-ELBO']:.2f}, NLL {scores['NLL']:.2f}, epochs {scores['epochs']}"

    return run_tasks(run, every, settings, folder, jobs, shown)
