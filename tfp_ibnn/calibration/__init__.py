"""One call from a trained model to a calibrated one, with the evidence."""

from tfp_ibnn.calibration.candidates import Candidate, Cost
from tfp_ibnn.calibration.report import Report
from tfp_ibnn.calibration.run import calibrate
from tfp_ibnn.calibration.table import Table

__all__ = ["Candidate", "Cost", "Report", "Table", "calibrate"]
