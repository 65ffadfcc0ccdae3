"""Hamiltonian Monte Carlo over the last layer's weights."""

import math
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor, mean
from tfp_ibnn.weights.agreement import agreement, table
from tfp_ibnn.weights.chains import MOST_FULL, sample_chains
from tfp_ibnn.weights.last_layer import LastLayerPosterior
from tfp_ibnn.weights.target import Target

_MOST_NUMBERS = 2**28
_GOLDEN_RATIO = 0.618


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class LastLayerHMC(LastLayerPosterior):
    """Draws from the exact posterior of the last layer's weights, by Hamiltonian Monte Carlo.

    Log-density: log p(y | x, w) + log p(w), with the prior w ~ N(0, prior_scale^2), on cached
    features. A Gaussian of full covariance comes first; the chains start from its draws and run
    in coordinates where it is N(0, 1). The step size adapts in the warm-up to 80 % acceptance.
    `report` has R-hat and effective sample sizes. Reference: Neal, MCMC Using Hamiltonian Dynamics,
    arXiv 1206.1901.

    Cost: (warmup + draws) * leapfrog gradients of all chains together, each O(N * D) per chain for
    N examples and D weights. Stores chains * draws sets of the last layer's weights.

    Args:
        model: a built Functional or Sequential model that ends in a Dense layer; it is not changed.
        chains: number of independent chains, at least 2.
        draws: from each chain, after the warm-up.
        warmup: steps of each chain that are not kept.
        **kwargs: `prior_scale` (1.0), the standard deviation of each weight's prior; `noise_scale`,
            that of a plain regression's targets (None takes the root mean square of the residuals
            of `model`); `head` and `from_logits` as for `MonteCarlo`; those of a Keras layer.

    Example:
        >>> import keras, numpy as np, tfp_ibnn as ibnn
        >>> x = np.linspace(-1, 1, 20, dtype="float32")[:, None]
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True))
        >>> posterior = ibnn.LastLayerHMC(model, chains=2, draws=100, warmup=100)
        >>> posterior.fit(x, x > 0.1, verbose=0).samples().shape
        (200, 2)
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        chains: int = 4,
        draws: int = 250,
        warmup: int = 300,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, **kwargs)
        self.chains = checks.positive_integer("chains", chains, least=2)
        self.draws = checks.positive_integer("draws", draws, least=4)
        self.warmup = checks.positive_integer("warmup", warmup)
        self.count = self.chains * self.draws
        if self.size > MOST_FULL or self.count * self.size > _MOST_NUMBERS:
            raise ValueError(
                f"{self.count} draws of {self.size} weights are too many: at most {MOST_FULL} "
                f"weights, and {_MOST_NUMBERS} numbers in all. Take fewer `draws`, or "
                "ibnn.GaussianVI(model, covariance='lowrank')."
            )
        self._sets = self._add("sets", (self.draws, self.chains, self.size))
        self._acceptance = self._add("acceptance", ())

    def fit_to(self, target: Target, rng: np.random.Generator, verbose: Any = 0) -> None:
        """Draw from a target's posterior.

        Args:
            target: its log-density.
            rng: source of the draws.
            verbose: 0 shows no progress.
        """
        sets, diagnostics = sample_chains(
            target,
            rng,
            sampler="hmc",
            chains=self.chains,
            draws=self.draws,
            warmup=self.warmup,
            time_limit=1e9,
            verbose=verbose,
        )
        self._sets.assign(sets)
        self._acceptance.assign(diagnostics["acceptance"])

    def draw(self, key: Tensor, number: int | Tensor) -> Tensor:
        """Return a draw, (size,): all of them in an order that mixes early and late ones.

        Args:
            key: not used.
            number: number of the draw, from 0 on; they repeat.

        Returns:
            A vector (size,), or several for several numbers.
        """
        place = number % self.count * self._stride() % self.count
        sets = ops.convert_to_tensor(self._sets)
        rows = ops.reshape(sets, (self.count, self.size))
        return ops.take(rows, place, axis=0)

    def _stride(self) -> int:
        """Return the distance between the places of consecutive draws.

        It has no divisor in common with the number of draws, and so visits all of them.
        """
        stride = int(_GOLDEN_RATIO * self.count)
        while math.gcd(stride, self.count) != 1:
            stride -= 1
        return stride

    def center(self) -> Tensor:
        """Return the mean of all draws."""
        return mean(ops.convert_to_tensor(self._sets), axis=(0, 1))

    def samples(self) -> np.ndarray:
        """Return all draws, (draws * chains, size)."""
        sets = ops.convert_to_numpy(self._sets.value)
        return sets.reshape(self.count, self.size)

    def diagnostics(self) -> dict[str, float]:
        """Return acceptance, R-hat and effective sample sizes by name."""
        acceptance = float(ops.convert_to_numpy(self._acceptance.value))
        return {"acceptance": acceptance, **agreement(ops.convert_to_tensor(self._sets))}

    def report(self) -> str:
        """Return the diagnostics as a table."""
        return table(self._sets.shape, self.diagnostics(), "weights")
