"""Last layers of one and two weights, whose posteriors quadrature knows."""

import keras
import numpy as np
from keras import ops
from scipy.special import logsumexp

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 1)).astype("float32")
Y = (X[:, 0] + 0.3 * RNG.normal(size=12) > 0).astype("float32")
PRIOR = 3.0
LOGITS = keras.losses.BinaryCrossentropy(from_logits=True)


def logistic(weights):
    """A logistic regression of one number: its slope, and with two weights its bias."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=weights == 2)])
    model.compile("sgd", LOGITS)
    return model


class Quadrature:
    """The posterior of a logistic regression on a grid."""

    def __init__(self, weights):
        axes = [np.linspace(-4, 18, 221), np.linspace(-9, 7, 161)][:weights]
        self.cell = np.prod([axis[1] - axis[0] for axis in axes])
        self.w = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, weights)
        design = np.concatenate([X, np.ones_like(X)], axis=1)[:, :weights]
        each = -np.logaddexp(0, (1 - 2 * Y) * (self.w @ design.T)).sum(axis=1)
        prior = -np.sum(self.w**2, axis=1) / (2 * PRIOR**2)
        joint = each + prior - weights * np.log(PRIOR * np.sqrt(2 * np.pi))
        self.evidence = logsumexp(joint) + np.log(self.cell)
        self.log_p = joint - self.evidence
        p = np.exp(self.log_p) * self.cell
        self.mean = p @ self.w
        self.covariance = (self.w - self.mean).T @ ((self.w - self.mean) * p[:, None])

    def kl_of(self, posterior):
        """KL[q || posterior] in nats."""
        w = ops.convert_to_tensor(self.w.astype("float32"))
        log_q = ops.convert_to_numpy(posterior.distribution().log_prob(w)).astype("float64")
        q = np.exp(log_q) * self.cell
        np.testing.assert_allclose(q.sum(), 1, atol=2e-3)
        return q @ (log_q - self.log_p)
