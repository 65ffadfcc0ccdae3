"""Networks trained as usual, calibrated by `ibnn.calibrate` at some effort, and tested.

A run is a pair of data and network, and a seed, which draws the training and validation examples
and the network's weights. Test data serves for nothing but the scores. `runs.jsonl` has a line per
run; the tables are made from it.
"""

import dataclasses
import math
import time

import keras
import numpy as np
from sklearn import datasets

import tfp_ibnn as ibnn
from lib import networks as models
from lib import provenance
from lib.parts import images, interleaved, packaged
from lib.scenes import garment_scenes
from lib.tasks import run_tasks
from lib.texts import VOCABULARY, WORDS, scipy_paragraphs
from studies.calibrate import dropout
from tfp_ibnn.calibration.efforts import up_to
from tfp_ibnn.calibration.fresh import SIZES

layers = keras.layers
QUICK = 64  # examples of each kind, at most
PAIRS = {  # titles, the epochs of training, and the batch size
    "digits": ("digits 1,000, MLP 64-64", 60, 32),
    "fashion_cnn": ("Fashion-MNIST 5,000, CNN with dropout", 25, 64),
    "fashion_lenet": ("Fashion-MNIST 20,000, LeNet", 30, 128),
    "cifar_lenet": ("CIFAR-10 10,000, LeNet", 25, 128),
    "cifar_resnet": ("CIFAR-10 10,000, WRN-16-2", 60, 128),
    "cifar_vgg16": ("CIFAR-10 10,000, VGG16 with dropout", 60, 128),
    "cancer": ("breast cancer 300, MLP 32-32", 60, 32),
    "efficientnet": ("digits 1,000, EfficientNetB0", 40, 32),
    "lstm": ("digits 1,000 row by row, LSTM", 60, 32),
    "wine": ("wine 78, MLP 32-32", 60, 16),
    "diabetes": ("diabetes 250 (regression), MLP 32-32", 200, 32),
    "segmentation": ("two garments 2,000 (pixels), U-Net with dropout", 20, 32),
    "text": ("SciPy's docstrings 2,000, embedding with dropout", 15, 32),
    "imbalanced": ("3% of one class 3,000 (synthetic), MLP 32-32", 40, 32),
}
UNSEEN = (  # `calibrate` was not tuned on these
    *("efficientnet", "lstm", "wine", "diabetes"),
    *("segmentation", "text", "imbalanced"),
)
TUNED = tuple(name for name in PAIRS if name not in UNSEEN)


def upsampled(x):
    """Return digits as RGB images of 32 by 32 pixels, from 0 to 255."""
    large = np.kron(x.reshape(-1, 8, 8), np.ones((4, 4), "float32"))
    return 255 * np.repeat(large[..., None], 3, axis=-1)


def rare(return_X_y):
    """Return 10,000 examples of 20 features, of which 3% are of the second class."""
    return datasets.make_classification(
        10_000, n_informative=8, weights=[0.97], flip_y=0.01, random_state=0
    )


def load(name, seed, data_dir=None):
    """Return the (x, y) of training, validation and test."""
    match name:
        case "digits":
            return packaged(seed, datasets.load_digits, 1000, 300)
        case "lstm":
            return packaged(seed, datasets.load_digits, 1000, 300, lambda x: x.reshape(-1, 8, 8))
        case "efficientnet":
            return packaged(seed, datasets.load_digits, 1000, 300, upsampled)
        case "cancer":
            return packaged(seed, datasets.load_breast_cancer, 300, 119)
        case "wine":
            return packaged(seed, datasets.load_wine, 78, 50)
        case "diabetes":
            return packaged(seed, datasets.load_diabetes, 250, 92)
        case "imbalanced":
            return [interleaved(*part) for part in packaged(seed, rare, 3000, 1000)]
        case "text":
            return scipy_paragraphs(seed, 2000, 1000)
        case "segmentation":
            return garment_scenes(seed, data_dir, 2000, 1000, 1000)
        case "fashion_cnn":
            return images(seed, data_dir, "fashion_mnist", 5_000, 3_000)
        case "fashion_lenet":
            return images(seed, data_dir, "fashion_mnist", 20_000, 5_000)
    return images(seed, data_dir, "cifar10", 10_000, 2_500)


def network(name, steps, schedule="own"):
    """Return a compiled network; `steps` is how long a falling learning rate takes.

    With the schedule "cosine" every rate falls; by its "own", only those of SGD.
    """
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    decay = keras.optimizers.schedules.CosineDecay
    optimizer = keras.optimizers.Adam(decay(0.001, steps) if schedule == "cosine" else 0.001)
    sgd = keras.optimizers.SGD(decay(0.1, steps), momentum=0.9, nesterov=True, weight_decay=5e-4)
    augmented = {"preprocessing": [ibnn.data.RandomShift(4), ibnn.data.RandomMirror()]}
    match name:
        case "digits":
            model = models.mlp((64,), hidden=(64, 64))
        case "fashion_cnn":
            parts = [
                *(layers.Conv2D(16, 3, activation="relu"), layers.MaxPooling2D()),
                *(layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D()),
                *(layers.Flatten(), layers.Dropout(0.3), layers.Dense(64, activation="relu")),
                layers.Dense(10, activation="softmax"),
            ]
            model = keras.Sequential([keras.Input((28, 28, 1)), *parts])
            loss = "sparse_categorical_crossentropy"
        case "fashion_lenet":
            model = models.lenet((28, 28, 1))
        case "cifar_lenet":
            model = models.lenet()
        case "cifar_resnet":
            model, optimizer = models.wide_resnet(depth=16, width=2, **augmented), sgd
        case "cifar_vgg16":
            model, optimizer = models.vgg16(dropout=0.5, **augmented), sgd
        case "cancer":
            model = models.mlp((30,), 1, hidden=(32, 32))
            loss = keras.losses.BinaryCrossentropy(from_logits=True)
        case "efficientnet":
            build = keras.applications.EfficientNetB0
            model = build(weights=None, input_shape=(32, 32, 3), classes=10)
            loss = "sparse_categorical_crossentropy"
        case "lstm":
            model = keras.Sequential([keras.Input((8, 8)), layers.LSTM(64), layers.Dense(10)])
        case "segmentation":
            model = models.unet((28, 28, 1), 11, dropout=0.3)
        case "text":
            parts = [
                layers.Embedding(1 + VOCABULARY, 32, mask_zero=True),
                layers.GlobalAveragePooling1D(),
                *(layers.Dropout(0.3), layers.Dense(64, activation="relu"), layers.Dense(8)),
            ]
            model = keras.Sequential([keras.Input((WORDS,)), *parts])
        case "imbalanced":
            model = models.mlp((20,), 1, hidden=(32, 32))
            loss = keras.losses.BinaryCrossentropy(from_logits=True)
        case "wine":
            model = models.mlp((13,), 3, hidden=(32, 32))
        case "diabetes":
            model, loss = models.mlp((10,), 1, hidden=(32, 32)), "mse"
    model.compile(optimizer, loss)
    return model


def run(name, seed, quick=False, data_dir=None, effort="trainings", schedule="own"):
    """Train and calibrate one network; return the record. Quick runs only show that it works.

    `choices` has what each effort up to this one would have chosen, of the same candidates.
    """
    _, epochs, batch_size = PAIRS[name]
    parts = load(name, seed, data_dir)
    train, validation, test = ((x[:QUICK], y[:QUICK]) if quick else (x, y) for x, y in parts)
    keras.utils.set_random_seed(seed)
    clock = [time.perf_counter()]
    model = network(name, epochs * -(-len(train[1]) // batch_size), schedule)
    model.fit(*train, batch_size=batch_size, epochs=1 if quick else epochs, verbose=0)
    clock.append(time.perf_counter())
    options = {"batch_size": batch_size, "effort": effort, "verbose": False}
    if quick:
        options["samples"] = 2
        options["epochs"] = None if effort == "seconds" else 1  # any number raises the effort
    report = ibnn.calibrate(model, train, validation, **options)
    clock.append(time.perf_counter())
    rows = report.evaluate(test).rows
    clock.append(time.perf_counter())
    steps = zip(("training", "calibrate", "test"), np.diff(clock).round(1).tolist(), strict=True)
    about = {
        "pair": name,
        "seed": seed,
        **provenance({"quick": quick, "effort": effort, "schedule": schedule}),
        "seconds": dict(steps),
    }
    numbers = {
        candidate: {key: value for key, value in row.items() if not isinstance(value, str)}
        for candidate, row in rows.items()
    }
    samples = options.get("samples", 32)
    if tuned := dropout.tuned_dropout(model, validation, test, samples, seed):
        numbers[dropout.NAME] = tuned
    chosen = {"chosen": report.chosen.name, "choices": choices(report, effort)}
    return {**about, **chosen, "candidates": numbers}


def choices(report, effort):
    """Return the name of what a run at each effort up to this one would have chosen."""
    chosen = {}
    allowed = []
    for each in up_to(effort):
        allowed.append(each)
        kept = [x for x in report.candidates if x.trial.effort in allowed]
        chosen[each] = dataclasses.replace(report, candidates=kept).chosen.name
    return chosen


def same_cost(record, name):
    """Return the ensembles that cost as much as a candidate: the same trainings, the same passes.

    The first has 1 + ceil(trainings) members, since the network itself is there; the second as many
    as the passes. Each is the largest that was trained of at most that size, at a temperature.
    """
    row = record["candidates"][name]
    members = (1 + math.ceil(row["trainings"]), math.floor(row["passes"] + 0.5))
    return [_ensemble(record, each) for each in members]


def _ensemble(record, members):
    """Return the name of the largest ensemble with at most so many members; one is the network."""
    found = "as it is + temperature"
    for size in SIZES:
        name = f"ensemble of {size} + temperature"
        if size <= members and name in record["candidates"]:
            found = name
    return found


def run_all(
    names, seeds, folder, *, quick=False, jobs=1, data_dir=None, effort="trainings", schedule="own"
):
    """Run what `runs.jsonl` in the folder lacks; return how many failed.

    A run at another effort or schedule, or of before there were any, is another run.
    """

    def shown(record):
        (before, after), seconds = scores_of(record, "NLL")[::2], sum(record["seconds"].values())
        return f"NLL {before:.4f}, {after:.4f} by {record['chosen']}, {seconds:.0f} s"

    every = [(name, seed) for seed in seeds for name in names]
    settings = {"quick": quick, "effort": effort, "schedule": schedule}
    options = (quick, data_dir, effort, schedule)
    return run_tasks(run, every, options, folder, jobs, shown, settings)


def scores_of(record, score):
    """Return a score of the model as it is, at a temperature, and as chosen; NaN if it has none."""
    names = ("as it is", "as it is + temperature", record["chosen"])
    return [record["candidates"].get(name, {}).get(score, np.nan) for name in names]
