"""The settings of one training run, checked before anything is done."""

import dataclasses
import functools
import os
import re
import shlex
from collections import namedtuple

from lib import checks, data, networks
from lib.posterior_files import read_posteriors
from tfp_ibnn import Posterior

DATASETS = {
    **data.DATASETS,
    "four_clusters": data.Dataset("four_clusters", ("0", "1"), (2,), 1_000, 100_000, "drawn", {}),
}
"""What `data.load` knows, and the points of `toy`."""

_OF_FLOWS = ("flow_layers", "flow_depth", "base_components")
_IN_FILES = ("affine", "components", "initial_scale", "mean_spread", "deterministic_layers")
# Height and width of the smallest images that each network takes.
_LEAST = {"lenet": 16, "vgg16": 32, "wide_resnet": 8, "mobilenet_v2": 32}
_MODELS = ("lenet", "vgg16", "mlp", "mlp_64_64", "wide_resnet", "wide_resnet_16_4", "mobilenet_v2")


# A part of a run that has its own optimizer.
Stage = namedtuple("Stage", "name epochs optimizer learning_rate")


@functools.lru_cache(typed=True)
def _check(*args, **options):
    """Raise for posteriors that cannot be built; most settings of a plan have the same."""
    networks.posterior_map(*args, **options)


@checks.settings("train")
class Settings(checks.Checked):
    """What determines a run, except for the backend and the hardware; see `settings.toml`.

    A deterministic network is trained for `pretrain_epochs`, or read from `pretrained`; it then
    gets its posterior and is trained for `epochs`. With `posterior="none"` it stays deterministic.
    """

    def __post_init__(self):
        super().__post_init__()
        if conflict := next(self._conflicts(), None):
            raise ValueError(conflict)
        if self.is_stochastic:
            self.posteriors(_check)

    def _conflicts(self):
        known, (name, size) = DATASETS[self.dataset], self.network()
        depth, least = size.get("depth", 10), _LEAST.get(name, 1)
        if depth < 10 or (depth - 4) % 6 or not size.get("width", 1):
            good = "a wide_resnet has a depth of 10, 16, 22, ... (6n + 4) and a width of at least 1"
            yield f"`model` {self.model!r} does not exist: {good}."
        if min(known.image_shape[:2]) < least:
            good = f"it takes images of at least {least} x {least} pixels"
            yield f"`model` {self.model!r} does not go with {self.dataset}: {good}."
        if self.classes is not None and not 2 <= self.classes < len(known.classes):
            good = f"be at least 2 and leave some of {self.dataset}'s {len(known.classes)}"
            yield f"`classes` must {good}; got {self.classes!r}."
        if self.transfer and (
            2 * (self.classes or 0) != len(known.classes) or not self.pretrain_epochs
        ):
            good = f"half of {self.dataset}'s `classes` and `pretrain_epochs`"
            yield f"`transfer` goes from some classes to as many others: it needs {good}."
        if name == "mobilenet_v2" and (self.posterior not in ("none", "gaussian") or self.dropout):
            yield "`model` 'mobilenet_v2' takes `posterior` 'none' or 'gaussian', and no `dropout`."
        whole = known.train_size + known.test_size
        if (self.train_size or 0) >= whole and self.dataset != "four_clusters":
            yield f"`train_size` must leave some of {whole} to test on; got {self.train_size}."
        read = self.pretrained is not None
        if read and self.pretrain_epochs:
            yield "`pretrained` and `pretrain_epochs` exclude each other: read it or train it."
        if self.freeze_network and not ((read or self.pretrain_epochs) and self.is_stochastic):
            good = "it needs a `posterior`, and `pretrained` or `pretrain_epochs`"
            yield f"`freeze_network` trains only the posteriors of a trained network: {good}."
        if read and (self.dropout or self.augment is not None):
            yield "The `pretrained` network has its own `dropout` and `augment`."
        if self.dropout_layers is not None and not self.dropout:
            yield "`dropout_layers` need a rate, `dropout`, above 0."
        for stage in self.stages():
            if self.warmup_epochs >= stage.epochs:
                good = f"be below the {stage.epochs} epochs of {stage.name}"
                yield f"`warmup_epochs` must {good}; got {self.warmup_epochs}."
        available = self.images
        if self.validation >= available:
            good = f"leave some of the {available} training images"
            yield f"`validation` must {good}; got {self.validation}."
        in_file = self.is_stochastic and self.posterior not in networks.POSTERIORS
        for name in self._changed():
            if name in (*_IN_FILES, *_OF_FLOWS) and in_file:
                yield f"`{name}` goes into the posterior file {self.posterior}."
            if name in _OF_FLOWS and self.posterior != "flow":
                yield f"`{name}` is of the posterior 'flow', not {self.posterior!r}."

    @classmethod
    def with_defaults(cls, **options):
        """Return settings with the library's prior and beta where they are None.

        With the library's prior, a Gaussian or a flow also starts where the library has it start.
        """
        missing = [name for name in ("prior_scale", "beta") if options[name] is None]
        chosen = cls(**{name: value for name, value in options.items() if name not in missing})
        if not chosen.is_stochastic:
            return chosen
        found = {name: chosen.library_defaults[name] for name in missing}
        starts = chosen.initial_scale is None and chosen.posterior in ("gaussian", "flow")
        if "prior_scale" in found and starts:
            found["initial_scale"] = min(0.1, found["prior_scale"])
        return dataclasses.replace(chosen, **found)

    @property
    def depth(self):
        """How many layers of the network can have a posterior."""
        name, size = self.network()
        if name == "wide_resnet":
            return size.get("depth", 28) + (size.get("width", 10) > 1)  # the first shortcut
        known = {"lenet": 5, "vgg16": 16, "mobilenet_v2": 53, "mlp": 3}
        return len(size["hidden"]) + 1 if "hidden" in size else known[name]

    @property
    def images(self):
        """About how many there are to train on, those for validation included."""
        known = DATASETS[self.dataset]
        count = self.train_size or known.train_size
        # All datasets have about as many images of each class.
        count = count * (self.classes or len(known.classes)) // len(known.classes)
        return min(count, self.limit or count)

    @property
    def is_stochastic(self):
        return self.posterior != "none"

    @property
    def has_baseline(self):
        """Whether a trained deterministic network of the same classes gets a posterior."""
        is_trained = bool(self.pretrained or self.pretrain_epochs)
        return self.is_stochastic and is_trained and not self.transfer

    @property
    def library_defaults(self):
        """The prior's scale and beta that the library takes for this network and these data."""
        scale = Posterior.default_prior_scale(self.depth)
        return {"prior_scale": scale, "beta": Posterior.default_beta(self.images)}

    @property
    def method(self):
        if not self.is_stochastic:
            return "mc_dropout" if self.dropout else "deterministic"
        return self.posterior if self.posterior in networks.POSTERIORS else "custom"

    @property
    def augments(self):
        return self.dataset == "cifar10" if self.augment is None else self.augment

    def stages(self):
        rate = self.pretrain_learning_rate or self.learning_rate
        optimizer = self.pretrain_optimizer or self.optimizer
        before = [Stage("pretraining", self.pretrain_epochs, optimizer, rate)]
        main = Stage("training", self.epochs, self.optimizer, self.learning_rate)
        return [*(before if self.pretrain_epochs else ()), main]

    def network(self):
        """Return the name of the builder in `networks` and its options."""
        if match := re.fullmatch(r"wide_resnet_(\d+)_(\d+)", self.model):
            return "wide_resnet", {"depth": int(match[1]), "width": int(match[2])}
        if match := re.fullmatch(r"mlp((?:_[1-9]\d*)+)(_sigmoid)?", self.model):
            hidden = tuple(map(int, match[1].split("_")[1:]))
            return "mlp", {"hidden": hidden, "activation": "sigmoid" if match[2] else "relu"}
        if match := re.fullmatch(r"lenet_([1-9]\d*)_([1-9]\d*)_([1-9]\d*)", self.model):
            return "lenet", {"widths": tuple(map(int, match.groups()))}
        return checks.choice(*_MODELS)("model", self.model), {}

    def posteriors(self, build=networks.posterior_map):
        common = {"prior_scale": self.prior_scale, "beta": self.beta, "gamma": self.gamma}
        if self.learn_prior_scale:
            common["learn_prior_scale"] = True
        if self.posterior not in networks.POSTERIORS:
            if not (self.posterior.startswith("{") or os.path.exists(self.posterior)):
                known = ", ".join(repr(name) for name in ("none", *networks.POSTERIORS))
                there = f"or the path of a JSON file; no file {self.posterior!r} exists"
                raise ValueError(f"`posterior` must be {known}, {there}.")
            return read_posteriors(self.posterior, common)
        more = {"deterministic": self.deterministic_layers}
        if self.posterior == "mixture":
            more |= {"components": self.components, "mean_spread": self.mean_spread}
            more["initial_scale"] = self.initial_scale
        else:
            more["affine"] = self.affine
            common["initial_scale"] = self.initial_scale  # None is the prior's
        if self.posterior == "flow":
            more |= {"layers": self.flow_layers, "depth": self.flow_depth}
        if self.base_components > 1:
            more |= {"components": self.base_components, "shared_components": True}
        common |= {name: value for name, value in more.items() if value is not None}
        name = self.network()[0]  # a Gaussian is in all layers, whatever they are called
        name = "mlp" if name == "mobilenet_v2" else name
        return build(name, self.posterior, **common)

    def command(self):
        """Return the command line that trains with these settings, but for the output folder."""
        words = ["python", "scripts/train_cifar.py"]
        named = ("prior_scale", "beta") if self.is_stochastic else ()
        for name, value in {**self._changed(), **{x: getattr(self, x) for x in named}}.items():
            word = "--" + name.replace("_", "-")
            if name == "precision":
                words += ["--mixed-precision", value.removeprefix("mixed_")]
            elif isinstance(value, bool):
                words.append(word if value else word.replace("--", "--no-", 1))
            else:
                short = isinstance(value, float) and float(f"{value:g}") == value
                words += [word, f"{value:g}" if short else str(value)]
        return shlex.join(words)

    def as_dict(self):
        """Return the settings, ready for JSON; a run is known by this record."""
        found, changed = dataclasses.asdict(self), self._changed()
        later = {name for name, option in checks.OPTIONS["train"].items() if "later" in option}
        return {name: v for name, v in found.items() if name not in later or name in changed}

    def _changed(self):
        fields = dataclasses.fields(self)
        values = {field.name: (getattr(self, field.name), field.default) for field in fields}
        return {name: value for name, (value, default) in values.items() if value != default}
