"""From probabilities to decisions: sets with a guarantee, unusual inputs, costs and refusals."""

from tfp_ibnn.decisions.conformal import Conformal
from tfp_ibnn.decisions.cost import decide, error_threshold
from tfp_ibnn.decisions.ood import OODDetector

__all__ = ["Conformal", "OODDetector", "decide", "error_threshold"]
