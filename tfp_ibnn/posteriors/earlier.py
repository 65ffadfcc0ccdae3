"""The posterior of an earlier task as a prior."""

from collections.abc import Iterable
from typing import Any

import keras
from keras import ops

from tfp_ibnn._core.backend import tfd
from tfp_ibnn._core.protocols import ZPosterior
from tfp_ibnn.posteriors import densities, priors


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Earlier(priors.Normal):
    """The posterior of an earlier task, whose weights the posterior that has this prior keeps.

    `ibnn.posterior_as_prior` makes it. Over weights it is N(0, 1), of weights that `MeanField` has
    standardized by the earlier means and scales: a KL stays the same under an affine map.

    Args:
        posterior: over z, without a prior of its own; None over weights.
    """

    def __init__(self, posterior: ZPosterior | None = None) -> None:
        super().__init__()
        self.posterior = posterior

    def copy(self, dtype: str) -> "Earlier":
        """Return one with a posterior of its own, which is not built.

        Args:
            dtype: of that posterior, "float32" or "float64".
        """
        return Earlier(self.posterior.copy(name="posterior", dtype=dtype))

    def over(self, shape: tuple[int, ...], dtype: str) -> tfd.Distribution:
        if self.posterior.is_centered:
            return densities.diagonal_normal(*self.posterior.loc_and_scale())
        return self.posterior.distribution()

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise if this is a prior of z, and the array is one of weights, or the other way round.

        Args:
            name: what the array is, for the error.
            shape: of the array.
        """
        if (name == "z") != (self.posterior is not None):
            raise ValueError(
                "`prior` must be one such as ibnn.priors.Normal(0.3); that of an earlier task is "
                "set by ibnn.posterior_as_prior(model)."
            )


def copy_values(variables: Iterable[keras.Variable], sources: Iterable[Any]) -> None:
    """Assign copies of values: JAX's trainer frees the buffers of those that it replaces.

    Args:
        variables: to assign to.
        sources: variables or tensors; a variable that does not train passes that on.
    """
    for variable, source in zip(variables, sources, strict=True):
        variable.assign(ops.convert_to_numpy(source).copy())
        if not getattr(source, "trainable", True):
            variable.trainable = False


class Fixed(keras.layers.Layer):
    """Keeps the weights of a posterior in files, and out of training whatever is unfrozen.

    Args:
        posterior: the one that is kept, not built.
    """

    def __init__(self, posterior: ZPosterior) -> None:
        super().__init__(name="earlier", dtype=posterior.dtype, trainable=False)
        self.posterior = posterior

    @property
    def trainable(self) -> bool:
        """Whether it trains: never."""
        return False

    @trainable.setter
    def trainable(self, value: bool) -> None:
        """Ignore what is set for all layers around it."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.posterior.build(input_shape)
        # A flag that came with a config reaches what is inside only when it changes.
        self.posterior.trainable = True
        self.posterior.trainable = False

    def get_build_config(self) -> None:
        """Leave building to the posterior around it, so that weight paths stay the same."""
