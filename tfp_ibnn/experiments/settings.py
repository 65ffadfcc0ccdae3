"""The settings of one training run, checked before anything is done."""

import dataclasses
import os
import re
import shlex
from typing import Any, NamedTuple

from tfp_ibnn import data, models
from tfp_ibnn._core import checks
from tfp_ibnn.experiments.posterior_files import read_posteriors
from tfp_ibnn.layers.multiplicative import NOISES, REDUCTIONS
from tfp_ibnn.models._blocks import LEAST, image_shape
from tfp_ibnn.models.wide_resnet import check_size
from tfp_ibnn.posteriors import Posterior

__all__ = ["Settings"]

OPTIMIZERS = ("sgd", "nesterov", "adam")
SCHEDULES = ("constant", "cosine")
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
_COUNTS = (
    "components",
    "base_components",
    "train_samples",
    "samples",
    "epochs",
    "batch_size",
    "evaluation_samples",
    "log_every",
)
_WHOLE = (
    "kl_warmup",
    "pretrain_epochs",
    "warmup_epochs",
    "validation",
    "evaluate_every",
    "seed",
)
_LATER = (
    "warmup_epochs",
    "log_every",
    "deterministic_layers",
    "flow_layers",
    "flow_depth",
    "base_components",
    "learn_prior_scale",
    "freeze_network",
    "classes",
)
_OF_FLOWS = ("flow_layers", "flow_depth", "base_components")
_NO_FILES = ("none", *models.POSTERIORS)
_WIDE_RESNET = re.compile(r"wide_resnet(?:_(\d+)_(\d+))?")


class Stage(NamedTuple):
    """A part of a run that has its own optimizer."""

    name: str
    epochs: int
    optimizer: str
    learning_rate: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What determines a run, but for the backend and the hardware.

    A deterministic network is trained for `pretrain_epochs`, or read from `pretrained`; it then
    gets its posterior and is trained for `epochs`. With `posterior="none"` it stays deterministic.

    Args:
        dataset: "cifar10", "fashion_mnist", "mnist" or "digits".
        model: "lenet", "vgg16", "mlp", "wide_resnet" (28-10) or for example "wide_resnet_16_4".
        posterior: "none", "gaussian", "flow" or "mixture" (see `ibnn.models.posterior_map`), or the
            path of a JSON file (see `read_posteriors`).
        noise: "channel" or "position".
        kl_reduction: "sum" or "mean" over positions.
        affine: "last", or "first", the original report's order.
        deterministic_layers: pattern of layers that have no posterior, unless they have a flow.
        flow_layers: pattern of the layers that have a flow, in place of the report's choice.
        flow_depth: of each flow, see the recipes; None takes their own.
        base_components: Gaussians under a flow; above 1, all layers share the component index.
        components: of a mixture.
        mean_spread: of the means of a mixture's components at the start; None takes the
            posterior's own.
        prior_scale: standard deviation of the prior.
        learn_prior_scale: train the prior's scales along with the posteriors.
        initial_scale: of the posterior at the start; None takes the posterior's own.
        beta: weight of the KL.
        gamma: weight of the entropy.
        kl_warmup: epochs over which beta rises from 0.
        train_samples: draws for each training example.
        samples: draws at test time.
        epochs: of training, after the pretraining.
        pretrain_epochs: of the deterministic network.
        pretrained: `.keras` file of a trained deterministic network.
        freeze_network: train nothing but the posteriors of the network that was trained or read.
        optimizer: "sgd" (momentum 0.9), "nesterov" or "adam".
        pretrain_optimizer: None takes `optimizer`.
        learning_rate: of the network's weights.
        stochastic_learning_rate: of the posteriors' weights; None takes `learning_rate`.
        pretrain_learning_rate: None takes `learning_rate`.
        schedule: of the learning rates, "constant" or "cosine" (to 0 at the end).
        warmup_epochs: of each stage, in which the learning rates rise linearly from 0.
        weight_decay: of the network's weights, decoupled.
        batch_size: examples in a step.
        dropout: rate in the network. Without a posterior the test then is by MC dropout.
        augment: shift and mirror the images; None does so for CIFAR-10.
        validation: hold this many training images out and test on them, not on the test images.
        evaluate_every: score the averaged prediction every so many epochs, for the log; 0 does not.
        evaluation_samples: draws in these scores.
        log_every: write the checkpoint, and log the posteriors, every so many epochs and at the
            end. A run that is killed goes on from the last checkpoint.
        classes: take only the first so many classes; the others are left to `evaluate`, as what
            the model has never seen.
        limit: take only this many training images, and as many test images at most.
        precision: "float32", "mixed_bfloat16" or "mixed_float16".
        seed: of weights, noise, augmentation and order.
    """

    dataset: str = "cifar10"
    model: str = "lenet"
    posterior: str = "flow"
    noise: str = "channel"
    kl_reduction: str = "sum"
    affine: str = "last"
    deterministic_layers: str | None = None
    flow_layers: str | None = None
    flow_depth: int | None = None
    base_components: int = 1
    components: int = 4
    mean_spread: float | None = None
    prior_scale: float = 0.5
    learn_prior_scale: bool = False
    initial_scale: float | None = None
    beta: float = 1.0
    gamma: float = 0.0
    kl_warmup: int = 0
    train_samples: int = 1
    samples: int = 128
    epochs: int = 50
    pretrain_epochs: int = 0
    pretrained: str | None = None
    freeze_network: bool = False
    optimizer: str = "nesterov"
    pretrain_optimizer: str | None = None
    learning_rate: float = 0.02
    stochastic_learning_rate: float | None = None
    pretrain_learning_rate: float | None = None
    schedule: str = "cosine"
    warmup_epochs: int = 0
    weight_decay: float = 0.0
    batch_size: int = 128
    dropout: float = 0.0
    augment: bool | None = None
    validation: int = 0
    evaluate_every: int = 0
    evaluation_samples: int = 16
    log_every: int = 1
    classes: int | None = None
    limit: int | None = None
    precision: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("model", "posterior"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"`{name}` must be a text; got {getattr(self, name)!r}.")
        if not isinstance(self.pretrained, str | None):
            raise ValueError(f"`pretrained` must be the path of a file; got {self.pretrained!r}.")
        checks.one_of("dataset", self.dataset, tuple(data.DATASETS))
        self._check_network()
        checks.one_of("noise", self.noise, NOISES)
        checks.one_of("kl_reduction", self.kl_reduction, REDUCTIONS)
        checks.one_of("affine", self.affine, ("last", "first"))
        checks.one_of("optimizer", self.optimizer, OPTIMIZERS)
        if self.pretrain_optimizer is not None:
            checks.one_of("pretrain_optimizer", self.pretrain_optimizer, OPTIMIZERS)
        checks.one_of("schedule", self.schedule, SCHEDULES)
        checks.one_of("precision", self.precision, PRECISIONS)
        # 3.0 counts as 3, and is the same run.
        for name in _COUNTS:
            self._set(name, checks.positive_integer(name, getattr(self, name)))
        for name in _WHOLE:
            self._set(name, checks.whole(name, getattr(self, name)))
        if self.seed >= 2**31:
            raise ValueError(f"`seed` must be below 2**31; got {self.seed}.")
        for name in ("prior_scale", "learning_rate"):
            checks.positive(name, getattr(self, name))
        for name in (
            "initial_scale",
            "mean_spread",
            "stochastic_learning_rate",
            "pretrain_learning_rate",
        ):
            if getattr(self, name) is not None:
                checks.positive(name, getattr(self, name))
        for name in ("beta", "gamma", "weight_decay"):
            checks.non_negative(name, getattr(self, name))
        checks.fraction("dropout", self.dropout)
        if self.limit is not None:
            self._set("limit", checks.positive_integer("limit", self.limit))
        checks.one_of("augment", self.augment, (None, True, False))
        for name in ("learn_prior_scale", "freeze_network"):
            self._set(name, bool(checks.one_of(name, getattr(self, name), (True, False))))
        if self.flow_depth is not None:
            self._set("flow_depth", checks.positive_integer("flow_depth", self.flow_depth))
        for name in ("deterministic_layers", "flow_layers"):
            _check_pattern(name, getattr(self, name))
        if self.classes is not None:
            known = len(data.DATASETS[self.dataset].classes)
            if not 2 <= checks.positive_integer("classes", self.classes) < known:
                raise ValueError(
                    f"`classes` must be at least 2 and leave some of {self.dataset}'s {known}; got "
                    f"{self.classes!r}."
                )
            self._set("classes", int(self.classes))
        if self.pretrained is not None and self.pretrain_epochs:
            raise ValueError(
                "`pretrained` and `pretrain_epochs` exclude each other: the network is read or "
                "trained."
            )
        trained = self.pretrained is not None or self.pretrain_epochs
        if self.freeze_network and not (trained and self.is_stochastic):
            raise ValueError(
                "`freeze_network` trains nothing but the posteriors of a trained network: it needs "
                "a `posterior`, and `pretrained` or `pretrain_epochs`."
            )
        if self.pretrained is not None and (self.dropout or self.augment is not None):
            raise ValueError("The `pretrained` network has its own `dropout` and `augment`.")
        for stage in self.stages():
            if self.warmup_epochs >= stage.epochs:
                raise ValueError(
                    f"`warmup_epochs` must be below the {stage.epochs} epochs of {stage.name}, or "
                    f"the learning rate never comes up; got {self.warmup_epochs}."
                )
        available = data.DATASETS[self.dataset].train_size
        if self.classes is not None:  # all datasets have about as many images of each class
            available = available * self.classes // len(data.DATASETS[self.dataset].classes)
        available = min(available, self.limit or available)
        if self.validation >= available:
            raise ValueError(
                f"`validation` must leave some of the {available} training images; got "
                f"{self.validation}."
            )
        self._check_posterior_options()
        if self.is_stochastic:
            self.posteriors()

    @property
    def is_stochastic(self) -> bool:
        """Whether the network gets a posterior."""
        return self.posterior != "none"

    @property
    def method(self) -> str:
        """The method's name in tables."""
        if not self.is_stochastic:
            return "mc_dropout" if self.dropout else "deterministic"
        return self.posterior if self.posterior in models.POSTERIORS else "custom"

    @property
    def augments(self) -> bool:
        """Whether training images are shifted and mirrored."""
        return self.dataset == "cifar10" if self.augment is None else self.augment

    def stages(self) -> list[Stage]:
        """Return the stages of training, in order."""
        before = Stage(
            "pretraining",
            self.pretrain_epochs,
            self.pretrain_optimizer or self.optimizer,
            self.pretrain_learning_rate or self.learning_rate,
        )
        main = Stage("training", self.epochs, self.optimizer, self.learning_rate)
        return [before, main] if self.pretrain_epochs else [main]

    def network(self) -> tuple[str, dict[str, int]]:
        """Return the name of the builder in `ibnn.models` and its options."""
        if match := _WIDE_RESNET.fullmatch(self.model):
            depth, width = match.groups()
            return "wide_resnet", {"depth": int(depth), "width": int(width)} if depth else {}
        choices = ("lenet", "vgg16", "mlp", "wide_resnet", "wide_resnet_16_4")
        return checks.one_of("model", self.model, choices), {}

    def _check_network(self) -> None:
        name, size = self.network()
        try:
            if size:
                check_size(**size)
            if name in LEAST:
                image_shape(data.DATASETS[self.dataset].image_shape, name)
        except ValueError as error:
            raise ValueError(
                f"`model` {self.model!r} does not go with {self.dataset}: {error}"
            ) from error

    def _check_posterior_options(self) -> None:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        changed = [name for name in defaults if getattr(self, name) != defaults[name]]
        in_files = ("affine", "components", "initial_scale", "mean_spread", "deterministic_layers")
        for name in changed:
            if name in (*in_files, *_OF_FLOWS) and self.posterior not in _NO_FILES:
                raise ValueError(f"`{name}` goes into the posterior file {self.posterior}.")
            if name in _OF_FLOWS and self.posterior != "flow":
                raise ValueError(f"`{name}` is of the posterior 'flow', not {self.posterior!r}.")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def posteriors(self) -> dict[str, Posterior]:
        """Return the posteriors of the layers, by pattern."""
        common = {"prior_scale": self.prior_scale, "beta": self.beta, "gamma": self.gamma}
        if self.learn_prior_scale:
            common["learn_prior_scale"] = True
        if self.posterior not in models.POSTERIORS:
            if not os.path.exists(self.posterior):
                known = ", ".join(repr(name) for name in ("none", *models.POSTERIORS))
                raise ValueError(
                    f"`posterior` must be {known}, or the path of a JSON file; there is no file "
                    f"{self.posterior!r}."
                )
            return read_posteriors(self.posterior, common)
        if self.initial_scale is not None:
            common["initial_scale"] = self.initial_scale
        if self.posterior == "mixture":
            common["components"] = self.components
            if self.mean_spread is not None:
                common["mean_spread"] = self.mean_spread
        else:
            common["affine"] = self.affine
        common["deterministic"] = self.deterministic_layers
        if self.posterior == "flow":
            common |= {"layers": self.flow_layers, "depth": self.flow_depth}
        if self.base_components > 1:
            common |= {"components": self.base_components, "shared_components": True}
        return models.posterior_map(self.network()[0], self.posterior, **common)

    def command(self) -> str:
        """Return the command line that trains with these settings, but for the output folder."""
        words = ["python", "scripts/train_cifar.py"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            option = "--" + field.name.replace("_", "-")
            if field.name == "precision":
                words += ["--mixed-precision", value.removeprefix("mixed_")]
            elif isinstance(value, bool):
                words.append(option if value else option.replace("--", "--no-", 1))
            else:
                words += [option, _shortest(value) if isinstance(value, float) else str(value)]
        return shlex.join(words)

    def as_dict(self) -> dict[str, Any]:
        """Return the settings, ready for JSON.

        Those that the first runs did not have are left out at their defaults, so that a run of then
        is known by the same record.
        """
        fields = {field.name: field for field in dataclasses.fields(self)}
        return {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if name not in _LATER or value != fields[name].default
        }


def _check_pattern(name: str, value: Any) -> None:
    try:
        if value is not None:
            re.compile(value)
    except (TypeError, re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"`{name}` must be a regular expression; got {value!r}.") from error


def _shortest(value: float) -> str:
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
