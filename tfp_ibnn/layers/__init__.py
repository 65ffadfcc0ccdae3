"""Stochastic layers, the model that holds them, and the switches of their noise."""

from tfp_ibnn.layers.base import StochasticLayer as StochasticLayer
from tfp_ibnn.layers.control import freeze as freeze
from tfp_ibnn.layers.control import noise_off as noise_off
from tfp_ibnn.layers.control import set_noise as set_noise
from tfp_ibnn.layers.control import stochastic_layers as stochastic_layers
from tfp_ibnn.layers.control import unfreeze as unfreeze
from tfp_ibnn.layers.heads import DistributionNLL as DistributionNLL
from tfp_ibnn.layers.heads import GaussianHead as GaussianHead
from tfp_ibnn.layers.heads import GaussianNLL as GaussianNLL
from tfp_ibnn.layers.mean_field import MeanFieldLayer as MeanFieldLayer
from tfp_ibnn.layers.mnf import MNFLayer as MNFLayer
from tfp_ibnn.layers.model import StochasticModel as StochasticModel
from tfp_ibnn.layers.multiplicative import Stochastic as Stochastic
from tfp_ibnn.layers.quantiles import PinballLoss as PinballLoss
from tfp_ibnn.layers.quantiles import QuantileHead as QuantileHead
