"""Models of the data themselves, on the flows of this library."""

from tfp_ibnn.generative.density import FlowDensity as FlowDensity
from tfp_ibnn.generative.vae import VAE as VAE
