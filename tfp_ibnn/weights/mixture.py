"""Mixtures of posteriors over weights."""

from collections.abc import Sequence
from typing import Any

import keras

from tfp_ibnn._core import protocols
from tfp_ibnn._core.serialization import ConfiguredLayer
from tfp_ibnn.prediction.samplers import MixtureSampler
from tfp_ibnn.weights.base import WeightPosterior, WeightSets


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class WeightMixture(ConfiguredLayer, WeightPosterior, keras.layers.Layer):
    """Several posteriors over weights, all equally likely: MultiSWAG, ensembles of anything.

    Draw s is draw s // n of member s mod n; `MonteCarlo` rounds `samples` up to a multiple of n, so
    that each member is drawn as often. The networks may be of any architecture, with the same
    inputs and outputs; of one architecture, a `DeepEnsemble` is smaller, since it holds one only.
    MultiSWAG (arXiv 2002.08791) is `ibnn.WeightMixture([swag.posterior() for swag in swags])`.

    Args:
        members: posteriors over weights, or built Keras models, stochastic ones too. The network of
            the first says what the output means.
        **kwargs: those of `keras.layers.Layer`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> small = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
        >>> hidden = [keras.layers.Dense(4, "relu"), keras.layers.Dense(2)]
        >>> large = keras.Sequential([keras.Input([3]), *hidden])
        >>> mixture = ibnn.WeightMixture([small, large])
        >>> ibnn.MonteCarlo(mixture, head="softmax", from_logits=True, samples=3).samples
        2
    """

    count = None

    def __init__(
        self, members: Sequence[protocols.WeightPosterior | keras.Model], **kwargs: Any
    ) -> None:
        if not isinstance(members, Sequence) or not members:
            raise ValueError(
                "`members` must be a list of posteriors over weights, or of built Keras models; "
                f"got {members!r}."
            )
        members = [_as_posterior(member) for member in members]
        shapes = [getattr(x.network, "output_shape", None) for x in members]
        if any(shape != shapes[0] for shape in shapes):
            raise ValueError(f"The outputs of `members` must be of one shape; got {shapes}.")
        super().__init__(**kwargs)
        self.members = members
        self.network = members[0].network
        self.built = True

    @property
    def modes(self) -> int:
        return sum(member.modes for member in self.members)

    def mean_network(self) -> keras.Model:
        return self.members[0].mean_network()

    def materialize(
        self, number: int, data: Any = None, *, seed: int = 0, **options: Any
    ) -> "WeightMixture":
        """Return the mixture of finite sets.

        Args:
            number: of sets, from each member that has more.
            data: inputs for batch-norm statistics, as for other posteriors.
            seed: of the first member's draws; the others follow.
            **options: other arguments of the members' `materialize`.

        Returns:
            A mixture of as many members.
        """
        finite = []
        for member_seed, member in enumerate(self.members, seed):
            finite.append(member.materialize(number, data, seed=member_seed, **options))
        return WeightMixture(finite)

    def sampler(self, samples: int, **options: Any) -> MixtureSampler:
        samplers = [member.sampler(samples, **options) for member in self.members]
        return MixtureSampler(samplers, samples, options.get("chunk_size"))


def _as_posterior(member: Any) -> protocols.WeightPosterior:
    if isinstance(member, protocols.WeightPosterior):
        return member
    return WeightSets([member])
