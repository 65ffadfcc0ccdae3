"""Layers whose input is multiplied by a latent z drawn from a posterior."""

import contextlib
import inspect
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import keras
import numpy as np
from keras import ops

from tfp_ibnn import _checks, noise
from tfp_ibnn._core import keras_internals
from tfp_ibnn._noisy_convolution import convolves, noisy_convolution, scaled_convolution
from tfp_ibnn.backend import Tensor, affine, mean, times
from tfp_ibnn.heads import GaussianHead, GaussianNLL
from tfp_ibnn.posteriors import Draw, NormalAffine, Posterior

__all__ = [
    "GaussianHead",
    "GaussianNLL",
    "Stochastic",
    "StochasticConv2D",
    "StochasticDense",
    "freeze",
    "noise_off",
    "set_noise",
    "stochastic_layers",
    "unfreeze",
]

_FEW_CHANNELS = 4  # an image's
_SMALL_OUTPUT = 2**13  # numbers in a convolution's output for one example

CONVERTIBLE = (
    keras.layers.Dense,
    keras.layers.EinsumDense,
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose,
    keras.layers.DepthwiseConv1D,
    keras.layers.DepthwiseConv2D,
    keras.layers.SeparableConv1D,
    keras.layers.SeparableConv2D,
)
"""The layers that `to_stochastic` wraps: each multiplies its input, of any type, by a kernel."""

NOISES = ("channel", "position")
REDUCTIONS = ("sum", "mean")


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Stochastic(keras.layers.Wrapper):
    """Wrap a layer: y = layer(z * x), with z from a posterior, whose KL is added to the loss.

    The term added by `add_loss` is (beta * KL - gamma * entropy) / train_size: Keras averages the
    likelihood over the batch, so the sum of both is the negative ELBO per example.

    The noise is on in training and in inference alike: it is a posterior, not a regulariser. It is
    switched off, and on again, by `set_noise`.

    Args:
        layer: a Keras layer with one floating-point input tensor, (batch, ..., channels). Dense
            layers and convolutions also take integers and booleans, and cast them.
        posterior: template; the layer builds its own copy for its channels. None is a Gaussian.
        train_size: number of training examples, over which the KL is spread.
        noise: "channel", one z for each example and channel; or "position", one for each position
            (pixel, time step) besides, from the same posterior.
        kl_reduction: with position noise, "sum" the KL over positions (the ELBO) or take the "mean"
            (as the original report did).
        seed: of the noise; None takes the posterior's, or one derived from it if an earlier layer
            has taken that.
        **kwargs: those of `keras.layers.Layer`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> layer = ibnn.Stochastic(keras.layers.Dense(2), ibnn.NormalPlanar1d(), train_size=100)
        >>> layer(keras.ops.ones((5, 3))).shape[-1]
        2
    """

    def __init__(
        self,
        layer: keras.layers.Layer,
        posterior: Posterior | None = None,
        train_size: int | None = None,
        noise: str = "channel",
        kl_reduction: str = "sum",
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(layer, keras.layers.Layer):
            raise ValueError(f"`layer` must be a Keras layer such as Dense(10); got {layer!r}.")
        if isinstance(layer, Stochastic):
            raise ValueError(f"`layer` is stochastic already: {layer.name!r}.")
        kwargs.setdefault("dtype", layer.dtype_policy)
        super().__init__(layer, **kwargs)
        posterior = NormalAffine() if posterior is None else posterior
        if not isinstance(posterior, Posterior):
            raise ValueError(
                "`posterior` must be a posterior such as ibnn.NormalAffine(); got "
                f"{posterior!r}. A recipe must be called: NormalAffine(), not NormalAffine."
            )
        self.train_size = _check_train_size(train_size)
        self.noise = _checks.one_of("noise", noise, NOISES)
        self.kl_reduction = _checks.one_of("kl_reduction", kl_reduction, REDUCTIONS)
        self.posterior = posterior.copy_for_layer(_checks.full_precision(self.dtype_policy), seed)
        self.supports_masking = True
        self._layer_takes_mask = "mask" in inspect.signature(layer.call).parameters

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Build the wrapped layer, the posterior and the switch of the noise."""
        owner = f"Stochastic({type(self.layer).__name__}) {self.name!r}"
        last = input_shape
        if isinstance(input_shape, (tuple, list)) and self._channel_axis(len(input_shape)) == 1:
            last = input_shape[:2]
        channels = _checks.channels_of(owner, last)
        if len(input_shape) < 2:
            raise ValueError(
                f"{owner} needs an input of shape (batch, ..., channels); got {input_shape}."
            )
        self.input_rank = len(input_shape)
        if not self.layer.built:
            self.layer.build(input_shape)
        self.posterior.build((None, channels))
        for variable in self.posterior.variables:
            variable.of_posterior = True  # by which `two_speed` knows them
        if not self.posterior.trainable:
            # A flag that came with a config reaches the flows only when it changes.
            self.posterior.trainable = True
            self.posterior.trainable = False
        self.noise_switch = self.add_weight(
            shape=(), initializer="ones", trainable=False, autocast=False, name="noise_switch"
        )
        self.built = True

    def call(
        self, inputs: Tensor, mask: Tensor | None = None, training: bool | None = None
    ) -> Tensor:
        """Return the wrapped layer's output for z * inputs."""
        inputs = self._as_numbers(inputs)
        if len(inputs.shape) < 2:  # not so in a graph that is yet to add an axis
            raise ValueError(
                f"Stochastic layer {self.name!r} needs an input of shape (batch, ..., channels); "
                f"got {tuple(inputs.shape)}."
            )
        here = noise.current()
        z = here.recall(self)
        if z is not None:
            here.restore_losses()
        elif here.off:
            z = self.posterior.mean()[None]
            here.remember(self, z)
        else:
            z, normal = self._draw(here, inputs, bool(training))
            if training and self._is_entrance and here.groups is None:
                rank = len(inputs.shape)
                parts = (self.broadcast(ops.cast(x, inputs.dtype), rank) for x in (z, normal))
                return noisy_convolution(
                    self.layer, inputs, *parts, *self.posterior.loc_and_scale()
                )
        if not training and self._is_one_scale(inputs, z):
            return scaled_convolution(self.layer, inputs, z[0])
        modulated = self._multiply(inputs, z, shared=here.groups is not None)
        return self.layer(modulated, mask=mask) if self._layer_takes_mask else self.layer(modulated)

    def compute_output_spec(
        self, inputs: Any, mask: Any = None, training: bool | None = None
    ) -> Any:
        """Return the wrapped layer's output spec; noise changes neither shape nor type."""
        return self.layer.compute_output_spec(self._as_numbers(inputs))

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> Any:
        """Return the wrapped layer's output shape."""
        return self.layer.compute_output_shape(input_shape)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> Any:
        """Return the wrapped layer's output mask."""
        return (
            self.layer.compute_mask(inputs, previous_mask) if self.layer.supports_masking else None
        )

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        config = {
            "posterior": keras.saving.serialize_keras_object(self.posterior),
            "train_size": self.train_size,
            "noise": self.noise,
            "kl_reduction": self.kl_reduction,
        }
        return {**super().get_config(), **config}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> "Stochastic":
        """Return a layer from what `get_config` gave."""
        config = dict(config)
        for key in ("layer", "posterior"):
            if isinstance(config.get(key), dict):
                config[key] = keras.saving.deserialize_keras_object(
                    config[key], custom_objects=custom_objects
                )
        return cls(**config)

    def _draw(self, here: noise.Pass, inputs: Tensor, training: bool) -> tuple[Tensor, Tensor]:
        """Draw z for this pass, add the KL term to the loss, and return z and its base noise."""
        posterior = self.posterior
        shape = ops.shape(inputs)
        axis = self._channel_axis(len(shape))
        between = range(2, len(shape)) if axis == 1 else range(1, len(shape) - 1)
        positions = tuple(shape[i] for i in between) if self.noise == "position" else ()
        count = shape[0] if here.groups is None else here.groups
        normal = self._normal(here, count, positions)
        z, draw = self._transform(here, normal, training)
        if not here.losses:
            here.remember(self, z)
            return z, normal
        weight = ops.cast(self.noise_switch > 0.5, posterior.dtype)
        if self.kl_reduction == "sum":
            for size in positions:
                weight = weight * ops.cast(size, posterior.dtype)
        loss = weight * mean(posterior.loss(draw)) / self.train_size
        loss = ops.cast(loss, keras.config.floatx())
        self.add_loss(loss)
        here.remember(self, z, loss, weight * mean(draw.kl))
        return z, normal

    def draw(self, here: noise.Pass, count: int | Tensor) -> tuple[Tensor, Draw]:
        """Return `count` z of a pass, (count, channels), and the posterior's draw."""
        return self._transform(here, self._normal(here, count), training=False)

    def _normal(
        self, here: noise.Pass, count: int | Tensor, positions: tuple[int | Tensor, ...] = ()
    ) -> Tensor:
        """Return base noise (count, [positions,] channels)."""
        posterior = self.posterior
        # A Gaussian is switched off by noise of size 0; it is its mean then.
        stddev = ops.cast(self.noise_switch > 0.5, posterior.dtype)
        return here.normal(
            count,
            (*positions, posterior.channels),
            posterior.dtype,
            posterior.seed_generator,
            stddev if posterior.is_centered else 1.0,
        )

    def _transform(self, here: noise.Pass, normal: Tensor, training: bool) -> tuple[Tensor, Draw]:
        """Return z for base noise, and the posterior's draw.

        The two differ only if the noise is switched off: z is then the posterior's mean.
        """
        posterior = self.posterior
        component = None
        if posterior.components > 1:
            count = ops.shape(normal)[0]
            component = here.component(
                posterior.components,
                count,
                posterior.seed_generator,
                shared=posterior.shared_components,
            )
            component = ops.reshape(component, (count, *(1,) * (len(normal.shape) - 2)))
        if posterior.is_centered:
            draw = posterior.transform(normal, component, training=training)
            return draw.z, draw
        on = self.noise_switch > 0.5
        fixed = posterior.fixed_noise(training)
        if fixed is None:
            draw = posterior.transform(normal, component, training=training)
            center = self._mean_if_needed(on)
        elif (normal.shape[0] or 0) >= len(fixed):
            draw, center = self._in_place(normal, fixed, on, training)
        else:
            draw, center = self._appended(normal, fixed, training)
        center = ops.where(on, ops.zeros_like(center), center)
        return affine(draw.z, center, ops.cast(on, posterior.dtype)), draw

    # A mean that is an average of draws takes them along with those of the pass: a second chain of
    # flows, under a condition, costs more than they do.

    def _in_place(
        self, normal: Tensor, fixed: np.ndarray, on: Tensor, training: bool
    ) -> tuple[Draw, Tensor]:
        """Return the draws and, if the noise is off, the mean, whose noise takes their place."""
        count, *positions, channels = normal.shape
        rows = ops.tile(fixed, (-(-count // len(fixed)), 1))[:count]
        rows = ops.reshape(rows, (count, *(1,) * len(positions), channels))
        draw = self.posterior.transform(ops.where(on, normal, rows), training=training)
        averaged = ops.reshape(draw.z[: len(fixed)], (len(fixed), -1, channels))[:, 0]
        return draw, mean(averaged, axis=0)

    def _appended(self, normal: Tensor, fixed: np.ndarray, training: bool) -> tuple[Draw, Tensor]:
        """Return the draws, and the mean of others that follow them."""
        rows = ops.reshape(normal, (-1, normal.shape[-1]))
        draw = self.posterior.transform(ops.concatenate([rows, fixed]), training=training)
        z, kl, entropy = (part[: -len(fixed)] for part in draw)
        z = ops.reshape(z, ops.shape(normal))
        return Draw(z, kl, entropy), mean(draw.z[-len(fixed) :], axis=0)

    def _mean_if_needed(self, on: Tensor) -> Tensor:
        """Return the posterior's mean; where it is costly, compute it only if the noise is off."""
        posterior = self.posterior
        if posterior.has_cheap_mean:
            return posterior.mean()
        nothing = ops.zeros((posterior.channels,), dtype=posterior.dtype)
        return ops.cond(on, lambda: nothing, posterior.mean)

    def _multiply(self, inputs: Tensor, z: Tensor, shared: bool) -> Tensor:
        """Return z * inputs, where z is (draws, [positions,] channels).

        Args:
            inputs: (batch, ..., channels).
            z: one draw, or one for each example, or, if shared, one for each block of examples.
            shared: whether blocks of examples share a draw.
        """
        z = self.broadcast(ops.cast(z, inputs.dtype), len(inputs.shape))
        draws, batch = z.shape[0], inputs.shape[0]
        if draws == 1 or draws == batch is not None or (draws is None and not shared):
            return times(inputs, z)
        if draws is not None and batch is not None and batch % draws:
            raise ValueError(
                f"Stochastic layer {self.name!r} has {draws} draws in this pass, which do not fit "
                f"a batch of {batch}. A layer that is called twice must see the same batch size, "
                "and a batch must divide into the `groups` of a noise scope."
            )
        # The batch is consecutive blocks, one a draw; broadcasting spares a repeated copy of z.
        size = ops.shape(inputs)
        draws = ops.shape(z)[0]
        blocks = ops.reshape(inputs, (draws, size[0] // draws, *size[1:]))
        return ops.reshape(times(blocks, z[:, None]), size)

    def broadcast(self, z: Tensor, rank: int) -> Tensor:
        """Return z (groups, [positions,] channels) with the axes of an input of that rank."""
        channels_first = self._channel_axis(rank) == 1
        if len(z.shape) == rank:
            return ops.moveaxis(z, -1, 1) if channels_first else z
        gap = (1,) * (rank - len(z.shape))
        order = (-1, z.shape[-1], *gap) if channels_first else (-1, *gap, z.shape[-1])
        return ops.reshape(z, order)

    @property
    def _is_entrance(self) -> bool:
        """Whether this is a convolution of images, most likely, under Gaussian noise."""
        return (
            self.posterior.is_centered
            and self.posterior.channels <= _FEW_CHANNELS
            and self._convolves
        )

    def separates(self, inputs: Any) -> bool:
        """Whether many z on the same inputs had better go by `SeparateChannels`.

        That takes memory as for one draw more for each channel of the input, so it is left to small
        networks, of which the first convolution is a large part.
        """
        if not (
            self.noise == "channel"
            and type(self).call is Stochastic.call
            and self.posterior.channels <= _FEW_CHANNELS
            and self._convolves
            and self._channel_axis(len(inputs.shape)) != 1
        ):
            return False
        outputs = self.compute_output_shape(inputs.shape)[1:]
        return None not in outputs and math.prod(outputs) <= _SMALL_OUTPUT

    def _is_one_scale(self, inputs: Tensor, z: Tensor) -> bool:
        """Whether all share one z, and it is less work to scale a kernel by it than the inputs."""
        if z.shape[0] != 1 or len(z.shape) != 2 or not self._convolves:
            return False
        example = inputs.shape[1:]
        return None not in example and math.prod(self.layer.kernel.shape) < 8 * math.prod(example)

    @property
    def _convolves(self) -> bool:
        return convolves(self.layer) and self.layer.compute_dtype == self.compute_dtype

    def _channel_axis(self, rank: int) -> int:
        first = getattr(self.layer, "data_format", None) == "channels_first"
        return 1 if first and rank > 2 else rank - 1

    def _as_numbers(self, inputs: Any) -> Any:
        """Return the inputs in a type that can be multiplied by noise, or raise."""
        if isinstance(inputs, (list, tuple, dict)):
            raise ValueError(
                f"Stochastic layer {self.name!r} wraps {type(self.layer).__name__}, which is "
                f"called with {len(inputs)} inputs. Only layers with one input can be wrapped."
            )
        if not hasattr(inputs, "dtype"):
            raise ValueError(
                f"Stochastic layer {self.name!r} must be called with a tensor; got {inputs!r}."
            )
        dtype = keras.backend.standardize_dtype(inputs.dtype)
        if not keras.backend.is_float_dtype(dtype):
            is_number = keras.backend.is_int_dtype(dtype) or dtype == "bool"
            if not is_number or not isinstance(self.layer, CONVERTIBLE):
                raise ValueError(
                    f"Stochastic layer {self.name!r} multiplies its input by noise, which needs a "
                    f"floating-point input; got {dtype}. Cast the input, or leave "
                    f"{type(self.layer).__name__} deterministic."
                )
            inputs = ops.cast(inputs, self.layer.compute_dtype)
        if self.built and len(inputs.shape) == self.input_rank:
            channels = inputs.shape[self._channel_axis(self.input_rank)]
            if channels not in (None, self.posterior.channels):
                raise ValueError(
                    f"Stochastic layer {self.name!r} was built for {self.posterior.channels} "
                    f"channels; got an input of shape {tuple(inputs.shape)}."
                )
        return inputs


class _StochasticPlain(Stochastic):
    """A stochastic layer that takes the arguments of a plain Keras layer besides its own."""

    layer_class: ClassVar[type[keras.layers.Layer]]

    def __init__(
        self,
        *args: Any,
        posterior: Posterior | None = None,
        train_size: int | None = None,
        noise: str = "channel",
        kl_reduction: str = "sum",
        seed: int | None = None,
        name: str | None = None,
        trainable: bool = True,
        **kwargs: Any,
    ) -> None:
        try:
            layer = self.layer_class(*args, **kwargs)
        except (TypeError, ValueError):
            takers = (self.layer_class.__init__, _StochasticPlain.__init__)
            _checks.known_keywords(type(self).__name__, kwargs, takers, but=("self",))
            raise
        super().__init__(
            layer,
            posterior,
            train_size,
            noise,
            kl_reduction,
            seed,
            name=name,
            trainable=trainable,
        )

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        config = super().get_config()
        del config["layer"]
        inner = self.layer.get_config()
        del inner["name"]
        trainable = inner.pop("trainable")
        return {**inner, **config, "dtype": inner["dtype"], "layer_trainable": trainable}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> "_StochasticPlain":
        """Return a layer from what `get_config` gave."""
        config = dict(config)
        trainable = config.pop("layer_trainable", True)
        layer = super().from_config(config, custom_objects)
        layer.layer.trainable = trainable
        return layer


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class StochasticDense(_StochasticPlain):
    """A Dense layer on noisy input: takes the arguments of `keras.layers.Dense` and `Stochastic`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> layer = ibnn.StochasticDense(8, activation="relu", train_size=100)
        >>> layer(keras.ops.ones((5, 3))).shape[-1]
        8
    """

    layer_class = keras.layers.Dense


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class StochasticConv2D(_StochasticPlain):
    """A Conv2D layer on noisy input: takes the arguments of `keras.layers.Conv2D` and `Stochastic`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> layer = ibnn.StochasticConv2D(8, 3, posterior=ibnn.NormalInvConv(), train_size=100)
        >>> layer(keras.ops.ones((5, 6, 6, 3))).shape[-1]
        8
    """

    layer_class = keras.layers.Conv2D


def stochastic_layers(model: keras.layers.Layer) -> list[Stochastic]:
    """Return the stochastic layers of a model, nested ones included, each once."""
    layers = keras_internals.nested_layers(model)
    return [layer for layer in layers if isinstance(layer, Stochastic)]


def set_noise(model: keras.layers.Layer, on: bool) -> None:
    """Switch the noise of all stochastic layers on or off.

    Off, z is its posterior mean and no KL is added: the model is a plain deterministic network. The
    switch is a variable, so it takes effect in functions that are compiled already.

    Args:
        model: a model with stochastic layers.
        on: whether there is noise.
    """
    for switch in _switches(model):
        switch.assign(float(on))


@contextlib.contextmanager
def noise_off(model: keras.layers.Layer) -> Iterator[None]:
    """Switch the noise off for the length of a `with` block, then back to what it was.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> layer = ibnn.StochasticDense(1, train_size=10)
        >>> x = keras.ops.ones((2, 3))
        >>> _ = layer(x)
        >>> with ibnn.noise_off(layer):
        ...     y = layer(x)
        >>> bool(keras.ops.all(y[0] == y[1]))
        True
    """
    switches = _switches(model)
    before = [float(ops.convert_to_numpy(switch)) for switch in switches]
    set_noise(model, on=False)
    try:
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.assign(value)


def _switches(model: keras.layers.Layer) -> list[keras.Variable]:
    layers = stochastic_layers(model)
    if not layers:
        raise ValueError(f"Model {model.name!r} has no stochastic layer.")
    unbuilt = [layer.name for layer in layers if not layer.built]
    if unbuilt:
        raise ValueError(
            f"The noise of {', '.join(unbuilt)} cannot be switched before the layer is built: call "
            "the model on data, or build it, first."
        )
    return [layer.noise_switch for layer in layers]


def freeze(model: keras.layers.Layer, part: str) -> None:
    """Stop training one part of a model; compile it again afterwards, as Keras requires.

    Args:
        model: a model with stochastic layers.
        part: "stochastic", the posteriors, or "deterministic", all other weights.
    """
    # Listed first: what a layer is set to, its weights and sublayers are set to as well.
    for switch in [switch for switch in _switches_of(model, part) if switch.trainable]:
        switch.frozen_by_part = True
        switch.trainable = False


def unfreeze(model: keras.layers.Layer, part: str) -> None:
    """Train again what `freeze` has stopped; compile the model again afterwards.

    What was frozen before `freeze`, by `layer.trainable = False`, stays frozen. Files do not tell
    the two apart: if nothing of the part trains and no `freeze` is known, as in a loaded model, all
    of the part is trained.

    Args:
        model: a model with stochastic layers.
        part: "stochastic" or "deterministic", as for `freeze`.
    """
    switches = _switches_of(model, part)
    layers = [switch for switch in switches if isinstance(switch, keras.layers.Layer)]
    nothing_trains = not any(layer.trainable_weights for layer in layers)
    ours = [getattr(switch, "frozen_by_part", False) for switch in switches]
    everything = nothing_trains and not any(ours)
    wanted = [
        everything or own or switch.trainable for switch, own in zip(switches, ours, strict=True)
    ]
    for switch, value in zip(switches, wanted, strict=True):
        switch.trainable = value
        switch.frozen_by_part = False


def _switches_of(model: keras.layers.Layer, part: str) -> list[keras.layers.Layer | keras.Variable]:
    """Return all of a part that has a flag `trainable`: layers, each before what it contains."""
    _checks.one_of("part", part, ("stochastic", "deterministic"))
    posteriors = [layer.posterior for layer in stochastic_layers(model)]
    if not posteriors:
        raise ValueError(f"Model {model.name!r} has no stochastic layer.")
    nested = keras_internals.nested_layers
    layers = [layer for posterior in posteriors for layer in nested(posterior)]
    if part == "deterministic":
        inside = {id(layer) for layer in layers}
        others = nested(model, include_self=False)
        layers = [layer for layer in others if id(layer) not in inside]
    switches = []
    for layer in layers:
        # The flag of a container would reach its posteriors too, so only its own weights are set.
        if part == "stochastic" or not nested(layer, include_self=False):
            switches.append(layer)
        switches += keras_internals.own_trainable_variables(layer)
    return switches


def _check_train_size(train_size: Any) -> int:
    if train_size is None:
        raise ValueError(
            "`train_size` is missing: give the number of training examples. The KL is divided by "
            "it, since Keras averages the likelihood over the batch; without it the loss would not "
            "be the ELBO."
        )
    return _checks.positive_integer("train_size", train_size)
