"""One training run, from the data to the report."""

import hashlib
import importlib.util
import json
import math
import re
import time
from contextlib import nullcontext
from pathlib import Path

import keras
import numpy as np
import pandas as pd

import tfp_ibnn as ibnn
from lib import data, files, networks, pruning, toy
from lib.devices import Devices
from lib.folder import RunError, RunFolder
from lib.report import write_report
from lib.scan import can_scan, scan
from lib.scoring import Scorer, read_model
from lib.settings import DATASETS
from lib.shifts import split_classes
from lib.store import provenance
from tfp_ibnn.training import Interrupts


def run(settings, output, data_dir=None, *, log=print, keep_models=True, export=True, devices=None):
    """Train, test and report; return what `metrics.json` holds.

    The folder gets, as it goes along, `settings.json`, `training.csv`, TensorBoard events and
    a checkpoint every `log_every` epochs; at the end `metrics.json`, `probabilities.npz`, figures,
    a model card and, with `keep_models`, `model.keras` and, with `export`, a SavedModel; or
    `failure.txt`, if training fails. An unfinished run of these settings in the folder resumes; if
    there is a finished one, nothing is done.

    Of several processes that train together (see `devices_for`) the first one writes, tests and
    logs; the others return an empty dict. RunError is raised if the folder belongs to
    something else, its checkpoint is damaged or training diverged, DataError without data.
    """
    devices = devices or Devices()
    log = log if devices.is_first else lambda line: None
    known = {**identity(settings), **devices.identity}
    ours = json.dumps(known, sort_keys=True)
    if devices.from_first(lambda: ours) != ours:
        raise RunError("The processes have different settings: start all with the same command.")
    metrics = devices.from_first(lambda: RunFolder(output, known).metrics)
    if metrics is not None:
        log(f"{output}: finished already.")
        return metrics
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(settings.precision)
    try:
        with RunFolder(output, known, check=False) as folder:
            return _run(settings, folder, data_dir, log, (keep_models, export), devices)
    finally:
        keras.config.set_dtype_policy(policy)


def identity(settings):
    """Return what a run is known by: its settings, with the content of the files they name."""
    content = {}
    for name in ("pretrained", "posterior"):
        path = getattr(settings, name)
        if path in (None, "none", *networks.POSTERIORS) or path.startswith("{"):
            continue
        try:
            content[f"{name}_sha256"] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror}.") from error
    return {**settings.as_dict(), **content, "backend": keras.backend.backend()}


def _run(settings, folder, data_dir, log, keep, devices):
    train, test = _arrays(settings, data_dir)
    before = _arrays(settings, data_dir, before=True) if settings.transfer else (train, test)
    devices.check_batch(min(settings.batch_size, len(train[0])))
    # Each stage begins from the seed, so that a run that resumes in the second one draws the same.
    keras.utils.set_random_seed(settings.seed)
    try:
        with devices.building():
            model = _network(settings, train[0])
            # A pattern that matches no layer is found now, not after the pretraining.
            _stochastic(model, settings, len(train[0]))
    except ValueError as error:
        raise RunError(str(error)) from error
    devices.from_first(folder.claim)
    times, baseline = {}, None
    for stage in settings.stages():
        if stage.name == "training":
            if settings.has_baseline and devices.count == 1:
                baseline = Scorer(model, settings.samples, settings.seed).score(*test)
            keras.utils.set_random_seed(settings.seed)
            with devices.building():
                model = _stochastic(model, settings, len(train[0]))
        now = before if stage.name == "pretraining" else (train, test)
        times[stage.name] = _fit(model, settings, stage, *now, folder, log, devices)
    if devices.is_first:
        model = devices.on_one(model)
    devices.leave()
    if not devices.is_first:
        return {}
    began = time.perf_counter()
    scorer = Scorer(model, settings.samples, settings.seed)
    try:
        scores = scorer.score(*test)
        found = scores.summary()
    except ValueError as error:
        raise RunError(
            f"The network predicts nonsense: training has diverged ({error})."
        ) from error
    times["testing"] = time.perf_counter() - began
    if settings.elbo_passes and settings.is_stochastic:
        # Of all training images together, in nats.
        options = {"batch_size": len(train[0]), "verbose": 0, "return_dict": True}
        losses = [model.evaluate(*train, **options)["loss"] for _ in range(settings.elbo_passes)]
        found["negative_elbo"] = float(np.mean(losses)) * len(train[0])
    if settings.pruning:
        found["weights"] = pruning.measure(model, scorer, test)
    # A network that was read may have dropout of its own.
    averaged = settings.is_stochastic or scorer.monte_carlo is None
    metrics = {
        **found,
        "tested_on": "validation" if settings.validation else "test",
        "method": settings.method if averaged else "mc_dropout",
        **{"train_size": len(train[0]), "test_size": len(test[0]), "devices": devices.count},
        "parameters": model.count_params(),
        "seconds": {name: round(seconds, 1) for name, seconds in times.items()},
        **provenance(settings.as_dict()),
    }
    log(scores.line())
    # What a finished run leaves; `metrics.json`, which makes it finished, comes last.
    with files.replacing(folder / "probabilities.npz") as temporary:
        np.savez_compressed(temporary, **scores.arrays())
    keep_models, export = keep
    if keep_models:
        with files.replacing(folder / "model.keras") as temporary:
            scorer.model.save(temporary)
        metrics["saved_model"] = export and keras.backend.backend() == "tensorflow"
        if metrics["saved_model"]:
            scorer.export(folder / "saved_model", overwrite=True)
        elif export:
            log("No SavedModel: that takes TensorFlow. `scripts/export.py` makes one there.")
    write_report(folder.path, metrics, scores, test, baseline)
    files.write_json(folder / "metrics.json", metrics)
    for stage in settings.stages():
        (folder / f"{stage.name}.npz").unlink(missing_ok=True)
    return metrics


def _arrays(settings, data_dir, before=False):
    """Return training and test arrays; `before`: five times as many of the classes left later."""
    if settings.dataset == "four_clusters":  # of each seed others, but all are tested on the same
        known, sample = DATASETS["four_clusters"], toy.sample
        train = sample(settings.train_size or known.train_size, [1, settings.seed])
        test = sample(known.test_size, [2])
    else:
        train, test = data.load(settings.dataset, data_dir)
        if settings.train_size is not None:
            every = [np.concatenate(both) for both in zip(train, test, strict=True)]
            order = np.random.default_rng(settings.seed).permutation(len(every[0]))
            parts = np.split(order, [settings.train_size])
            train, test = ([part[rows] for part in every] for rows in parts)
    if settings.classes is not None:
        train, test = (split_classes(*x, settings.classes) for x in (train, test))
        later = settings.transfer and not before
        train, test = ((x, y - later * settings.classes) for x, y in (train[later], test[later]))
    limit = settings.limit and (5 if before else 1) * settings.limit
    train, test = ([part[:limit] for part in x] for x in (train, test))
    if not settings.validation:
        return train, test
    # The images held out are the same in all runs, whatever their seed.
    return data.validation_split(*train, settings.validation, seed=0)


def _network(settings, images):
    if path := settings.pretrained:
        model = read_model(Path(path), settings.dataset, settings.classes)
        if ibnn.stochastic_layers(model):
            raise RunError(f"{path} has a posterior: give a deterministic network.")
        if settings.posterior in networks.POSTERIORS and model.name != settings.network()[0]:
            wrong = f"{path} is {model.name!r}, not {settings.model!r}: give the `model` that it is"
            raise RunError(f"{wrong}, or give the posteriors of its layers in a file.")
        if settings.precision not in {layer.dtype_policy.name for layer in model.layers}:
            raise RunError(f"{path} does not compute in {settings.precision}.")
        return model
    name, options = settings.network()
    if images.ndim > 2:
        # Four pixels for 32, the custom for CIFAR-10, and in proportion for others.
        padding = max(1, images.shape[1] // 8)
        shifts = {"augment": settings.augments, "padding": padding, "seed": settings.seed}
        options["preprocessing"] = ibnn.data.preprocessing(images, **shifts)
    classes = settings.classes or len(DATASETS[settings.dataset].classes)
    if name == "mobilenet_v2":
        return _mobilenet_v2(images.shape[1:], classes, **options)
    build = _wide_lenet if "widths" in options else getattr(networks, name)
    channels = settings.dropout_layers
    rate = settings.dropout if channels is None else 0.0
    model = build(images.shape[1:], classes, dropout=rate, **options)
    return model if channels is None else channel_dropout(model, settings.dropout, channels)


def _mobilenet_v2(shape, classes, preprocessing):
    """Return Keras' own, without ImageNet's weights."""
    inputs = x = keras.Input(shape)
    for layer in preprocessing:
        x = layer(x)
    options = {"weights": None, "classes": classes, "classifier_activation": None}
    model = keras.applications.MobileNetV2(shape, input_tensor=x, **options)
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.9  # at Keras' 0.999 the averages are old after so few steps
    return keras.Model(inputs, model.output, name="mobilenet_v2")


def _wide_lenet(shape, classes, widths, preprocessing, dropout):
    """Return the LeNet of arXiv 1703.01961: two 5x5 convolutions, max-pooling, one hidden layer."""
    layers, (*filters, units) = keras.layers, widths
    inputs = x = keras.Input(shape, name="image")
    for layer in preprocessing:
        x = layer(x)
    for place, width in enumerate(filters, start=1):
        x = layers.Conv2D(width, 5, activation="relu", name=f"conv{place}")(x)
        x = layers.MaxPooling2D(2, name=f"pool{place}")(x)
    x = layers.Flatten(name="flatten")(x)
    for place, (width, active) in enumerate([(units, "relu"), (classes, None)], start=1):
        x = layers.Dropout(dropout, name=f"fc{place}_dropout")(x) if dropout else x
        x = layers.Dense(width, active, name=f"fc{place}")(x)
    return keras.Model(inputs, x, name="lenet")


def channel_dropout(model, rate, pattern):
    """Return an untrained copy with dropout of whole channels on the inputs of some layers."""
    dropped = []

    def call(layer, *args, **kwargs):
        if re.fullmatch(pattern, layer.name):
            x, *args = args
            kinds = {4: keras.layers.SpatialDropout2D, 2: keras.layers.Dropout}
            dropped.append(kinds[len(x.shape)](rate, name=f"{layer.name}_dropout"))
            args = dropped[-1](x), *args
        return layer(*args, **kwargs)

    model = keras.models.clone_model(model, call_function=call)
    if not dropped:
        raise ValueError(f"`dropout_layers` {pattern!r} matches no layer of {model.name}.")
    return model


def _stochastic(model, settings, train_size):
    """Return a copy with the posteriors of the settings, or the model itself without any."""
    if not settings.is_stochastic:
        return model
    plain = settings.deterministic_layers
    if plain is not None and not any(re.fullmatch(plain, layer.name) for layer in model.layers):
        raise ValueError(f"`deterministic_layers` {plain!r} matches no layer of {model.name}.")
    names = ("noise", "kl_reduction", "train_samples", "seed")
    options = {name: getattr(settings, name) for name in names}
    copy = ibnn.to_stochastic(model, settings.posteriors(), train_size, **options)
    if settings.freeze_network:
        ibnn.freeze(copy, "deterministic")
    return copy


def _fit(model, settings, stage, train, test, folder, log, devices):
    """Train a model to the end of a stage; return the seconds that it took, over all parts."""
    # Of many images a few may be left out, so that all batches have one shape; of few points none.
    whole = settings.dataset != "four_clusters"
    batches = ibnn.data.ShuffledBatches(
        *train, settings.batch_size, settings.seed, drop_remainder=whole, shard=devices.shard
    )
    with devices.building():
        optimizer = _optimizer(model, settings, stage, stage.epochs * len(batches))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        metrics = ["accuracy", ibnn.ExpectedCalibrationError(name="ece", from_logits=True)]
        model.compile(optimizer, loss, metrics=metrics, jit_compile=devices.jit_compile)
        # TensorFlow would trace the first step twice for an optimizer or metrics without variables.
        model.optimizer.build(model.trainable_variables)
        if devices.count == 1:
            model.compute_metrics(None, train[1][:1], keras.ops.zeros((1, *model.output_shape[1:])))

    def due(epoch):  # counted from 0, at its end
        return (epoch + 1) % settings.log_every == 0 or epoch + 1 == stage.epochs

    checkpoint, history = _Checkpoint(folder / f"{stage.name}.npz", due), f"{stage.name}.csv"
    try:
        done = devices.restore(checkpoint, model)
    except ibnn.training.CheckpointError as error:
        raise RunError(str(error)) from error
    if done and devices.is_first:
        # A run that was killed right after its checkpoint lacks a line here.
        checkpoint.write_history(folder / history)
    if 0 < done < stage.epochs:
        log(f"{stage.name}: going on after epoch {done} of {stage.epochs}.")

    def tell(epoch, logs):
        checkpoint.write_history(folder / history)
        names = ("loss", "nll", "kl", "accuracy", "ece", "test_accuracy", "test_nll", "test_ece")
        parts = ", ".join(f"{name} {logs[name]:.4g}" for name in names if name in logs)
        seconds = sum(row["seconds"] for row in checkpoint.logs)
        log(f"{stage.name}: epoch {epoch + 1}/{stage.epochs}, {parts}, {seconds:.0f} s")

    # The guard is before all that saves: of a run that has diverged nothing is kept.
    guard, interrupts = ibnn.TerminateOnNonFinite(every=None, raises=True), Interrupts()
    callbacks = [interrupts, batches.follow(), guard]
    if settings.kl_warmup and ibnn.stochastic_layers(model):
        callbacks.append(ibnn.KLAnnealing(settings.kl_warmup))
    callbacks.append(_Log(settings, test, devices, due))
    if devices.is_first:
        callbacks += [checkpoint, keras.callbacks.LambdaCallback(on_epoch_end=tell)]
        # Keras writes TensorBoard's files with TensorFlow, whichever backend computes.
        if all(importlib.util.find_spec(name) for name in ("tensorflow", "tensorboard")):
            callbacks.append(keras.callbacks.TensorBoard(folder / f"tensorboard/{stage.name}"))
    if done < stage.epochs:
        # One device only: on several, Keras deals out each batch by itself.
        one_call = devices.jit_compile is not False and devices.count == 1 and can_scan(batches)
        loop = scan(model, batches) if one_call else nullcontext()
        options = {"epochs": stage.epochs, "initial_epoch": done, "callbacks": callbacks}
        try:
            with interrupts, devices.training(), loop:
                model.fit(batches, shuffle=False, verbose=0, **options)
        except ibnn.NonFiniteError as error:
            raise RunError(f"{stage.name} diverged: {error} Lower the learning rate.") from error
    return sum(row["seconds"] for row in checkpoint.logs)


def _optimizer(model, settings, stage, steps):
    rate = _rate(stage.learning_rate, settings, stage, steps)
    decay = settings.weight_decay or None
    if stage.optimizer == "adam":
        optimizer = keras.optimizers.Adam(rate, weight_decay=decay)
    else:
        nesterov = stage.optimizer == "nesterov"
        optimizer = keras.optimizers.SGD(rate, 0.9, nesterov=nesterov, weight_decay=decay)
    if not ibnn.stochastic_layers(model):
        return optimizer
    stochastic = settings.stochastic_learning_rate or stage.learning_rate
    if settings.warmup_epochs:  # `two_speed` cannot scale a schedule that begins at 0
        stochastic = _rate(stochastic, settings, stage, steps)
    return ibnn.two_speed(optimizer, stochastic)


def _rate(rate, settings, stage, steps):
    """Return a learning rate as the settings have it change over the steps of a stage."""
    cosine = keras.optimizers.schedules.CosineDecay
    if settings.warmup_epochs:
        rising = steps // stage.epochs * settings.warmup_epochs
        # With alpha 1 the cosine is flat.
        alpha = 0.0 if settings.schedule == "cosine" else 1.0
        return cosine(0.0, max(1, steps - rising), alpha, warmup_target=rate, warmup_steps=rising)
    return cosine(rate, steps) if settings.schedule == "cosine" else rate


class _Checkpoint(ibnn.Checkpoint):
    """Writes the file at some epochs only, but keeps the history of all."""

    def __init__(self, path, due):
        super().__init__(path)
        self.due = due

    def on_epoch_end(self, epoch, logs=None):
        if self.due(epoch):
            return super().on_epoch_end(epoch, logs)
        finite = {key: float(value) for key, value in logs.items() if math.isfinite(value)}
        self.logs = [*self.logs[:epoch], finite]

    def write_history(self, path):
        """Write all that was logged so far as CSV: a run that was killed leaves no line twice."""
        rows = pd.DataFrame(self.logs)
        rows.insert(0, "epoch", range(1, len(rows) + 1))
        with files.replacing(path) as temporary:
            rows.to_csv(temporary, index=False)


class _Log(keras.callbacks.Callback):
    """Logs the posteriors, where due, the scores, and the seconds of each epoch."""

    def __init__(self, settings, test, devices, due):
        super().__init__()
        self.settings, self.test, self.devices, self.due = settings, test, devices, due
        self.posteriors, self.scorer = ibnn.PosteriorLog(), None

    def on_train_begin(self, logs=None):
        self.last = time.perf_counter()  # the first epoch has the compilation
        self.posteriors.set_model(self.model)
        if self.settings.evaluate_every and self.devices.is_first:
            model = self.devices.on_one(self.model)
            with self.devices.alone():
                self.scorer = Scorer(model, self.settings.evaluation_samples, self.settings.seed)

    def on_epoch_end(self, epoch, logs=None):
        now = time.perf_counter()
        logs["seconds"], self.last = now - self.last, now
        if self.due(epoch) and ibnn.stochastic_layers(self.model):
            self.posteriors.on_epoch_end(epoch, logs)
        if self.scorer and (epoch + 1) % self.settings.evaluate_every == 0:
            with self.devices.alone():
                self.devices.update(self.scorer.model, self.model)
                found = self.scorer.score(*self.test).scores()
            logs.update({f"test_{name}": found[name] for name in ("accuracy", "nll", "ece")})
