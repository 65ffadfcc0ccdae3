"""LeNet and VGG16 on 5,000 images of CIFAR-10, every method tuned in as many trials.

5,000 images, the same for all, are for validation: settings are chosen and temperatures fitted on
them. A seed draws 5,000 training images of the others, and tests on the 50,000 that are left. The
settings of each method are the best of four trials, with training images of a seed of their own.

A task is a pair of data and network, a seed, a method, and for trials its number. The tasks
`member1` to `member4` train what `ensemble` averages with the deterministic network.
"""

import functools
import math
import time
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

import keras
import numpy as np
from scipy.special import log_softmax

import tfp_ibnn as ibnn
from lib import data, files, provenance
from lib.networks import lenet, posterior_map, vgg16
from lib.probabilities import best_temperature, nll, scaled
from lib.run import channel_dropout
from lib.tasks import append, read
from studies.methods.run import Problem as MethodProblem
from tfp_ibnn.metrics.calibration import ece_floor

PAIRS = {  # titles, epochs, batch size
    "few_lenet": ("CIFAR-10 5,000, LeNet", 60, 128),
    "few_vgg16": ("CIFAR-10 5,000, VGG16", 60, 128),
}
IMAGES, VALIDATION, TRIAL_SEED, DRAWS, MEMBERS = 5000, 5000, 8, 32, 5
BATCH = {"few_lenet": 2500, "few_vgg16": 1000}
WEIGHT_SCALE = {"few_lenet": 1e-2, "few_vgg16": 1e-3}  # of weights at the start
INNER = "conv(?!1$).*|fc.*"  # all layers but the first, where noise spoils colours
STOCHASTIC_SPEED = 5  # the rate of posteriors to that of the network
ANNEALING = 1 / 3  # of the epochs, for posteriors over weights
DECAY = 0.1  # of the weights, where they have no prior and it is not tuned


def half(rates, prior_scales, betas):
    """Return four of the eight combinations, in which each pair of values is met once."""
    return [
        {"rate": rates[i], "prior_scale": prior_scales[j], "beta": betas[i ^ j]}
        for i in (0, 1)
        for j in (0, 1)
    ]


def crossed(rates, **values):
    """Return all combinations of two rates and two values of another option."""
    ((name, values),) = values.items()
    return [{"rate": rate, name: value} for rate in rates for value in values]


def grids(rates, decays, dropouts, fixed, of_z, of_weights):
    """Return the four trials of each method, in the order in which they are run.

    `of_z` and `of_weights` have two scales of the prior, and two betas.
    """
    over_z, over_weights = half(rates, *of_z), half(rates, *of_weights)
    return {
        "deterministic": crossed(rates, decay=decays),
        "Gaussian": over_z,
        "flow": over_z,
        "joint flow": over_z,
        "mean-field": over_weights,
        "fixed noise": crossed(rates, prior_scale=fixed),
        "channel dropout": crossed(rates, dropout=dropouts),
        "low-rank Gaussian": over_z,
        "mixture": over_z,
        "MNF": over_weights,
    }


GRIDS = {
    "few_lenet": grids(
        rates=(1e-3, 3e-3),
        decays=(0.1, 1.0),
        dropouts=(0.05, 0.15),
        fixed=(0.2, 0.4),
        of_z=((0.3, 0.6), (1.0, 10.0)),
        of_weights=((0.1, 0.3), (0.01, 0.1)),
    ),
    "few_vgg16": grids(
        rates=(3e-4, 1e-3),
        decays=(0.1, 1.0),
        dropouts=(0.05, 0.1),
        fixed=(0.1, 0.2),
        of_z=((0.1, 0.3), (1.0, 10.0)),
        of_weights=((0.03, 0.1), (1e-4, 1e-3)),
    ),
}
METHODS = list(GRIDS["few_lenet"])


def couplings(**options):
    """Return a flow that moves every other number of a vector, and then the rest, twice."""
    steps = [ibnn.flows.AffineCoupling(swap=swap, mask="alternating") for swap in (False, True) * 2]
    return ibnn.FlowPosterior(steps, **options)


def posterior_of(pair, method, options):
    """Return what `to_stochastic` takes for a method."""
    network, scale = pair.removeprefix("few_"), options["prior_scale"]
    start = {"initial_scale": min(0.1, scale)}
    match method:
        case "fixed noise":
            return {INNER: ibnn.NormalAffine(initial_scale=None, **options)}
        case "Gaussian":
            return ibnn.NormalAffine(**start, **options)
        case "low-rank Gaussian":
            return ibnn.NormalLowRank(4, **start, **options)
        case "flow":
            return posterior_map(network, "flow", **start, **options)
        case "joint flow":
            return ibnn.JointPosterior(couplings(**start, **options))
        case "mixture":
            return ibnn.MixturePosterior(4, mean_spread=scale / 2, **options)
        case "mean-field":
            return ibnn.MeanField(initial_scale=WEIGHT_SCALE[pair], **options)
        case "MNF":
            return ibnn.MNF(initial_scale=WEIGHT_SCALE[pair], z_scale=0.1, **options)


@functools.cache
def all_images(data_dir):
    """Return the 60,000 images and their labels, in the order of validation images, then others."""
    parts = zip(*data.load("cifar10", data_dir), strict=True)
    x, y = (np.concatenate(part) for part in parts)
    order = np.random.default_rng(0).permutation(len(y))
    return x[order], y[order]


class Problem(MethodProblem):
    """Data, network and training of a pair, drawn by a seed."""

    def __init__(self, pair, seed, quick=False, data_dir=None):
        _, self.epochs, self.batch_size = PAIRS[pair]
        self.pair, self.seed, self.draws, self.quick = pair, seed, DRAWS, quick
        x, y = all_images(data_dir)
        self.validation = x[:VALIDATION], y[:VALIDATION]
        others = VALIDATION + np.random.default_rng(seed).permutation(len(y) - VALIDATION)
        train, test = np.split(others, [IMAGES])
        if quick:
            self.validation = self.validation[0][:100], self.validation[1][:100]
            train, test = train[:100], test[:100]
            self.epochs, self.draws = 1, 2
        self.train, self.test = (x[train], y[train]), (x[test], y[test])

    def build(self, seed, dropout=0.0):
        """Return a network as `seed` starts it; VGG16 shifts and mirrors its images."""
        keras.utils.set_random_seed(seed)
        is_deep = self.pair == "few_vgg16"
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy("mixed_bfloat16" if is_deep else "float32")
        # By images that are the same for all seeds, so that the compiled programs are, too.
        front = ibnn.data.preprocessing(self.validation[0], augment=is_deep, seed=seed)
        network = vgg16 if is_deep else lenet
        model = network(self.train[0].shape[1:], preprocessing=front)
        model = channel_dropout(model, dropout, INNER) if dropout else model
        keras.config.set_dtype_policy(before)
        return model

    def trained(self, method, settings, number=0):
        """Return a network trained as a method's settings say, ready to predict."""
        settings = dict(settings)
        rate = settings.pop("rate")
        decay = settings.pop("decay", 0.0 if method in ("mean-field", "MNF") else DECAY)
        optimizer = keras.optimizers.Adam(rate, weight_decay=decay)
        model = self.build(100 * self.seed + number, settings.pop("dropout", 0.0))
        # A variable, unlike a schedule, leaves the compiled program the same for all rates.
        falling = keras.callbacks.LearningRateScheduler(
            lambda epoch: rate * (1 + math.cos(math.pi * epoch / self.epochs)) / 2
        )
        if not settings:
            self.fit(model, optimizer=optimizer, callbacks=[falling])
            is_dropout = method == "channel dropout"
            return self.predictor(model, dropout=True) if is_dropout else model
        posterior = posterior_of(self.pair, method, settings)
        model = ibnn.to_stochastic(model, posterior, len(self.train[1]), seed=self.seed)
        callbacks = [falling]
        if method == "fixed noise":
            ibnn.freeze(model, "stochastic")
        else:
            optimizer = ibnn.two_speed(optimizer, STOCHASTIC_SPEED * rate)
        if method in ("mean-field", "MNF"):
            callbacks.append(ibnn.KLAnnealing(max(1, round(ANNEALING * self.epochs))))
        self.fit(model, optimizer=optimizer, callbacks=callbacks)
        return self.predictor(model)

    def predictor(self, model, **options):
        options |= {"head": "softmax", "from_logits": True}
        return ibnn.MonteCarlo(model, samples=self.draws, seed=0, **options)

    def log_probabilities(self, model, x):
        """Return the logarithms of what a model predicts, averaged over its draws."""
        found = model.predict(x, batch_size=BATCH[self.pair], verbose=0)
        if isinstance(model, ibnn.MonteCarlo):
            return np.log(np.maximum(found["mean"].astype("float64"), 1e-30))
        return log_softmax(found.astype("float64"), axis=-1)


def held_out(logs, y):
    """Return what predictions of validation images score, by which settings are chosen."""
    if not np.isfinite(logs).all():  # it diverged
        return {"NLL": None, "NLL, T": None, "accuracy": None}
    p = np.exp(logs)
    found = {"NLL": nll(p, y), "NLL, T": nll(scaled(p, best_temperature(p, y)), y)}
    return {**found, "accuracy": float(np.mean(p.argmax(-1) == y))}


def scores(held, y_held, test, y):
    """Return what log-probabilities of test images score, with and without a temperature."""
    held, test = np.exp(held), np.exp(test)
    temperature = best_temperature(held, y_held)
    found = {"accuracy": float(np.mean(test.argmax(-1) == y)), "T": temperature}
    for mark, p in (("", test), (", T", scaled(test, temperature))):
        found[f"NLL{mark}"] = nll(p, y)
        found[f"Brier{mark}"] = float(ibnn.metrics.brier_score(p, y))
        found[f"ECE{mark}"] = float(ibnn.metrics.expected_calibration_error(p, y))
    return found | {"ECE floor, T": ece_floor(p, 0)}


def kept(folder, pair, seed, number, quick):
    return Path(folder) / "predictions" / f"{pair}-{seed}-{number}{'-quick' * quick}.npz"


def run(pair, seed, method, trial, settings, folder, quick=False, data_dir=None):
    """Run one task; return the record. Quick runs only show that it works."""
    keras.utils.clear_session()
    begun, problem = time.perf_counter(), Problem(pair, seed, quick, data_dir)
    about = {"pair": pair, "seed": seed, "method": method, "trial": trial, "settings": settings}
    about |= provenance({"quick": quick})
    (x_held, y_held), (x, y) = problem.validation, problem.test
    number = int(method.removeprefix("member")) if method.startswith("member") else 0
    if method == "ensemble":
        every = []
        for member in members(quick):
            with np.load(kept(folder, pair, seed, member, quick)) as arrays:
                every.append([np.exp(arrays[name].astype("float64")) for name in ("held", "test")])
        held, test = (np.log(np.mean(part, axis=0)) for part in zip(*every, strict=True))
        return {**about, "scores": scores(held, y_held, test, y) | {"draws": len(every)}}
    model = problem.trained(method, settings, number)
    fitted = time.perf_counter()
    held = problem.log_probabilities(model, x_held)
    seconds = {"fit (s)": round(fitted - begun, 2)}
    if trial is not None:
        return {**about, "validation": held_out(held, y_held), **seconds}
    begun = time.perf_counter()
    test = problem.log_probabilities(model, x)
    seconds["prediction (s)"] = round(time.perf_counter() - begun, 2)
    if number or method == "deterministic":
        path = kept(folder, pair, seed, number, quick)
        path.parent.mkdir(parents=True, exist_ok=True)
        half_precision = {"held": held.astype("float16"), "test": test.astype("float16")}
        with files.replacing(path) as temporary:
            np.savez(temporary, **half_precision)
    found = scores(held, y_held, test, y) | {"draws": getattr(model, "samples", 1), **seconds}
    return {**about, "scores": found}


def members(quick=False):
    """Return the numbers of the networks of an ensemble; 0 is the deterministic one."""
    return range(2 if quick else MEMBERS)


def key_of(record):
    return tuple(record[name] for name in ("pair", "seed", "method", "trial"))


def chosen(records, pair, method, quick=False):
    """Return the settings with the lowest validation NLL at a temperature; None if some lack."""
    if quick and method != "deterministic":
        return GRIDS[pair][method][0]
    found = {
        record["trial"]: record["validation"]["NLL, T"]
        for record in records
        if record["trial"] is not None and (record["pair"], record["method"]) == (pair, method)
    }
    finite = {trial: value for trial, value in found.items() if value is not None}
    if len(found) < (2 if quick else len(GRIDS[pair][method])) or not finite:
        return None
    return GRIDS[pair][method][min(finite, key=finite.get)]


def settings_of(records, task, folder, quick=False):
    """Return the settings of a task, or None while others must be run before."""
    pair, seed, method, trial = task
    if trial is not None:
        return GRIDS[pair][method][trial]
    if method == "ensemble":
        files = [kept(folder, pair, seed, number, quick) for number in members(quick)]
        return {} if all(file.exists() for file in files) else None
    return chosen(records, pair, "deterministic" if "member" in method else method, quick)


def tasks(pair, seeds, quick=False):
    """Return the tasks of a pair: of each method the trials, then the seeds; the dearest last."""
    found, (*first, last) = [], METHODS[:2] if quick and pair == "few_vgg16" else METHODS
    for method in [*first, *(f"member{number}" for number in members(quick)[1:]), "ensemble", last]:
        count = len(GRIDS[pair].get(method, ()))
        if quick:  # no choice, but for the deterministic network
            count = 2 if method == "deterministic" else 0
        found += [(pair, TRIAL_SEED, method, trial) for trial in range(count)]
        found += [(pair, seed, method, None) for seed in seeds]
    return found


class Here(Executor):
    """Runs what is submitted at once, in this process."""

    def submit(self, function, *args):
        future = Future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run_all(pairs, seeds, folder, *, quick=False, jobs=1, data_dir=None):
    """Run what `runs.jsonl` in the folder lacks; return how many failed.

    Processes take one task after the other: the first whose settings are known.
    """
    folder, failed, running = Path(folder), 0, {}
    folder.mkdir(parents=True, exist_ok=True)
    records = read(folder)
    every, done = (
        [task for pair in pairs for task in tasks(pair, seeds, quick)],
        set(map(key_of, records)),
    )
    left = [task for task in every if task not in done]
    print(f"{len(left)} runs to do, {len(every) - len(left)} are there", flush=True)
    with ProcessPoolExecutor(jobs, get_context("spawn")) if jobs > 1 else Here() as pool:
        while left or running:
            for task in left.copy():
                settings = settings_of(records, task, folder, quick)
                if settings is not None and len(running) < jobs:
                    left.remove(task)
                    future = pool.submit(run, *task, settings, str(folder), quick, data_dir)
                    running[future] = task
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                name = ", ".join(map(str, running.pop(future)))
                try:
                    record = future.result()
                except Exception as error:  # of one task, which costs the others nothing
                    failed += 1
                    print(f"error: {name}: {type(error).__name__}: {error}", flush=True)
                    continue
                records.append(record)
                append(folder, record)
                row = record.get("scores") or record["validation"]
                print(f"{name}: NLL, T {row['NLL, T'] or np.nan:.4f}", flush=True)
    return failed + len(left)  # those that wait for others that failed
