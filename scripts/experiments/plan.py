"""What the experiments run. To add one, add an entry to `PLANS`.

A plan has parts, whose runs are compared with each other. A run is a method: the changes by which
its settings differ from the part's base. A value that is a function gets the settings to change. A
part without a base is tuned: each method has the settings that its trials have chosen, or the
Gaussian's, if it has none of its own, and then its changes.

A run has a name of four parts: part, dataset, method, and its seed or, of a trial, what it tries.
"""

import hashlib
import itertools
import json
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from experiments import checks, robustness
from experiments.settings import Settings

__all__ = ["PLANS", "Part", "Plan", "key", "quick_evaluations", "quick_runs", "toy2d"]

HELD_OUT = 5_000
"""Training images that trials do not see, and are scored on."""


class Part(NamedTuple):
    """Runs that are compared with each other."""

    runs: dict
    """Changes to the base by method."""
    base: Settings | None = None
    """None: what trials have chosen."""
    narrowed: bool = True
    """Whether some of the methods may be asked for."""
    first_seed: bool = False
    """Whether one seed is enough."""
    evaluations: dict = {}
    """Images that its models are evaluated on in addition to the test, by a name."""


class Plan(NamedTuple):
    """The runs of an experiment."""

    seeds: tuple
    """Of the results that are kept."""
    parts: dict
    """By name, in the order of the tables."""
    datasets: tuple = ("cifar10",)
    base: Settings = Settings()
    """Of the trials."""
    trials: dict = {}
    """What each method may choose from: lists of changes to the base."""
    last: int = 1
    """Epochs at the end of training that logged losses are averaged over."""
    keep_models: bool = False
    """Whether figures need the models."""
    probabilities: bool = False
    """Whether results hold the test probabilities, at a temperature and averaged over seeds too."""

    @property
    def methods(self):
        """The methods that may be asked for."""
        parts = (part.runs for part in self.parts.values() if part.narrowed)
        return tuple(dict.fromkeys(m for runs in parts for m in runs if "continued" not in m))

    @property
    def tuned(self):
        """The parts that need trials."""
        return {name for name, part in self.parts.items() if part.base is None}

    def trial_runs(self, seed, methods=None, datasets=None):
        """Return the runs by which the settings of some methods are chosen, by name."""
        tried = dict.fromkeys(
            m if m in self.trials else "gaussian" for m in methods or self.methods
        )
        return {
            f"trials/{dataset}/{method}/{label(change)}": changed(
                replace(self.base, dataset=dataset, validation=HELD_OUT, seed=seed), change
            )
            for dataset in datasets or self.datasets
            for method in self.trials
            if method in tried
            for change in self.trials[method]
        }

    def runs(self, name, seeds, methods=None, datasets=None, chosen=None):
        """Return the runs of a part, by name; `chosen` has settings by dataset and method."""
        part, found, chosen = self.parts[name], {}, chosen or {}
        for dataset in datasets or self.datasets:
            for seed in seeds[:1] if part.first_seed else seeds:
                for method, change in part.runs.items():
                    wanted = method.removesuffix("_continued") in (methods or self.methods)
                    of = method if method in self.trials else "gaussian"
                    base = part.base or chosen.get((dataset, of))
                    if base is not None and (wanted or not part.narrowed):
                        more = {"validation": 0} if part.base is None else {}
                        base = replace(base, dataset=dataset, seed=seed, **more)
                        found[f"{name}/{dataset}/{method}/seed{seed}"] = changed(base, change)
        return found


def changed(settings, change):
    """Return settings with some changes; those that are functions get the settings."""
    values = {name: v(settings) if callable(v) else v for name, v in change.items()}
    return replace(settings, **values)


def label(change):
    """Return changes as a name."""
    shown = {k: f"{v:g}" if isinstance(v, float) else v for k, v in change.items()}
    return ",".join(f"{name}={v}" for name, v in shown.items() if not callable(v)) or "reference"


def key(name, settings):
    """Return what a run is stored by: the hash of its part and its settings."""
    content = json.dumps({"part": name.split("/")[0], **settings.as_dict()}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _reported(epochs, mixture=True):
    """Return the runs with the report's epochs and rates.

    The baseline is trained by SGD. All others begin with such a training, MC dropout under dropout,
    and have 50 epochs of Adam more; the stochastic ones with a rate of their own for the
    posteriors, noise for each position, the KL averaged over positions, the affine map first, and
    the prior N(1, 0.5²). The report does not state its rate of dropout, nor has it a mixture: there
    0.2 and four components are ours. "deterministic_continued" is the control that the report
    lacks.
    """
    continued = {"pretrain_epochs": epochs, "epochs": 50, "optimizer": "adam"}
    continued |= {"pretrain_optimizer": "sgd", "learning_rate": 2e-4}
    continued["pretrain_learning_rate"] = attrgetter("learning_rate")
    stochastic = {**continued, "stochastic_learning_rate": 2e-3, "prior_scale": 0.5}
    stochastic |= {"noise": "position", "kl_reduction": "mean", "affine": "first"}
    posteriors = ("gaussian", "mixture", "flow") if mixture else ("gaussian", "flow")
    return {
        "deterministic": {"epochs": epochs},
        "deterministic_continued": continued,
        "mc_dropout": {**continued, "dropout": 0.2},
        **{name: {**stochastic, "posterior": name} for name in posteriors},
    }


# Two dimensions: four clusters, a small network, and planar flows of several lengths.


def toy2d(
    *,
    points=1_000,
    test_points=100_000,
    lengths=(0, 3, 6, 9, 12, 15),
    flow_length=12,
    early_epochs=5,
    epochs=50,
    converged_epochs=300,
    samples=128,
):
    """Return the plan of the report's first experiment (its figures 3 and 4), and what it lacks.

    Of the part "report", one network is stopped early, as the report's baseline seems to be, or
    continued for as long as the stochastic copies of the early one train: one for each length of
    planar flow, where 0 is a Gaussian. Of "equal", the network is trained to the end, and on, and
    so are its copies, a Gaussian and one flow.

    The report states the lengths and the 50 epochs; the 128 samples are those of its other
    experiments. The 1,000 points are our choice; the batches, the rate of Adam and the 300 epochs
    are those of the first notebook. The early network stops after 5 epochs, where its ECE, the mean
    of three other seeds on points that are neither trained nor tested on, comes nearest to the
    report's 0.094. After 300 epochs the training loss still falls, slowly, and on those points the
    NLL has risen since epoch 100: the converged network has begun to overfit. The length of the
    flow that starts from it is the report's best, settled before any run. By chance, Bayes' rule
    itself has an ECE of 0.001 on 100,000 test points; on 10,000 it would have three to six times
    as much.
    """
    checks.count("points", points)
    if len(lengths) < 2 or lengths[0] != 0 or list(lengths) != sorted(set(lengths)):
        raise ValueError(f"`lengths` must rise from 0, the Gaussian, as in 0 3 6; got {lengths}.")
    if flow_length not in lengths[1:]:
        raise ValueError(
            f"`flow_length` must be one of `lengths` above 0, such as {lengths[-1]}; got "
            f"{flow_length!r}."
        )

    def copies(start, lengths):
        planar = '{{".*": {{"posterior": "NormalPlanar1d", "depth": {}}}}}'
        return {
            f"flow_{length}" if length else "gaussian": {
                "posterior": planar.format(length) if length else "gaussian",
                **{"pretrain_epochs": start, "epochs": epochs},
            }
            for length in lengths
        }

    base = Settings(
        **{"dataset": "four_clusters", "model": "mlp_16_sigmoid", "posterior": "none"},
        **{"optimizer": "adam", "learning_rate": 0.02, "schedule": "constant", "batch_size": 32},
        **{"train_size": points, "samples": samples, "log_every": 50},
        limit=None if test_points == 100_000 else test_points,
    )
    early = {
        "deterministic": {"epochs": early_epochs},
        "deterministic_continued": {"epochs": early_epochs + epochs},
    }
    converged = {"deterministic": {"epochs": converged_epochs + epochs}}
    parts = {
        "report": Part({**early, **copies(early_epochs, lengths)}, base),
        "equal": Part({**converged, **copies(converged_epochs, (0, flow_length))}, base),
    }
    return Plan(tuple(range(5)), parts, ("four_clusters",), last=10, keep_models=True)


# Digits: does a flow pay where the network cannot adapt to its posterior? A small network is trained
# on few images; then posteriors are trained with it, or alone, and the network stays as it is.

_FROZEN = Settings(
    **{"dataset": "digits", "model": "mlp_64_64", "posterior": "none", "train_size": 300},
    **{"optimizer": "adam", "learning_rate": 3e-3, "stochastic_learning_rate": 2e-2},
    **{"epochs": 300, "pretrain_epochs": 100, "batch_size": 50, "log_every": 100},
)
# They start narrow: the network has learned without noise.
_OF_FROZEN = {
    name: {
        "posterior": json.dumps({".*": {"posterior": recipe, **options, "initial_scale": 0.1}}),
        "elbo_passes": 200,
    }
    for name, (recipe, options) in {
        "gaussian": ("NormalAffine", {}),
        "flow_planar": ("NormalPlanar1d", {"depth": 4}),
        "flow_iaf": ("NormalIAF", {"depth": 1}),
        "flow_sylvester": ("NormalSylvester", {"depth": 2, "units": 16}),
    }.items()
}


# LeNet: the report's figure 5, and the same at equal budgets.

_LENET_BASE = Settings(
    **{"model": "lenet", "posterior": "none", "optimizer": "sgd", "learning_rate": 0.002},
    **{"schedule": "constant", "evaluate_every": 5},
)
_PRIORS = ({"prior_scale": 0.2}, {"prior_scale": 0.5}, {"prior_scale": 0.5, "beta": 10.0})
# What a method has to offer against overfitting, weak to strong.
_STRENGTHS = {
    "deterministic": [{"weight_decay": decay} for decay in (0.0, 5e-3, 2e-2)],
    "mc_dropout": [{"dropout": rate} for rate in (0.02, 0.05, 0.1)],
    **{name: [{"posterior": name, **p} for p in _PRIORS] for name in ("gaussian", "flow")},
    # The components start apart by as much as the prior allows.
    "mixture": [{"posterior": "mixture", "mean_spread": p["prior_scale"], **p} for p in _PRIORS],
}
_LENET_METHODS = ("deterministic", "mc_dropout", "gaussian", "mixture", "flow")


def _rates(rate, strength):
    more = {"stochastic_learning_rate": 2 * rate} if "posterior" in strength else {}
    return {"learning_rate": rate, **strength, **more}


# VGG16: does a posterior earn its cost on CIFAR-10, and does a flow?

_BASE = Settings(
    **{"dataset": "cifar10", "model": "vgg16", "posterior": "none", "epochs": 100},
    **{"learning_rate": 0.05, "weight_decay": 0.01, "log_every": 50},
    precision="mixed_bfloat16",
)
_GAUSSIAN = {"posterior": "gaussian", "prior_scale": 0.3, "beta": 30.0}
_GAUSSIAN["stochastic_learning_rate"] = 0.02
# The settings of the Gaussian are for all posteriors: what differs between them then is the
# posterior. The learning rates, and where mixtures start, were settled before, by trials on the
# same held-out images that are not part of this.
_VGG16_TRIALS = {
    "deterministic": [{"weight_decay": decay} for decay in (0.01, 0.02, 0.04)],
    "mc_dropout": [
        {"dropout": rate, "weight_decay": decay}
        for rate, decay in ((0.3, 0.02), (0.5, 0.02), (0.5, 0.04))
    ],
    "gaussian": [
        {**_GAUSSIAN, "prior_scale": scale, "beta": beta}
        for scale, beta in ((0.3, 30.0), (0.3, 100.0), (0.4, 30.0), (0.2, 30.0))
    ],
}
_AT_PRIOR = {"initial_scale": attrgetter("prior_scale")}
# The posterior starts at the prior and stays there.
_FIXED = {"stochastic_learning_rate": 1e-12, **_AT_PRIOR}
_FLOW, _INNER = {"posterior": "flow"}, {"deterministic_layers": "conv1"}
_MIXTURE = {"posterior": "mixture", **_AT_PRIOR, "mean_spread": 0.1}
_ELBO = {"beta": 1.0, "stochastic_learning_rate": 0.1}
_EQUAL = {
    "deterministic": {},
    "mc_dropout": {},
    "gaussian": {},
    # As many Gaussians in each layer, sharing their index.
    "mixture_4": _MIXTURE,
    "mixture_16": {**_MIXTURE, "components": 16},
    # The recipe of arXiv 2010.13498 for VGG16, as far as an equal budget allows. Its two draws for
    # each training image make a step about twice as long. Other than there: 100 epochs in place of
    # 300, and beta rising over 66 in place of 200; batch normalization; a cosine schedule; the KL
    # is a bound. Its weight decay of 5e-4 goes through momentum of 0.9, which makes it ten times as
    # strong; a decoupled one does not.
    "mixture_16_ibnn": {
        **{"posterior": "mixture", "components": 16, "prior_scale": 0.3, "beta": 1.0},
        **{"kl_warmup": 66, "train_samples": 2, "stochastic_learning_rate": 1.2},
        "weight_decay": 0.005,
    },
    # Flows where the report has them, Gaussians elsewhere, with the affine map at either end.
    "flow_first": {**_FLOW, "affine": "first"},
    "flow_last": _FLOW,
    # Over a mixture of four, in the Gaussian layers too.
    "flow_over_mixture": {**_FLOW, "base_components": 4},
    # No noise in the first layer; the same with nothing of it learned. In the first layer such
    # noise would spoil the colours.
    "gaussian_inner": _INNER,
    "fixed_inner": {**_INNER, **_FIXED},
    # Beta is 1, as the ELBO has it, and the posteriors learn five times as fast.
    "gaussian_elbo": _ELBO,
    "flow_elbo": {**_ELBO, **_FLOW, "affine": "first"},
}
_ABLATED = replace(_BASE, **_GAUSSIAN)
_ABLATED = replace(_ABLATED, epochs=60, samples=64, validation=HELD_OUT, log_every=1000)
_FIXED_THERE = {**_FIXED, "initial_scale": _ABLATED.prior_scale}  # named in its label
# Twice the epochs are there to be compared with two draws for each image.
_ABLATIONS = [
    {},
    {"noise": "position"},
    *({"prior_scale": scale} for scale in (0.2, 0.5)),
    {"learn_prior_scale": True},
    *({"beta": beta} for beta in (1.0, 10.0, 100.0, 300.0)),
    {"gamma": 30.0},
    {"kl_warmup": 40},
    {"warmup_epochs": 5},
    {"stochastic_learning_rate": 0.1},
    {"train_samples": 2},
    {"epochs": 120},
    _FIXED_THERE,
    _INNER,
    {**_INNER, **_FIXED_THERE},
    _FLOW,
    *({**_FLOW, "flow_depth": depth} for depth in (1, 6)),
    {**_FLOW, "flow_layers": "conv[2-7]"},
]
# What the models of equal budgets are evaluated on, in addition to the test.
_SHIFTS = robustness.Settings(
    dataset="cifar10",
    shifts=("clean", "corruptions", "rotations", "foreign"),
    degrees=tuple(range(30, 181, 30)),
    foreign=("fashion_mnist", "mnist"),
    samples=16,
    limit=2_000,
)
_CLASSES = 5
_OF_HALF = replace(_SHIFTS, classes=_CLASSES, shifts=("clean", "foreign"))
# Numbers of draws with which one model, a second run of the reference, is evaluated.
_ALL_IMAGES = replace(_SHIFTS, shifts=("clean",), limit=None)
_DRAWS = {f"draws{n}": replace(_ALL_IMAGES, samples=n) for n in (1, 2, 4, 8, 16, 32, 64, 128)}
_LONG = ("deterministic", "gaussian", "flow_last")
_HALF = ("deterministic", "mc_dropout", "gaussian", "mixture_4", "flow_last")
# The report does not say for how long its VGG16 was trained before; it has no mixture.
_VGG16_REPORTED = replace(
    _BASE,
    **{"weight_decay": 0.0, "evaluate_every": 5, "optimizer": "sgd", "learning_rate": 0.001},
    schedule="constant",
)

PLANS = {
    "toy2d": toy2d(),
    "frozen": Plan(
        seeds=tuple(range(10, 20)),
        datasets=("digits",),
        parts={
            "frozen": Part(
                {
                    "deterministic": {"epochs": 100, "pretrain_epochs": 0},
                    **{m: {**change, "freeze_network": True} for m, change in _OF_FROZEN.items()},
                },
                _FROZEN,
            ),
            "joint": Part({"deterministic": {}, **_OF_FROZEN}, _FROZEN),
        },
    ),
    "lenet": Plan(
        seeds=tuple(range(5)),
        datasets=("fashion_mnist", "cifar10"),
        parts={
            # The report's baseline has other epochs on each dataset.
            "report": Part(
                _reported(lambda of: {"fashion_mnist": 10, "cifar10": 20}[of.dataset]), _LENET_BASE
            ),
            "equal": Part(dict.fromkeys(_LENET_METHODS, {})),
        },
        base=Settings(posterior="none", epochs=60, batch_size=256),
        trials={
            method: [_rates(*pair) for pair in itertools.product((0.02, 0.06), _STRENGTHS[method])]
            for method in _LENET_METHODS
        },
    ),
    "vgg16": Plan(
        seeds=tuple(range(3)),
        parts={
            "equal": Part(_EQUAL, evaluations={"robustness": _SHIFTS}),
            # As long as those of arXiv 2010.13498.
            "long": Part({method: {**_EQUAL[method], "epochs": 300} for method in _LONG}),
            "report": Part(_reported(30, mixture=False), _VGG16_REPORTED, narrowed=False),
            # Knowing the first five classes only.
            "half": Part(
                {method: {**_EQUAL[method], "classes": _CLASSES} for method in _HALF},
                evaluations={"robustness": _OF_HALF},
            ),
            # One change at a time, scored on held-out training images.
            "ablations": Part({label(c): c for c in _ABLATIONS}, _ABLATED, False, True),
            "draws": Part({"reference": {}}, _ABLATED, False, True, _DRAWS),
        },
        base=_BASE,
        trials=_VGG16_TRIALS,
        probabilities=True,
    ),
}
"""The experiments that `scripts/reproduce.py` knows."""


def quick_runs(runs):
    """Return runs in small, whose scores mean nothing: one trial per method, three ablations."""
    found, count = {}, {}
    for name, settings in runs.items():
        part, dataset, method, _ = name.split("/")
        group = (part, dataset, method) if part == "trials" else part
        count[group] = count.get(group, 0) + 1
        if count[group] <= {"trials": 1, "ablations": 3}.get(part, len(runs)):
            names = ("kl_warmup", "pretrain_epochs", "evaluate_every", "elbo_passes")
            found[name] = replace(
                settings,
                **{name: min(1, getattr(settings, name)) for name in names},
                **{
                    "limit": 300,
                    "validation": 100 if settings.validation else 0,
                    "batch_size": 100,
                },
                **{"epochs": 1, "warmup_epochs": 0, "evaluation_samples": 2, "samples": 4},
                train_size=settings.train_size and 100,
            )
    return found


def quick_evaluations(wanted):
    """Return evaluations in small, and of the draws two."""
    few = {"corruptions": _SHIFTS.corruptions[:1], "degrees": (90,), "foreign": ("mnist",)}
    return {
        name: replace(settings, **few, limit=100, samples=min(2, settings.samples))
        for name, settings in wanted.items()
        if name not in list(_DRAWS)[2:]
    }
