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
import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tfp_ibnn import data
from tfp_ibnn._core import checks, files
from tfp_ibnn.conversion import to_stochastic
from tfp_ibnn.experiments.folder import RunFolder
from tfp_ibnn.experiments.provenance import provenance
from tfp_ibnn.experiments.scoring import Scorer
from tfp_ibnn.experiments.summary import SCORES
from tfp_ibnn.layers import freeze, stochastic_layers
from tfp_ibnn.models import mlp
from tfp_ibnn.posteriors import (
    NormalAffine,
    NormalIAF,
    NormalPlanar1d,
    NormalSylvester,
    Posterior,
)
from tfp_ibnn.training import two_speed

__all__ = ["BUDGETS", "Settings", "run", "run_kept"]

BUDGETS = ("frozen", "joint")

Row = dict[str, Any]
Say = Callable[[str], None]

# Passes over the training images by which the ELBO is estimated, each with its own noise.
_PASSES = 200


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that a run depends on, but for its seed.

    Args:
        images: to train on; the others of the 1,797 are tested on.
        hidden: units of the hidden layers.
        pretrain_epochs: of the network.
        epochs: of the posteriors.
        prior_scale: of the posteriors.
        initial_scale: of the posteriors: small, since the network has learned without noise.
        learning_rate: Adam's, of the network, falling to 0 by a cosine in each stage.
        stochastic_learning_rate: the same, of the posteriors.
        batch_size: in training.
        samples: draws at test time.
    """

    images: int = 300
    hidden: tuple[int, ...] = (64, 64)
    pretrain_epochs: int = 100
    epochs: int = 300
    prior_scale: float = 0.5
    initial_scale: float = 0.1
    learning_rate: float = 3e-3
    stochastic_learning_rate: float = 2e-2
    batch_size: int = 50
    samples: int = 128

    def __post_init__(self) -> None:
        for name in ("images", "pretrain_epochs", "epochs", "batch_size", "samples"):
            checks.positive_integer(name, getattr(self, name))
        for field in dataclasses.fields(self):
            if field.type is float:
                checks.positive(field.name, getattr(self, field.name))

    def posteriors(self) -> dict[str, Posterior]:
        """Return the posteriors that are compared, by method."""
        scales = {"prior_scale": self.prior_scale, "initial_scale": self.initial_scale}
        return {
            "gaussian": NormalAffine(**scales),
            "flow_planar": NormalPlanar1d(depth=4, **scales),
            "flow_iaf": NormalIAF(depth=1, **scales),
            "flow_sylvester": NormalSylvester(depth=2, units=16, **scales),
        }

    @classmethod
    def quick(cls) -> "Settings":
        """Return settings for a run of a minute, whose numbers mean nothing."""
        return cls(images=100, hidden=(8,), pretrain_epochs=2, epochs=2, samples=4)


def run_kept(
    folder: str | os.PathLike,
    seed: int,
    settings: Settings | None = None,
    *,
    data_dir: str | os.PathLike | None = None,
    say: Say = print,
) -> list[Row]:
    """Do as `run`, and keep the rows in a folder; if they are there, return them.

    Args:
        folder: of this seed.
        seed: see `run`.
        settings: see `run`.
        data_dir: see `run`.
        say: see `run`.

    Raises:
        RunError: if the folder belongs to something else.
    """
    settings = settings or Settings()
    identity = {**dataclasses.asdict(settings), "hidden": list(settings.hidden), "seed": seed}
    with RunFolder(folder, identity) as kept:
        if (found := kept.metrics) is not None:
            say(f"seed {seed} is finished in {folder}")
            return found["rows"]
        kept.claim()
        made = provenance({})
        where = {key: made[key] for key in ("backend", "hardware", "versions", "python")}
        rows = run(seed, settings, data_dir=data_dir, say=say)
        rows = [{**row, **where} for row in rows]
        files.write_json(kept / "metrics.json", {"rows": rows})
    return rows


def run(
    seed: int,
    settings: Settings | None = None,
    *,
    data_dir: str | os.PathLike | None = None,
    say: Say = print,
) -> list[Row]:
    """Train and score all models of one seed; return a row for each.

    Those of posteriors have `negative_elbo`, of all training images and in nats, estimated by many
    draws when training is over.

    Args:
        seed: of the choice of training images, the initial weights, the noise and the order.
        settings: by default those of the full experiment.
        data_dir: where the data is cached.
        say: called with a line of text for each model.
    """
    seed = checks.whole("seed", seed)
    settings = settings or Settings()
    (x, y), (x_test, y_test) = _split(seed, settings.images, data_dir)
    training = _Training(seed, settings, x, y)
    keras.utils.set_random_seed(seed)
    start = mlp(x.shape[1:], hidden=settings.hidden, preprocessing=data.preprocessing(x))
    training.fit(start, settings.pretrain_epochs)
    rows = []
    for budget in BUDGETS:
        for method in ("deterministic", *settings.posteriors()):
            model = training.trained(start, budget, method)
            found = {}
            if method != "deterministic":
                found["negative_elbo"] = _negative_elbo(model, x, y)
            scores = Scorer(model, settings.samples, seed).score(x_test, y_test)
            say(f"seed {seed}, {budget} {method}: {scores.line()}")
            summary = scores.summary()
            as_it_was = (budget, method) == ("frozen", "deterministic")
            rows.append(
                {
                    "dataset": "digits",
                    "model": "mlp",
                    "method": method,
                    "budget": budget,
                    "epochs": settings.pretrain_epochs + (0 if as_it_was else settings.epochs),
                    "seed": seed,
                    **{key: summary[key] for key in (*SCORES, "samples")},
                    "parameters": model.count_params(),
                    **found,
                }
            )
    return rows


def _negative_elbo(model: keras.Model, x: np.ndarray, y: np.ndarray) -> float:
    """Return an estimate for all training images, in nats."""
    options = {"batch_size": len(x), "verbose": 0, "return_dict": True}
    passes = [model.evaluate(x, y, **options)["loss"] for _ in range(_PASSES)]
    return float(np.mean(passes)) * len(x)


def _split(
    seed: int, images: int, data_dir: str | os.PathLike | None
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Return images and labels to train and to test on, chosen anew for each seed."""
    parts = data.load("digits", data_dir)
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

    def trained(self, start: keras.Model, budget: str, method: str) -> keras.Model:
        """Return what a budget and a method make of the network."""
        keras.utils.set_random_seed(self.seed)
        if method == "deterministic":
            model = keras.models.clone_model(start)
            model.set_weights(start.get_weights())
            if budget == "joint":
                self.fit(model, self.settings.epochs)
            return model
        posterior = self.settings.posteriors()[method]
        model = to_stochastic(start, posterior, len(self.x), seed=self.seed)
        if budget == "frozen":
            freeze(model, "deterministic")
        self.fit(model, self.settings.epochs)
        return model

    def fit(self, model: keras.Model, epochs: int) -> None:
        """Train a model."""
        batches = data.ShuffledBatches(self.x, self.y, self.settings.batch_size, self.seed)
        rate = self.settings.learning_rate
        optimizer = keras.optimizers.Adam(
            keras.optimizers.schedules.CosineDecay(rate, epochs * len(batches))
        )
        if stochastic_layers(model):
            optimizer = two_speed(optimizer, self.settings.stochastic_learning_rate)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, steps_per_execution=len(batches))
        optimizer.build(model.trainable_variables)  # else TensorFlow traces the step twice
        callbacks = [batches.follow()]
        model.fit(batches, epochs=epochs, verbose=0, shuffle=False, callbacks=callbacks)
