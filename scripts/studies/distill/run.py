"""Teachers, their students of one pass, and what either is compared with.

A task is a pair of data and network, a seed, and a teacher: a Gaussian over z, or an ensemble of
five. The first network of the ensemble is the single network of both. Test data serves for nothing
but the scores; temperatures are fitted on validation data. Every student is trained on the inputs
of the training data alone, changed at random. `runs.jsonl` has a line per task.
"""

import time

import keras
import numpy as np
from keras import layers, ops
from scipy.stats import norm
from sklearn import datasets

import tfp_ibnn as ibnn
from lib import provenance
from lib.networks import lenet, mlp, vgg16
from lib.parts import images, ood_images, packaged
from lib.probabilities import best_temperature, nll, scaled
from lib.tasks import run_tasks

PAIRS = {  # titles, the epochs of training and of distillation, and the batch size
    "digits": ("digits 1,000, MLP 64-64", 60, 60, 32),
    "diabetes": ("diabetes 250 (regression), MLP 32-32", 60, 120, 32),
    "fashion_lenet": ("Fashion-MNIST 55,000, LeNet", 30, 30, 128),
    "cifar_vgg16": ("CIFAR-10 10,000, VGG16", 60, 40, 128),
}
TEACHERS = ("Gaussian over z", "ensemble of 5")
REGRESSIONS = ("diabetes",)
DRAWS, MEMBERS, BATCH, QUICK = 32, 5, 500, 64


@keras.saving.register_keras_serializable(package="experiments")
class Mixed(layers.Layer):
    """Mix each example with another of its batch, by a share drawn uniformly from 0 to `most`."""

    def __init__(self, most=0.5, seed=0, **kwargs):
        super().__init__(**kwargs)
        self.most = most
        self.seed = keras.random.SeedGenerator(seed)

    def call(self, x):
        ones = (1,) * (len(x.shape) - 1)
        share = keras.random.uniform((ops.shape(x)[0], *ones), 0, self.most, seed=self.seed)
        return x + share * (ops.roll(x, 1, axis=0) - x)


class Problem:
    """Data, network and training of a pair, drawn by a seed."""

    def __init__(self, pair, seed, quick=False, data_dir=None):
        _, self.epochs, self.student_epochs, self.batch_size = PAIRS[pair]
        self.pair, self.seed, self.draws = pair, seed, DRAWS
        self.is_regression = pair in REGRESSIONS
        parts = self._parts(data_dir)
        if quick:
            parts = [(x[:QUICK], y[:QUICK]) for x, y in parts]
            self.epochs = self.student_epochs = 1
            self.draws = 2
        self.train, self.validation, self.test = parts
        self.ood = self._unlike(self.test[0], data_dir)

    def _parts(self, data_dir):
        match self.pair:
            case "digits":
                return packaged(self.seed, datasets.load_digits, 1000, 300)
            case "diabetes":
                parts = packaged(self.seed, datasets.load_diabetes, 250, 92)
                return [(x, y[:, None].astype("float32")) for x, y in parts]
            case "fashion_lenet":
                return images(self.seed, data_dir, "fashion_mnist", 55_000, 5_000)
        return images(self.seed, data_dir, "cifar10", 10_000, 2_500)

    def _unlike(self, x, data_dir):
        """Return out-of-distribution inputs: other images, turned digits, shuffled columns."""
        if self.pair == "digits":
            turned = np.rot90(x.reshape(-1, 8, 8), axes=(1, 2))
            return turned.reshape(-1, 64).copy()
        if self.pair == "diabetes":
            return 2 * np.random.default_rng(self.seed).permuted(x, axis=0)
        own = "fashion_mnist" if self.pair == "fashion_lenet" else "cifar10"
        return ood_images(own, len(x), data_dir)

    @property
    def augment(self):
        """What changes the inputs of a distillation."""
        if self.pair == "cifar_vgg16":
            return keras.Sequential([*self._changes(), Mixed()])
        return Mixed()

    def _changes(self):
        return [ibnn.data.RandomShift(4, self.seed), ibnn.data.RandomMirror(self.seed + 1)]

    def build(self, number):
        """Return a network as a number starts it."""
        keras.utils.set_random_seed(100 * self.seed + number)
        match self.pair:
            case "digits":
                return mlp((64,), hidden=(64, 64))
            case "diabetes":
                body = mlp((10,), 2, hidden=(32, 32))
                head = ibnn.layers.GaussianHead()(body.output)
                return keras.Model(body.input, head, name="mlp")
            case "fashion_lenet":
                return lenet((28, 28, 1))
        return vgg16(preprocessing=self._changes())

    def fit(self, model):
        """Train a network, at a rate that falls to 0."""
        steps = self.epochs * -(-len(self.train[1]) // self.batch_size)
        if self.pair == "cifar_vgg16":
            rate = keras.optimizers.schedules.CosineDecay(0.05, steps)
            optimizer = keras.optimizers.SGD(rate, 0.9, nesterov=True, weight_decay=5e-4)
        else:
            optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(1e-3, steps))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, ibnn.layers.GaussianNLL() if self.is_regression else loss)
        batches = ibnn.data.ShuffledBatches(*self.train, self.batch_size, self.seed)
        callbacks = [batches.follow()]
        model.fit(batches, epochs=self.epochs, shuffle=False, verbose=0, callbacks=callbacks)
        return model

    def averaged(self, model, **options):
        return ibnn.MonteCarlo(model, seed=0, **options)


def teacher_of(problem, kind, single):
    """Return a trained teacher."""
    if kind == "ensemble of 5":
        others = [problem.fit(problem.build(number)) for number in range(1, MEMBERS)]
        return problem.averaged(ibnn.DeepEnsemble([single, *others]), samples=MEMBERS)
    start = problem.build(0)
    stochastic = ibnn.to_stochastic(
        start, ibnn.NormalAffine(), len(problem.train[1]), seed=problem.seed
    )
    return problem.averaged(problem.fit(stochastic), samples=problem.draws)


def distribution_loss(y_true, y_pred):
    """Return the mean NLL of Gaussians under teachers that give means and variances."""
    mean, variance = ops.split(y_true, 2, axis=-1)
    loc, scale = ops.split(y_pred, 2, axis=-1)
    distance = variance + ops.square(mean - loc)
    return ops.sum(ops.log(scale) + distance / (2 * ops.square(scale)), axis=-1)


class Taught(keras.utils.PyDataset):
    """Changed inputs, with what a teacher predicts for them on average."""

    def __init__(self, problem, teacher):
        super().__init__()
        self.x, self.batch_size, self.teacher = problem.train[0], problem.batch_size, teacher
        self.is_regression, self.augment = problem.is_regression, problem.augment
        self.order, self.random = np.arange(len(self.x)), np.random.default_rng(problem.seed)

    def __len__(self):
        return -(-len(self.x) // self.batch_size)

    def __getitem__(self, index):
        start = index * self.batch_size
        x = self.augment(self.x[self.order[start : start + self.batch_size]], training=True)
        x = ops.convert_to_numpy(x)
        prediction = self.teacher.predict_on_batch(x)
        if not self.is_regression:
            return x, prediction["mean"]
        return x, np.concatenate([prediction["mean"], prediction["total_variance"]], axis=-1)

    def on_epoch_end(self):
        self.random.shuffle(self.order)


def plainly_distilled(problem, teacher, network):
    """Return a network trained to the teacher's mean alone, or to its mean and total variance."""
    student = keras.models.clone_model(network)
    student.set_weights(network.get_weights())
    steps = problem.student_epochs * -(-len(problem.train[1]) // problem.batch_size)
    rate = keras.optimizers.schedules.CosineDecay(1e-3, steps)
    of_classes = keras.losses.CategoricalCrossentropy(from_logits=True)
    loss = distribution_loss if problem.is_regression else of_classes
    student.compile(keras.optimizers.Adam(rate), loss)
    taught = Taught(problem, teacher)
    student.fit(taught, epochs=problem.student_epochs, shuffle=False, verbose=0)
    return student


def scores(problem, model):
    """Return what a model scores, alone and at a temperature or with a factor for its scale."""
    if not isinstance(model, ibnn.MonteCarlo):
        head = "gaussian" if problem.is_regression else "softmax"
        options = {"head": head, "from_logits": None if problem.is_regression else True}
        model = problem.averaged(model, samples=1, **options)

    def predict(x):
        prediction = model.predict(x, batch_size=BATCH, verbose=0)
        return {name: value.astype("float64") for name, value in prediction.items()}

    held, test, unlike = map(predict, (problem.validation[0], problem.test[0], problem.ood))
    begun = time.perf_counter()
    predict(problem.test[0])
    seconds = time.perf_counter() - begun
    score = of_numbers if problem.is_regression else of_classes
    found = score(held, problem.validation[1], test, problem.test[1])
    has_epistemic = bool(np.ptp(test["epistemic"]))
    total = "total_variance" if problem.is_regression else "entropy"
    uncertainty = {"AUROC, total": total}
    if has_epistemic:
        uncertainty["AUROC, epistemic"] = "epistemic"
    for name, key in uncertainty.items():
        found[name] = float(ibnn.metrics.auroc(test[key].ravel(), unlike[key].ravel()))
    return {**found, "passes": model.samples, "prediction (s)": round(seconds, 3)}


def of_classes(held, y_held, test, y):
    """Return scores of class probabilities."""
    temperature = best_temperature(held["mean"], y_held)
    p = test["mean"]
    return {
        "accuracy": float(np.mean(p.argmax(-1) == y)),
        "NLL": nll(p, y),
        "NLL, T": nll(scaled(p, temperature), y),
        "ECE": float(ibnn.metrics.expected_calibration_error(p, y)),
    }


def of_numbers(held, y_held, test, y):
    """Return scores of Gaussians with the mean and the total variance."""
    factor = np.sqrt(np.mean((y_held - held["mean"]) ** 2 / held["total_variance"]))
    scale = np.sqrt(test["total_variance"])
    return {
        "RMSE": float(np.sqrt(np.mean((y - test["mean"]) ** 2))),
        "NLL": float(-norm(test["mean"], scale).logpdf(y).mean()),
        "NLL, T": float(-norm(test["mean"], factor * scale).logpdf(y).mean()),
    }


def run(pair, seed, kind, quick=False, data_dir=None):
    """Run one task; return the record. Quick runs only show that it works."""
    problem = Problem(pair, seed, quick, data_dir)
    clock = {}

    def timed(name, make, *arguments, **options):
        begun = time.perf_counter()
        made = make(*arguments, **options)
        clock[name] = round(time.perf_counter() - begun, 1)
        return made

    single = timed("single", lambda: problem.fit(problem.build(0)))
    teacher = timed("teacher", teacher_of, problem, kind, single)
    models = {"single network": single, "teacher": teacher}
    center = single
    if kind != "ensemble of 5":
        center = models["posterior mean"] = ibnn.to_deterministic(teacher.inner)
    models["mean distilled"] = timed("mean distilled", plainly_distilled, problem, teacher, center)
    losses = {"ibnn.distill": "moments"}
    if not problem.is_regression:  # of numbers, both are the same
        losses["ibnn.distill, likelihood"] = "likelihood"
    for name, loss in losses.items():
        models[name] = timed(
            name,
            ibnn.distill,
            teacher,
            problem.train[0],
            augment=problem.augment,
            loss=loss,
            epochs=problem.student_epochs,
            batch_size=problem.batch_size,
            seed=seed,
            verbose=0,
        )
    found = {name: scores(problem, model) for name, model in models.items()}
    about = {"pair": pair, "seed": seed, "group": kind, **provenance({"quick": quick})}
    return {**about, "seconds": clock, "methods": found}


def gain(methods, name):
    """Return how much lower a method's NLL is than the single network's at a temperature."""
    return methods["single network"]["NLL, T"] - methods[name]["NLL"]


def run_all(pairs, seeds, folder, *, quick=False, jobs=1, data_dir=None):
    """Run what `runs.jsonl` in the folder lacks; return how many failed."""

    def shown(record):
        methods = record["methods"]
        gains = [gain(methods, name) for name in ("teacher", "ibnn.distill")]
        return "NLL gained by teacher and student: {:.4f}, {:.4f}".format(*gains)

    every = [(pair, seed, kind) for pair in pairs for kind in TEACHERS for seed in seeds]
    return run_tasks(run, every, (quick, data_dir), folder, jobs, shown)
