"""A mixture of posteriors over weights, of networks of any kind."""

from collections.abc import Sequence
from typing import Any

import keras

from tfp_ibnn._core import protocols
from tfp_ibnn.prediction.samplers import MixtureSampler
from tfp_ibnn.weights.base import WeightPosterior, WeightSets


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class WeightMixture(WeightPosterior, keras.layers.Layer):
    """Several posteriors over weights, all equally likely: MultiSWAG, ensembles of anything.

    Draw s is draw s // n of member s mod n. Every member has a network of its own, of any
    architecture; all take the same inputs, and their outputs mean the same. A compiled prediction
    holds all n networks. For plain models of one architecture `DeepEnsemble` is smaller.

    Args:
        members: posteriors over weights, or built Keras models, stochastic ones too. The network of
            the first says what the output means, and alone stands for all in `at_mean`.
        **kwargs: those of `keras.layers.Layer`.

    Example:
        MultiSWAG, of two trainings that a `SWAG` callback has followed:

        >>> import keras, numpy as np, tfp_ibnn as ibnn
        >>> def posterior(seed):
        ...     keras.utils.set_random_seed(seed)
        ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        ...     swag = ibnn.SWAG()
        ...     x = np.ones((4, 3), "float32")
        ...     log = model.fit(x, x[:, :1], epochs=3, verbose=0, callbacks=[swag])
        ...     return swag.posterior()
        >>> mixture = ibnn.WeightMixture([posterior(seed) for seed in (0, 1)])
        >>> ibnn.MonteCarlo(mixture, samples=10).samples
        10

    References:
        Wilson and Izmailov, Bayesian Deep Learning and a Probabilistic Perspective of
        Generalization, arXiv 2002.08791.
    """

    count = None

    def __init__(
        self, members: Sequence[protocols.WeightPosterior | keras.Model], **kwargs: Any
    ) -> None:
        if not isinstance(members, Sequence) or not members:
            want = "a list of posteriors over weights, or of built Keras models"
            raise ValueError(f"`members` must be {want}; got {members!r}.")
        is_posterior = [isinstance(x, protocols.WeightPosterior) for x in members]
        pairs = list(zip(members, is_posterior, strict=True))
        members = [x if given else WeightSets([x]) for x, given in pairs]
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

    def get_config(self) -> dict[str, Any]:
        """Return the members; their weights are saved as weights."""
        members = [keras.saving.serialize_keras_object(x) for x in self.members]
        return {**super().get_config(), "members": members}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "WeightMixture":
        """Return a mixture from what `get_config` gave; its weights are yet to be loaded."""
        load = keras.saving.deserialize_keras_object
        members = [load(x, custom_objects=custom_objects) for x in config["members"]]
        return cls(**{**config, "members": members})
