"""Digits: does a flow pay where the network cannot adapt to its posterior?

A small network is trained on few images. Then posteriors are trained with it, or alone, and the
network stays as it is. A row of the result is named by `budget` and `method`:

| budget | method | is |
|---|---|---|
| frozen | deterministic | the network |
| frozen | any other | the same with a posterior, and nothing but that trained |
| joint | deterministic | the network, trained on |
| joint | any other | the same with a posterior, all of it trained |
"""

import dataclasses

import keras
import numpy as np

import tfp_ibnn as ibnn
from experiments import checks, files
from experiments.checks import count, option, positive
from experiments.folder import RunFolder
from experiments.provenance import provenance
from experiments.scoring import Scorer
from experiments.tables import SCORES

__all__ = ["BUDGETS", "Settings", "run", "run_kept"]

BUDGETS = ("frozen", "joint")
# Passes over the training images by which the ELBO is estimated, each with its own noise.
_PASSES = 200


@dataclasses.dataclass(frozen=True)
class Settings(checks.Checked):
    """All that a run depends on, but for its seed."""

    images: int = option(300, count, "to train on; the others of the 1,797 are tested on")
    hidden: tuple = option((64, 64), checks.units, "units of the hidden layers")
    pretrain_epochs: int = option(100, count, "of the network")
    epochs: int = option(300, count, "of the posteriors")
    prior_scale: float = option(0.5, positive, "of the posteriors")
    initial_scale: float = option(0.1, positive, "small: the network has learned without noise")
    learning_rate: float = option(3e-3, positive, "Adam's, falling to 0 by a cosine in each stage")
    stochastic_learning_rate: float = option(2e-2, positive, "the same, of the posteriors")
    batch_size: int = option(50, count, "in training")
    samples: int = option(128, count, "draws at test time")

    def posteriors(self):
        """Return the posteriors that are compared, by method."""
        scales = {"prior_scale": self.prior_scale, "initial_scale": self.initial_scale}
        return {
            "gaussian": ibnn.NormalAffine(**scales),
            "flow_planar": ibnn.NormalPlanar1d(depth=4, **scales),
            "flow_iaf": ibnn.NormalIAF(depth=1, **scales),
            "flow_sylvester": ibnn.NormalSylvester(depth=2, units=16, **scales),
        }

    @classmethod
    def quick(cls):
        """Return settings for a run of a minute, whose numbers mean nothing."""
        return cls(images=100, hidden=(8,), pretrain_epochs=2, epochs=2, samples=4)


def run_kept(folder, seed, settings=None, *, data_dir=None, log=print):
    """Do as `run`, and keep the rows in a folder; if they are there, return them.

    Raises:
        RunError: if the folder belongs to something else.
    """
    settings = settings or Settings()
    identity = {**dataclasses.asdict(settings), "hidden": list(settings.hidden), "seed": seed}
    with RunFolder(folder, identity) as kept:
        if (found := kept.metrics) is not None:
            log(f"seed {seed} is finished in {folder}")
            return found["rows"]
        kept.claim()
        made = provenance({})
        where = {key: made[key] for key in ("backend", "hardware", "versions", "python")}
        rows = [{**row, **where} for row in run(seed, settings, data_dir=data_dir, log=log)]
        files.write_json(kept / "metrics.json", {"rows": rows})
    return rows


def run(seed, settings=None, *, data_dir=None, log=print):
    """Train and score all models of one seed; return a row for each.

    Those of posteriors have `negative_elbo`, of all training images and in nats, estimated by many
    draws when training is over.
    """
    seed, settings = checks.whole("seed", seed), settings or Settings()
    (x, y), (x_test, y_test) = _split(seed, settings.images, data_dir)
    training = _Training(seed, settings, x, y)
    keras.utils.set_random_seed(seed)
    front = ibnn.data.preprocessing(x)
    start = ibnn.models.mlp(x.shape[1:], hidden=settings.hidden, preprocessing=front)
    training.fit(start, settings.pretrain_epochs)
    rows = []
    for budget in BUDGETS:
        for method in ("deterministic", *settings.posteriors()):
            model = training.trained(start, budget, method)
            more = {}
            if method != "deterministic":
                options = {"batch_size": len(x), "verbose": 0, "return_dict": True}
                passes = [model.evaluate(x, y, **options)["loss"] for _ in range(_PASSES)]
                more["negative_elbo"] = float(np.mean(passes)) * len(x)
            scores = Scorer(model, settings.samples, seed).score(x_test, y_test)
            log(f"seed {seed}, {budget} {method}: {scores.line()}")
            found = scores.summary()
            as_it_was = (budget, method) == ("frozen", "deterministic")
            rows.append(
                {
                    "dataset": "digits",
                    "model": "mlp",
                    "method": method,
                    "budget": budget,
                    "epochs": settings.pretrain_epochs + (0 if as_it_was else settings.epochs),
                    "seed": seed,
                    **{key: found[key] for key in (*SCORES, "samples")},
                    "parameters": model.count_params(),
                    **more,
                }
            )
    return rows


def _split(seed, images, data_dir):
    """Return images and labels to train and to test on, chosen anew for each seed."""
    parts = ibnn.data.load("digits", data_dir)
    x, y = (np.concatenate(both) for both in zip(*parts, strict=True))
    if images >= len(x):
        raise ValueError(f"`images` must leave some of {len(x)} to test on; got {images}.")
    order = np.random.default_rng(seed).permutation(len(x))
    train, test = order[:images], order[images:]
    return (x[train], y[train]), (x[test], y[test])


@dataclasses.dataclass(frozen=True)
class _Training:
    """The training of all networks of one seed."""

    seed: int
    settings: Settings
    x: np.ndarray
    y: np.ndarray

    def trained(self, start, budget, method):
        """Return what a budget and a method make of the network."""
        keras.utils.set_random_seed(self.seed)
        if method == "deterministic":
            model = keras.models.clone_model(start)
            model.set_weights(start.get_weights())
            if budget == "joint":
                self.fit(model, self.settings.epochs)
            return model
        posterior = self.settings.posteriors()[method]
        model = ibnn.to_stochastic(start, posterior, len(self.x), seed=self.seed)
        if budget == "frozen":
            ibnn.freeze(model, "deterministic")
        self.fit(model, self.settings.epochs)
        return model

    def fit(self, model, epochs):
        """Train a model."""
        batches = ibnn.data.ShuffledBatches(self.x, self.y, self.settings.batch_size, self.seed)
        schedule = keras.optimizers.schedules.CosineDecay(
            self.settings.learning_rate, epochs * len(batches)
        )
        optimizer = keras.optimizers.Adam(schedule)
        if ibnn.stochastic_layers(model):
            optimizer = ibnn.two_speed(optimizer, self.settings.stochastic_learning_rate)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, steps_per_execution=len(batches))
        optimizer.build(model.trainable_variables)  # else TensorFlow traces the step twice
        callbacks = [batches.follow()]
        model.fit(batches, epochs=epochs, verbose=0, shuffle=False, callbacks=callbacks)
