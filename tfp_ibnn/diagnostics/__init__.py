"""Is the posterior right? A reference by chains, the evidence, scores, modes, calibration."""

from tfp_ibnn.diagnostics.comparison import Comparison as Comparison
from tfp_ibnn.diagnostics.comparison import report as report
from tfp_ibnn.diagnostics.evidence import bridge as bridge
from tfp_ibnn.diagnostics.evidence import smc as smc
from tfp_ibnn.diagnostics.multimodal import Modes as Modes
from tfp_ibnn.diagnostics.multimodal import modes as modes
from tfp_ibnn.diagnostics.reference import Reference as Reference
from tfp_ibnn.diagnostics.reference import hmc as hmc
from tfp_ibnn.diagnostics.scores import Estimate as Estimate
from tfp_ibnn.diagnostics.scores import agreement as agreement
from tfp_ibnn.diagnostics.scores import disagreement as disagreement
from tfp_ibnn.diagnostics.scores import elbo as elbo
from tfp_ibnn.diagnostics.scores import importance_bound as importance_bound
from tfp_ibnn.diagnostics.scores import k_hat as k_hat
from tfp_ibnn.diagnostics.scores import log_weights as log_weights
from tfp_ibnn.diagnostics.scores import mmd as mmd
from tfp_ibnn.diagnostics.scores import simulation_based_calibration as simulation_based_calibration
from tfp_ibnn.diagnostics.scores import sliced_wasserstein as sliced_wasserstein
from tfp_ibnn.diagnostics.scores import total_variation as total_variation
from tfp_ibnn.diagnostics.symmetries import canonical as canonical
from tfp_ibnn.weights.density import Density as Density

Report = Comparison  # its name before, which stays
