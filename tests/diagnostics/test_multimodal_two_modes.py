"""Ways to several modes, on one posterior that has two; results/two_modes has the numbers.

y = z2 tanh(z1 x) + noise, with the prior N(0, 1): z and -z give the same function. The same numbers
are z of a network whose weights are 1, and weights of a network without z.
"""

import functools
import re
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers
from scipy.special import logsumexp

import tfp_ibnn as ibnn
from tests.whole.test_elbo import compiled
from tfp_ibnn.diagnostics import elbo, modes

N, SIGMA, REPEATS, STEPS = 20, 0.3, 8, 400
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 1)).astype("float32")
Y = (1.2 * np.tanh(1.5 * X) + SIGMA * RNG.normal(size=(N, 1))).astype("float32")
PRIOR = {"prior_loc": 0.0, "prior_scale": 1.0, "beta": 1.0}
PAGE = Path(__file__).parents[2] / "results" / "two_modes" / "README.md"

# The number of modes, and log evidence - ELBO in nats.
EXPECTED = {
    "NormalFull": (1, 1.31),
    "NormalFull, gamma=1": (1, 1.48),
    "four couplings": (2, 1.76),
    "four couplings, gamma=1": (2, 2.07),
    "two components": (1, 0.87),
    "two components, apart": (2, 0.48),
    "two components, apart, four couplings": (2, 0.03),
    "MixturePosterior": (2, 0.48),
    "refined modes": (2, 0.10),
}


def log_joint(z):
    errors = (z[:, 1:] * np.tanh(z[:, :1] * X[:, 0]) - Y[:, 0]) / SIGMA
    logs = -(errors**2) / 2 - np.log(SIGMA) - np.log(2 * np.pi) / 2
    return logs.sum(axis=1) - (z**2).sum(axis=1) / 2 - np.log(2 * np.pi)


@functools.cache
def evidence():
    side = np.linspace(-6, 6, 601)
    points = np.stack(np.meshgrid(side, side), axis=-1)
    rows = [logsumexp(log_joint(row)) for row in points]
    return float(logsumexp(rows)) + 2 * np.log(side[1] - side[0])


def network(weight=1.0, output=1.0):
    hidden = layers.Dense(1, "tanh", use_bias=False)
    model = keras.Sequential([keras.Input((1,)), hidden, layers.Dense(1, use_bias=False)])
    model.set_weights([np.array([[weight]]), np.array([[output]])])
    return model


def couplings():
    return [ibnn.flows.AffineCoupling(swap=swap) for swap in (False, True, False, True)]


def over_z(posterior, apart=False):
    keras.utils.set_random_seed(0)
    model = ibnn.to_stochastic(network(), posterior, train_size=N)
    if apart:
        joint = ibnn.stochastic_layers(model)[0].posterior.joint
        joint.base_loc.assign(np.array([[2, 2], [-2, -2]]))
    compiled(model, SIGMA, 0.03, STEPS)
    x, y = np.tile(X, (REPEATS * STEPS, 1)), np.tile(Y, (REPEATS * STEPS, 1))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`train_size` is")  # the examples are repeated
        model.fit(x, y, batch_size=REPEATS * N, shuffle=False, verbose=0)
    return model


def joint(*flows, apart=False, components=2, **options):
    options = {"components": components, "initial_scale": 0.5, **PRIOR, **options}
    posterior = ibnn.FlowPosterior(flows, **options)
    return over_z(ibnn.JointPosterior(posterior), apart)


def full(**options):
    posterior = ibnn.NormalFull(initial_scale=0.5, **PRIOR, **options)
    return over_z(ibnn.JointPosterior(posterior))


def refined_modes():
    keras.utils.set_random_seed(0)
    found = []
    for sign in (1, -1):  # two networks, as training from two starts gives them
        model = network(1.5 * sign, 1.2 * sign)
        model.compile("sgd", "mse")
        options = {"subset_of_weights": "all", "hessian_structure": "full", "noise_scale": SIGMA}
        laplace = ibnn.Laplace(model, prior_precision=1.0, **options).fit(X, Y)
        options = {"steps": 150, "noise_scale": SIGMA, "verbose": 0}
        found.append(ibnn.refine(laplace, couplings(), X, Y, **options))
    assert ibnn.MonteCarlo(ibnn.WeightMixture(found), samples=8).samples == 8
    equal = ibnn.tfd.Categorical(probs=[0.5, 0.5])
    return ibnn.tfd.Mixture(equal, [x.distribution() for x in found])


CASES = {
    "NormalFull": full,
    "NormalFull, gamma=1": lambda: full(gamma=1.0),
    "four couplings": lambda: joint(*couplings(), components=1),
    "four couplings, gamma=1": lambda: joint(*couplings(), components=1, gamma=1.0),
    "two components": joint,
    "two components, apart": lambda: joint(apart=True),
    "two components, apart, four couplings": lambda: joint(*couplings(), apart=True),
    "MixturePosterior": lambda: over_z(ibnn.MixturePosterior(2, **PRIOR)),
    "refined modes": refined_modes,
}


def test_the_posterior_itself_has_two_modes():
    assert evidence() == pytest.approx(-3.576, abs=1e-3)
    at = np.array([[1.5, 1.2], [-1.5, -1.2], [0.0, 0.0]])
    values = log_joint(at)
    assert values[0] == pytest.approx(values[1])
    assert values[0] > values[2] + 30


@pytest.mark.slow
@pytest.mark.once
@pytest.mark.parametrize("name", CASES)
def test_how_many_modes_a_posterior_finds(name):
    posterior, (count, gap) = CASES[name](), EXPECTED[name]
    assert len(modes(posterior, 100).masses) == count
    found = elbo(posterior, log_joint)
    assert evidence() - found.value == pytest.approx(gap, abs=0.05 + 2 * found.error)


@pytest.mark.once
def test_the_page_has_these_numbers():
    page = PAGE.read_text(encoding="utf-8")
    for name, (count, gap) in EXPECTED.items():
        assert re.search(rf"\| {re.escape(name)} \|.*\| {count} \| {gap:.2f} \|", page), name
