"""The settings of one training run, checked before anything is done."""

import dataclasses
import os
import re
import shlex
from typing import NamedTuple

from experiments import checks
from experiments.checks import choice, count, option
from experiments.posterior_files import read_posteriors
from tfp_ibnn import data, models

__all__ = ["DATASETS", "Settings"]

DATASETS = {
    **data.DATASETS,
    "four_clusters": data.Dataset("four_clusters", ("0", "1"), (2,), 1_000, 100_000, "drawn", {}),
}
"""What `ibnn.data.load` knows, and the points of `ibnn.data.toy`."""

# Those that the first runs did not have: at their defaults they are not part of a run's record.
_LATER = (
    *("warmup_epochs", "log_every", "deterministic_layers", "flow_layers", "flow_depth", "classes"),
    *("base_components", "learn_prior_scale", "freeze_network", "train_size", "elbo_passes"),
)
_OF_FLOWS = ("flow_layers", "flow_depth", "base_components")
_IN_FILES = ("affine", "components", "initial_scale", "mean_spread", "deterministic_layers")
# Height and width of the smallest images that each network takes.
_LEAST = {"lenet": 16, "vgg16": 32, "wide_resnet": 8}
_MODELS = ("lenet", "vgg16", "mlp", "mlp_64_64", "wide_resnet", "wide_resnet_16_4")
_optimizer = choice("sgd", "nesterov", "adam")


class Stage(NamedTuple):
    """A part of a run that has its own optimizer."""

    name: str
    epochs: int
    optimizer: str
    learning_rate: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(checks.Checked):
    """What determines a run, except for the backend and the hardware.

    A deterministic network is trained for `pretrain_epochs`, or read from `pretrained`; it then
    gets its posterior and is trained for `epochs`. With `posterior="none"` it stays deterministic.
    """

    dataset: str = option("cifar10", choice(*DATASETS), "its name")
    model: str = option("lenet", checks.text, "lenet, vgg16, mlp_64_64, wide_resnet_16_4, ...")
    posterior: str = option("flow", checks.text, "none, gaussian, flow, mixture, or JSON")
    noise: str = option("channel", choice("channel", "position"), "what has a z of its own")
    kl_reduction: str = option("sum", choice("sum", "mean"), "over positions")
    affine: str = option("last", choice("last", "first"), "first is the original report's order")
    deterministic_layers: str | None = option(None, checks.pattern, "layers without a posterior")
    flow_layers: str | None = option(None, checks.pattern, "with a flow; None: the report's choice")
    flow_depth: int | None = option(None, count, "of each flow; None takes the recipe's own")
    base_components: int = option(1, count, "Gaussians under a flow; all layers share the index")
    components: int = option(4, count, "of a mixture")
    mean_spread: float | None = option(None, checks.positive, "of a mixture's means at the start")
    prior_scale: float = option(0.5, checks.positive, "standard deviation of the prior")
    learn_prior_scale: bool = option(False, checks.flag, "train the prior's scales as well")
    initial_scale: float | None = option(None, checks.positive, "of the posterior at the start")
    beta: float = option(1.0, checks.non_negative, "weight of the KL")
    gamma: float = option(0.0, checks.non_negative, "weight of the entropy")
    kl_warmup: int = option(0, checks.whole, "epochs over which beta rises from 0")
    train_samples: int = option(1, count, "draws for each training example")
    samples: int = option(128, count, "draws at test time")
    epochs: int = option(50, count, "of training, after the pretraining")
    pretrain_epochs: int = option(0, checks.whole, "of the deterministic network")
    pretrained: str | None = option(None, checks.text, ".keras file of a deterministic network")
    freeze_network: bool = option(False, checks.flag, "train nothing but the posteriors")
    optimizer: str = option("nesterov", _optimizer, "sgd (momentum 0.9), nesterov or adam")
    pretrain_optimizer: str | None = option(None, _optimizer, "None takes `optimizer`")
    learning_rate: float = option(0.02, checks.positive, "of the network's weights")
    stochastic_learning_rate: float | None = option(None, checks.positive, "of the posteriors'")
    pretrain_learning_rate: float | None = option(None, checks.positive, "in the pretraining")
    schedule: str = option("cosine", choice("constant", "cosine"), "of the learning rates")
    warmup_epochs: int = option(0, checks.whole, "of each stage, in which the rates rise from 0")
    weight_decay: float = option(0.0, checks.non_negative, "of the network's weights, decoupled")
    batch_size: int = option(128, count, "examples in a step")
    dropout: float = option(0.0, checks.fraction, "rate; without a posterior: MC dropout")
    augment: bool | None = option(None, checks.flag, "shift and mirror; None: for CIFAR-10")
    validation: int = option(0, checks.whole, "hold out so many training images, and test on them")
    evaluate_every: int = option(0, checks.whole, "epochs between scores in the log; 0: none")
    evaluation_samples: int = option(16, count, "draws in these scores")
    log_every: int = option(1, count, "epochs between checkpoints, and logs of the posteriors")
    classes: int | None = option(None, count, "take only the first so many; others are OOD")
    train_size: int | None = option(None, count, "draw so many by the seed, and test on the rest")
    limit: int | None = option(None, count, "take only so many training and test images")
    elbo_passes: int = option(0, checks.whole, "over the training images, to estimate the ELBO")
    precision: str = option("float32", choice("float32", "mixed_bfloat16", "mixed_float16"), "")
    seed: int = option(0, checks.seed, "of weights, noise, augmentation and order")

    def __post_init__(self):
        super().__post_init__()
        if conflict := next(self._conflicts(), None):
            raise ValueError(conflict)
        if self.is_stochastic:
            self.posteriors()

    def _conflicts(self):
        known, (name, size) = DATASETS[self.dataset], self.network()
        depth, width = size.get("depth", 10), size.get("width", 1)
        if depth < 10 or (depth - 4) % 6 or not width:
            yield (
                f"`model` {self.model!r} does not exist: the depth of a wide_resnet is 10, 16, 22, "
                "28, ... (6n + 4), and its width at least 1."
            )
        if min(known.image_shape[:2]) < (least := _LEAST.get(name, 1)):
            yield (
                f"`model` {self.model!r} does not go with {self.dataset}: it takes images of at "
                f"least {least} x {least} pixels."
            )
        if self.classes is not None and not 2 <= self.classes < len(known.classes):
            yield (
                f"`classes` must be at least 2 and leave some of {self.dataset}'s "
                f"{len(known.classes)}; got {self.classes!r}."
            )
        whole = known.train_size + known.test_size
        if (self.train_size or 0) >= whole and self.dataset != "four_clusters":
            yield f"`train_size` must leave some of {whole} to test on; got {self.train_size}."
        trained = self.pretrained is not None or self.pretrain_epochs
        if self.pretrained is not None and self.pretrain_epochs:
            yield "`pretrained` and `pretrain_epochs` exclude each other: read it or train it."
        if self.freeze_network and not (trained and self.is_stochastic):
            yield (
                "`freeze_network` trains nothing but the posteriors of a trained network: it needs "
                "a `posterior`, and `pretrained` or `pretrain_epochs`."
            )
        if self.pretrained is not None and (self.dropout or self.augment is not None):
            yield "The `pretrained` network has its own `dropout` and `augment`."
        for stage in self.stages():
            if self.warmup_epochs >= stage.epochs:
                yield (
                    f"`warmup_epochs` must be below the {stage.epochs} epochs of {stage.name}, or "
                    f"the learning rate never comes up; got {self.warmup_epochs}."
                )
        # All datasets have about as many images of each class.
        available = self.train_size or known.train_size
        available = available * (self.classes or len(known.classes)) // len(known.classes)
        available = min(available, self.limit or available)
        if self.validation >= available:
            yield (
                f"`validation` must leave some of the {available} training images; got "
                f"{self.validation}."
            )
        in_file = self.is_stochastic and self.posterior not in models.POSTERIORS
        for name in self._changed():
            if name in (*_IN_FILES, *_OF_FLOWS) and in_file:
                yield f"`{name}` goes into the posterior file {self.posterior}."
            if name in _OF_FLOWS and self.posterior != "flow":
                yield f"`{name}` is of the posterior 'flow', not {self.posterior!r}."

    @property
    def is_stochastic(self):
        return self.posterior != "none"

    @property
    def method(self):
        if not self.is_stochastic:
            return "mc_dropout" if self.dropout else "deterministic"
        return self.posterior if self.posterior in models.POSTERIORS else "custom"

    @property
    def augments(self):
        return self.dataset == "cifar10" if self.augment is None else self.augment

    def stages(self):
        rate = self.pretrain_learning_rate or self.learning_rate
        optimizer = self.pretrain_optimizer or self.optimizer
        before = Stage("pretraining", self.pretrain_epochs, optimizer, rate)
        main = Stage("training", self.epochs, self.optimizer, self.learning_rate)
        return [before, main] if self.pretrain_epochs else [main]

    def network(self):
        """Return the name of the builder in `ibnn.models` and its options."""
        if match := re.fullmatch(r"wide_resnet_(\d+)_(\d+)", self.model):
            return "wide_resnet", {"depth": int(match[1]), "width": int(match[2])}
        if match := re.fullmatch(r"mlp((?:_[1-9]\d*)+)(_sigmoid)?", self.model):
            hidden = tuple(map(int, match[1].split("_")[1:]))
            return "mlp", {"hidden": hidden, "activation": "sigmoid" if match[2] else "relu"}
        return choice(*_MODELS)("model", self.model), {}

    def posteriors(self):
        common = {"prior_scale": self.prior_scale, "beta": self.beta, "gamma": self.gamma}
        if self.learn_prior_scale:
            common["learn_prior_scale"] = True
        if self.posterior not in models.POSTERIORS:
            if not (self.is_inline or os.path.exists(self.posterior)):
                known = ", ".join(repr(name) for name in ("none", *models.POSTERIORS))
                raise ValueError(
                    f"`posterior` must be {known}, or the path of a JSON file; there is no file "
                    f"{self.posterior!r}."
                )
            return read_posteriors(self.posterior, common)
        common["deterministic"] = self.deterministic_layers
        if self.initial_scale is not None:
            common["initial_scale"] = self.initial_scale
        if self.posterior == "mixture":
            common["components"] = self.components
            if self.mean_spread is not None:
                common["mean_spread"] = self.mean_spread
        else:
            common["affine"] = self.affine
        if self.posterior == "flow":
            common |= {"layers": self.flow_layers, "depth": self.flow_depth}
        if self.base_components > 1:
            common |= {"components": self.base_components, "shared_components": True}
        return models.posterior_map(self.network()[0], self.posterior, **common)

    @property
    def is_inline(self):
        """Whether `posterior` is JSON itself, not the path of a file."""
        return self.posterior.startswith("{")

    def command(self):
        """Return the command line that trains with these settings, but for the output folder."""
        words = ["python", "scripts/train_cifar.py"]
        for name, value in self._changed().items():
            word = "--" + name.replace("_", "-")
            if name == "precision":
                words += ["--mixed-precision", value.removeprefix("mixed_")]
            elif isinstance(value, bool):
                words.append(word if value else word.replace("--", "--no-", 1))
            elif isinstance(value, float) and float(f"{value:g}") == value:
                words += [word, f"{value:g}"]
            else:
                words += [word, str(value)]
        return shlex.join(words)

    def as_dict(self):
        """Return the settings, ready for JSON; a run is known by this record."""
        found, changed = dataclasses.asdict(self), self._changed()
        return {name: v for name, v in found.items() if name not in _LATER or name in changed}

    def _changed(self):
        fields = dataclasses.fields(self)
        values = {field.name: (getattr(self, field.name), field.default) for field in fields}
        return {name: value for name, (value, default) in values.items() if value != default}
