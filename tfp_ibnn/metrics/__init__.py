"""Calibration, proper scores, and out-of-distribution detection."""

from tfp_ibnn.metrics.calibration import ExpectedCalibrationError as ExpectedCalibrationError
from tfp_ibnn.metrics.calibration import Reliability as Reliability
from tfp_ibnn.metrics.calibration import adaptive_calibration_error as adaptive_calibration_error
from tfp_ibnn.metrics.calibration import classwise_calibration_error as classwise_calibration_error
from tfp_ibnn.metrics.calibration import expected_calibration_error as expected_calibration_error
from tfp_ibnn.metrics.calibration import reliability as reliability
from tfp_ibnn.metrics.detection import RiskCoverage as RiskCoverage
from tfp_ibnn.metrics.detection import aupr as aupr
from tfp_ibnn.metrics.detection import auroc as auroc
from tfp_ibnn.metrics.detection import fpr_at_95_tpr as fpr_at_95_tpr
from tfp_ibnn.metrics.detection import ood_scores as ood_scores
from tfp_ibnn.metrics.detection import risk_coverage as risk_coverage
from tfp_ibnn.metrics.scoring import BrierScore as BrierScore
from tfp_ibnn.metrics.scoring import NegativeLogLikelihood as NegativeLogLikelihood
from tfp_ibnn.metrics.scoring import brier_score as brier_score
from tfp_ibnn.metrics.scoring import negative_log_likelihood as negative_log_likelihood
