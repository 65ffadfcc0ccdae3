"""A toy posterior over weights: a Gaussian of one width around a trained network."""

import keras
from keras import ops

from tfp_ibnn import noise
from tfp_ibnn.weights import WeightPosterior, WeightSampler


@keras.saving.register_keras_serializable(package="stranger")
class Jitter(WeightPosterior, keras.layers.Layer):
    """Weights w + width * eps."""

    count = None

    def __init__(self, network, width=0.1, **kwargs):
        super().__init__(**kwargs)
        self.network, self.width = network, width

    def sample(self, key, number):
        source = noise.Source(seed=key, sample=ops.reshape(number, (1,)))
        return [
            weight + self.width * source.normal(1, tuple(weight.shape), "float32", None)[0]
            for weight in self.sampled
        ]

    def mean(self):
        return [ops.convert_to_tensor(weight) for weight in self.sampled]

    def sampler(self, samples, **options):
        return WeightSampler(self, samples, options["chunk_size"])

    def get_config(self):
        network = keras.saving.serialize_keras_object(self.network)
        return {**super().get_config(), "network": network, "width": self.width}

    @classmethod
    def from_config(cls, config):
        network = keras.saving.deserialize_keras_object(config["network"])
        return cls(**{**config, "network": network})
