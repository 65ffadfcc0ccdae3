"""The marginal likelihood of a Laplace approximation."""

import math
from typing import NamedTuple

import numpy as np

_LOG_2_PI = math.log(2 * math.pi)
_MOST_STEPS = 10_000


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
        """Return the logarithm of the evidence.

        Args:
            prior_precision: that of the weights.
            noise_scale: standard deviation of the targets, 1 by default.

        Returns:
            log p(D), in nats.
        """
        ratios = self._scaled_eigenvalues(noise_scale) / prior_precision
        log_det = float(np.sum(np.log1p(ratios)))
        penalty = prior_precision * self.norm
        fit = self._log_likelihood_at(noise_scale)
        return fit - (penalty + log_det) / 2

    def maximize(
        self, prior_precision: float | None = None, noise_scale: float | None = None
    ) -> tuple[float, float]:
        """Return prior precision and noise scale of the largest evidence.

        By MacKay's fixed point (1992): with the number of well-determined directions, g = sum_i
        f l_i / (f l_i + prior), the prior becomes g / |w|^2, and the noise variance the squared
        error divided by the number of targets less g.

        Args:
            prior_precision: a value that stays; None is to be found.
            noise_scale: a value that stays; None is to be found, if the noise scale is free.

        Returns:
            Prior precision and noise scale.
        """
        prior = prior_precision or 1.0
        scale = noise_scale or 1.0
        for _ in range(_MOST_STEPS):
            previous = prior, scale
            determined = self._determined(prior, scale)
            if prior_precision is None:
                best = determined / max(self.norm, 1e-30)
                prior = float(np.clip(best, 1e-6, 1e9))
            if noise_scale is None and self.numbers:
                undetermined = max(self.numbers - determined, 1.0)
                scale = max(math.sqrt(self._squared_error() / undetermined), 1e-6)
            if np.allclose(previous, (prior, scale), rtol=1e-7, atol=0):
                break
        return prior, scale

    def _scaled_eigenvalues(self, noise_scale: float) -> np.ndarray:
        """Return f l."""
        return self.eigenvalues / (self.temperature * noise_scale**2)

    def _determined(self, prior: float, scale: float) -> float:
        """Return the number of directions that the data determines, not the prior."""
        values = self._scaled_eigenvalues(scale)
        return float(np.sum(values / (values + prior)))

    def _squared_error(self) -> float:
        """Return the sum of the squared errors, if the noise scale is free."""
        constant = self.numbers * _LOG_2_PI / 2
        return -2 * (self.log_likelihood + constant)

    def _log_likelihood_at(self, noise_scale: float) -> float:
        """Return log p(D | w); the noise scale matters if it is free only."""
        if not self.numbers:
            return self.log_likelihood
        constant = self.numbers * _LOG_2_PI / 2
        squares = (self.log_likelihood + constant) / noise_scale**2
        return squares - constant - self.numbers * math.log(noise_scale)
