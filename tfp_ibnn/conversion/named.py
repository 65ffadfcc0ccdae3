"""Keras's own layers made stochastic, by their own arguments, and those of TensorFlow Probability.

`DenseFlipout` and the like take the arguments of the Keras layer, those of `ibnn.MeanField`, and
`train_size`. Their names end in the estimator: Reparameterization is "shared", Flipout "flipout",
LocalReparameterization "local". What TFP's other arguments become: docs/from_tfp.md. Users find all
of them in `ibnn.layers`.
"""

import inspect
from collections.abc import Callable
from typing import Any

import keras
from keras import layers

from tfp_ibnn._core import checks, keras_internals
from tfp_ibnn._core.protocols import PosteriorTemplate
from tfp_ibnn.layers.mean_field import MeanFieldLayer
from tfp_ibnn.layers.multiplicative import Stochastic
from tfp_ibnn.posteriors.mean_field import MeanField

__all__ = [
    "Conv1DFlipout",
    "Conv1DReparameterization",
    "Conv2DFlipout",
    "Conv2DReparameterization",
    "Conv3DFlipout",
    "Conv3DReparameterization",
    "DenseFlipout",
    "DenseLocalReparameterization",
    "DenseReparameterization",
    "StochasticConv2D",
    "StochasticDense",
]

Sizes = int | tuple[int, ...]
"""A number for each axis of a convolution, or one for all."""

_OF_LAYER = ("name", "trainable")
"""Arguments of `keras.layers.Layer` of the stochastic layer; others are of the one inside."""


class _StochasticPlain(Stochastic):
    """A stochastic layer that takes the arguments of a plain Keras layer and its own."""

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["layer"]
        config.pop("activity_regularizer", None)  # that of the layer inside counts
        inner = self.layer.get_config()
        own = {"dtype": inner["dtype"], "layer_trainable": inner["trainable"]}
        return {**inner, **config, **own}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "_StochasticPlain":
        config = keras_internals.readable(config)
        trainable = config.pop("layer_trainable", True)
        layer = super().from_config(config, custom_objects)
        layer.layer.trainable = trainable
        return layer


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class StochasticDense(_StochasticPlain):
    """A Dense layer on noisy input: takes the arguments of Keras's layer and of `Stochastic`.

    Args:
        units: size of the output.
        activation: of the output, a function or its name.
        use_bias: whether a bias is added.
        kernel_initializer: of the kernel.
        bias_initializer: of the bias.
        kernel_regularizer: penalty on the kernel.
        bias_regularizer: penalty on the bias.
        activity_regularizer: penalty on the output.
        kernel_constraint: on the kernel.
        bias_constraint: on the bias.
        posterior: template over z; None is `ibnn.NormalAffine()`, a Gaussian.
        train_size: number of training examples, over which the KL is spread.
        noise: "channel" or "position", see `Stochastic`.
        kl_reduction: "sum" or "mean" over positions, see `Stochastic`.
        seed: of the noise; None takes the posterior's.
        **kwargs: those of `keras.layers.Layer`, and `lora_rank` and the like of Keras's layer.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> layer = ibnn.StochasticDense(8, activation="relu", train_size=100)
        >>> layer(keras.ops.ones((5, 3))).shape[-1]
        8
    """

    def __init__(
        self,
        units: int,
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        *,
        posterior: PosteriorTemplate | None = None,
        train_size: int | None = None,
        noise: str = "channel",
        kl_reduction: str = "sum",
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        outer = {name: kwargs.pop(name) for name in _OF_LAYER if name in kwargs}
        takers = (type(self).__init__, layers.Dense.__init__)
        with checks.known_keywords(type(self).__name__, kwargs, takers, but=("self",)):
            dense = layers.Dense(
                units,
                activation=activation,
                use_bias=use_bias,
                kernel_initializer=kernel_initializer,
                bias_initializer=bias_initializer,
                kernel_regularizer=kernel_regularizer,
                bias_regularizer=bias_regularizer,
                activity_regularizer=activity_regularizer,
                kernel_constraint=kernel_constraint,
                bias_constraint=bias_constraint,
                **kwargs,
            )
        super().__init__(dense, posterior, train_size, noise, kl_reduction, seed, **outer)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class StochasticConv2D(_StochasticPlain):
    """A Conv2D layer on noisy input: takes the arguments of Keras's layer and of `Stochastic`.

    Args:
        filters: number of channels of the output.
        kernel_size: height and width of the window, in pixels.
        strides: distances between windows, in pixels.
        padding: "valid" or "same".
        data_format: "channels_last", or None if that is Keras's setting.
        dilation_rate: distances between the pixels of a window.
        groups: number of groups of channels that are convolved apart.
        activation: of the output, a function or its name.
        use_bias: whether a bias is added.
        kernel_initializer: of the kernel.
        bias_initializer: of the bias.
        kernel_regularizer: penalty on the kernel.
        bias_regularizer: penalty on the bias.
        activity_regularizer: penalty on the output.
        kernel_constraint: on the kernel.
        bias_constraint: on the bias.
        posterior: template over z; None is `ibnn.NormalAffine()`, a Gaussian.
        train_size: number of training examples, over which the KL is spread.
        noise: "channel", or "position" for a z at each pixel, see `Stochastic`.
        kl_reduction: "sum" or "mean" over positions, see `Stochastic`.
        seed: of the noise; None takes the posterior's.
        **kwargs: those of `keras.layers.Layer`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> layer = ibnn.StochasticConv2D(8, 3, padding="same", train_size=100)
        >>> tuple(layer(keras.ops.ones((2, 5, 5, 1))).shape)
        (2, 5, 5, 8)
    """

    def __init__(
        self,
        filters: int,
        kernel_size: Sizes,
        strides: Sizes = (1, 1),
        padding: str = "valid",
        data_format: str | None = None,
        dilation_rate: Sizes = (1, 1),
        groups: int = 1,
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        *,
        posterior: PosteriorTemplate | None = None,
        train_size: int | None = None,
        noise: str = "channel",
        kl_reduction: str = "sum",
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        outer = {name: kwargs.pop(name) for name in _OF_LAYER if name in kwargs}
        takers = (type(self).__init__, layers.Conv2D.__init__)
        with checks.known_keywords(type(self).__name__, kwargs, takers, but=("self",)):
            convolution = layers.Conv2D(
                filters,
                kernel_size,
                strides=strides,
                padding=padding,
                data_format=data_format,
                dilation_rate=dilation_rate,
                groups=groups,
                activation=activation,
                use_bias=use_bias,
                kernel_initializer=kernel_initializer,
                bias_initializer=bias_initializer,
                kernel_regularizer=kernel_regularizer,
                bias_regularizer=bias_regularizer,
                activity_regularizer=activity_regularizer,
                kernel_constraint=kernel_constraint,
                bias_constraint=bias_constraint,
                **kwargs,
            )
        super().__init__(convolution, posterior, train_size, noise, kl_reduction, seed, **outer)


def _dense(
    owner: str,
    estimator: str,
    kind: type[layers.Layer],
    /,
    units: int,
    *beyond: Any,
    activation: Any = None,
    use_bias: bool = True,
    kernel_initializer: Any = "glorot_uniform",
    bias_initializer: Any = "zeros",
    activity_regularizer: Any = None,
    train_size: int | None = None,
    prior: Any = None,
    prior_scale: float | None = None,
    initial_scale: float = 0.01,
    moped: float | None = None,
    bias: str = "deterministic",
    beta: float | None = None,
    gamma: float = 0.0,
    seed: int | None = None,
    **kwargs: Any,
) -> MeanFieldLayer:
    """Return a Dense layer of random weights, as TFP's function `owner` does."""
    if beyond:
        raise TypeError(f"{owner} takes 1 positional argument; give others by name.")
    template = MeanField(
        prior=prior,
        prior_scale=prior_scale,
        initial_scale=initial_scale,
        moped=moped,
        estimator=estimator,
        bias=bias,
        beta=beta,
        gamma=gamma,
        seed=seed,
    )
    outer = {key: kwargs.pop(key) for key in _OF_LAYER if key in kwargs}
    with checks.known_keywords(owner, kwargs, (_dense, kind.__init__), but=("self",)):
        dense = kind(
            units,
            activation=activation,
            use_bias=use_bias,
            kernel_initializer=kernel_initializer,
            bias_initializer=bias_initializer,
            activity_regularizer=activity_regularizer,
            **kwargs,
        )
    return template.wrap(dense, train_size, **outer)


def _convolution(
    owner: str,
    estimator: str,
    kind: type[layers.Layer],
    /,
    filters: int,
    kernel_size: Sizes,
    *beyond: Any,
    strides: Sizes = 1,
    padding: str = "valid",
    dilation_rate: Sizes = 1,
    groups: int = 1,
    activation: Any = None,
    use_bias: bool = True,
    kernel_initializer: Any = "glorot_uniform",
    bias_initializer: Any = "zeros",
    activity_regularizer: Any = None,
    train_size: int | None = None,
    prior: Any = None,
    prior_scale: float | None = None,
    initial_scale: float = 0.01,
    moped: float | None = None,
    bias: str = "deterministic",
    beta: float | None = None,
    gamma: float = 0.0,
    seed: int | None = None,
    **kwargs: Any,
) -> MeanFieldLayer:
    """Return a convolution of random weights, as TFP's function `owner` does."""
    if beyond:  # where TFP and Keras differ in order
        raise TypeError(f"{owner} takes 2 positional arguments; give others by name.")
    template = MeanField(
        prior=prior,
        prior_scale=prior_scale,
        initial_scale=initial_scale,
        moped=moped,
        estimator=estimator,
        bias=bias,
        beta=beta,
        gamma=gamma,
        seed=seed,
    )
    outer = {key: kwargs.pop(key) for key in _OF_LAYER if key in kwargs}
    with checks.known_keywords(owner, kwargs, (_convolution, kind.__init__), but=("self",)):
        convolution = kind(
            filters,
            kernel_size,
            strides=strides,
            padding=padding,
            dilation_rate=dilation_rate,
            groups=groups,
            activation=activation,
            use_bias=use_bias,
            kernel_initializer=kernel_initializer,
            bias_initializer=bias_initializer,
            activity_regularizer=activity_regularizer,
            **kwargs,
        )
    return template.wrap(convolution, train_size, **outer)


def _named(
    name: str,
    make: Callable[..., MeanFieldLayer],
    estimator: str,
    kind: type[layers.Layer],
) -> Callable[..., MeanFieldLayer]:
    """Return a function under a name of TFP's, with the signature and docstring of help().

    Args:
        name: of the function.
        make: makes the layer; its first three parameters, by position only, are the others here.
        estimator: of `ibnn.MeanField`.
        kind: class of the Keras layer.
    """
    of_make = inspect.signature(make)
    parameters = of_make.parameters.values()
    users = [parameter for parameter in parameters if parameter.kind != parameter.POSITIONAL_ONLY]
    signature = of_make.replace(parameters=users)

    def named(*args: Any, **kwargs: Any) -> MeanFieldLayer:
        bound = signature.bind(*args, **kwargs)
        return make(name, estimator, kind, *bound.args, **bound.kwargs)

    named.__name__ = name
    named.__qualname__ = name
    named.__signature__ = signature
    named.__doc__ = (
        f"Return `MeanField(estimator={estimator!r})` around `keras.layers.{kind.__name__}`.\n\n"
        "Args:\n"
        f"    units, or filters and kernel_size: those of `keras.layers.{kind.__name__}`.\n"
        "    train_size: number of training examples, over which the KL is spread.\n"
        "    prior, prior_scale, initial_scale, moped, bias, beta, gamma, seed: those of\n"
        "        `ibnn.MeanField`.\n"
        f"    **kwargs: this and the others are those of `keras.layers.{kind.__name__}`, by name.\n"
    )
    return named


DenseReparameterization = _named("DenseReparameterization", _dense, "shared", layers.Dense)
DenseFlipout = _named("DenseFlipout", _dense, "flipout", layers.Dense)
DenseLocalReparameterization = _named("DenseLocalReparameterization", _dense, "local", layers.Dense)
Conv1DReparameterization = _named("Conv1DReparameterization", _convolution, "shared", layers.Conv1D)
Conv1DFlipout = _named("Conv1DFlipout", _convolution, "flipout", layers.Conv1D)
Conv2DReparameterization = _named("Conv2DReparameterization", _convolution, "shared", layers.Conv2D)
Conv2DFlipout = _named("Conv2DFlipout", _convolution, "flipout", layers.Conv2D)
Conv3DReparameterization = _named("Conv3DReparameterization", _convolution, "shared", layers.Conv3D)
Conv3DFlipout = _named("Conv3DFlipout", _convolution, "flipout", layers.Conv3D)
