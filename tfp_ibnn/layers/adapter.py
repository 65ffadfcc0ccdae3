"""Layers with LoRA, with noise between the two small kernels."""

from typing import Any

import keras
from keras import ops

from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.protocols import PosteriorTemplate
from tfp_ibnn.layers.base import has_lora, is_known, is_quantized
from tfp_ibnn.layers.convolution import finish
from tfp_ibnn.layers.multiplicative import LINEAR, Stochastic


def has_adapter(layer: keras.layers.Layer) -> bool:
    """Whether a layer has LoRA, of a form whose two kernels follow one another."""
    if not has_lora(layer) or not is_known(layer) or is_quantized(layer):
        return False
    if isinstance(layer, keras.layers.EinsumDense):  # the kernel's last axis must be the output's
        operands = layer.equation.replace("->", ",")
        inputs, kernel, outputs = operands.split(",")
        last = kernel[-1]
        return last == outputs[-1] and last not in inputs
    return getattr(layer, "groups", 1) == 1


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class StochasticAdapter(Stochastic):
    """Wrap a layer with LoRA: activation(K x + alpha / rank * B (z * (A x)) + bias).

    Only what the adapter adds is random: z has `rank` channels. `to_stochastic` makes such layers
    from those on which `enable_lora` was called; A and B become weights of this layer. Reference:
    Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, arXiv 2106.09685.

    Args:
        layer: one of Keras's own layers, with LoRA or without it.
        posterior: template over z; None is a Gaussian.
        train_size: number of training examples.
        rank: of the adapter, for a layer without LoRA.
        alpha: of the adapter, for a layer without LoRA; None is `rank`.
        **kwargs: `seed`, and the arguments of `keras.layers.Layer`.
    """

    draws_ahead = True
    is_plain_product = False

    def __init__(
        self,
        layer: keras.layers.Layer,
        posterior: PosteriorTemplate | None = None,
        train_size: int | None = None,
        rank: int = 4,
        alpha: float | None = None,
        **kwargs: Any,
    ) -> None:
        self._initializers = ("he_uniform", "zeros")  # as Keras does
        if has_adapter(layer):
            rank = layer.lora_rank
            alpha = layer.lora_alpha
            self._initializers = tuple(map(_constant, (layer.lora_kernel_a, layer.lora_kernel_b)))
            layer = _without_adapter(layer)
        if not is_known(layer) or is_quantized(layer) or has_lora(layer):
            raise ValueError(
                "StochasticAdapter needs one of Keras's own layers, neither quantized nor in "
                f"groups, with an adapter whose two kernels follow one another; got {layer!r}. Use "
                "ibnn.Stochastic(layer, posterior, train_size), with z on the input."
            )
        super().__init__(layer, posterior, train_size, **kwargs)
        if self._multiplies_outputs:
            raise ValueError(
                f"`sides='both'` is for layers without LoRA; got {layer.name!r}. Use sides='input'."
            )
        self.rank = rank
        self.alpha = rank if alpha is None else alpha
        self.activity_regularizer = layer.activity_regularizer
        self.forbid("quantize", "enable_lora")

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        *inputs, outputs = self.layer.kernel.shape
        first, second = self._initializers
        self.kernels = [
            self._add_kernel("lora_kernel_a", (*inputs, self.rank), first),
            self._add_kernel("lora_kernel_b", (self.rank, outputs), second),
        ]
        self.layer.kernel.trainable = False

    def _add_kernel(self, name: str, shape: tuple[int, ...], initializer: Any) -> keras.Variable:
        """Add one of the two kernels, under the name that it has in Keras."""
        regularizer = self.layer.kernel_regularizer
        return self.add_weight(shape, initializer, regularizer=regularizer, name=name)

    def _latent_channels(self, input_shape: tuple[int | None, ...]) -> int:
        return self.rank

    def apply(
        self,
        inputs: Tensor,
        latent: Tensor,
        groups: int | Tensor | None = None,
        mask: Tensor | None = None,
        training: bool = False,
    ) -> Tensor:
        first, second = self.kernels
        inputs = ops.cast(inputs, self.layer.compute_dtype)  # as the layer's call does
        inner = keras_internals.call_with(self.layer, inputs, kernel=first, **LINEAR)
        shared = groups is not None
        inner = self._multiply(inner, latent, shared)
        second = ops.cast(second, inner.dtype)
        product = ops.matmul(inner, second)
        factor = self.alpha / self.rank
        added = factor * product
        plain = keras_internals.call_with(self.layer, inputs, **LINEAR)
        return finish(self.layer, plain + added)

    def fold(self) -> keras.layers.Layer:
        """Return a layer with LoRA, with the mean of z in the first kernel of its adapter."""
        config = {**self.layer.get_config(), "name": self.name}
        copy = type(self.layer).from_config(config)
        copy.build(self._input_shape)
        copy.enable_lora(self.rank, lora_alpha=self.alpha)
        first, second = map(ops.convert_to_numpy, self.kernels)
        mean = ops.convert_to_numpy(self.posterior.mean())
        weights = self.layer.get_weights()
        copy.set_weights([*weights, first * mean, second])
        _copy_trainability(self.layer.weights, copy.weights)
        return copy


def _constant(weight: keras.Variable) -> keras.initializers.Initializer:
    """Return an initializer that gives the value of a weight."""
    return keras.initializers.Constant(ops.convert_to_numpy(weight))


def _without_adapter(layer: keras.layers.Layer) -> keras.layers.Layer:
    """Return a built layer with the weights of another one, except those of its LoRA."""
    config = layer.get_config()
    plain_config = {key: config[key] for key in config if not key.startswith("lora_")}
    plain = type(layer).from_config(plain_config)
    input_shape = layer.get_build_config()["input_shape"]
    plain.build(input_shape)
    weights = [weight for weight in layer.weights if not weight.name.startswith("lora_")]
    values = [ops.convert_to_numpy(weight).copy() for weight in weights]
    plain.set_weights(values)
    _copy_trainability(weights, plain.weights)
    return plain


def _copy_trainability(weights: list[keras.Variable], copies: list[keras.Variable]) -> None:
    """Make the first copies trainable where the weights are; those of an adapter may follow."""
    for weight, copied in zip(weights, copies, strict=False):
        copied.trainable = weight.trainable
