"""The evidence of a fitted Laplace approximation."""

from typing import Any

import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn.weights.features import LogitNetwork
from tfp_ibnn.weights.laplace.evidence import Evidence
from tfp_ibnn.weights.laplace.options import Options
from tfp_ibnn.weights.laplace.structure import Structure


class MarginalLikelihood:
    """What `Laplace` knows of the marginal likelihood, by what `fit` has kept."""

    structure: Structure
    logit_network: LogitNetwork
    prior_precision: Any
    noise_scale: Any
    _options: Options
    _fit: dict[str, Any]

    @property
    def evidence(self) -> Evidence:
        """What the marginal likelihood depends on."""
        self._check_fitted()
        weights = [ops.convert_to_numpy(value) for value in self.mean()]
        squares = [np.sum(np.square(value, dtype="float64")) for value in weights]
        network = self.logit_network
        is_free = network.likelihood.free_scale
        return Evidence(
            eigenvalues=self.structure.eigenvalues(),
            norm=float(sum(squares)),
            log_likelihood=self._fit["log_likelihood"],
            numbers=self._fit["examples"] * network.width if is_free else 0,
            temperature=self._options.temperature,
        )

    @property
    def prior_scale(self) -> float:
        """The prior's standard deviation: where "guarded" narrowed it, that of "marglik"."""
        precision = float(self.prior_precision)
        by_evidence, narrowed = self._fit.get("guarded", (precision, precision))
        if precision == narrowed:
            precision = by_evidence
        return precision**-0.5

    def log_marginal_likelihood(
        self, prior_precision: float | None = None, noise_scale: float | None = None
    ) -> float:
        """Return the logarithm of the evidence, to compare models and priors by.

        Costs a sum over the weights.

        Args:
            prior_precision: None takes the one that was fitted, before "guarded" narrowed it.
            noise_scale: of the targets of a plain regression; None takes the one that was fitted.

        Returns:
            log p(D), in nats.
        """
        if prior_precision is None:
            prior_precision = self.prior_scale**-2
        if noise_scale is None:
            noise_scale = float(self.noise_scale)
        checks.positive("prior_precision", prior_precision)
        checks.positive("noise_scale", noise_scale)
        return self.evidence.log_prob(prior_precision, noise_scale)

    def _check_fitted(self) -> None:
        if not self._fit:
            raise ValueError("The Laplace approximation is not fitted: call fit(x, y) first.")
