"""Proposals of a random walk, for the algorithm of Metropolis."""

from collections.abc import Callable
from typing import Any, NamedTuple

from keras import ops

from tfp_ibnn._core.backend import Tensor, tfd, tfp


class _Proposal(NamedTuple):
    """What TFP keeps of a proposal; a step size among it is one that TFP adapts."""

    target_log_prob: Tensor  # (chains,)
    log_acceptance_correction: Tensor  # (chains,), 0: a step back is as likely
    step_size: Tensor


class RandomWalk(tfp.mcmc.TransitionKernel):
    """Gaussian steps in all directions, which `tfp.mcmc.MetropolisHastings` accepts or not.

    That of TFP, `tfp.mcmc.UncalibratedRandomWalk`, has steps of a fixed size.

    Args:
        log_prob: function of places (chains, size) that returns log-densities (chains,).
        step_size: tensor (chains, 1), the standard deviation of a step in each direction.
    """

    is_calibrated = False
    parameters: dict[str, Any]

    def __init__(self, log_prob: Callable[[Tensor], Tensor], step_size: Tensor) -> None:
        self.parameters = {"log_prob": log_prob, "step_size": step_size}

    def bootstrap_results(self, init_state: Tensor) -> _Proposal:
        """Return what is kept before the first step."""
        return self._proposal(init_state, self.parameters["step_size"])

    def one_step(
        self, current_state: Tensor, previous_kernel_results: _Proposal, seed: Any = None
    ) -> tuple[Tensor, _Proposal]:
        """Return a proposal for each chain."""
        step_size = previous_kernel_results.step_size
        origin = ops.zeros_like(current_state)
        noise = tfd.Normal(origin, ops.ones_like(current_state)).sample(seed=seed)
        proposed = current_state + step_size * noise
        return proposed, self._proposal(proposed, step_size)

    def _proposal(self, place: Tensor, step_size: Tensor) -> _Proposal:
        value = self.parameters["log_prob"](place)
        return _Proposal(value, ops.zeros_like(value), step_size)
