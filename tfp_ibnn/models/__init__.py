"""Keras models with named layers, not compiled, whose outputs are logits."""

from tfp_ibnn.models.networks import lenet as lenet
from tfp_ibnn.models.networks import mlp as mlp
from tfp_ibnn.models.networks import vgg16 as vgg16
