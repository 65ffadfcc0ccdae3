"""What the VGG16 experiment runs: methods, budgets, and what models are evaluated on."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import robustness
from experiments.comparison import HELD_OUT, best, report_budget, shortened
from experiments.settings import Settings

__all__ = [
    "DRAWS",
    "METHODS",
    "NEEDS_TRIALS",
    "PARTS",
    "SHIFTS",
    "ablations",
    "candidates",
    "choose",
    "equal",
    "evaluations_of",
    "half",
    "long",
    "quick_evaluations",
    "quick_runs",
    "report",
    "runs_of",
    "trials",
]

METHODS = (
    "deterministic",
    "mc_dropout",
    "gaussian",
    "mixture_4",
    "mixture_16",
    "mixture_16_ibnn",
    "flow_first",
    "flow_last",
    "flow_over_mixture",
    "gaussian_inner",
    "fixed_inner",
    "gaussian_elbo",
    "flow_elbo",
)
"""Of the equal budgets; see `equal`."""

PARTS = ("equal", "long", "report", "half", "ablations")
"""Equal budgets; three times as long; the report's; half of the classes; one change at a time."""

NEEDS_TRIALS = ("equal", "long", "half")
"""Parts whose settings are chosen by trials."""

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
"""What the models of equal budgets are evaluated on, besides the test."""

_CLASSES = 5
# All other methods have the Gaussian's settings.
_CHOSEN_BY = {"deterministic": "deterministic", "mc_dropout": "mc_dropout"}
_LONG = ("deterministic", "gaussian", "flow_last")
_HALF = ("deterministic", "mc_dropout", "gaussian", "mixture_4", "flow_last")

# The report does not say for how long its baseline was trained.
_BASELINE_EPOCHS = 30

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
_GAUSSIAN = dataclasses.replace(
    _BASE, posterior="gaussian", prior_scale=0.3, beta=30.0, stochastic_learning_rate=0.02
)


def candidates() -> dict[str, dict[str, Settings]]:
    """Return the settings to choose from, by method.

    Those of the Gaussian are for all posteriors: what differs between them then is the posterior.
    The learning rates, and where mixtures start, were settled before, by trials on the same
    held-out images that are not part of this.
    """
    base = dataclasses.replace(_BASE, validation=HELD_OUT)
    gaussian = dataclasses.replace(_GAUSSIAN, validation=HELD_OUT)
    priors = ((0.3, 30.0), (0.3, 100.0), (0.4, 30.0), (0.2, 30.0))
    drops = ((0.3, 0.02), (0.5, 0.02), (0.5, 0.04))
    return {
        "deterministic": {
            f"decay{decay:g}": dataclasses.replace(base, weight_decay=decay)
            for decay in (0.01, 0.02, 0.04)
        },
        "mc_dropout": {
            f"dropout{rate:g}-decay{decay:g}": dataclasses.replace(
                base, dropout=rate, weight_decay=decay
            )
            for rate, decay in drops
        },
        "gaussian": {
            f"prior{scale:g}-beta{beta:g}": dataclasses.replace(
                gaussian, prior_scale=scale, beta=beta
            )
            for scale, beta in priors
        },
    }


def equal(chosen: Mapping[str, Settings], seed: int) -> dict[str, Settings]:
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

    Args:
        chosen: the settings of "deterministic", "mc_dropout" and "gaussian", or of some of them.
        seed: of the runs.
    """
    runs = {method: _final(settings, seed) for method, settings in chosen.items()}
    if "gaussian" not in runs:
        return runs
    gaussian = runs["gaussian"]
    mixture = dataclasses.replace(
        gaussian, posterior="mixture", initial_scale=gaussian.prior_scale, mean_spread=0.1
    )
    flow = dataclasses.replace(gaussian, posterior="flow")
    inner = dataclasses.replace(gaussian, deterministic_layers="conv1")
    elbo = dataclasses.replace(gaussian, beta=1.0, stochastic_learning_rate=0.1)
    return runs | {
        "mixture_4": mixture,
        "mixture_16": dataclasses.replace(mixture, components=16),
        "mixture_16_ibnn": _ibnn(seed),
        "flow_first": dataclasses.replace(flow, affine="first"),
        "flow_last": flow,
        "flow_over_mixture": dataclasses.replace(flow, base_components=4),
        "gaussian_inner": inner,
        "fixed_inner": dataclasses.replace(inner, **_fixed(inner)),
        "gaussian_elbo": elbo,
        "flow_elbo": dataclasses.replace(elbo, posterior="flow", affine="first"),
    }


def _final(settings: Settings, seed: int) -> Settings:
    return dataclasses.replace(settings, validation=0, seed=seed)


def _fixed(settings: Settings) -> dict[str, Any]:
    """Return changes by which the posterior starts at the prior and stays there."""
    return {"stochastic_learning_rate": 1e-12, "initial_scale": settings.prior_scale}


def _ibnn(seed: int) -> Settings:
    """Return the recipe of arXiv 2010.13498 for VGG16, as far as an equal budget allows.

    Its two draws for each training image make a step about twice as long. Other than there: 100
    epochs in place of 300, and beta rising over 66 in place of 200; batch normalization; a cosine
    schedule; the KL is a bound. Its weight decay of 5e-4 goes through momentum of 0.9, which makes
    it ten times as strong; a decoupled one does not.
    """
    return dataclasses.replace(
        _BASE,
        posterior="mixture",
        components=16,
        prior_scale=0.3,
        kl_warmup=2 * _BASE.epochs // 3,
        train_samples=2,
        stochastic_learning_rate=1.2,
        weight_decay=0.005,
        seed=seed,
    )


def long(chosen: Mapping[str, Settings], seed: int) -> dict[str, Settings]:
    """Return runs of 300 epochs, as long as those of arXiv 2010.13498, by method."""
    runs = equal(chosen, seed)
    return {name: dataclasses.replace(runs[name], epochs=300) for name in _LONG if name in runs}


def report(seed: int) -> dict[str, Settings]:
    """Return the runs with the report's epochs and rates (its figure 6), by method."""
    baseline = dataclasses.replace(
        _BASE,
        epochs=_BASELINE_EPOCHS,
        optimizer="sgd",
        learning_rate=0.001,
        schedule="constant",
        weight_decay=0.0,
        evaluate_every=5,
        seed=seed,
    )
    runs = report_budget(baseline)
    del runs["mixture"]  # the report has none
    return runs


def half(chosen: Mapping[str, Settings], seed: int) -> dict[str, Settings]:
    """Return runs that know the first five classes only, by method."""
    runs = equal(chosen, seed)
    return {
        name: dataclasses.replace(runs[name], classes=_CLASSES) for name in _HALF if name in runs
    }


def ablations(seed: int) -> dict[str, Settings]:
    """Return the runs that differ from the first by what their names say.

    They are shorter than those of the comparison, begin from beta = 30, and are scored on held-out
    training images. Twice the epochs are there to be compared with two draws for each image.
    """
    base = dataclasses.replace(
        _GAUSSIAN, epochs=60, samples=64, validation=HELD_OUT, log_every=1000, seed=seed
    )
    fixed = _fixed(base)
    flow = {"posterior": "flow"}
    changes: list[dict[str, Any]] = [
        {},
        {"noise": "position"},
        {"prior_scale": 0.2},
        {"prior_scale": 0.5},
        {"learn_prior_scale": True},
        {"beta": 1.0},
        {"beta": 10.0},
        {"beta": 100.0},
        {"beta": 300.0},
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
        {**flow, "flow_depth": 1},
        {**flow, "flow_depth": 6},
        {**flow, "flow_layers": "conv[2-7]"},
    ]
    return {_label(change): dataclasses.replace(base, **change) for change in changes}


def _label(change: Mapping[str, Any]) -> str:
    words = (
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in change.items()
    )
    return ",".join(words) or "reference"


def trials(seed: int, methods: Sequence[str] = METHODS) -> dict[str, Settings]:
    """Return the runs by which the settings of some methods are chosen, by name."""
    wanted = {_CHOSEN_BY.get(method, "gaussian") for method in methods}
    return {
        f"trials/cifar10/{method}/{name}": dataclasses.replace(settings, seed=seed)
        for method, choices in candidates().items()
        if method in wanted
        for name, settings in choices.items()
    }


def choose(
    runs: Mapping[str, Settings], found: Mapping[str, dict[str, Any]]
) -> dict[str, Settings]:
    """Return the settings of the best trial of each method, as `equal` takes them."""
    return {method: settings for (_, method), settings in best(runs, found).items()}


def runs_of(
    part: str,
    seeds: Sequence[int],
    methods: Sequence[str] = METHODS,
    chosen: Mapping[str, Settings] | None = None,
) -> dict[str, Settings]:
    """Return the runs of a part, by name.

    Args:
        part: one of `PARTS`.
        seeds: of the runs; of the ablations there is only the first.
        methods: some of `METHODS`, where the part has them.
        chosen: from `choose`, for the parts in `NEEDS_TRIALS`.
    """
    if part == "ablations":
        changed = ablations(seeds[0])
        named = {f"ablations/cifar10/{name}": settings for name, settings in changed.items()}
        named["draws/cifar10/reference"] = changed["reference"]
        return {f"{name}/seed{seeds[0]}": settings for name, settings in named.items()}
    make = {"equal": equal, "long": long, "half": half, "report": report}[part]
    return {
        f"{part}/cifar10/{method}/seed{seed}": settings
        for seed in seeds
        for method, settings in (make(seed) if part == "report" else make(chosen, seed)).items()
        if part == "report" or method in methods
    }


def evaluations_of(name: str) -> dict[str, robustness.Settings]:
    """Return what the model of a run is evaluated on besides the test, by the name of a folder."""
    budget = name.split("/")[0]
    if budget == "equal":
        return {"robustness": SHIFTS}
    if budget == "half":
        shifts = ("clean", "foreign")
        return {"robustness": dataclasses.replace(SHIFTS, classes=_CLASSES, shifts=shifts)}
    if budget == "draws":
        clean = dataclasses.replace(SHIFTS, shifts=("clean",), limit=None)
        return {f"draws{count}": dataclasses.replace(clean, samples=count) for count in DRAWS}
    return {}


def quick_runs(runs: Mapping[str, Settings]) -> dict[str, Settings]:
    """Return runs in small; of the trials one a method, of the ablations three."""
    found: dict[str, Settings] = {}
    count: dict[str, int] = {}
    for name, settings in runs.items():
        budget, _, method, _ = name.split("/")
        group = f"{budget}/{method}" if budget == "trials" else budget
        count[group] = count.get(group, 0) + 1
        if count[group] <= {"trials": 1, "ablations": 3}.get(budget, len(runs)):
            found[name] = shortened(settings)
    return found


def quick_evaluations(
    evaluations: Mapping[str, robustness.Settings],
) -> dict[str, robustness.Settings]:
    """Return evaluations in small."""
    few = {"corruptions": SHIFTS.corruptions[:1], "degrees": (90,), "foreign": ("mnist",)}
    return {
        name: dataclasses.replace(settings, **few, limit=100, samples=min(2, settings.samples))
        for name, settings in evaluations.items()
        if name not in [f"draws{count}" for count in DRAWS[2:]]
    }
