"""Draws of posteriors and their densities, to be compared by quadrature."""

import numpy as np
import pytest
from keras import ops

from tests.flows.tools import numpy
from tests.registry import min_posterior_channels

# KL and entropy of these are one number, not one for each draw.
CORRELATED = {"NormalFull", "NormalLowRank"}
CLOSED_FORM = {"NormalAffine", "MixturePosterior-bound", "MixturePosterior-averaged", *CORRELATED}

# Given the component, their KL is not that of the marginal density, but above it.
GIVEN_THE_COMPONENT = {"mixture-base-shared", "MixturePosterior-bound"}


def fresh(x):
    """A tensor that TFP's cache does not know."""
    return ops.convert_to_tensor(np.array(ops.convert_to_numpy(x)))


def log_density(distribution, z):
    return numpy(distribution.log_prob(fresh(z)))


def draw(posterior, count):
    """Many draws: z and the KL of each, or of all."""
    return numpy(*posterior.sample_and_kl((count,)))


class Grid:
    """Quadrature with q's own density, in one or two dimensions."""

    def __init__(self, posterior, points=4001):
        dimensions = posterior.channels
        points = points if dimensions == 1 else 401
        sample = draw(posterior, 20_000)[0]
        middle, low, high = np.median(sample, axis=0), sample.min(axis=0), sample.max(axis=0)
        axes = [
            np.linspace(m + 1.6 * (a - m), m + 1.6 * (b - m), points)
            for m, a, b in zip(middle, low, high, strict=True)
        ]
        self.cell = np.prod([axis[1] - axis[0] for axis in axes])
        self.z = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, dimensions)
        self.log_q = log_density(posterior.distribution(), self.z)
        self.q = np.exp(self.log_q)

    def integral(self, value=1.0):
        return np.sum(self.q * value) * self.cell

    def kl(self, posterior):
        return self.integral(self.log_q - log_density(posterior.prior(), self.z))


def quadrature_cases(names):
    """Each in as few channels as it takes: quadrature in two dimensions takes long."""
    return pytest.mark.parametrize(
        ("name", "channels"), [(name, min_posterior_channels(name)) for name in names]
    )
