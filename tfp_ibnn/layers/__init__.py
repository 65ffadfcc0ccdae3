"""Stochastic layers, the model that holds them, and the switches of their noise."""

from tfp_ibnn.layers.base import StochasticLayer
from tfp_ibnn.layers.control import freeze, noise_off, set_noise, stochastic_layers, unfreeze
from tfp_ibnn.layers.heads import GaussianHead, GaussianNLL
from tfp_ibnn.layers.mean_field import MeanFieldLayer
from tfp_ibnn.layers.mnf import MNFLayer
from tfp_ibnn.layers.model import StochasticModel
from tfp_ibnn.layers.multiplicative import Stochastic
from tfp_ibnn.layers.named import (
    Conv1DFlipout,
    Conv1DReparameterization,
    Conv2DFlipout,
    Conv2DReparameterization,
    Conv3DFlipout,
    Conv3DReparameterization,
    DenseFlipout,
    DenseLocalReparameterization,
    DenseReparameterization,
    StochasticConv2D,
    StochasticDense,
)

__all__ = [
    "Conv1DFlipout",
    "Conv1DReparameterization",
    "Conv2DFlipout",
    "Conv2DReparameterization",
    "Conv3DFlipout",
    "Conv3DReparameterization",
    "DenseFlipout",
    "DenseLocalReparameterization",
    "DenseReparameterization",
    "GaussianHead",
    "GaussianNLL",
    "MNFLayer",
    "MeanFieldLayer",
    "Stochastic",
    "StochasticConv2D",
    "StochasticDense",
    "StochasticLayer",
    "StochasticModel",
    "freeze",
    "noise_off",
    "set_noise",
    "stochastic_layers",
    "unfreeze",
]
