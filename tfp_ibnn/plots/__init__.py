"""Figures, legible in print and for the colour-blind, on an axis that is given or a new one.

Import it by name, `from tfp_ibnn import plots`: Matplotlib takes long to import.
"""

from tfp_ibnn._core.extras import needs

with needs("plots"):
    from tfp_ibnn.plots.classification import (
        class_distributions,
        entropy_histograms,
        extreme_images,
        reliability_diagram,
        risk_coverage,
    )
    from tfp_ibnn.plots.posterior import posterior_marginals, posterior_pairs
    from tfp_ibnn.plots.predictions import decision_boundary, regression_bands
    from tfp_ibnn.plots.style import COLORS
    from tfp_ibnn.plots.training import training_curves, training_panel

__all__ = [
    "COLORS",
    "class_distributions",
    "decision_boundary",
    "entropy_histograms",
    "extreme_images",
    "posterior_marginals",
    "posterior_pairs",
    "regression_bands",
    "reliability_diagram",
    "risk_coverage",
    "training_curves",
    "training_panel",
]
