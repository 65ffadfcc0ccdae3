"""How close do methods come to Hamiltonian Monte Carlo on CIFAR-10? The reference is published.

A task is a method, a seed and a trial, one of the method's two settings. The network is a ResNet-20
with filter response normalization and swish; the prior is N(0, 1/5) on every weight, the
temperature 1, and images are not augmented. The reference is the predictive distribution of HMC on
the test images. Settings are chosen by the agreement with it on the first half of these; scores are
those of the second half. Predictions are kept, and averages of several made from them.
"""

import json
import os
import time
from pathlib import Path

import keras
import numpy as np

import tfp_ibnn as ibnn
from lib import data, files, provenance
from lib.networks import resnet20
from lib.probabilities import nll
from lib.tasks import read, run_tasks
from studies.methods.run import Problem as MethodProblem
from tfp_ibnn.training import TwoSpeed

MEAN, DEVIATION = (0.49, 0.48, 0.44), 0.2  # the reference's preprocessing
PRIOR = 0.2**0.5  # standard deviation of every weight
BATCH, DRAWS, EPOCHS = 128, 32, 50
MEMBERS = 5  # of ensembles: networks, or chains
CYCLE, KEPT = 5, 2  # epochs of a cycle, and the last of these that count
BURN_IN, START = 0.4, 0.1  # share of a short chain, and the rate with which it begins
ACCURACY = 0.9144  # of the reference
PAIRS = {  # titles, and the two trials of each method
    "map": ("MAP", {"rate 0.03": 0.03, "rate 0.1": 0.1}),
    "filters": ("SGHMC, rates by filter", {"rate 0.01": 0.01, "rate 0.03": 0.03}),
    "csghmc": ("cyclical SGHMC", {"plain": (0.1, None), "preconditioned": (1e-4, "rmsprop")}),
    "gaussian": ("Gaussian of z", {"prior 0.1": 0.1, "prior 0.3": 0.3}),
    "flow": ("flow of z", {"prior 0.1": 0.1, "prior 0.3": 0.3}),
    "swag": ("SWAG", {"rate 0.01": 0.01, "rate 0.03": 0.03}),
    "mean_field": ("mean-field VI", {"rate 0.0003": 3e-4, "rate 0.001": 1e-3}),
    "laplace": ("Laplace, last layer", {"full": "full", "kron": "kron"}),
}
FIRST = ("map", "filters", "csghmc", "gaussian", "flow")  # the others begin with the best MAP
LONG = "one chain"  # a group of `filters` that has no trial: the budget of all chains in one
LEAST = float(np.finfo("float16").smallest_subnormal)  # so that no stored probability is 0
Cosine = keras.optimizers.schedules.CosineDecay


def load_reference(path, labels):
    """Return the predictive distribution of HMC on all test images; raise if it is another."""
    path = path or os.environ.get("TFP_IBNN_HMC")
    if not path:
        kit = "probabilities (10000, 10) in the order of CIFAR-10's own files"
        source = "starter kit of the NeurIPS 2021 competition on approximate inference"
        raise ValueError(
            f"Give `--reference PATH`, or set TFP_IBNN_HMC: an .npz file with {kit}, made from "
            f"data/cifar10/probs.csv of the {source} (there in the order of TensorFlow Datasets)."
        )
    with np.load(path) as arrays:
        found = arrays["probabilities"].astype("float64")
    accuracy = float(np.mean(found.argmax(-1) == labels)) if found.shape == (10_000, 10) else 0.0
    if abs(accuracy - ACCURACY) > 5e-5:
        got = f"shape {found.shape}, accuracy {accuracy:.4f}"
        raise ValueError(f"{path} is not the reference, or in another order: {got}.")
    return found


def stand_in(labels):
    """Return probabilities drawn at random, for quick runs."""
    logits = np.random.default_rng(0).normal(size=(len(labels), 10))
    logits[np.arange(len(labels)), labels] += 2
    return np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)


class Problem(MethodProblem):
    """CIFAR-10, the network and its training; a seed draws the start and the order."""

    def __init__(self, seed, quick=False, data_dir=None, path=None, epochs=None):
        train, (x, y) = data.load("cifar10", data_dir)
        self.seed, self.batch_size, self.draws = seed, BATCH, DRAWS
        self.epochs, self.is_quick = epochs or EPOCHS, quick
        if quick:
            train, (x, y) = ((x[:64, ::4, ::4], y[:64]) for x, y in (train, (x, y)))
            self.batch_size, self.draws, self.epochs = 16, 4, epochs or 2
        self.reference = stand_in(y) if quick else load_reference(path, y)
        self.train, self.test = ((self._scaled(x), y) for x, y in (train, (x, y)))
        self.prior = {"train_size": len(self.train[1]), "prior_scale": PRIOR}

    @staticmethod
    def _scaled(x):
        return ((x / np.float32(255) - np.float32(MEAN)) / np.float32(DEVIATION)).astype("float32")

    def build(self, seed, dropout=0.0):
        """Return a network as `seed` starts it; for quick runs, one that ends early."""
        keras.utils.set_random_seed(seed)
        model = resnet20(self.train[0].shape[1:])
        if not self.is_quick:
            return model
        x = keras.layers.GlobalAveragePooling2D()(model.get_layer("group1_block1_2_silu").output)
        return keras.Model(model.input, keras.layers.Dense(10, name="fc")(x))

    def descent(self, rate):
        """Return SGD with momentum, on the negative log posterior."""
        return ibnn.SGHMC(rate, temperature=0.0, **self.prior)

    def falling(self, rate):
        """Return a rate that rises for a twentieth of the epochs, then falls to 0."""
        total = self.epochs * self.steps
        rise = max(1, total // 20)
        return Cosine(0.0, total - rise, warmup_target=rate, warmup_steps=rise)

    def predict(self, posterior):
        """Return the predictive distribution on all test images."""
        if isinstance(posterior, keras.Model) and not ibnn.stochastic_layers(posterior):
            posterior = ibnn.DeepEnsemble([posterior])
        draws = getattr(posterior, "count", None) or self.draws
        mc = ibnn.MonteCarlo(posterior, samples=draws, seed=0)
        mean = mc.predict(self.test[0], batch_size=500, verbose=0)["mean"].astype("float64")
        if not np.isfinite(mean).all():
            raise ArithmeticError("The predictions are not finite: the training diverged.")
        return mean, draws


def scores(mean, reference, labels):
    """Return distances to the reference on the first half, and all scores on the second."""
    half = len(labels) // 2
    p, q, y = mean[half:], reference[half:], labels[half:]
    return {
        "choice": ibnn.diagnostics.agreement(mean[:half], reference[:half]).value,
        "choice, TV": ibnn.diagnostics.total_variation(mean[:half], reference[:half]).value,
        "agreement": ibnn.diagnostics.agreement(p, q).value,
        "TV": ibnn.diagnostics.total_variation(p, q).value,
        "accuracy": float(np.mean(p.argmax(-1) == y)),
        "NLL": nll(p, y),
        "ECE": float(ibnn.metrics.expected_calibration_error(p, y)),
    }


class Filters(ibnn.SGHMC):
    """SGHMC whose rate is larger by a constant factor for the weights of filters.

    Normalization follows every convolution, so what a filter's n weights do depends on their
    direction only: given the data their squared length is independent of it, and 0.2 n in the mean,
    as under the prior. A step turns a filter by an angle that falls with the squared length. So the
    rate is larger by 0.2 n / 2: at He's start the squared length is 2. Constant factors are a
    preconditioner that leaves the target as it is.
    """

    def update_step(self, gradient, variable, learning_rate):
        factor = squared_length(variable.shape) / 2 if len(variable.shape) == 4 else 1.0
        super().update_step(gradient, variable, factor * learning_rate)


def squared_length(shape):
    """Return what the prior gives the filters of a kernel in the mean."""
    return PRIOR**2 * float(np.prod(shape[:-1]))


def start_at_prior(model):
    """Scale the filters to the length that they have under the prior; return the model."""
    for layer in model.layers:
        if isinstance(layer, keras.layers.Conv2D):
            kernel, bias = layer.get_weights()
            square = np.sum(kernel**2, axis=(0, 1, 2))
            scale = np.sqrt(squared_length(kernel.shape) / square)
            layer.set_weights([kernel * scale, bias * scale])
    return model


class BurnIn(keras.optimizers.schedules.LearningRateSchedule):
    """Falls from START to a rate in the burn-in; then there are cosine cycles, from it to 0.

    In the first tenth of the burn-in it rises to START.
    """

    def __init__(self, rate, burn_in, cycle):
        self.rate, self.burn_in = rate, burn_in
        self.cycles = ibnn.CosineCycles(rate, cycle, exploration=0.0)

    def __call__(self, step):
        step = keras.ops.cast(step, "int32")
        share = keras.ops.cast(step, "float32") / self.burn_in
        first = (START - self.rate) / 2 * (keras.ops.cos(np.pi * share) + 1) + self.rate
        first = first * keras.ops.minimum(1.0, 10 * share)
        return keras.ops.where(step < self.burn_in, first, self.cycles(step - self.burn_in))


class Ends(ibnn.Snapshots):
    """Snapshots after the last epochs of every cycle that begins after the burn-in."""

    def __init__(self, burn_in, cycle, kept):
        super().__init__()
        self.burn_in, self.cycle, self.kept = burn_in, cycle, kept

    def on_epoch_end(self, epoch, logs=None):
        if epoch >= self.burn_in and epoch % self.cycle >= self.cycle - self.kept:
            super().on_epoch_end(epoch, logs)


def chain(problem, rate, epochs):
    """Return samples of one chain: rates by filter, noise at every step, short cycles."""
    cycle = min(CYCLE, max(1, problem.epochs // 2))
    burn_in = round(BURN_IN * problem.epochs / cycle) * cycle or cycle
    schedule = BurnIn(rate, burn_in * problem.steps, cycle * problem.steps)
    kept = Ends(burn_in, cycle, min(KEPT, cycle))
    optimizer = Filters(schedule, seed=problem.seed, **problem.prior)
    model = start_at_prior(problem.build(problem.seed))
    problem.fit(model, epochs, optimizer=optimizer, callbacks=[kept])
    return kept.posterior()


def posterior_of(problem, method, value, best_map):
    """Return a posterior, or a model, and its cost in epochs; a MAP is None where none is used."""
    epochs = problem.epochs
    match method:
        case "map":
            optimizer = problem.descent(problem.falling(value))
            return problem.fit(problem.build(problem.seed), optimizer=optimizer), epochs
        case "filters":
            return chain(problem, value, epochs), epochs
        case "csghmc":
            (rate, preconditioner), cycle = value, max(1, epochs // 2)
            schedule = ibnn.CosineCycles(rate, cycle * problem.steps, exploration=0.5)
            more = {"preconditioner": preconditioner, "seed": problem.seed}
            kept = ibnn.Snapshots(every=max(1, round(epochs / 25)), start=cycle)
            optimizer = ibnn.SGHMC(schedule, **problem.prior, **more)
            model = problem.build(problem.seed)
            problem.fit(model, MEMBERS * epochs, optimizer=optimizer, callbacks=[kept])
            return kept.posterior(), MEMBERS * epochs
        case "gaussian" | "flow":
            kind = ibnn.NormalAffine if method == "gaussian" else ibnn.NormalPlanar1d
            size, model = problem.prior["train_size"], problem.build(problem.seed)
            model = ibnn.to_stochastic(model, kind(prior_scale=value), size, seed=problem.seed)
            posterior = keras.optimizers.Adam(problem.falling(5e-3))
            optimizer = TwoSpeed(problem.descent(problem.falling(0.05)), posterior)
            return problem.fit(model, optimizer=optimizer), epochs
        case "swag":
            half, kept = max(2, epochs // 2), ibnn.SWAG(rank=20)
            problem.fit(best_map, half, optimizer=problem.descent(value), callbacks=[kept])
            return kept.posterior(), epochs + half
        case "mean_field":
            template = ibnn.MeanField(prior_scale=PRIOR, bias="stochastic", initial_scale=0.01)
            size = problem.prior["train_size"]
            model = ibnn.to_stochastic(best_map, template, size, seed=problem.seed)
            optimizer = keras.optimizers.Adam(problem.falling(value))
            return problem.fit(model, optimizer=optimizer), 2 * epochs
    best_map.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    found = ibnn.Laplace(best_map, "last_layer", value, prior_precision=PRIOR**-2)
    return found.fit(*problem.train, batch_size=500, verbose=0), epochs + 1


def best(records, method):
    """Return the trial of a method that agrees most on the first half, or None; not LONG."""
    found = [x for x in records if x["pair"] == method and x["group"] != LONG]
    seed = min((x["seed"] for x in found), default=None)
    found = [x for x in found if x["seed"] == seed]
    return max(found, key=lambda x: x["scores"]["choice"])["group"] if found else None


def kept(folder, kind, method, seed, trial):
    """Return where a task keeps its network, or its predictions; neither is committed."""
    suffix = "keras" if kind == "models" else "npz"
    return Path(folder) / kind / f"{method}-{seed}-{trial.replace(' ', '_')}.{suffix}"


def run(method, seed, trial, folder, quick=False, data_dir=None, path=None, epochs=None):
    """Run one task, keep its predictions, and return the record."""
    problem = Problem(seed, quick, data_dir, path, epochs)
    records, start, begun = read(folder), None, time.perf_counter()
    if method not in FIRST:
        found = kept(folder, "models", "map", 0, best(records, "map"))
        start = keras.models.load_model(found, compile=False)
    if trial == LONG:
        value = PAIRS[method][1][best(records, method)]
        cost = MEMBERS * problem.epochs
        posterior = chain(problem, value, cost)
    else:
        posterior, cost = posterior_of(problem, method, PAIRS[method][1][trial], start)
    seconds = time.perf_counter() - begun
    mean, draws = problem.predict(posterior)
    for kind in ("models", "predictions"):
        kept(folder, kind, method, seed, trial).parent.mkdir(parents=True, exist_ok=True)
    if method == "map":
        posterior.save(kept(folder, "models", method, seed, trial))
    with files.replacing(kept(folder, "predictions", method, seed, trial)) as temporary:
        np.savez(temporary, probabilities=np.maximum(mean, LEAST).astype("float16"))
    found = scores(mean, problem.reference, problem.test[1])
    found |= {"draws": draws, "epochs": cost, "seconds": round(seconds, 1)}
    made = provenance({"quick": quick, "epochs": problem.epochs, "batch": problem.batch_size})
    return {"pair": method, "seed": seed, "group": trial, **made, "scores": found}


def averages(folder, records, labels, reference):
    """Yield the records of averages over the seeds of a method's best trial that are not there."""
    there = {(x["pair"], x["group"]) for x in records}
    for method in ("map", "filters", "gaussian", "flow"):
        trial = best(records, method)
        each = [x for x in records if (x["pair"], x["group"]) == (method, trial)]
        each.sort(key=lambda x: x["seed"])
        for count in (3, MEMBERS):
            name = f"{count} of {method}"
            if len(each) < count or ("average", name) in there:
                continue
            paths = [kept(folder, "predictions", method, x["seed"], trial) for x in each[:count]]
            mean = np.mean([np.load(path)["probabilities"] for path in paths], 0, "float64")
            found = scores(mean, reference, labels)
            for key in ("draws", "epochs", "seconds"):
                found[key] = round(sum(x["scores"][key] for x in each[:count]), 1)
            about = {"of": [method, trial, [x["seed"] for x in each[:count]]]}
            yield {"pair": "average", "seed": 0, "group": name, **about, "scores": found}


def second_phase(pairs, seeds, records, members):
    """Return the tasks that need the best trials, the longest first."""
    tasks = [("filters", 0, LONG)] if "filters" in pairs else []
    for method in [x for x in ("map", "filters") if x in pairs]:
        tasks += [(method, seed, best(records, method)) for seed in range(1, members)]
    later = [x for x in pairs if x not in FIRST]
    tasks += [(method, 0, trial) for method in later for trial in PAIRS[method][1]]
    for method in [x for x in ("gaussian", "flow") if x in pairs]:
        tasks += [(method, seed, best(records, method)) for seed in seeds if seed]
    return [task for task in tasks if task[2] is not None]


def run_all(
    pairs, seeds, folder, *, quick=False, jobs=1, data_dir=None, reference=None, epochs=None
):
    """Run what `runs.jsonl` in the folder lacks; return how many failed."""
    labels = data.load("cifar10", data_dir)[1][1][: 64 if quick else None]
    truth = stand_in(labels) if quick else load_reference(reference, labels)

    def shown(record):
        found = record["scores"]
        return f"agreement {found['agreement']:.4f}, TV {found['TV']:.4f}, {found['seconds']:.0f} s"

    def phase(tasks):
        options = (folder, quick, data_dir, reference, epochs)
        return run_tasks(run, tasks, options, folder, jobs, shown)

    first = [(x, 0, trial) for x in FIRST if x in pairs for trial in PAIRS[x][1]]
    failed = phase(first)
    failed += phase(second_phase(pairs, seeds, read(folder), 2 if quick else MEMBERS))
    with (Path(folder) / "runs.jsonl").open("a", encoding="utf-8") as file:
        for record in averages(folder, read(folder), labels, truth):
            file.write(json.dumps(record, allow_nan=False) + "\n")
            print(f"{record['group']}: {shown(record)}", flush=True)
    return failed
