"""What the parts of the library know about each other.

A method of inference is a posterior with its layer, or a posterior over whole weight sets. All else
(conversion, prediction, export, callbacks, plots) uses only what is defined here.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import keras
from keras import ops

from tfp_ibnn._core.backend import Tensor


class Draw(NamedTuple):
    """Draws of a latent z (..., channels), with KL and entropy (sampled or exact) in nats."""

    z: Any  # a tensor; or a tuple of several, if the layer does not draw ahead
    kl: Tensor
    entropy: Tensor


class PosteriorTemplate:
    """A template for the posteriors of a model's layers; each layer takes a copy.

    This is all that the base of the stochastic layers, conversion, training and plots ask of a
    posterior. A subclass that is also a Keras layer, with a config, defines `wrap`, `loss` and
    `summary`; what its own stochastic layer asks of it beyond that is between the two.
    """

    latent: Literal["z", "weights"] = "weights"
    """What is random: z, which multiplies inputs (in a `ZPosterior`), or weights of any kind."""

    beta: Any
    """The weight of the KL in the loss, a variable that each copy has when it is built."""

    initial_beta: float | None = 1.0
    """What `beta` starts at; None leaves it to the layer."""

    seed: int | None = None
    """The seed of the noise; None draws fresh noise in each process."""

    def wrap(self, layer: Any, train_size: int, **options: Any) -> Any:
        """Return a stochastic layer around a Keras layer, with its own copy of this posterior.

        Args:
            layer: a Keras layer.
            train_size: number of training examples, over which the KL is spread.
            **options: `name`, `seed`, and `noise` and `kl_reduction`, which are for posteriors
                over z; others ignore these two.

        Returns:
            A `StochasticLayer`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `wrap`.")

    def copy_for_layer(
        self, dtype: str, seed: int | None = None, train_size: int = 1
    ) -> "PosteriorTemplate":
        """Return the unbuilt copy that a layer takes: one of the same config, named "posterior".

        A posterior whose noise has a seed, or whose beta depends on the number of examples,
        overrides this.

        Args:
            dtype: "float32" or "float64".
            seed: of the layer's noise; None leaves the choice to the template.
            train_size: number of training examples of the layer.

        Returns:
            A posterior of the same class.
        """
        del seed, train_size
        config = {**self.get_config(), "dtype": dtype, "name": "posterior"}
        return type(self).from_config(config)

    def at_depth(self, depth: int) -> "PosteriorTemplate":
        """Return the template for a model in which `depth` layers are stochastic."""
        return self

    def bind(self, layers: Sequence[Any]) -> None:
        """Take the stochastic layers of the model of which this copy, in one of them, is part."""

    def loss(self, draw: Draw) -> Tensor:
        """Return what a draw adds to the loss before division by the number of examples."""
        raise NotImplementedError(f"{type(self).__name__} must define `loss`.")

    def summary(self) -> Draw:
        """Return a fixed set of draws, the same for the same weights."""
        raise NotImplementedError(f"{type(self).__name__} must define `summary`.")

    def fixed_layers(self) -> list[Any]:
        """Return the layers inside whose weights are constants, whatever is frozen or not."""
        return []

    def for_next_task(self) -> "PosteriorTemplate":
        """Return an unbuilt template whose prior this built posterior becomes, by `continue_from`.

        Raises:
            ValueError: If its density is not known.
        """
        raise ValueError(
            f"The posterior {type(self).__name__} cannot be a prior: it has no density that can be "
            "computed for one layer alone. Those of MeanField, NormalAffine, NormalFull, "
            "NormalLowRank and FlowPosterior have one."
        )

    def continue_from(self, posterior: "PosteriorTemplate", means: Sequence[Tensor] = ()) -> None:
        """Start at another posterior, and take it as the prior.

        Args:
            posterior: the one whose `for_next_task` gave the template of this one, both built.
            means: of the random weights, of a posterior over weights.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `continue_from`.")


class ZPosterior(PosteriorTemplate):
    """A posterior over a latent z that multiplies what a layer is given: what `Stochastic` asks.

    The layer builds its copy for the shape (None, channels).
    """

    latent = "z"

    channels: int | None
    """The size of z, once it is built."""

    sides: Literal["input", "both"] = "input"
    """Whether z multiplies a layer's inputs, or the outputs of its kernel as well."""

    @property
    def is_centered(self) -> bool:
        """Whether z = loc + scale * noise, with `loc_and_scale` for both: a diagonal Gaussian."""
        return False

    def loc_and_scale(self) -> tuple[Tensor, Tensor]:
        """Return loc and scale, (channels,) each, of a posterior that `is_centered`."""
        raise NotImplementedError(f"{type(self).__name__} is not z = loc + scale * noise.")

    def mean(self) -> Tensor:
        """Return the mean of z, (channels,)."""
        raise NotImplementedError(f"{type(self).__name__} must define `mean`.")

    def draw(
        self,
        forward_pass: Any,
        count: int | Tensor,
        positions: tuple[int | Tensor, ...],
        on: Tensor,
        training: bool = False,
    ) -> Draw:
        """Return `count` draws of z, each at all positions, with KL and entropy.

        Args:
            forward_pass: the `noise.Pass` whose `source` gives the random numbers.
            count: how many draws.
            positions: sizes of the axes between those of the draws and of the channels; () for one
                z per draw.
            on: boolean, () or (channels,): where it is False, z is the mean.
            training: whether the draws are for a training step.

        Returns:
            A `Draw` whose z is (count, *positions, channels).
        """
        raise NotImplementedError(f"{type(self).__name__} must define `draw`.")


class Density:
    """A Keras model of data that returns log p(x), (examples,) in nats, when it is called.

    This is all that `OODDetector` asks of it; a subclass is a `keras.Model`.
    """

    condition: Any = None
    """None, or what p(x | condition) depends on; inputs are then pairs (x, condition)."""

    event: tuple[int, ...] = ()
    """The shape of one example, once the model is built."""

    def checked_data(self, x: Any) -> Any:
        """Return arrays as the model takes them, or raise; datasets are left as they are.

        Args:
            x: data (examples, ...), or a pair of data and a condition, or a dataset.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `checked_data`.")


class Chunks(NamedTuple):
    """The sampled networks on a batch, to be run chunk by chunk."""

    run: Callable[..., Tensor]  # run(first) gives outputs (size, batch, ...) from that draw on
    size: int | Tensor  # draws in a chunk
    count: int | Tensor  # number of chunks; the last may go beyond the number of samples

    @property
    def is_one(self) -> bool:
        """Whether it is known in advance that there is only one chunk."""
        return isinstance(self.count, int) and self.count == 1


class Sampler:
    """Runs sampled networks on a batch. Keys are tensors of two integers."""

    samples: int  # how many networks `chunks` runs

    def chunks(self, inputs: Any, key: Tensor) -> Chunks:
        """Prepare the networks that a key gives for a batch.

        Args:
            inputs: a batch, as the model takes it.
            key: a tensor of two integers.
        """
        raise NotImplementedError

    def unrolled(self, inputs: Any, key: Tensor) -> Chunks:
        """Do as `chunks` does, in one chunk and without a loop: for files that hold no loops.

        Args:
            inputs: a batch, as the model takes it.
            key: a tensor of two integers.
        """

        def run(_: int) -> Any:
            outputs = [self.draw(inputs, key, number) for number in range(self.samples)]
            return keras.tree.map_structure(lambda *draws: ops.concatenate(draws), *outputs)

        return Chunks(run, self.samples, 1)

    def draw(self, inputs: Any, key: Tensor, number: int | Tensor) -> Tensor:
        """Return the outputs of one network; `chunks` has those from 0 on.

        Args:
            inputs: a batch, as the model takes it.
            key: a tensor of two integers.
            number: which of the networks that the key gives.

        Returns:
            Outputs (1, batch, ...).
        """
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
        """How many means its networks are around: for an ensemble, the number of its members."""
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
        """Return one of the sets that a key gives.

        Args:
            key: a tensor of two integers.
            number: which of them, from 0 on.

        Returns:
            A value for each variable of `sampled`, in its order.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `sample`.")

    def mean(self) -> list[Tensor]:
        """Return the values of the one set that stands for all."""
        raise NotImplementedError(f"{type(self).__name__} must define `mean`.")

    def mean_network(self) -> Any:
        """Return a copy of the network at `mean()`; with several modes, at that of the first."""
        raise NotImplementedError(f"{type(self).__name__} must define `mean_network`.")

    def distribution(self) -> Any:
        """Return a TFP distribution over one vector: the values of `sampled`, flat, in order."""
        raise NotImplementedError(f"{type(self).__name__} has no density.")

    def sampler(self, samples: int, **options: Any) -> Sampler:
        """Return what runs `samples` of the networks."""
        raise NotImplementedError(f"{type(self).__name__} must define `sampler`.")
