"""What the parts of the library know of each other.

A method of inference is a posterior with its layer, or a posterior over whole weight sets. All else
(conversion, prediction, export, callbacks, plots) knows only what stands here.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tfp_ibnn._core.backend import Tensor


class Draw(NamedTuple):
    """Draws of a latent z (..., channels), with KL and entropy in nats, each or in closed form."""

    z: Any  # a tensor; several in a tuple, if the layer does not draw ahead
    kl: Tensor
    entropy: Tensor


class PosteriorTemplate:
    """A template for the posteriors of a model's layers; each layer takes a copy."""

    beta: Any  # the weight of the KL, a variable of each copy
    initial_beta: float
    seed: int | None  # of the noise

    def wrap(self, layer: Any, train_size: int, **options: Any) -> Any:
        """Return a stochastic layer around a Keras layer, with its own copy of this posterior."""
        raise NotImplementedError(f"{type(self).__name__} must define `wrap`.")

    def at_depth(self, depth: int) -> "PosteriorTemplate":
        """Return the template for a model in which so many layers are stochastic."""
        return self

    def bind(self, layers: Sequence[Any]) -> None:
        """See all stochastic layers of the model that this copy, in one of them, is now part of."""

    def loss(self, draw: Draw) -> Tensor:
        """Return what a draw adds to the loss before division by the number of examples."""
        raise NotImplementedError(f"{type(self).__name__} must define `loss`.")

    def summary(self) -> Draw:
        """Return a fixed set of draws, the same for the same weights."""
        raise NotImplementedError(f"{type(self).__name__} must define `summary`.")


class Chunks(NamedTuple):
    """The sampled networks on a batch, to be run chunk by chunk."""

    run: Callable[..., Tensor]  # of a number: outputs (size, batch, ...) of the draws from it on
    size: int | Tensor  # draws in a chunk
    count: int | Tensor  # of chunks; the last one may go beyond the number of samples

    @property
    def is_one(self) -> bool:
        """Whether it is known ahead that there is one chunk only."""
        return isinstance(self.count, int) and self.count == 1


class Sampler:
    """Runs sampled networks on a batch. Keys are tensors of two integers."""

    samples: int  # how many networks `chunks` runs

    def chunks(self, inputs: Any, key: Tensor) -> Chunks:
        """Prepare the networks that a key gives for a batch."""
        raise NotImplementedError

    def draw(self, inputs: Any, key: Tensor, number: Tensor) -> Tensor:
        """Return the outputs (1, batch, ...) of one of them; `chunks` has those from 0 on."""
        raise NotImplementedError

    def at_mean(self, inputs: Any) -> Tensor:
        """Return the outputs (1, batch, ...) of the network without noise."""
        raise NotImplementedError


class WeightPosterior:
    """A posterior over whole sets of weights of one network; a subclass is a Keras layer."""

    network: Any  # the Keras model whose weights are sampled
    count: int | None  # how many sets there are; None gives as many as are wanted

    @property
    def modes(self) -> int:
        """How many networks it has that are not around one mean, such as those of an ensemble."""
        return 1

    @property
    def sampled(self) -> list[Any]:
        """The variables of `network` that a set has values for, batch-norm statistics included."""
        return self.network.weights

    @property
    def metrics(self) -> list[Any]:
        """None: those of a compiled `network` would be mixed with the scores of a prediction."""
        return []

    def sample(self, key: Tensor, number: int | Tensor) -> list[Tensor]:
        """Return set `number`, from 0 on, of those a key gives, in the order of `sampled`."""
        raise NotImplementedError(f"{type(self).__name__} must define `sample`.")

    def mean(self) -> list[Tensor]:
        """Return the values of the one set that stands for all."""
        raise NotImplementedError(f"{type(self).__name__} must define `mean`.")

    def mean_network(self) -> Any:
        """Return a copy of the network at `mean()`; of several modes, the first one's."""
        raise NotImplementedError(f"{type(self).__name__} must define `mean_network`.")

    def distribution(self) -> Any:
        """Return a TFP distribution over one vector: the values of `sampled`, flat, in order."""
        raise NotImplementedError(f"{type(self).__name__} has no density.")

    def sampler(self, samples: int, **options: Any) -> Sampler:
        """Return what runs `samples` of the networks."""
        raise NotImplementedError(f"{type(self).__name__} must define `sampler`.")
