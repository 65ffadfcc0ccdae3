"""Calibration, proper scores, and out-of-distribution detection."""

from tfp_ibnn.metrics.calibration import (
    AdaptiveCalibrationError,
    ClasswiseCalibrationError,
    ExpectedCalibrationError,
    MaximumCalibrationError,
    Reliability,
    adaptive_calibration_error,
    classwise_calibration_error,
    expected_calibration_error,
    maximum_calibration_error,
    reliability,
)
from tfp_ibnn.metrics.detection import (
    RiskCoverage,
    aupr,
    auroc,
    fpr_at_95_tpr,
    ood_scores,
    risk_coverage,
)
from tfp_ibnn.metrics.scoring import (
    BrierScore,
    NegativeLogLikelihood,
    brier_score,
    negative_log_likelihood,
)

__all__ = [
    "AdaptiveCalibrationError",
    "BrierScore",
    "ClasswiseCalibrationError",
    "ExpectedCalibrationError",
    "MaximumCalibrationError",
    "NegativeLogLikelihood",
    "Reliability",
    "RiskCoverage",
    "adaptive_calibration_error",
    "aupr",
    "auroc",
    "brier_score",
    "classwise_calibration_error",
    "expected_calibration_error",
    "fpr_at_95_tpr",
    "maximum_calibration_error",
    "negative_log_likelihood",
    "ood_scores",
    "reliability",
    "risk_coverage",
]
