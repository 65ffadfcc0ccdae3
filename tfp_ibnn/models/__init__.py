"""Keras models, not compiled, whose outputs are logits, and posteriors for their named layers."""

from tfp_ibnn.models.networks import POSTERIORS, lenet, mlp, posterior_map, vgg16, wide_resnet

__all__ = ["POSTERIORS", "lenet", "mlp", "posterior_map", "vgg16", "wide_resnet"]
