"""Keras models with named layers, not compiled, whose outputs are logits."""

from tfp_ibnn.models.networks import mlp as mlp
