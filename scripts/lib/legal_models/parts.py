"""Layers and models as users write them, for random models to be made of."""

import keras
from keras import layers, ops

__all__ = [
    "Block",
    "Gated",
    "Network",
    "Repeated",
    "ScaledDense",
    "StandardizedConv2D",
    "nested",
    "two_paths",
    "with_lora",
]

register = keras.saving.register_keras_serializable(package="legal_models")


@register
class Block(layers.Layer):
    """A residual block; its layers are in an attribute, a list and a dict."""

    def __init__(self, units=3, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.norm = layers.LayerNormalization()
        self.steps = [layers.Dense(units, "tanh"), layers.Dense(units)]
        self.gates = {"out": layers.Dense(units, "sigmoid")}
        self.skip = layers.Dense(units, use_bias=False)

    def build(self, input_shape):
        inner = (*input_shape[:-1], self.units)
        self.norm.build(input_shape)
        self.steps[0].build(input_shape)
        self.steps[1].build(inner)
        self.gates["out"].build(inner)
        self.skip.build(input_shape)

    def call(self, x):
        y = self.steps[1](self.steps[0](self.norm(x)))
        return self.skip(x) + y * self.gates["out"](y)

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], self.units)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@register
class Gated(layers.Layer):
    """Takes two inputs, and calls one layer on both."""

    def __init__(self, units=3, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.inner = layers.Dense(units)

    def build(self, input_shape):
        self.inner.build(input_shape[0])

    def call(self, inputs):
        first, second = inputs
        return self.inner(first) * ops.sigmoid(self.inner(second))

    def compute_output_shape(self, input_shape):
        return (*input_shape[0][:-1], self.units)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@register
class Repeated(layers.Layer):
    """Calls one layer several times, one call after another."""

    def __init__(self, times=2, **kwargs):
        super().__init__(**kwargs)
        self.times = times

    def build(self, input_shape):
        self.inner = layers.Dense(input_shape[-1], "tanh", name="inner")
        self.inner.build(input_shape)

    def call(self, x):
        for _ in range(self.times):
            x = self.inner(x)
        return x

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return {**super().get_config(), "times": self.times}


@register
class StandardizedConv2D(layers.Conv2D):
    """A convolution that standardizes its kernel, as in Keras's example of BiT."""

    def convolution_op(self, inputs, kernel):
        axes = tuple(range(len(kernel.shape) - 1))
        mean = ops.mean(kernel, axis=axes, keepdims=True)
        spread = ops.sqrt(ops.var(kernel, axis=axes, keepdims=True) + 1e-5)
        return super().convolution_op(inputs, (kernel - mean) / spread)


@register
class ScaledDense(layers.Dense):
    """A Dense layer whose kernel has columns of length one."""

    def call(self, inputs, training=None):
        kernel = ops.cast(self.kernel, self.compute_dtype)
        length = ops.sqrt(ops.sum(ops.square(kernel), axis=0) + 1e-6)
        outputs = ops.matmul(inputs, kernel / length)
        outputs = outputs if self.bias is None else outputs + self.bias
        return outputs if self.activation is None else self.activation(outputs)


@register
class Network(keras.Model):
    """A subclassed model around a functional one."""

    def __init__(self, inner, **kwargs):
        super().__init__(**kwargs)
        is_config = isinstance(inner, dict)
        self.inner = keras.saving.deserialize_keras_object(inner) if is_config else inner

    def call(self, inputs, training=None):
        return self.inner(inputs, training=training)

    def get_config(self):
        inner = keras.saving.serialize_keras_object(self.inner)
        return {**super().get_config(), "inner": inner}


def nested(x, units, activation="tanh"):
    """Call a nested Sequential model."""
    inner = keras.Sequential(
        [keras.Input(x.shape[1:]), layers.Dense(units, activation), layers.Dense(units)]
    )
    return inner(x)


def two_paths(x, units):
    """Call a nested functional model with two paths, and a layer that both use."""
    inputs = keras.Input(x.shape[1:])
    common = layers.Dense(units)
    first = layers.Activation("tanh")(common(inputs))
    second = common(ops.sin(inputs))
    return keras.Model(inputs, layers.Add()([first, second]))(x)


def with_lora(layer, x, rank):
    """Call a layer, and give it a LoRA adapter."""
    outputs = layer(x)
    layer.enable_lora(rank)
    return outputs
