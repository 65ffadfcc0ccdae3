"""How far from the true posterior of a last layer are its approximations? NUTS is the truth.

A task is a problem and a seed: a network is trained on some of the data, then the posterior of its
last layer given others, under one prior for all methods, is drawn from by NUTS and approximated.
Every task has a process of its own, and `runs.jsonl` a line for each.
"""

import math
import time

import keras
import numpy as np
from scipy import stats
from scipy.special import logsumexp
from sklearn import datasets

import tfp_ibnn as ibnn
from lib import provenance
from lib.networks import mlp, vgg16
from lib.parts import images
from lib.tasks import run_tasks

layers, flows, diagnostics = keras.layers, ibnn.flows, ibnn.diagnostics
PAIRS = {  # titles, and examples of the last layer
    "fashion_50": ("Fashion-MNIST, LeNet, 210 weights, N = 50", 50),
    "fashion_1000": ("Fashion-MNIST, LeNet, 210 weights, N = 1,000", 1000),
    "fashion_40000": ("Fashion-MNIST, LeNet, 210 weights, N = 40,000", 40_000),
    "cifar_1000": ("CIFAR-10, VGG16, 210 weights, N = 1,000", 1000),
    "cifar_40000": ("CIFAR-10, VGG16, 210 weights, N = 40,000", 40_000),
    "diabetes_40": ("diabetes with learned noise, 34 weights, N = 40", 40),
    "diabetes_200": ("diabetes with learned noise, 34 weights, N = 200", 200),
    "z_digits": ("z of an MLP 64-16-10 on digits, 80 numbers, N = 200", 200),
    "z_moons": ("z of an MLP 2-16-16-2 on moons, 34 numbers, N = 60", 60),
    "z_gap": ("z of an MLP 2-16-16-1 on a sine with a gap, 34 numbers, N = 40", 40),
}
AGAIN = "NUTS again"
LOSS, Z_SCALE = keras.losses.SparseCategoricalCrossentropy(from_logits=True), 0.3
DRAWS, STEPS = 1000, 2000  # of each posterior, for predictions; of Adam, for every flow


def turns(kind, count):
    return [kind(swap=bool(number % 2)) for number in range(count)]


FLOWS = {
    "10 radial": lambda: [flows.Radial() for _ in range(10)],
    "10 planar": lambda: [flows.Planar() for _ in range(10)],
    "8 couplings": lambda: turns(flows.AffineCoupling, 8),
    "16 couplings": lambda: turns(flows.AffineCoupling, 16),
    "6 spline couplings": lambda: turns(flows.SplineCoupling, 6),
}


BY_DRAWS = "8 couplings, by draws of NUTS"  # maximum likelihood, not the ELBO


class Problem:
    """A trained network, the data of its last layer, and test data, drawn by a seed."""

    def __init__(self, pair, seed, quick=False, data_dir=None):
        self.seed, self.is_image, count = seed, not pair.startswith("diabetes"), PAIRS[pair][1]
        self.is_deep = pair.startswith("cifar")
        if self.is_image:
            name, others = ("cifar10", 10_000) if self.is_deep else ("fashion_mnist", 20_000)
            parts = images(seed, data_dir, name, others, count)
            self.others, self.train, self.test = parts
            self.test = tuple(part[:2000] for part in self.test)
        else:
            x, y = datasets.load_diabetes(return_X_y=True)
            order = np.random.default_rng(seed).permutation(len(y))
            x, y = (20 * x[order]).astype("float32"), (y[order, None] / 100).astype("float32")
            parts = zip(*(np.split(part, [120, 120 + count]) for part in (x, y)), strict=True)
            self.others, self.train, self.test = parts
        if quick:
            self.others, self.test = (tuple(p[:80] for p in x) for x in (self.others, self.test))
        epochs = 30 if self.is_deep else 10 if self.is_image else 300
        self.model = self._network(1 if quick else epochs)

    def _network(self, epochs):
        keras.utils.set_random_seed(self.seed)
        shape = self.others[0].shape[1:]
        if self.is_deep:
            deep = vgg16(shape)
            body = [keras.Model(deep.input, deep.get_layer("flatten").output)]
            body += [layers.Dense(20, "tanh")]
        elif self.is_image:
            body = [layers.Conv2D(6, 5, activation="relu"), layers.MaxPooling2D()]
            body += [layers.Conv2D(16, 5, activation="relu"), layers.MaxPooling2D()]
            body += [layers.Flatten(), layers.Dense(84, "relu"), layers.Dense(20, "tanh")]
        else:
            body = [layers.Dense(16, "tanh"), layers.Dense(16, "tanh")]
        loss, head = LOSS, []
        if not self.is_image:
            loss, head = ibnn.layers.GaussianNLL(), [ibnn.layers.GaussianHead()]
        last = layers.Dense(10 if self.is_image else 2)
        model = keras.Sequential([keras.Input(shape), *body, last, *head])
        model.compile(keras.optimizers.Adam(2e-3 if not self.is_deep else 1e-3), loss)
        self.body, self.last = keras.Sequential(body), last
        model.fit(*self.others, batch_size=128, epochs=epochs, verbose=0)
        return model

    def logits(self, w):
        """Return what weight vectors (draws, size) make of the test inputs: (draws, N, K)."""
        kernel, _ = self.last.get_weights()
        features = self.body.predict(self.test[0], verbose=0).astype("float64")
        return features @ w[:, : kernel.size].reshape(-1, *kernel.shape) + w[:, None, kernel.size :]

    def scores(self, w, reference=None):
        """Return what the average prediction scores, and its distance to a reference's."""
        y, logits = self.test[1], self.logits(w)
        if self.is_image:
            logs = logits - logsumexp(logits, axis=-1, keepdims=True)
            each, mean = logs[:, np.arange(len(y)), y], np.exp(logs).mean(axis=0)
        else:
            loc, scale = logits[..., 0], np.logaddexp(0, logits[..., 1]) + 1e-3
            each, mean = stats.norm.logpdf(y[:, 0], loc, scale), None
        found = {"NLL": float(np.mean(np.log(len(w)) - logsumexp(each, axis=0)))}
        if reference is not None:
            found["total variation"] = diagnostics.total_variation(mean, reference).value
            found["agreement"] = diagnostics.agreement(mean, reference).value
        return found, mean

    def reference(self, seed, **options):
        """Return draws of the posterior by NUTS."""
        options |= {"over": "last_layer", "prior_scale": 1.0}
        return diagnostics.hmc(self.model, self.train, seed=seed, **options)

    def approximations(self, steps, reference):
        """Yield names, and what makes a posterior, the same data and prior for all."""
        fit, data, made = {"verbose": 0, "seed": self.seed}, self.train, {}

        def variational(covariance):
            return ibnn.GaussianVI(self.model, covariance=covariance, prior_scale=1.0).fit(
                *data, **fit
            )

        def laplace():
            options = {"prior_precision": 1.0, "pred_type": "nn"}
            mode = at_mode(self)
            return ibnn.Laplace(mode, "last_layer", "full", **options).fit(*data, verbose=0)

        def full():
            made["full"] = variational("full")
            return made["full"]

        yield "Laplace", laplace
        yield "mean-field VI", lambda: variational("diag")
        yield "full-covariance VI", full
        for name, build in FLOWS.items():
            yield (
                f"+ {name}",
                lambda build=build: ibnn.refine(made["full"], build(), *data, steps=steps, **fit),
            )
        draws = reference.samples.reshape(-1, reference.target.size)
        if len(draws) >= 10 * draws.shape[1]:  # quick runs have fewer
            build = FLOWS[BY_DRAWS.split(",")[0]]
            options = {"samples": draws, "steps": steps, **fit}
            yield f"+ {BY_DRAWS}", lambda: ibnn.refine(made["full"], build(), **options)


def at_mode(problem):
    """Return the network with the last layer at the mode of its posterior, as Laplace needs it."""
    target = ibnn.GaussianVI(problem.model, prior_scale=1.0).target(*problem.train, verbose=0)
    model = keras.models.clone_model(problem.model)
    model.compile(loss=problem.model.loss)
    model.set_weights(problem.model.get_weights())
    mode, kernel = target.mode().astype("float32"), problem.last.kernel
    size = math.prod(kernel.shape)
    last = next(x for x in reversed(model.layers) if x.weights)
    last.set_weights([mode[:size].reshape(kernel.shape), mode[size:]])
    return model


JOINT = {
    "low-rank Gaussian": lambda **kw: ibnn.NormalLowRank(4, **kw),
    "full Gaussian": ibnn.NormalFull,
    "couplings": lambda **kw: ibnn.FlowPosterior(turns(flows.AffineCoupling, 4), **kw),
}
BY_LAYER = {
    "Gaussian": ibnn.NormalAffine,
    **JOINT,
    "planar": lambda **kw: ibnn.NormalPlanar1d(8, **kw),
    "Sylvester": ibnn.NormalSylvester,
    "IAF": ibnn.NormalIAF,
    "spline couplings": lambda **kw: ibnn.FlowPosterior(turns(flows.SplineCoupling, 4), **kw),
}


def sine_with_gap(count, seed):
    """Return `count` points of two intervals, then 500 of all, in units of their noise."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(0.5, 1.5, count) * np.where(np.arange(count) % 2, 1, -1)
    x = np.concatenate([x, rng.uniform(-1.5, 1.5, 500)])[:, None]
    y = 10 * np.sin(4 * x) + rng.normal(size=x.shape)
    return np.concatenate([x, x**2], axis=-1), y.astype("float32")  # couplings need two channels


@keras.saving.register_keras_serializable(package="tfp_ibnn_experiments")
def half_square(y, prediction):
    """The negative log-likelihood of a normal distribution of scale 1, up to a constant."""
    return keras.ops.sum(keras.ops.square(y - prediction), axis=-1) / 2


class Noise:
    """Posteriors over the z of all layers of a small trained network, whose weights stay."""

    def __init__(self, pair, seed, quick=False, data_dir=None):
        self.seed, count, self.loss = seed, PAIRS[pair][1], LOSS
        hidden, classes = (16, 16), 2
        if pair == "z_digits":
            x, y = datasets.load_digits(return_X_y=True)
            x, hidden, classes = x / 16, (16,), 10
        elif pair == "z_moons":
            x, y = datasets.make_moons(2000, noise=0.25, random_state=seed)
        else:
            x, y = sine_with_gap(count, seed)
            classes, self.loss = 1, half_square
        if classes > 1:
            order = np.random.default_rng(seed).permutation(len(y))
            x, y = x[order], y[order]
        x = x.astype("float32")
        self.train, self.test = (x[:count], y[:count]), (x[count:], y[count:])
        keras.utils.set_random_seed(seed)
        kind = "relu" if classes > 1 else "tanh"
        self.model = mlp(x.shape[1:], classes, hidden=hidden, activation=kind)
        self.model.compile(keras.optimizers.Adam(5e-3), self.loss)
        epochs = 1 if quick else 100 if classes > 1 else 1000
        self.model.fit(*self.train, epochs=epochs, batch_size=32, verbose=0)

    def noisy(self, template):
        """Return the network with a posterior over z, not trained; its weights stay."""
        sto = ibnn.to_stochastic(self.model, template, len(self.train[1]), seed=self.seed)
        ibnn.freeze(sto, "deterministic")
        return sto

    def reference(self, seed, **options):
        """Return draws of the posterior by NUTS."""
        sto = self.noisy(ibnn.NormalAffine(prior_scale=Z_SCALE))
        sto.compile(loss=LOSS if self.loss is LOSS else "mse")
        options |= {} if self.loss is LOSS else {"noise_scale": 1.0}
        self.target = (found := diagnostics.hmc(sto, self.train, seed=seed, **options)).target
        return found

    def approximations(self, steps, reference):
        """Yield names, and what makes a posterior, the same data and prior for all."""

        def trained(template):
            sto = self.noisy(template)
            rate = keras.optimizers.schedules.CosineDecay(5e-3, steps)
            sto.compile(keras.optimizers.Adam(rate), self.loss)
            sto.fit(*self.train, batch_size=len(self.train[1]), epochs=steps, verbose=0)
            return sto

        options = {"prior_scale": Z_SCALE, "beta": 1.0}
        for name, make in BY_LAYER.items():
            yield name, lambda make=make: trained(make(**options))
        for name, make in JOINT.items():
            yield f"joint {name}", lambda make=make: trained(ibnn.JointPosterior(make(**options)))

    def scores(self, w, reference=None):
        """Return what the average prediction scores, and its distance to a reference's."""
        logits, y = self.target.predict(w[:200], self.test[0]).astype("float64"), self.test[1]
        if self.loss is half_square:
            each = stats.norm.logpdf(y[:, 0], logits[..., 0])
            return {"NLL": float(np.mean(np.log(len(each)) - logsumexp(each, axis=0)))}, None
        logs = logits - logsumexp(logits, axis=-1, keepdims=True)
        mean = np.exp(logs).mean(axis=0)
        found = {"NLL": float(-np.mean(np.log(mean[np.arange(len(y)), y])))}
        if reference is not None:
            found["total variation"] = diagnostics.total_variation(mean, reference).value
            found["agreement"] = diagnostics.agreement(mean, reference).value
        return found, mean


def number(value):
    return float(getattr(value, "value", value))


def run(pair, seed, quick=False, data_dir=None):
    """Run one task; return the record. Quick runs only show that it works."""
    kind = Noise if pair.startswith("z_") else Problem
    begun, problem = time.perf_counter(), kind(pair, seed, quick, data_dir)
    chains = {"draws": 40, "warmup": 40} if quick else {"draws": 1000, "warmup": 500}
    reference, other = (problem.reference(2 * seed + k, verbose=0, **chains) for k in range(2))
    seconds = (time.perf_counter() - begun) / 2
    evidence = diagnostics.bridge(reference, seed=seed) if not quick else (0.0, 0.0)
    about = {"pair": pair, "seed": seed, **provenance({"quick": quick})}
    about["reference"] = {**reference.diagnostics(), "evidence": list(map(float, evidence))}
    rows = reference.samples.reshape(-1, reference.target.size)
    chosen = np.random.default_rng(seed).permutation(rows)[:DRAWS]
    truth, mean = problem.scores(chosen)
    about["reference"] |= {"NLL": truth["NLL"]}
    found, every = {}, dict(problem.approximations(20 if quick else STEPS, reference))
    for name, make in {**every, AGAIN: lambda: other.samples}.items():
        began = time.perf_counter()
        posterior = make()
        spent = time.perf_counter() - began if name != AGAIN else seconds
        report = diagnostics.report(posterior, reference, evidence=evidence, seed=seed)
        table = {key: number(values[0]) for key, values in report.scores.items()}
        scores, _ = problem.scores(report.draws[:DRAWS], mean)
        found[name] = {**table, **scores, "seconds": round(spent, 1)}
    return {**about, "methods": found}


def run_all(pairs, seeds, folder, *, quick=False, jobs=1, data_dir=None):
    """Run what `runs.jsonl` in the folder lacks; return how many failed."""

    def shown(record):
        rows = record["methods"].items()
        return ", ".join(f"{key} {row.get('log evidence - ELBO', 0):.2f}" for key, row in rows)

    every = [(pair, seed) for pair in pairs for seed in seeds]
    return run_tasks(run, every, (quick, data_dir), folder, jobs, shown)
