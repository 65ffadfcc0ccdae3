"""Is a posterior right? A reference by HMC, and the evidence."""

from tfp_ibnn.diagnostics.evidence import Evidence as Evidence
from tfp_ibnn.diagnostics.evidence import bridge as bridge
from tfp_ibnn.diagnostics.evidence import smc as smc
from tfp_ibnn.diagnostics.hmc import Reference as Reference
from tfp_ibnn.diagnostics.hmc import hmc as hmc
from tfp_ibnn.weights.target import Density as Density
