"""One call from a trained model to a calibrated one, with the evidence."""

from tfp_ibnn.calibration.report import Candidate, Report, Table
from tfp_ibnn.calibration.run import calibrate

__all__ = ["Candidate", "Report", "Table", "calibrate"]
