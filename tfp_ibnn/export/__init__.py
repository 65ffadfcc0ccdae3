"""Files that predict without this library: SavedModel, ONNX and LiteRT."""

from tfp_ibnn.export.exporting import export
from tfp_ibnn.export.scores import exported_scores

__all__ = ["export", "exported_scores"]
