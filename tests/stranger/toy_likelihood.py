"""A toy likelihood: counts by a Poisson distribution, whose logarithmic rate the network gives."""

import keras
from keras import ops

from tfp_ibnn import tfd
from tfp_ibnn.likelihoods import Numbers


@keras.saving.register_keras_serializable(package="stranger")
class Counts(Numbers):
    """y ~ Poisson(exp(output)); minus the log-probability has the Hessian diag(rate)."""

    def targets(self, y, *, what="`y`"):
        y = super().targets(y, what=what)
        if (y < 0).any() or (y % 1).any():
            raise ValueError(f"{what} must be counts: whole numbers of 0 or above.")
        return y

    def log_prob(self, logits, y):
        y = ops.cast(y, logits.dtype)
        return ops.sum(tfd.Poisson(log_rate=logits).log_prob(y), axis=-1)

    def hessian_factors(self, logits):
        root = ops.exp(logits / 2)
        return root[:, :, None] * ops.eye(root.shape[-1], dtype=root.dtype)

    def draws(self, outputs):
        rate = ops.exp(outputs)
        return rate, rate  # the mean, and the variance

    def loss(self, y_true, prediction):
        y, rate = self.pair(y_true, prediction)
        return -ops.sum(tfd.Poisson(rate=rate).log_prob(y), axis=-1)
