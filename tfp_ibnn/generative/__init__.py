"""Models of the data themselves, on the flows of this library."""

from tfp_ibnn.generative.density import FlowDensity as FlowDensity
