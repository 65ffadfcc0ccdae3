"""The base of all stochastic layers."""

import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tfp_ibnn._core import checks, keras_internals
from tfp_ibnn._core.backend import Tensor, mean
from tfp_ibnn._core.protocols import Draw, PosteriorTemplate
from tfp_ibnn._core.serialization import naming_unknown_classes
from tfp_ibnn.noise import Pass, current
from tfp_ibnn.noise.source import spread

CONVOLUTIONS = (layers.Conv1D, layers.Conv2D, layers.Conv3D)
TRANSPOSED = (layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose)
DEPTHWISE = (layers.DepthwiseConv1D, layers.DepthwiseConv2D)
SEPARABLE = (layers.SeparableConv1D, layers.SeparableConv2D)
CONVERTIBLE = (layers.Dense, layers.EinsumDense, *CONVOLUTIONS, *TRANSPOSED, *DEPTHWISE, *SEPARABLE)
"""The layers that `to_stochastic` wraps: each multiplies its input, of any type, by a kernel."""

CELLS = (layers.LSTMCell, layers.GRUCell, layers.SimpleRNNCell)
"""The cells of recurrent layers that it wraps: each multiplies its state by a kernel, too."""


def is_known(layer: keras.layers.Layer) -> bool:
    """Whether a layer only multiplies by its kernels; a subclass may do anything."""
    return type(layer) in (*CONVERTIBLE, *CELLS)


def is_quantized(layer: keras.layers.Layer) -> bool:
    """Whether `quantize` was called on a layer, or its policy has it quantized from the start."""
    return layer.quantization_mode is not None


def has_lora(layer: keras.layers.Layer) -> bool:
    """Whether `enable_lora` was called on a layer."""
    return bool(getattr(layer, "lora_enabled", False))


def float_policy(layer: keras.layers.Layer) -> Any:
    """Return the dtype policy of a layer, or the one that it had before it was quantized."""
    if not is_quantized(layer):
        return layer.dtype_policy
    compute_dtype = layer.compute_dtype
    if compute_dtype == layer.variable_dtype:
        return keras.DTypePolicy(compute_dtype)
    return keras.DTypePolicy(f"mixed_{compute_dtype}")


class StochasticLayer(keras.layers.Wrapper):
    """A Keras layer with a random latent, drawn once in each forward pass, whose KL is a loss.

    A new kind of layer is a subclass with `draw`, `apply`, `mean_latent` and `fold`.

    Args:
        layer: the Keras layer to wrap, with its channels last.
        posterior: template; the layer takes its own copy.
        train_size: number of training examples, over which the KL is spread.
        seed: of the noise; None takes the posterior's, or one derived from it if an earlier layer
            has taken that.
        **kwargs: those of `keras.layers.Layer`.
    """

    draws_ahead = True
    """Whether `draw` works without `inputs`, for many latents at once: they are small."""

    prior_on_weights = False
    """Whether a prior pulls at the weights of the wrapped layer, as weight decay does."""

    kl_scale = 1.0
    """A factor of the KL, next to beta / train_size; `StochasticModel.compile` sets it."""

    draw_size = 0
    """How many numbers a latent has, if not `draws_ahead`; predictions hold few large ones."""

    def __init__(
        self,
        layer: keras.layers.Layer,
        posterior: PosteriorTemplate,
        train_size: int | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        _check_layer(layer)
        kwargs.setdefault("dtype", float_policy(layer))
        super().__init__(layer, **kwargs)
        if not isinstance(posterior, PosteriorTemplate):
            raise ValueError(
                f"`posterior` must be one such as ibnn.NormalAffine(); got {posterior!r}. A recipe "
                "must be called: NormalAffine(), not NormalAffine."
            )
        self.train_size = check_train_size(train_size)
        precisions = {checks.full_precision(x) for x in (self.dtype_policy, layer.dtype_policy)}
        dtype = "float64" if "float64" in precisions else "float32"
        self.posterior = posterior.copy_for_layer(dtype, seed, self.train_size)
        self.supports_masking = True
        self._layer_takes_mask = "mask" in inspect.signature(layer.call).parameters

    def draw(
        self, forward_pass: Pass, count: int | Tensor, inputs: Any = None, training: bool = False
    ) -> Draw:
        """Return latents, with their KL and entropy; without noise, each is `mean_latent`.

        Args:
            forward_pass: the pass whose `source` gives the random numbers.
            count: how many latents.
            inputs: those of the layer; without `draws_ahead`, latents depend on their shape.
            training: whether the latents are for a training step.

        Returns:
            A `Draw`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `draw`.")

    def apply(
        self,
        inputs: Tensor,
        latent: Tensor,
        groups: int | Tensor | None = None,
        mask: Tensor | None = None,
        training: bool = False,
    ) -> Tensor:
        """Return the output for one latent, one for each example, or one for each block.

        Args:
            inputs: those of the wrapped layer.
            latent: what `draw` gave as z.
            groups: number of consecutive blocks of equal size that the batch is cut into, with a
                latent each; None has no blocks.
            mask: that of the inputs.
            training: whether this is a training step.

        Returns:
            The output of the layer.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `apply`.")

    def mean_latent(self) -> Tensor:
        """Return the one latent that stands for the posterior without noise."""
        raise NotImplementedError(f"{type(self).__name__} must define `mean_latent`.")

    def fold(self) -> keras.layers.Layer:
        """Return a plain Keras layer, built, that computes what this one does without noise."""
        raise NotImplementedError(f"{type(self).__name__} must define `fold`.")

    def summary(self) -> Draw:
        """Return a fixed set of draws of the posterior, the same for the same weights."""
        return self.posterior.summary()

    def signal_to_noise(self) -> dict[str, np.ndarray]:
        """Return |mean| / standard deviation of what is random: z of inputs, or named weights.

        Raises:
            ValueError: If this kind of layer has neither.
        """
        raise ValueError(f"{self._owner} has no random weights and no z, so it cannot be pruned.")

    def continue_from(self, layer: "StochasticLayer") -> None:
        """Start at what another layer has learned, whose posterior becomes the prior.

        Args:
            layer: one around the same layer, whose posterior gave this one's by `for_next_task`.
        """
        self.posterior.continue_from(layer.posterior)
        switch = ops.convert_to_numpy(layer.noise_switch)
        self.noise_switch.assign(switch)

    def check_blocks(self, inputs: Tensor, draws: int | None) -> None:
        """Raise if it is known in advance that a batch does not divide into a block for each draw.

        Args:
            inputs: (batch, ...).
            draws: how many; None is unknown.
        """
        batch = inputs.shape[0]
        if draws is not None and batch is not None and batch % draws:
            raise ValueError(
                f"{self._owner} has {draws} draws in this pass, which do not fit a batch of "
                f"{batch}: called twice it must see one batch size, which `groups` of a noise "
                "scope divide."
            )

    def forbid(self, *methods: str) -> None:
        """Make methods of the wrapped layer that would change its weights raise from now on."""
        for method in methods:
            setattr(self.layer, method, self._refusal_of(method))

    def _refusal_of(self, method: str) -> Callable[..., None]:
        def refuse(*_: Any, **__: Any) -> None:
            raise NotImplementedError(
                f"{self._owner} does not allow `{method}` on the layer inside. Call it on what "
                "ibnn.to_deterministic(model) returns; or before ibnn.to_stochastic, with a "
                "posterior over z with sides='input', such as ibnn.NormalAffine()."
            )

        return refuse

    @property
    def _owner(self) -> str:
        """What errors call this layer."""
        return f"{type(self).__name__}({type(self.layer).__name__}) {self.name!r}"

    def kl_weight(self, inputs: Tensor) -> float | Tensor:
        """Return how often the KL of one draw counts."""
        return 1.0

    def shares_work(self, inputs: Any) -> bool:
        """Whether many latents on the same inputs, given symbolically, go faster by `shared`."""
        return False

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Build the wrapped layer and the switch of the noise; the posterior must be built."""
        if not self.layer.built:
            self.layer.build(input_shape)
        self.claim_posterior()
        self.noise_switch = self.add_weight(
            (), "ones", name="noise_switch", trainable=False, autocast=False
        )
        self.built = True

    def claim_posterior(self) -> None:
        """Mark the variables of the posterior, and freeze them if it is not trainable."""
        for variable in self.posterior.variables:
            variable.of_posterior = True  # by which `two_speed` recognizes them
        if not self.posterior.trainable:
            # A flag that came with a config reaches the flows only when it changes.
            self.posterior.trainable = True
            self.posterior.trainable = False

    def call(self, inputs: Tensor, mask: Any = None, training: bool | None = None) -> Tensor:
        """Return the output for the latent of this pass, and add its KL to the loss.

        Args:
            inputs: those of the wrapped layer.
            mask: that of the inputs.
            training: whether this is a training step.

        Returns:
            The output of the layer.
        """
        inputs = self.checked_inputs(inputs)
        forward_pass = current()
        latent = self._latent(forward_pass, inputs, bool(training))
        return self.apply(inputs, latent, forward_pass.groups, mask, bool(training))

    def _latent(self, forward_pass: Pass, inputs: Tensor, training: bool) -> Any:
        """Return the latent of a pass, for the rows of these inputs; draw it in the first call."""
        if forward_pass.seen is not None:
            forward_pass.seen.append((self, inputs))
        rows = ops.shape(inputs)[0]
        latent = forward_pass.recall(self)
        if latent is not None:
            forward_pass.restore_losses()
        else:
            count = forward_pass.count_of_draws(rows)
            latent = self.draw_for(forward_pass, count, inputs, training)
        if forward_pass.groups is not None or forward_pass.examples is None:
            return latent
        return self.spread(latent, rows)

    def spread(self, latent: Any, rows: int | Tensor) -> Any:
        """Return latents for the rows that the examples are cut into.

        Args:
            latent: tensors (examples, ...) in any structure, or (1, ...) of one for all.
            rows: how many there are, in the order of their examples.

        Returns:
            The same structure of tensors (rows, ...), or (1, ...).
        """

        def of_rows(values: Tensor) -> Tensor:
            return values if values.shape[0] == 1 else spread(values, rows)

        return keras.tree.map_structure(of_rows, latent)

    def checked_inputs(self, inputs: Any) -> Any:
        """Return the inputs as `apply` takes them, or raise."""
        return inputs

    def draw_for(self, forward_pass: Pass, count: int | Tensor, inputs: Any, training: bool) -> Any:
        """Draw latents for a pass, which remembers them, and add their KL to the loss.

        Args:
            forward_pass: the pass.
            count: how many latents.
            inputs: those of the layer, or None if it `draws_ahead`.
            training: whether this is a training step.

        Returns:
            The latents.
        """
        if forward_pass.off:
            return forward_pass.remember(self, self.mean_latent())
        draw = self.draw(forward_pass, count, inputs, training)
        if not forward_pass.losses:
            return forward_pass.remember(self, draw.z)
        is_on = self.noise_switch > 0.5
        is_on = ops.cast(is_on, self.posterior.dtype)
        weight = is_on * self.kl_weight(inputs)
        # Times the reciprocal: the gradient of a quotient takes TensorFlow seven operations.
        factor = self.kl_scale / self.train_size
        loss_of_draw = _average(self.posterior.loss(draw))
        loss = weight * loss_of_draw * factor
        loss = ops.cast(loss, keras.config.floatx())
        self.add_loss(loss)
        kl = weight * _average(draw.kl)
        return forward_pass.remember(self, draw.z, loss, kl)

    def compute_output_spec(self, inputs: Any, mask: Any = None, training: Any = None) -> Any:
        return self.layer.compute_output_spec(self.checked_inputs(inputs))

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> Any:
        return keras_internals.output_shape(self.layer, input_shape)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> Any:
        if not self.layer.supports_masking:
            return None
        return self.layer.compute_mask(inputs, previous_mask)

    def get_config(self) -> dict[str, Any]:
        posterior = keras.saving.serialize_keras_object(self.posterior)
        return {**super().get_config(), "posterior": posterior, "train_size": self.train_size}

    @classmethod
    @naming_unknown_classes()
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "StochasticLayer":
        config = keras_internals.readable(config)
        for key in ("layer", "posterior"):
            if isinstance(config.get(key), dict):
                config[key] = keras.saving.deserialize_keras_object(config[key], custom_objects)
        return cls(**config)


def _check_layer(layer: Any) -> None:
    """Raise if a layer cannot be made stochastic."""
    if not isinstance(layer, keras.layers.Layer):
        raise ValueError(f"`layer` must be a Keras layer such as Dense(10); got {layer!r}.")
    if isinstance(layer, StochasticLayer):
        raise ValueError(f"`layer` is already stochastic: {layer.name!r}.")
    if getattr(layer, "data_format", None) == "channels_first":
        raise ValueError(f"`layer` must have its channels last; {layer.name!r} has them first.")


def _average(x: Tensor) -> Tensor:
    """Return the mean over draws; one number as it is, since a mean takes 20 operations."""
    return mean(x) if len(x.shape) else x


def check_train_size(train_size: Any) -> int:
    """Return the number of training examples, or raise."""
    if train_size is None:
        raise ValueError("`train_size` is missing: give the number of training examples.")
    return checks.positive_integer("train_size", train_size)
