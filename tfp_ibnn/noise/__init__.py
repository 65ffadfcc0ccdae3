"""The random numbers behind the draws, and the forward pass that hands them to the layers."""

from tfp_ibnn.noise.counter import key_of_part
from tfp_ibnn.noise.forward_pass import Pass, current, scope
from tfp_ibnn.noise.source import SAMPLINGS, Source

__all__ = ["SAMPLINGS", "Pass", "Source", "current", "key_of_part", "scope"]
