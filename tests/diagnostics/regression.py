"""A linear regression whose posterior and evidence are known, and a network with noise."""

import keras
import numpy as np
from keras import layers, ops
from scipy.stats import multivariate_normal

import tfp_ibnn as ibnn

RNG = np.random.default_rng(0)
PRIOR, NOISE = 3.0, 0.4
X = RNG.normal(size=(30, 2)).astype("float32")
DESIGN = np.concatenate([X, np.ones((30, 1))], axis=1)
Y = DESIGN @ [1.0, -2.0, 0.3] + NOISE * RNG.normal(size=30)


def numpy(x):
    return np.asarray(ops.convert_to_numpy(x), "float64")


def normal(loc, covariance):
    factor = np.linalg.cholesky(covariance).astype("float32")
    return ibnn.tfd.MultivariateNormalTriL(np.asarray(loc, "float32"), factor)


class Linear:
    """A linear regression of known noise: its target, exact posterior and evidence."""

    def __init__(self):
        self.model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
        self.model.compile("sgd", "mse")
        self.vi = ibnn.GaussianVI(self.model, prior_scale=PRIOR, noise_scale=NOISE)
        self.target = self.vi.target(X, Y, verbose=0)
        precision = DESIGN.T @ DESIGN / NOISE**2 + np.eye(3) / PRIOR**2
        self.covariance = np.linalg.inv(precision)
        self.mean = self.covariance @ DESIGN.T @ Y / NOISE**2
        wide = NOISE**2 * np.eye(30) + PRIOR**2 * DESIGN @ DESIGN.T
        self.evidence = multivariate_normal(np.zeros(30), wide).logpdf(Y)

    def kl(self, factor):
        """KL of the posterior with a covariance that is so many times larger."""
        return 3 * (factor - 1 - np.log(factor)) / 2


def network(posterior):
    det = keras.Sequential([keras.Input((3,)), layers.Dense(4, "relu"), layers.Dense(2)])
    return ibnn.to_stochastic(det, posterior, train_size=100)
