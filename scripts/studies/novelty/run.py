"""Classes that a network has never seen, and other inputs unlike its training data.

A task is a group of methods for a problem and a seed: Fashion-MNIST without a class, or CIFAR-10
without cats and ships. Test data serves for nothing but the scores; from which uncertainty on an
image is called a new class is decided on validation data. `results/novelty/PLAN.md` has the plan.
"""

import time

import keras
import numpy as np

import tfp_ibnn as ibnn
from lib import data, provenance, shifts
from lib.networks import lenet, mlp, posterior_map, vgg16
from lib.probabilities import nll
from lib.tasks import run_tasks
from studies.methods.run import CORRUPTIONS, Problem

CIFAR, HELD_OUT = ("cifar_vgg16", "cifar_lenet"), (3, 8)  # cats and ships
PAIRS = {  # the data set, left-out classes, epochs, batch size, validation images, precision
    "cifar_vgg16": ("cifar10", HELD_OUT, 30, 128, 2000, "mixed_bfloat16"),
    "cifar_lenet": ("cifar10", HELD_OUT, 30, 128, 2000, "float32"),
}
PAIRS |= {
    f"fashion-{c}": ("fashion_mnist", (c,), 10, 128, 4000, "float32") for c in (7, *range(7), 8, 9)
}
DRAWS, FEATURE_DRAWS, MEMBERS, DROPOUT = 32, 8, 3, 0.2
BANK, UNKNOWN, BATCH = 10_000, 1000, 500  # training images for features; images of an OOD set
FEATURE_SCORES = ("energy", "mahalanobis", "relative_mahalanobis", "knn", "vim")
INSIDE, SHOWN = ("small image inside", "clothing inside"), 24
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class Novelty(Problem):
    """Data without some classes, what is unlike it, and networks trained on it."""

    def __init__(self, pair, seed, quick=False, data_dir=None):
        self.pair, self.seed, self.draws, self.feature_draws = pair, seed, DRAWS, FEATURE_DRAWS
        self.name, left_out, self.epochs, self.batch_size, held, self.policy = PAIRS[pair]
        splits, maximum = data.load(self.name, data_dir), 16 if self.name == "digits" else 255
        (x, y), (x_test, y_test) = (((x / maximum).astype("float32"), y) for x, y in splits)
        labels = np.setdiff1d(np.arange(10), left_out)
        order = np.random.default_rng(seed).permutation(np.flatnonzero(np.isin(y, labels)))
        parts = [(x[index], y[index]) for index in (order[held:], order[:held])]
        is_known, few = np.isin(y_test, labels), 100 if quick else None
        parts.append((x_test[is_known], y_test[is_known]))
        parts = [(x[:few], np.searchsorted(labels, y[:few])) for x, y in parts]
        self.train, self.validation, self.test = parts
        self.classes, self.unknown = len(labels), {"left out": x_test[~is_known]}
        if self.name == "cifar10":
            self.unknown |= others(self.test[0], few or UNKNOWN, data_dir)
        self.unknown["left out"] = self.unknown["left out"][: few or UNKNOWN]
        if quick:
            self.epochs, self.draws, self.feature_draws = 1, 4, 2

    def build(self, seed, dropout=0.0):
        """Return a network as `seed` starts it."""
        keras.utils.set_random_seed(seed)
        shape, options = self.train[0].shape[1:], {"dropout": dropout}
        if self.name == "digits":
            return mlp(shape, self.classes, hidden=(64, 64), **options)
        if self.pair != "cifar_vgg16":
            return lenet(shape, self.classes, **options)
        options["preprocessing"] = [ibnn.data.RandomShift(4), ibnn.data.RandomMirror()]
        return vgg16(shape, self.classes, **options)

    def trained(self, number=0, posterior=None, dropout=0.0):
        """Return a trained network, in single precision; `posterior` makes that of its layers."""

        def made(policy):
            keras.config.set_dtype_policy(policy)
            model, size = self.build(100 * self.seed + number, dropout), len(self.train[1])
            if posterior is not None:
                model = ibnn.to_stochastic(model, posterior(), size, seed=self.seed)
            keras.config.set_dtype_policy("float32")
            return model

        if self.policy == "float32":
            return self.fit(made("float32"))
        rate = keras.optimizers.schedules.CosineDecay(0.05, self.epochs * self.steps)
        optimizer = keras.optimizers.SGD(rate, 0.9, nesterov=True, weight_decay=0.01)
        if posterior is not None:
            optimizer = ibnn.two_speed(optimizer, 0.05)  # no decay of posteriors
        model, copy = self.fit(made(self.policy), optimizer=optimizer), made("float32")
        copy.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        copy.set_weights(model.get_weights())
        return copy

    def scores(self, posterior, networks):
        """Return the scores of predictions, and of the features of `networks`, one per draw."""
        if not isinstance(posterior, ibnn.MonteCarlo):
            posterior = ibnn.MonteCarlo(posterior, samples=self.draws, seed=0)

        def measures(x):
            found = posterior.predict(x, batch_size=BATCH, verbose=0)
            mean = found["mean"].astype("float64")
            # 1 - p_max, with all its digits.
            doubt = np.minimum(np.sort(mean, axis=1)[:, :-1].sum(axis=1), 1 - 1 / self.classes)
            kept = {"-log p_max": -np.log1p(-doubt), "entropy": found["entropy"]}
            if posterior.samples > 1:
                kept |= {"total variance": found["total_variance"], "epistemic": found["epistemic"]}
            return mean, kept

        x, y = self.test
        (mean, known), (_, held) = measures(x), measures(self.validation[0])
        means, unknown = {"known": mean}, {}
        for name, x in self.unknown.items():
            means[name], unknown[name] = measures(x)
        wrong = mean.argmax(axis=1) != y
        row = {"accuracy": float(1 - wrong.mean()), "NLL": nll(mean, y), "draws": posterior.samples}
        row |= {"OOD": {}, "decisions": {}}
        for key, own in known.items():
            row["OOD"][key] = {name: ood(own, found[key]) for name, found in unknown.items()}
            new = unknown["left out"][key]
            row["decisions"][key] = decisions(own, new, held[key], wrong)
        if self.name == "cifar10":  # for the figure
            names = ("known", *INSIDE)
            row["shown"] = {name: means[name][:SHOWN].round(3).tolist() for name in names}
        if networks and self.name != "fashion_mnist":
            row["OOD"] |= self.of_features(networks)
        return row

    def of_features(self, networks):
        """Return the scores of features: noise off, averaged, and as averaged scores of draws."""
        kept = min(BANK, len(self.train[1]))
        tested = [self.test[0], *self.unknown.values()]
        x = np.concatenate([self.train[0][:kept], *tested])
        ends = np.cumsum([len(part) for part in tested])[:-1]
        plain, kinds = networks, {}
        if ibnn.stochastic_layers(networks[0]):
            plain = [ibnn.to_deterministic(networks[0])]
            options = {"head": "point", "return_samples": True, "seed": 0}
            sampled = ibnn.MonteCarlo(body(networks[0]), self.feature_draws, **options)
            draws = sampled.predict(x, batch_size=BATCH, verbose=0)["samples"].swapaxes(0, 1)
            kinds["noise off"] = body(plain[0]).predict(x, BATCH, verbose=0)[None]
        else:
            draws = np.stack([body(model).predict(x, BATCH, verbose=0) for model in plain])
        if len(draws) > 1:
            kinds |= {"averaged features": draws.mean(axis=0)[None], "averaged scores": draws}
        heads, found = [head(model) for model in plain], {}
        for kind, features in (kinds or {"features": draws}).items():
            for score in FEATURE_SCORES:
                each = []
                for number, f in enumerate(features):
                    model = heads[number % len(heads)]
                    detector = ibnn.OODDetector(model, score).fit(f[:kept], self.train[1][:kept])
                    each.append(detector.score(f[kept:]))
                known, *unknown = np.split(np.mean(each, axis=0), ends)
                values = {n: ood(known, u) for n, u in zip(self.unknown, unknown, strict=True)}
                found[f"{score}, {kind}"] = values
        return found


def body(model):
    """Return a network up to the input of its last layer."""
    return keras.Model(model.inputs, model.layers[-1].input)


def head(model):
    """Return the last layer of a network, as a model of features."""
    last = model.layers[-1]
    made = keras.Sequential([keras.Input(last.input.shape[1:]), keras.layers.Dense(last.units)])
    made.set_weights(last.get_weights())
    made.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return made


def others(known, count, data_dir=None):
    """Return OOD inputs of CIFAR-10: of other data, out of place, and corrupted known images."""
    found, pixels = {}, np.round(255 * known[:count]).astype("uint8")
    for name in ("fashion_mnist", "mnist"):
        images = data.load(name, data_dir)[1][0][:count]
        found[name] = shifts.convert_images(images, name, "cifar10") / 255
    found |= out_of_place(known[:count], known[-count:], data_dir)
    for name in CORRUPTIONS:
        found[name] = (shifts.corrupt(pixels, name, 3) / 255).astype("float32")
    return found


def out_of_place(backgrounds, objects, data_dir=None, seed=0):
    """Return images with another one in them, of half its size, and with a piece of clothing."""
    random, count = np.random.default_rng(seed), len(backgrounds)
    clothes = data.load("fashion_mnist", data_dir)[1][0][:count] / 255
    clothes = np.repeat(clothes, 3, axis=-1).astype("float32")
    found = {}
    for name, things in zip(INSIDE, (objects, clothes), strict=True):
        side = things.shape[1] // 2
        small = things.reshape(-1, side, 2, side, 2, 3).mean(axis=(2, 4))
        images = backgrounds.copy()
        places = random.integers(0, 33 - side, size=(count, 2))
        for image, thing, (top, left) in zip(images, small, places, strict=True):
            window = image[top : top + side, left : left + side]
            shown = thing.max(axis=-1, keepdims=True) > (0.1 if things is clothes else -1)
            window[:] = np.where(shown, thing, window)
        found[name] = images
    return found


def ood(known, unknown):
    """Return AUROC, AUPR and FPR at 95 %."""
    return [round(value, 5) for value in ibnn.metrics.ood_scores(known, unknown).values()]


def decisions(known, unknown, held, wrong):
    """Return the accuracy by share answered, and what calling the uncertain a new class does."""
    order = np.concatenate([known, unknown])
    losses = np.concatenate([wrong, np.ones(len(unknown))])
    risk = ibnn.metrics.risk_coverage(order, losses).risk
    limit = np.quantile(held, 0.95, method="higher")
    shares = {"found": unknown > limit, "refused": known > limit}
    shares["accuracy"] = np.concatenate([~shares["refused"] & ~wrong, shares["found"]])
    found = {name: float(values.mean()) for name, values in shares.items()}
    return found | {"answered": [round(1 - risk[int(s * len(order)) - 1], 5) for s in SHARES]}


def methods(problem, group):
    """Yield the names of a group's methods, and what makes a posterior and its networks."""
    network = problem.pair.removeprefix("cifar_") if problem.pair in CIFAR else None

    def noisy(posterior):
        model = problem.trained(0, posterior)
        return model, [model]

    def laplace(subset):
        found = ibnn.Laplace(members[0], subset, "kron", prior_precision="marglik")
        return found.fit(*problem.train, batch_size=BATCH, verbose=0), []

    def dropout():
        options = {"samples": problem.draws, "dropout": True, "seed": 0}
        return ibnn.MonteCarlo(problem.trained(0, dropout=DROPOUT), **options), []

    if group == "networks":
        members = [problem.trained(number) for number in range(MEMBERS)]
        yield "deterministic", lambda: (ibnn.DeepEnsemble(members[:1]), members[:1])
        yield f"ensemble of {MEMBERS}", lambda: (ibnn.DeepEnsemble(members), members)
        yield "Laplace, last layer", lambda: laplace("last_layer")
        if network is None:
            yield "Laplace, all", lambda: laplace("all")
    for name, recipe in {"Gaussian": ibnn.NormalAffine, "flow": ibnn.NormalPlanar1d}.items():
        if group == name.lower():
            yield name, lambda: noisy(lambda: posterior_map(network, group))
        elif group == "noise":
            yield name, lambda recipe=recipe: noisy(recipe)
    if group == "noise":
        yield "mean-field VI", lambda: noisy(ibnn.MeanField)
        yield "MC dropout", dropout


def groups(pair):
    return ("networks", "gaussian", "flow") if pair in CIFAR else ("networks", "noise")


def run(pair, seed, group, quick=False, data_dir=None):
    """Run one task; return the record. Quick runs only show that it works."""
    begun = time.perf_counter()
    problem, found = Novelty(pair, seed, quick, data_dir), {}
    for name, make in methods(problem, group):
        found[name] = problem.scores(*make())
    names = ("epochs", "batch_size", "policy", "draws", "feature_draws")
    settings = {"quick": quick} | {name: getattr(problem, name) for name in names}
    about = {"pair": pair, "seed": seed, "group": group, **provenance(settings)}
    return {**about, "seconds": round(time.perf_counter() - begun, 1), "methods": found}


def run_all(pairs, seeds, folder, *, quick=False, jobs=1, data_dir=None):
    """Run what `runs.jsonl` in the folder lacks; return how many failed."""

    def shown(record):
        rows = record["methods"].items()
        texts = [f"{name} {row['OOD']['entropy']['left out'][0]:.3f}" for name, row in rows]
        return f"AUROC {', '.join(texts)}; {record['seconds']:.0f} s"

    every = [(pair, seed, group) for seed in seeds for pair in pairs for group in groups(pair)]
    return run_tasks(run, every, (quick, data_dir), folder, jobs, shown)
