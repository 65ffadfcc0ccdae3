"""Ensembles of trained models."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfp_ibnn._core import backend, checks
from tfp_ibnn._core.text import with_strings
from tfp_ibnn.weights.base import WeightSets
from tfp_ibnn.weights.members import Members


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class DeepEnsemble(WeightSets):
    """Several trainings of one network, from different starts; `MonteCarlo` averages them.

    Members with stochastic layers make a mixture of posteriors: draw s is of member s mod n, with
    noise of its own, and `MonteCarlo` rounds `samples` up to a multiple of n. The first network
    runs with the weights of each: models that differ in more (layers, connections, functions,
    attributes, what `Normalization` adapted to), and posteriors over weights such as SWAG's, make a
    `WeightMixture`. Reference: Lakshminarayanan et al., arXiv 1612.01474.

    Args:
        models: built Keras models of one architecture. The first says what the output means:
            compile it with its loss, or give `MonteCarlo` a `head`.
        **kwargs: those of `keras.layers.Layer`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> layers = [[keras.Input([3]), keras.layers.Dense(2)] for _ in range(4)]
        >>> ensemble = ibnn.DeepEnsemble([keras.Sequential(each) for each in layers])
        >>> ibnn.MonteCarlo(ensemble, head="softmax", from_logits=True).samples
        4
    """

    @classmethod
    def train(
        cls,
        build: Callable[..., keras.Model],
        n: int,
        x: Any,
        y: Any = None,
        *,
        seed: int = 0,
        callbacks: Any = None,
        side_by_side: bool = False,
        verbose: Any = 1,
        **fit: Any,
    ) -> "DeepEnsemble":
        """Train n members, each from a seed of its own; one after the other by default.

        Member i is built and trained after `keras.utils.set_random_seed(seed + i)`, so equal calls
        give equal ensembles. A member that is not finite is left out, and after an interrupt
        (Ctrl-C) those that are finished are returned, both with a warning.

        Args:
            build: a function that returns a compiled model; it may take the member's seed.
            n: number of members.
            x: training inputs, or a dataset, as for `fit`.
            y: training targets.
            seed: of the first member; the others follow.
            callbacks: for `fit`; or a function that returns new ones, which may take that seed.
            side_by_side: take all members through the same batches, in the order of `x`, without
                `callbacks`: on JAX all of them in one compiled step, which an interrupt loses, on
                TensorFlow one after the other. What they learn is the same up to rounding.
            verbose: 1 or "auto" prints a line for each member, and every ten seconds; 2 the epochs
                too; 0 nothing.
            **fit: other arguments of `fit`, such as `epochs`.

        Returns:
            The ensemble of the members that did not diverge.

        Raises:
            ArithmeticError: if all of them diverged.
            ValueError: if `build` returns models that differ in more than values of weights.

        Example:
            >>> import keras, numpy as np, tfp_ibnn as ibnn
            >>> def build():
            ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
            ...     model.compile("sgd", "mse")
            ...     return model
            >>> x = np.ones((4, 3), "float32")
            >>> ibnn.DeepEnsemble.train(build, 2, x, x[:, :2], verbose=0).count
            2
        """
        n = checks.positive_integer("n", n)
        seed = checks.whole("seed", seed)
        verbose = 1 if verbose == "auto" else verbose
        if side_by_side and callbacks is not None:
            raise ValueError("`callbacks` must be None if members train side by side.")
        if n > 1 and isinstance(x, Iterator):
            raise ValueError(
                f"`x` is a {type(x).__name__}, which the first of {n} members would use up: give "
                "arrays, a tf.data.Dataset or a PyDataset."
            )
        x = with_strings(x)
        options = {"verbose": 2 if verbose > 1 else 0, **fit}
        if side_by_side:
            options["shuffle"] = False
        seeds = list(range(seed, seed + n))
        members = Members(build, seeds, is_shown=bool(verbose), is_slow_shown=verbose == 1)
        try:
            if side_by_side and backend.SCANS_EPOCHS:
                members.train_side_by_side(x, y, options)
            else:
                members.train_in_turn(x, y, options, callbacks)
        except KeyboardInterrupt:
            finished = len(members.sets)
            if not finished:
                raise
            warnings.warn(
                f"Interrupted: {finished} of {n} members are finished, and make the ensemble.",
                stacklevel=2,
            )
        if not members.sets:
            raise ArithmeticError(f"All members diverged: those of the seeds {seeds}.")
        return cls.of(members.first, members.sets)
