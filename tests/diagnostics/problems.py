"""Posteriors that are known in closed form."""

import keras
import numpy as np
from keras import layers, ops
from scipy.stats import multivariate_normal

import tfp_ibnn as ibnn

NOISE, PRIOR = 0.4, 3.0
RNG = np.random.default_rng(1)
X = RNG.normal(size=(30, 3)).astype("float32")
X[:, 1] += X[:, 0]
KERNEL, BIAS = np.array([1.0, -2.0, 0.5]), 0.3
Y = X @ KERNEL + BIAS + NOISE * RNG.normal(size=30)


class Linear:
    """y = offset + design @ w + noise, with the prior w ~ N(loc, scale^2)."""

    def __init__(self, design, offset, loc, scale):
        size = design.shape[1]
        self.precision = design.T @ design / NOISE**2 + np.eye(size) / scale**2
        self.covariance = np.linalg.inv(self.precision)
        pull = design.T @ (Y - offset) / NOISE**2 + loc / scale**2
        self.mean = self.covariance @ (pull * np.ones(size))
        marginal = NOISE**2 * np.eye(len(Y)) + scale**2 * design @ design.T
        center = offset + design @ np.full(size, loc)
        self.evidence = multivariate_normal(center, marginal).logpdf(Y)

    def log_joint(self, w):
        return self.evidence + multivariate_normal(self.mean, self.covariance).logpdf(w)


WEIGHTS = Linear(np.concatenate([X, np.ones((30, 1))], axis=1), 0.0, 0.0, PRIOR)
Z = Linear(X * KERNEL, BIAS, 1.0, 0.5)


def network():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def stochastic():
    """The network with z on its inputs: the posterior of z is Gaussian."""
    model = ibnn.to_stochastic(network(), ibnn.NormalAffine(prior_scale=0.5), train_size=30)
    model.compile("sgd", "mse")
    model.layers[-1].layer.set_weights([KERNEL[:, None], np.array([BIAS])])
    return model


def two_modes(w):
    """0.3 N(3, 0.5^2) + 0.7 N(-3, 0.5^2) in each direction at once; its integral is 1."""
    first, second = (-2 * ops.sum((w - loc) ** 2, axis=-1) for loc in (3.0, -3.0))
    return ops.logaddexp(first + np.log(0.3), second + np.log(0.7)) - np.log(np.pi / 2)


def funnel(w):
    """v ~ N(0, 3^2), x ~ N(0, e^v)."""
    v, x = w[:, 0], w[:, 1]
    return -(v**2) / 18 - x**2 * ops.exp(-v) / 2 - v / 2


def banana(w):
    """x ~ N(0, 1), y ~ N(x^2, 1)."""
    return -(w[:, 0] ** 2) / 2 - (w[:, 1] - w[:, 0] ** 2) ** 2 / 2


def density(function, **options):
    return ibnn.diagnostics.Density(function, np.zeros(2, "float32"), prior_scale=4.0, **options)
