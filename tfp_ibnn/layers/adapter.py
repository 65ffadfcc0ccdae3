"""Layers with LoRA, with noise between the two small kernels."""

from typing import Any

import keras
from keras import ops

from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.protocols import PosteriorTemplate
from tfp_ibnn.layers.base import has_lora, is_known, is_quantized
from tfp_ibnn.layers.convolution import finish
from tfp_ibnn.layers.multiplicative import Stochastic


def has_adapter(layer: keras.layers.Layer) -> bool:
    """Whether a layer has LoRA, of a form whose two kernels follow one another."""
    plain = is_known(layer) and getattr(layer, "groups", 1) == 1 and not is_quantized(layer)
    if isinstance(layer, keras.layers.EinsumDense):  # the kernel's last axis is the output's
        inputs, kernel, outputs = layer.equation.replace("->", ",").split(",")
        plain = plain and kernel[-1] == outputs[-1] and kernel[-1] not in inputs
    return plain and has_lora(layer)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class StochasticAdapter(Stochastic):
    """Wrap a layer with LoRA: activation(K x + alpha / rank * B (z * (A x)) + bias).

    Only what the adapter adds is random: z has `rank` channels. `to_stochastic` makes such layers
    of those on which `enable_lora` was called; A and B become weights of this layer. The arguments
    are those of `Stochastic`, and `rank` and `alpha` of the adapter of a plain layer. Reference: Hu
    et al., LoRA: Low-Rank Adaptation of Large Language Models, arXiv 2106.09685.
    """

    draws_ahead = True

    def __init__(
        self,
        layer: keras.layers.Layer,
        posterior: PosteriorTemplate | None = None,
        train_size: int | None = None,
        rank: int = 4,
        alpha: float | None = None,
        **kwargs: Any,
    ) -> None:
        self._start = ["he_uniform", "zeros"]  # as Keras does
        if has_adapter(layer):
            rank, alpha = layer.lora_rank, layer.lora_alpha
            kernels = (layer.lora_kernel_a, layer.lora_kernel_b)
            self._start = [keras.initializers.Constant(ops.convert_to_numpy(x)) for x in kernels]
            config = {k: v for k, v in layer.get_config().items() if not k.startswith("lora_")}
            plain = type(layer).from_config(config)
            plain.build(layer.get_build_config()["input_shape"])
            kept = [weight for weight in layer.weights if not weight.name.startswith("lora_")]
            plain.set_weights([ops.convert_to_numpy(weight).copy() for weight in kept])
            for weight, own in zip(kept, plain.weights, strict=True):
                own.trainable = weight.trainable
            layer = plain
        if not is_known(layer) or is_quantized(layer) or has_lora(layer):
            raise ValueError(
                "StochasticAdapter needs one of Keras's own layers, neither quantized nor in "
                f"groups, with an adapter whose two kernels follow one another; got {layer!r}. Use "
                "ibnn.Stochastic(layer, posterior, train_size), with z on the input."
            )
        super().__init__(layer, posterior, train_size, **kwargs)
        if self._both:
            raise ValueError(
                f"`sides='both'` is for layers without LoRA; got {layer.name!r}. Use sides='input'."
            )
        self.rank, self.alpha = rank, rank if alpha is None else alpha
        self.activity_regularizer = layer.activity_regularizer
        self.forbid("quantize", "enable_lora")

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        *inputs, outputs = self.layer.kernel.shape
        shapes = {"lora_kernel_a": (*inputs, self.rank), "lora_kernel_b": (self.rank, outputs)}
        self.kernels = [
            self.add_weight(shape, start, regularizer=self.layer.kernel_regularizer, name=name)
            for (name, shape), start in zip(shapes.items(), self._start, strict=True)
        ]
        self.layer.kernel.trainable = False

    def _latent_channels(self, input_shape: tuple[int | None, ...]) -> int:
        return self.rank

    def apply(self, inputs: Tensor, latent: Tensor, groups: Any = None, *_: Any) -> Tensor:
        first, second = self.kernels
        inputs = ops.cast(inputs, self.layer.compute_dtype)  # as its own call does
        linear = {"bias": None, "use_bias": False, "activation": None}
        small = keras_internals.call_with(self.layer, inputs, kernel=first, **linear)
        small = self._multiply(small, latent, shared=groups is not None)
        added = self.alpha / self.rank * ops.matmul(small, ops.cast(second, small.dtype))
        return finish(self.layer, keras_internals.call_with(self.layer, inputs, **linear) + added)

    def fold(self) -> keras.layers.Layer:
        """Return a layer with LoRA, with the mean of z in the first kernel of its adapter."""
        copy = type(self.layer).from_config({**self.layer.get_config(), "name": self.name})
        copy.build(self._input_shape)
        copy.enable_lora(self.rank, lora_alpha=self.alpha)
        first, second = (ops.convert_to_numpy(kernel) for kernel in self.kernels)
        mean = ops.convert_to_numpy(self.posterior.mean())
        copy.set_weights([*self.layer.get_weights(), first * mean, second])
        for weight, own in zip(self.layer.weights, copy.weights, strict=False):
            own.trainable = weight.trainable
        return copy
