"""A mixture of posteriors over weights, of networks of any kind."""

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

    Draw s is draw s // n of member s mod n. Every member has a network of its own, of any
    architecture; all take the same inputs, and their outputs mean the same. A compiled prediction
    holds all n networks. For models of one architecture `DeepEnsemble` is smaller.

    Args:
        members: posteriors over weights, or built Keras models, stochastic ones too. The network of
            the first says what the output means.
        **kwargs: those of `keras.layers.Layer`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> small, large = (
        ...     [keras.Input((3,)), keras.layers.Dense(n), keras.layers.Dense(2, "softmax")]
        ...     for n in (4, 8)
        ... )
        >>> mixture = ibnn.WeightMixture([keras.Sequential(small), keras.Sequential(large)])
        >>> ibnn.MonteCarlo(mixture).samples
        2

        MultiSWAG: `ibnn.WeightMixture([swag.posterior() for swag in swags])`.

    References:
        Wilson and Izmailov, Bayesian Deep Learning and a Probabilistic Perspective of
        Generalization, arXiv 2002.08791.
    """

    arguments = ("members",)
    count = None

    def __init__(
        self, members: Sequence[protocols.WeightPosterior | keras.Model], **kwargs: Any
    ) -> None:
        if not isinstance(members, Sequence) or not members:
            want = "a list of posteriors over weights, or of built Keras models"
            raise ValueError(f"`members` must be {want}; got {members!r}.")
        is_posterior = protocols.WeightPosterior
        members = [x if isinstance(x, is_posterior) else WeightSets([x]) for x in members]
        shapes = [getattr(x.network, "output_shape", None) for x in members]
        if any(shape != shapes[0] for shape in shapes):
            raise ValueError(f"The outputs of `members` must be of one shape; got {shapes}.")
        super().__init__(**kwargs)
        self.members = members
        self.built = True

    @property
    def network(self) -> keras.Model:
        """The network of the first member."""
        return self.members[0].network

    def materialize(
        self, number: int, data: Any = None, *, seed: int = 0, **options: Any
    ) -> "WeightMixture":
        """Return the mixture of finite sets, `number` of each member that has more."""
        numbered = enumerate(self.members, seed)
        made = [x.materialize(number, data, seed=own, **options) for own, x in numbered]
        return WeightMixture(made)

    def sampler(self, samples: int, **options: Any) -> MixtureSampler:
        """Return what runs the networks of all members in turn."""
        samplers = [x.sampler(samples, **options) for x in self.members]
        return MixtureSampler(samplers, samples, options.get("chunk_size"))
