"""A toy posterior over the bias of a layer, with a stochastic layer of its own."""

import keras
from keras import ops

from tfp_ibnn.layers import StochasticLayer
from tfp_ibnn.posteriors import Draw, PosteriorTemplate


@keras.saving.register_keras_serializable(package="stranger")
class BiasNoise(PosteriorTemplate, keras.layers.Layer):
    """q(b) = N(loc, 1) for a number b that is added to a layer's output; the prior is N(0, 1)."""

    def __init__(self, start=0.0, **kwargs):
        super().__init__(**kwargs)
        self.start = start
        self.seed_generator = keras.random.SeedGenerator()

    def wrap(self, layer, train_size, **options):
        return NoisyBias(layer, self, train_size, options["seed"], name=options["name"])

    def bind(self, layers):
        self.bound_to = [layer.name for layer in layers]

    def build(self, input_shape):
        start = keras.initializers.Constant(self.start)
        self.loc = self.add_weight(shape=(1,), initializer=start, name="loc")
        self.beta = self.add_weight(shape=(), initializer="ones", trainable=False, name="beta")

    def given(self, normal):
        kl = ops.sum(ops.square(self.loc)) / 2
        return Draw(self.loc + normal, kl, ops.zeros(()))

    def loss(self, draw):
        return self.beta * draw.kl

    def summary(self):
        return self.given(ops.convert_to_tensor([[-1.0], [1.0]]))

    def get_config(self):
        return {**super().get_config(), "start": self.start}


@keras.saving.register_keras_serializable(package="stranger")
class NoisyBias(StochasticLayer):
    """y = layer(x) + b."""

    def build(self, input_shape):
        self.posterior.build((None, 1))
        self.input_shape_ = tuple(input_shape)
        super().build(input_shape)

    def draw(self, forward_pass, count, inputs=None, training=False):
        on = ops.cast(self.noise_switch > 0.5, "float32")
        generator = self.posterior.seed_generator
        normal = forward_pass.source.normal(count, (1,), "float32", generator, on)
        return self.posterior.given(normal)

    def apply(self, inputs, latent, groups=None, mask=None, training=False):
        outputs = self.layer(inputs)
        rows = ops.shape(outputs)[0] // ops.shape(latent)[0]
        return outputs + ops.repeat(latent, rows, axis=0)

    def mean_latent(self):
        return ops.convert_to_tensor(self.posterior.loc)[None]

    def fold(self):
        plain = type(self.layer).from_config(self.layer.get_config())
        plain.build(self.input_shape_)
        kernel, bias = self.layer.get_weights()
        plain.set_weights([kernel, bias + ops.convert_to_numpy(self.posterior.loc)])
        return plain
