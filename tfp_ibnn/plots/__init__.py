"""Figures, legible in print and for the color-blind, on an axis that is given or a new one.

Import it by name, `from tfp_ibnn import plots`: Matplotlib takes long to import.
"""

from tfp_ibnn._core.extras import needs

with needs("plots"):
    from tfp_ibnn.plots.boundary import decision_boundary as decision_boundary
    from tfp_ibnn.plots.classification import entropy_histograms as entropy_histograms
    from tfp_ibnn.plots.classification import reliability_diagram as reliability_diagram
    from tfp_ibnn.plots.classification import risk_coverage as risk_coverage
    from tfp_ibnn.plots.posterior import posterior_marginals as posterior_marginals
    from tfp_ibnn.plots.posterior import posterior_pairs as posterior_pairs
    from tfp_ibnn.plots.probabilities import draws as draws
    from tfp_ibnn.plots.regression import regression_bands as regression_bands
    from tfp_ibnn.plots.style import COLORS as COLORS
