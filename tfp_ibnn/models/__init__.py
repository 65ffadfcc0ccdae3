"""Deterministic Keras models with named layers, and posteriors for them.

Each builder returns a Functional model that is not compiled and whose outputs are logits. Its
layers are named, so that posteriors can be chosen by layer.
"""

from tfp_ibnn.models.maps import POSTERIORS, posterior_map
from tfp_ibnn.models.networks import lenet, mlp, vgg16, wide_resnet

__all__ = ["POSTERIORS", "lenet", "mlp", "posterior_map", "vgg16", "wide_resnet"]
