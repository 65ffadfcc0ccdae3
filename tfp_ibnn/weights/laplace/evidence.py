"""The marginal likelihood of a Laplace approximation."""

import math
from typing import NamedTuple

import numpy as np


class Evidence(NamedTuple):
    """What the marginal likelihood of a Laplace approximation depends on; arrays are float64.

    log p(D) = log p(D | w) - prior |w|^2 / 2 - sum_i log(1 + f l_i / prior) / 2, with f = 1 /
    (temperature * noise variance) and the eigenvalues l of the Hessian at the weights w.
    """

    eigenvalues: np.ndarray
    norm: float  # the squared length of the chosen weights
    log_likelihood: float  # at a noise scale of 1
    numbers: int  # targets of all examples together, if the noise scale is free, or else 0
    temperature: float

    def log_prob(self, prior_precision: float, noise_scale: float = 1.0) -> float:
        """Return the logarithm of the evidence, in nats."""
        values = self.eigenvalues / (self.temperature * noise_scale**2)
        log_det = float(np.sum(np.log1p(values / prior_precision)))
        fit = self.log_likelihood
        if self.numbers:
            constant = self.numbers * math.log(2 * math.pi) / 2
            fit = (fit + constant) / noise_scale**2 - constant
            fit -= self.numbers * math.log(noise_scale)
        return fit - (prior_precision * self.norm + log_det) / 2

    def maximize(
        self, prior_precision: float | None = None, noise_scale: float | None = None
    ) -> tuple[float, float]:
        """Return prior precision and noise scale of the largest evidence; what is given stays.

        By MacKay's fixed point (1992): with the number of well-determined directions, g = sum_i
        f l_i / (f l_i + prior), the prior becomes g / |w|^2, and the noise variance the squared
        error divided by the number of targets less g.
        """
        prior, scale = prior_precision or 1.0, noise_scale or 1.0
        constant = self.numbers * math.log(2 * math.pi) / 2
        error = -2 * (self.log_likelihood + constant)  # the squared error, if the scale is free
        for _ in range(10_000):
            old = prior, scale
            values = self.eigenvalues / (self.temperature * scale**2)
            determined = float(np.sum(values / (values + prior)))
            if prior_precision is None:
                prior = float(np.clip(determined / max(self.norm, 1e-30), 1e-6, 1e9))
            if noise_scale is None and self.numbers:
                left = max(self.numbers - determined, 1.0)
                scale = max(math.sqrt(error / left), 1e-6)
            if np.allclose(old, (prior, scale), rtol=1e-7, atol=0):
                break
        return prior, scale
