"""One network on one data set under every method of the library, none of them tuned.

A task is a group of methods for a pair of data and network, and a seed. The tasks `member0` to
`member4` train networks that differ in their start, and keep them; most others begin with these.
Test data serves for nothing but the scores; temperatures are fitted on validation data. Every task
has a process of its own, and `runs.jsonl` a line for each.
"""

import time
from contextlib import nullcontext
from pathlib import Path

import keras
import numpy as np
from sklearn import datasets

import tfp_ibnn as ibnn
from lib import files, provenance, shifts
from lib.networks import lenet, mlp, vgg16
from lib.parts import images, ood_images, packaged
from lib.probabilities import best_temperature, entropy, nll, scaled
from lib.scan import can_scan, scan
from lib.tasks import run_tasks

DRAWS, BATCH, MEMBERS = 32, 500, 5
PAIRS = {  # titles, epochs, batch size, the rate of SGHMC, the data set
    "fashion_lenet": ("Fashion-MNIST 55,000, LeNet", 30, 128, 0.05, "fashion_mnist"),
    "cifar_lenet": ("CIFAR-10 45,000, LeNet", 30, 128, 0.05, "cifar10"),
    "cifar_vgg16": ("CIFAR-10 45,000, MLP 64 on features of VGG16", 30, 128, 0.05, "cifar10"),
    "digits": ("digits 1,000, MLP 64-64", 60, 32, 0.05, "digits"),
}
VGG16_EPOCHS = 40
CORRUPTIONS = ("gaussian_noise", "defocus_blur", "contrast")


class Problem:
    """Data, network and training of a pair, drawn by a seed."""

    def __init__(self, pair, seed, quick=False, data_dir=None):
        _, self.epochs, self.batch_size, self.rate, self.name = PAIRS[pair]
        self.seed, self.draws, self.cycles = seed, DRAWS, 3
        if pair == "digits":
            parts = packaged(seed, datasets.load_digits, 1000, 300)
        else:
            parts = images(seed, data_dir, self.name, 55_000 if "fashion" in pair else 45_000, 5000)
        self.train, self.validation, self.test = parts
        if quick:
            few = [(x[:100], y[:100]) for x, y in (self.train, self.validation, self.test)]
            self.train, self.validation, self.test = few
            self.epochs, self.draws, self.cycles = 1, 4, 1
        self.others, self.shifted_labels = self._others(data_dir), self.test[1]

    def inputs(self):
        """Return all inputs: of training, validation and test, then OOD and corrupted ones."""
        ood, corrupted = self.others
        return [self.train[0], self.validation[0], self.test[0], ood, *corrupted]

    def on_features(self, features):
        """Put features in the place of the inputs, in one scale for all of them."""
        train, validation, test, ood, *corrupted = (x / features[0].std() for x in features)
        self.train, self.validation = (train, self.train[1]), (validation, self.validation[1])
        self.test, self.others = (test, self.test[1]), (ood, corrupted)

    def _others(self, data_dir):
        """Return OOD inputs, and the test inputs under corruptions; none of the digits."""
        if self.name == "digits":
            return None, []
        count = len(self.test[1])
        pixels = np.round(255 * self.test[0][: count // 5]).astype("uint8")
        changed = [shifts.corrupt(pixels, name, 3) / 255 for name in CORRUPTIONS]
        corrupted = [x.astype("float32") for x in changed]
        return ood_images(self.name, count, data_dir), corrupted

    @property
    def steps(self):
        """In an epoch."""
        return max(1, len(self.train[1]) // self.batch_size)

    def build(self, seed, dropout=0.0):
        """Return a network as `seed` starts it."""
        keras.utils.set_random_seed(seed)
        shape = self.train[0].shape[1:]
        if len(shape) == 1:
            hidden = (64, 64) if self.name == "digits" else (64,)
            return mlp(shape, hidden=hidden, dropout=dropout)
        return lenet(shape, dropout=dropout)

    def fit(self, model, epochs=None, rate=None, optimizer=None, callbacks=()):
        """Train by Adam, at a rate that falls to 0; or, at a rate that is given, by SGD."""
        epochs = epochs or self.epochs
        falling = keras.optimizers.schedules.CosineDecay(1e-3, epochs * self.steps)
        if optimizer is None and rate is None:
            optimizer = keras.optimizers.Adam(falling)
        optimizer = optimizer or keras.optimizers.SGD(rate, momentum=0.9, nesterov=True)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        batches = ibnn.data.ShuffledBatches(*self.train, self.batch_size, self.seed, True)
        callbacks = [batches.follow(), *callbacks]
        with scan(model, batches) if can_scan(batches) else nullcontext():
            model.fit(batches, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
        return model

    def scores(self, posterior, seconds):
        """Return what a model or a posterior over weights scores, and what it cost."""
        if not isinstance(posterior, ibnn.MonteCarlo):
            if isinstance(posterior, keras.Model) and not ibnn.stochastic_layers(posterior):
                posterior = ibnn.DeepEnsemble([posterior])
            posterior = ibnn.MonteCarlo(posterior, samples=self.draws, seed=0)

        def predict(x):
            return posterior.predict(x, batch_size=BATCH, verbose=0)["mean"].astype("float64")

        held, test = predict(self.validation[0]), predict(self.test[0])
        begun = time.perf_counter()
        predict(self.test[0])
        seconds_test = time.perf_counter() - begun
        y, temperature = self.test[1], best_temperature(held, self.validation[1])
        ood, corrupted = self.others
        auroc = None if ood is None else ibnn.metrics.auroc(entropy(test), entropy(predict(ood)))
        shifted = [nll(predict(x), self.shifted_labels[: len(x)]) for x in corrupted]
        return {
            "accuracy": float(np.mean(test.argmax(-1) == y)),
            "NLL": nll(test, y),
            "NLL, T": nll(scaled(test, temperature), y),
            "Brier": float(ibnn.metrics.brier_score(test, y)),
            "ECE": float(ibnn.metrics.expected_calibration_error(test, y)),
            "AUROC": auroc,
            "NLL corrupted": float(np.mean(shifted)) if shifted else None,
            "T": temperature,
            "draws": posterior.samples,
            "fit (s)": round(seconds, 2),
            "prediction (s)": round(seconds_test, 2),
        }


def vgg16_features(problem):
    """Train a VGG16, and return what its convolutions make of all inputs."""
    keras.utils.set_random_seed(problem.seed)
    size = problem.train[0].shape[1:]
    changes = [ibnn.data.RandomShift(4), ibnn.data.RandomMirror()]
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = vgg16(size, preprocessing=changes)
    keras.config.set_dtype_policy("float32")
    epochs = 1 if problem.epochs == 1 else VGG16_EPOCHS
    rate = keras.optimizers.schedules.CosineDecay(0.05, epochs * problem.steps)
    optimizer = keras.optimizers.SGD(rate, 0.9, nesterov=True, weight_decay=5e-4)
    problem.fit(model, epochs, optimizer=optimizer)
    body = keras.Model(model.input, model.get_layer("flatten").output)
    return [body.predict(x, BATCH, verbose=0).astype("float32") for x in problem.inputs()]


def member(problem, kept, number):
    """Train and keep a network; the first one is the MAP."""
    begun = time.perf_counter()
    model = problem.fit(problem.build(100 * problem.seed + number))
    seconds = time.perf_counter() - begun
    with files.replacing(kept(number)) as temporary:
        model.save(temporary)
    return {"MAP": (model, seconds)} if number == 0 else {}


def ensembles(problem, models):
    """Average the kept networks; training them is what it costs."""
    for count in (3, MEMBERS):
        yield f"ensemble of {count}", lambda n=count: ibnn.DeepEnsemble(models[:n])


def laplace(problem, models):
    """Laplace approximations of the MAP."""
    fit = {"batch_size": BATCH, "verbose": 0}

    def fitted(subset, structure, **options):
        found = ibnn.Laplace(models[0], subset, structure, prior_precision="marglik", **options)
        return found.fit(*problem.train, **fit)

    yield "Laplace, last diag", lambda: fitted("last_layer", "diag")
    yield "Laplace, last Kronecker", lambda: fitted("last_layer", "kron")
    yield "Laplace, last full", lambda: fitted("last_layer", "full")
    yield "Laplace, last full, probit", lambda: fitted("last_layer", "full", link_approx="probit")
    yield "Laplace, last full, samples", lambda: fitted("last_layer", "full", pred_type="nn")
    yield "Laplace, all diag", lambda: fitted("all", "diag")
    yield "Laplace, all Kronecker", lambda: fitted("all", "kron")
    yield "Laplace, all Kronecker, samples", lambda: fitted("all", "kron", pred_type="nn")


def last_layer(problem, models):
    """Posteriors of the last layer under one prior: that of the largest marginal likelihood."""
    train, quiet = problem.train, {"verbose": 0}
    found = ibnn.Laplace(models[0], "last_layer", "full", prior_precision="marglik")
    found.fit(*train, batch_size=BATCH, **quiet)
    prior = {"prior_scale": float(found.prior_precision) ** -0.5}
    steps = {"steps": 20 if problem.epochs == 1 else 2000}
    made = {}

    def gaussian():
        made["full"] = ibnn.GaussianVI(models[0], **prior).fit(*train, seed=0, **quiet)
        return made["full"]

    def refined(flows):
        options = {"validation": problem.validation, **steps, **quiet}
        return ibnn.refine(made["full"], flows, *train, **options)

    def couplings():
        return [ibnn.flows.SplineCoupling(swap=number % 2 == 1) for number in range(4)]

    yield "VI, last full", gaussian
    yield (
        "VI, last diag",
        lambda: ibnn.GaussianVI(models[0], covariance="diag", **prior).fit(*train, seed=0, **quiet),
    )
    yield "refined by 4 spline couplings", lambda: refined(couplings())
    yield "refined by 10 radial flows", lambda: refined([ibnn.flows.Radial() for _ in range(10)])
    yield "HMC, last", lambda: ibnn.LastLayerHMC(models[0], **prior).fit(*train, seed=0, **quiet)


def swag(problem, models):
    """SWAG for half as many epochs as the training had, and as long without it."""
    half, rate = max(2, problem.epochs // 2), problem.rate / 5
    kept = {}

    def swagged(number):
        callback = ibnn.SWAG(rank=10)
        copy = keras.models.clone_model(models[number])
        copy.set_weights(models[number].get_weights())
        keras.utils.set_random_seed(number)
        problem.fit(copy, half, rate, callbacks=[callback])
        kept.setdefault("trained on", copy)
        kept[number] = callback.posterior()
        return kept[number]

    yield "SWAG", lambda: swagged(0)
    yield "trained on, as long as SWAG", lambda: kept["trained on"]
    yield "MultiSWAG of 3", lambda: ibnn.WeightMixture([kept[0], swagged(1), swagged(2)])


def sghmc(problem, models):
    """Cyclical SGHMC from scratch, for three times as many epochs, at two temperatures."""
    for temperature in (1.0, 0.01):

        def sampled(temperature=temperature):
            cycle = problem.epochs * problem.steps
            optimizer = ibnn.SGHMC(
                ibnn.CosineCycles(problem.rate, cycle, 0.8 if problem.epochs > 1 else 0.0),
                train_size=len(problem.train[1]),
                prior_scale=0.2,
                temperature=temperature,
                seed=problem.seed,
            )
            kept = ibnn.Snapshots()
            model = problem.build(100 * problem.seed)
            problem.fit(
                model, problem.cycles * problem.epochs, optimizer=optimizer, callbacks=[kept]
            )
            return kept.posterior()

        yield f"cyclical SGHMC, temperature {temperature:g}", sampled


def dropout(problem, models):
    """A network trained with dropout, which prediction leaves on."""

    def trained():
        model = problem.fit(problem.build(100 * problem.seed, dropout=0.2))
        return ibnn.MonteCarlo(model, samples=problem.draws, dropout=True, seed=0)

    yield "MC dropout", trained


def stochastic(posterior):
    """Return a group with a posterior over z, trained from scratch for as many epochs."""

    def group(problem, models):
        def trained():
            model = problem.build(100 * problem.seed)
            size = len(problem.train[1])
            return problem.fit(ibnn.to_stochastic(model, posterior(), size, seed=problem.seed))

        yield f"{posterior.__name__} of z", trained

    return group


GROUPS = {  # and how many of the kept networks they need; the longest first
    "sghmc": (sghmc, 0),
    "laplace": (laplace, 1),
    "last_layer": (last_layer, 1),
    "flow": (stochastic(ibnn.NormalPlanar1d), 0),
    "gaussian": (stochastic(ibnn.NormalAffine), 0),
    "dropout": (dropout, 0),
    "swag": (swag, 3),
    "ensembles": (ensembles, MEMBERS),
}
TASKS = ["features", *(f"member{number}" for number in range(MEMBERS)), *GROUPS]


def wait_for(*paths, hours=2):
    """Return when the files are there, which other tasks make."""
    end = time.monotonic() + 3600 * hours
    while not all(path.exists() for path in paths):
        if time.monotonic() > end:
            raise TimeoutError(f"{paths[0]} was not made within {hours} hours.")
        time.sleep(1)


def run(pair, seed, group, folder, quick=False, data_dir=None):
    """Run one task; return the record. Quick runs only show that it works."""

    def kept(number):
        return Path(folder) / "models" / f"{pair}-{seed}-{number}{'-quick' * quick}.keras"

    problem, found = Problem(pair, seed, quick, data_dir), {}
    kept(0).parent.mkdir(parents=True, exist_ok=True)
    features = kept("features").with_suffix(".npz")
    if group == "features":
        with files.replacing(features) as temporary:
            np.savez(temporary, *vgg16_features(problem))
    elif pair == "cifar_vgg16":
        wait_for(features)
        with np.load(features) as arrays:
            problem.on_features([arrays[name] for name in arrays.files])
    if group.startswith("member"):
        made = member(problem, kept, int(group.removeprefix("member")))
        found = {name: problem.scores(*pair) for name, pair in made.items()}
    elif group in GROUPS:
        methods, needed = GROUPS[group]
        wait_for(*map(kept, range(needed)))
        models = [keras.models.load_model(kept(number)) for number in range(needed)]
        for name, make in methods(problem, models):
            begun = time.perf_counter()
            posterior = make()
            found[name] = problem.scores(posterior, time.perf_counter() - begun)
    about = {"pair": pair, "seed": seed, "group": group, **provenance({"quick": quick})}
    return {**about, "methods": found}


def run_all(pairs, seeds, folder, *, quick=False, jobs=1, data_dir=None):
    """Run what `runs.jsonl` in the folder lacks; return how many failed."""

    def shown(record):
        return ", ".join(f"{key}: NLL {row['NLL']:.4f}" for key, row in record["methods"].items())

    every = [(pair, seed, group) for group in TASKS for pair in pairs for seed in seeds]
    every = [task for task in every if task[2] != "features" or task[0] == "cifar_vgg16"]
    return run_tasks(run, every, (folder, quick, data_dir), folder, jobs, shown)
