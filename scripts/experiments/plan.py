"""What the comparisons run: a plan for each, as changes to base settings.

A run has a name of four parts: budget, dataset, method, and its seed or, of a trial, what it tries.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from experiments import robustness
from experiments.settings import Settings
from tfp_ibnn.models import POSTERIORS

__all__ = ["LENET", "VGG16", "Plan", "evaluations", "quick_evaluations", "quick_runs"]

HELD_OUT = 5_000
"""Training images that trials do not see, and are scored on."""
DRAWS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of draws with which one model is evaluated on all test images."""
SHIFTS = robustness.Settings(
    dataset="cifar10",
    shifts=("clean", "corruptions", "rotations", "foreign"),
    degrees=tuple(range(30, 181, 30)),
    foreign=("fashion_mnist", "mnist"),
    samples=16,
    limit=2_000,
)
"""What the VGG16 models of equal budgets are evaluated on, in addition to the test."""

_CLASSES = 5


class Plan(NamedTuple):
    """The runs of a comparison."""

    datasets: tuple[str, ...]
    methods: tuple[str, ...]
    parts: tuple[str, ...]
    """Budgets, in the order of the tables."""
    tuned: tuple[str, ...]
    """Parts whose settings are chosen by trials."""
    narrowed: tuple[str, ...]
    """Parts of which some methods may be asked for."""
    candidates: Callable[[str], dict[str, dict[str, Settings]]]
    """Gives the settings to choose from, of a dataset, by method and label."""
    make: Callable[..., dict[str, Settings]]
    """Gives the runs of a part, by method, from the dataset and the settings chosen by method."""

    def trials(self, seed, methods=None, datasets=None):
        """Return the runs by which the settings of some methods are chosen, by name."""
        found = {dataset: self.candidates(dataset) for dataset in datasets or self.datasets}
        return {
            f"trials/{dataset}/{method}/{label}": replace(settings, seed=seed)
            for dataset, choices in found.items()
            for method in choices
            # A method without trials of its own has the Gaussian's settings.
            if any(method == (m if m in choices else "gaussian") for m in methods or self.methods)
            for label, settings in choices[method].items()
        }

    def runs(self, part, seeds, methods=None, datasets=None, chosen=None):
        """Return the runs of a part, by name; of the ablations only those of the first seed."""
        found = {}
        for dataset in datasets or self.datasets:
            best = {method: s for (of, method), s in (chosen or {}).items() if of == dataset}
            for seed in seeds[:1] if part == "ablations" else seeds:
                for method, settings in self.make(part, dataset, best).items():
                    wanted = method.removesuffix("_continued") in (methods or self.methods)
                    if wanted or part not in self.narrowed:
                        name = f"{part}/{dataset}/{method}/seed{seed}"
                        found[name] = replace(settings, seed=seed)
        if part == "ablations":  # the model of the draws is a second run of the reference
            name, settings = next(iter(found.items()))
            found[name.replace(part, "draws", 1)] = settings
        return found


def report_budget(baseline):
    """Return the runs with the report's epochs and rates, by method.

    The baseline is trained by SGD. All others begin with such a training, MC dropout under dropout,
    and have 50 epochs of Adam more; the stochastic ones with a rate of their own for the
    posteriors, noise for each position, the KL averaged over positions, the affine map first, and
    the prior N(1, 0.5²). The report does not state its rate of dropout, nor has it a mixture: there
    0.2 and four components are ours. "deterministic_continued" is the control that the report
    lacks.
    """
    continued = replace(
        baseline,
        pretrain_epochs=baseline.epochs,
        pretrain_optimizer=baseline.optimizer,
        pretrain_learning_rate=baseline.learning_rate,
        epochs=50,
        optimizer="adam",
        learning_rate=2e-4,
    )
    as_reported = {"noise": "position", "kl_reduction": "mean", "affine": "first"}
    stochastic = replace(continued, stochastic_learning_rate=2e-3, prior_scale=0.5, **as_reported)
    return {
        "deterministic": baseline,
        "deterministic_continued": continued,
        "mc_dropout": replace(continued, dropout=0.2),
        **{name: replace(stochastic, posterior=name) for name in ("gaussian", "mixture", "flow")},
    }


# LeNet: the report's figure 5, and the same at equal budgets.

_REPORTED = Settings(
    model="lenet",
    posterior="none",
    optimizer="sgd",
    learning_rate=0.002,
    schedule="constant",
    evaluate_every=5,
)
_BASELINE_EPOCHS = {"fashion_mnist": 10, "cifar10": 20}  # the report's
_POSTERIOR = ({"prior_scale": 0.2}, {"prior_scale": 0.5}, {"prior_scale": 0.5, "beta": 10.0})
# What a method has to offer against overfitting, weak to strong.
_STRENGTHS = {
    "deterministic": [{"weight_decay": decay} for decay in (0.0, 5e-3, 2e-2)],
    "mc_dropout": [{"dropout": rate} for rate in (0.02, 0.05, 0.1)],
    **dict.fromkeys(("gaussian", "mixture", "flow"), _POSTERIOR),
}


def _lenet_candidates(dataset):
    """Return six settings for each method: two learning rates times three strengths."""
    base = Settings(dataset=dataset, posterior="none", epochs=60, batch_size=256)
    found = {}
    for method, strengths in _STRENGTHS.items():
        found[method] = {}
        for rate, own in itertools.product((0.02, 0.06), strengths):
            more = {"posterior": method} if method in POSTERIORS else {}
            if more:
                more["stochastic_learning_rate"] = 2 * rate
            if method == "mixture":  # the components start apart by as much as the prior allows
                more["mean_spread"] = own["prior_scale"]
            name = "-".join(f"{key}{value:g}" for key, value in {"rate": rate, **own}.items())
            found[method][name] = replace(
                base, learning_rate=rate, validation=HELD_OUT, **own, **more
            )
    return found


def _lenet(part, dataset, chosen):
    if part == "report":
        return report_budget(replace(_REPORTED, dataset=dataset, epochs=_BASELINE_EPOCHS[dataset]))
    return {method: replace(settings, validation=0) for method, settings in chosen.items()}


LENET = Plan(
    datasets=("fashion_mnist", "cifar10"),
    methods=("deterministic", "mc_dropout", "gaussian", "mixture", "flow"),
    parts=("report", "equal"),
    tuned=("equal",),
    narrowed=("report", "equal"),
    candidates=_lenet_candidates,
    make=_lenet,
)


# VGG16: does a posterior earn its cost on CIFAR-10, and does a flow?

_BASE = Settings(
    dataset="cifar10",
    model="vgg16",
    posterior="none",
    epochs=100,
    learning_rate=0.05,
    weight_decay=0.01,
    log_every=50,
    precision="mixed_bfloat16",
)
_GAUSSIAN = replace(
    _BASE, posterior="gaussian", prior_scale=0.3, beta=30.0, stochastic_learning_rate=0.02
)


def _vgg16_candidates(dataset):
    """Return the settings to choose from, by method.

    Those of the Gaussian are for all posteriors: what differs between them then is the posterior.
    The learning rates, and where mixtures start, were settled before, by trials on the same
    held-out images that are not part of this.
    """
    base, gaussian = replace(_BASE, validation=HELD_OUT), replace(_GAUSSIAN, validation=HELD_OUT)
    priors = ((0.3, 30.0), (0.3, 100.0), (0.4, 30.0), (0.2, 30.0))
    drops = ((0.3, 0.02), (0.5, 0.02), (0.5, 0.04))
    return {
        "deterministic": {f"decay{d:g}": replace(base, weight_decay=d) for d in (0.01, 0.02, 0.04)},
        "mc_dropout": {
            f"dropout{rate:g}-decay{decay:g}": replace(base, dropout=rate, weight_decay=decay)
            for rate, decay in drops
        },
        "gaussian": {
            f"prior{scale:g}-beta{beta:g}": replace(gaussian, prior_scale=scale, beta=beta)
            for scale, beta in priors
        },
    }


def _vgg16_equal(chosen):
    """Return the runs at equal budget, by method.

    - `deterministic`, `mc_dropout`, `gaussian`: as they were chosen.
    - `mixture_4`, `mixture_16`: as many Gaussians in each layer, sharing their index.
    - `mixture_16_ibnn`: the same after the recipe of its authors, see `_ibnn`.
    - `flow_first`, `flow_last`: flows where the report has them, Gaussians elsewhere, with the
      affine map at either end.
    - `flow_over_mixture`: `flow_last` over a mixture of four, in the Gaussian layers too.
    - `gaussian_inner`: no noise in the first layer.
    - `fixed_inner`: the same with the posterior fixed at the prior, so that nothing of it is
      learned. In the first layer such noise would spoil the colours.
    - `gaussian_elbo`, `flow_elbo`: beta is 1, as the ELBO has it, and the posteriors learn five
      times as fast; the affine map first.
    """
    runs = {method: replace(settings, validation=0) for method, settings in chosen.items()}
    if "gaussian" not in runs:
        return runs
    gaussian = runs["gaussian"]
    mixture = {"posterior": "mixture", "initial_scale": gaussian.prior_scale, "mean_spread": 0.1}
    flow, inner = {"posterior": "flow"}, {"deterministic_layers": "conv1"}
    elbo = {"beta": 1.0, "stochastic_learning_rate": 0.1}
    changes = {
        "mixture_4": mixture,
        "mixture_16": {**mixture, "components": 16},
        "mixture_16_ibnn": None,
        "flow_first": {**flow, "affine": "first"},
        "flow_last": flow,
        "flow_over_mixture": {**flow, "base_components": 4},
        "gaussian_inner": inner,
        "fixed_inner": {**inner, **_fixed(gaussian)},
        "gaussian_elbo": elbo,
        "flow_elbo": {**elbo, **flow, "affine": "first"},
    }
    return runs | {
        method: _ibnn() if change is None else replace(gaussian, **change)
        for method, change in changes.items()
    }


def _fixed(settings):
    """Return changes by which the posterior starts at the prior and stays there."""
    return {"stochastic_learning_rate": 1e-12, "initial_scale": settings.prior_scale}


def _ibnn():
    """Return the recipe of arXiv 2010.13498 for VGG16, as far as an equal budget allows.

    Its two draws for each training image make a step about twice as long. Other than there: 100
    epochs in place of 300, and beta rising over 66 in place of 200; batch normalization; a cosine
    schedule; the KL is a bound. Its weight decay of 5e-4 goes through momentum of 0.9, which makes
    it ten times as strong; a decoupled one does not.
    """
    return replace(
        _BASE,
        posterior="mixture",
        components=16,
        prior_scale=0.3,
        kl_warmup=2 * _BASE.epochs // 3,
        train_samples=2,
        stochastic_learning_rate=1.2,
        weight_decay=0.005,
    )


def _ablations():
    """Return the runs that differ from the first by what their names say.

    They are shorter than those of the comparison, begin from beta = 30, and are scored on held-out
    training images. Twice the epochs are there to be compared with two draws for each image.
    """
    base = replace(_GAUSSIAN, epochs=60, samples=64, validation=HELD_OUT, log_every=1000)
    fixed, flow = _fixed(base), {"posterior": "flow"}
    changes = [
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
        fixed,
        {"deterministic_layers": "conv1"},
        {"deterministic_layers": "conv1", **fixed},
        flow,
        *({**flow, "flow_depth": depth} for depth in (1, 6)),
        {**flow, "flow_layers": "conv[2-7]"},
    ]

    def label(change):
        numbers = {k: f"{v:g}" if isinstance(v, float) else v for k, v in change.items()}
        return ",".join(f"{key}={value}" for key, value in numbers.items()) or "reference"

    return {label(change): replace(base, **change) for change in changes}


def _vgg16(part, dataset, chosen):
    if part == "ablations":
        return _ablations()
    if part == "report":
        # The report does not say for how long its baseline was trained.
        sgd = {"epochs": 30, "optimizer": "sgd", "learning_rate": 0.001, "schedule": "constant"}
        runs = report_budget(replace(_BASE, weight_decay=0.0, evaluate_every=5, **sgd))
        del runs["mixture"]  # the report has none
        return runs
    runs = _vgg16_equal(chosen)
    if part == "equal":
        return runs
    # As long as those of arXiv 2010.13498; or knowing the first five classes only.
    shown, change = {
        "long": (("deterministic", "gaussian", "flow_last"), {"epochs": 300}),
        "half": (
            ("deterministic", "mc_dropout", "gaussian", "mixture_4", "flow_last"),
            {"classes": _CLASSES},
        ),
    }[part]
    return {name: replace(runs[name], **change) for name in shown if name in runs}


VGG16 = Plan(
    datasets=("cifar10",),
    methods=(
        *("deterministic", "mc_dropout", "gaussian", "mixture_4", "mixture_16", "mixture_16_ibnn"),
        *("flow_first", "flow_last", "flow_over_mixture", "gaussian_inner", "fixed_inner"),
        *("gaussian_elbo", "flow_elbo"),
    ),
    # Equal budgets; three times as long; the report's; half of the classes; one change at a time.
    parts=("equal", "long", "report", "half", "ablations"),
    tuned=("equal", "long", "half"),
    narrowed=("equal", "long", "half"),
    candidates=_vgg16_candidates,
    make=_vgg16,
)


def evaluations(name):
    """Return what the model of a VGG16 run is evaluated on, by the name of a folder."""
    budget = name.split("/")[0]
    if budget == "half":
        return {"robustness": replace(SHIFTS, classes=_CLASSES, shifts=("clean", "foreign"))}
    if budget == "draws":
        clean = replace(SHIFTS, shifts=("clean",), limit=None)
        return {f"draws{count}": replace(clean, samples=count) for count in DRAWS}
    return {"robustness": SHIFTS} if budget == "equal" else {}


def quick_runs(runs):
    """Return runs in small, whose scores mean nothing: one trial per method, three ablations."""
    found, count = {}, {}
    for name, settings in runs.items():
        budget, dataset, method, _ = name.split("/")
        group = (budget, dataset, method) if budget == "trials" else budget
        count[group] = count.get(group, 0) + 1
        if count[group] <= {"trials": 1, "ablations": 3}.get(budget, len(runs)):
            found[name] = replace(
                settings,
                limit=300,
                validation=100 if settings.validation else 0,
                epochs=1,
                kl_warmup=min(1, settings.kl_warmup),
                warmup_epochs=0,
                pretrain_epochs=min(1, settings.pretrain_epochs),
                evaluate_every=min(1, settings.evaluate_every),
                evaluation_samples=2,
                samples=4,
                batch_size=100,
            )
    return found


def quick_evaluations(wanted):
    """Return evaluations in small."""
    few = {"corruptions": SHIFTS.corruptions[:1], "degrees": (90,), "foreign": ("mnist",)}
    return {
        name: replace(settings, **few, limit=100, samples=min(2, settings.samples))
        for name, settings in wanted.items()
        if name not in [f"draws{count}" for count in DRAWS[2:]]
    }
