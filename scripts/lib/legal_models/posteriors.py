"""Random posteriors over z and over weights, as Python expressions."""

from random import Random

__all__ = ["draw_options", "draw_posterior"]

_PRIORS_OF_Z = (
    "ibnn.priors.Laplace(0.5, loc=1.0)",
    "ibnn.priors.StudentT(3.0, 0.5, loc=1.0)",
    "ibnn.priors.Normal(0.5, loc=1.0)",
    "ibnn.tfd.Normal(1.0, 0.5)",
)
_PRIORS_OF_WEIGHTS = (
    "ibnn.priors.ScaleMixture()",
    "ibnn.priors.Laplace(0.5)",
    "ibnn.priors.Tied(0.5)",
    "ibnn.priors.Cauchy(0.5)",
)
_FLOWS = (
    "ibnn.flows.Planar()",
    "ibnn.flows.Radial()",
    "ibnn.flows.Affine()",
    "ibnn.flows.ActNorm()",
    "ibnn.flows.Sylvester(2)",
    "ibnn.flows.InverseAutoregressive(4)",
    "ibnn.flows.Inverse(ibnn.flows.Planar())",
    "ibnn.flows.Stack(ibnn.flows.Planar(), 2)",
)


def _call(name: str, *args: str, **options: str) -> str:
    return f"{name}({', '.join([*args, *(f'{key}={value}' for key, value in options.items())])})"


def _some(rng: Random, chances: dict[str, tuple[float, tuple[str, ...]]]) -> dict[str, str]:
    """Return options, each with a chance, and one of its values."""
    drawn = {name: (rng.random() < chance, rng.choice(x)) for name, (chance, x) in chances.items()}
    return {name: value for name, (is_used, value) in drawn.items() if is_used}


def _over_z(rng: Random) -> str:
    options = _some(
        rng,
        {
            "prior": (0.15, _PRIORS_OF_Z),
            "prior_scale": (0.5, ("0.5", "1.0")),
            "sides": (0.2, ("'both'",)),
            "learn_prior_scale": (0.1, ("True",)),
            "beta": (0.4, ("1.0", "0.5")),
            "gamma": (0.15, ("0.3",)),
            "seed": (0.5, ("3",)),
        },
    )
    if "prior" in options:
        options.pop("prior_scale", None)
        options.pop("learn_prior_scale", None)
    flows = f"[{', '.join(rng.choice(_FLOWS) for _ in range(rng.choice((1, 2))))}]"
    name, *args = rng.choice(
        (
            *(("ibnn.NormalAffine",),) * 5,
            *(("ibnn.FlowPosterior", flows),) * 2,
            ("ibnn.FlowPosterior", "components=2", f"shared_components={rng.random() < 0.5}"),
            *(("ibnn.NormalPlanar1d", "1"), ("ibnn.NormalInvConv", "1", "1")),
            *(("ibnn.NormalGlowStep", "1", "4"), ("ibnn.NormalIAF", "1", "4")),
            *(("ibnn.NormalFull",), ("ibnn.NormalLowRank", "2")),
            *(("ibnn.MixturePosterior", "3"), ("ibnn.MixturePosterior", "2", "kl='averaged'")),
        )
    )
    return _call(name, *args, **options)


def _over_weights(rng: Random) -> str:
    options = _some(
        rng,
        {
            "prior": (0.2, _PRIORS_OF_WEIGHTS),
            "prior_scale": (0.3, ("0.5",)),
            "initial_scale": (0.7, ("0.1", "0.3")),
            "moped": (0.15, ("0.2",)),
            "estimator": (0.4, ("'shared'", "'local'")),
            "bias": (0.4, ("'stochastic'",)),
            "beta": (0.3, ("0.5",)),
            "gamma": (0.1, ("0.2",)),
            "seed": (0.5, ("3",)),
        },
    )
    if "prior" in options:
        options.pop("prior_scale", None)
    return _call(rng.choice(("ibnn.MeanField", "ibnn.MeanField", "ibnn.MNF")), **options)


def draw_posterior(rng: Random) -> str:
    """Return an expression for a posterior, or for several by patterns of layer names."""
    chance = rng.random()
    if chance < 0.08:
        return f"ibnn.JointPosterior({_over_z(rng)})"
    if chance < 0.2:
        pattern = rng.choice(("head.*", "dense.*", "conv.*", ".*dense.*"))
        first, second = rng.choice((_over_z, _over_weights)), rng.choice((_over_z, _over_weights))
        return f"{{{pattern!r}: {first(rng)}, '.*': {second(rng)}}}"
    return _over_weights(rng) if chance < 0.5 else _over_z(rng)


def draw_options(rng: Random) -> dict[str, object]:
    """Return options of `to_stochastic`."""
    options: dict[str, object] = {}
    if rng.random() < 0.15:
        options["noise"] = "position"
        options["kl_reduction"] = rng.choice(("sum", "mean"))
    if rng.random() < 0.5:
        options["seed"] = rng.randrange(100)
    if rng.random() < 0.15:
        options["train_samples"] = 2
    return options
