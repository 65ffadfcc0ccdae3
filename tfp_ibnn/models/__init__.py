"""Keras models, not compiled, whose outputs are logits, and posteriors for their named layers."""

from tfp_ibnn.models.networks import POSTERIORS, lenet, mlp, posterior_map, vgg16, wide_resnet
from tfp_ibnn.models.networks import resnet20 as resnet20

__all__ = ["POSTERIORS", "lenet", "mlp", "posterior_map", "resnet20", "vgg16", "wide_resnet"]
