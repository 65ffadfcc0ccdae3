"""The table of the study of densities of images."""

import numpy as np

from lib.markdown import listed
from studies.image_density.run import METHODS

PUBLISHED = {
    "MADE": "2.04",
    "MAF": "1.89",
    "RealNVP": "1.06",
    "RealNVP, 128 filters": "1.06",
    "Glow": "1.05",
    "continuous": "0.99 (FFJORD)",
    "residual": "1.06 (i-ResNet), 0.970 (residual flow)",
}


def bits(records):
    """Return a Markdown table of bits per dimension, a mean where there are several seeds."""
    lines = []
    for method in METHODS:
        if not (own := [x["scores"] for x in records if x["group"] == method]):
            continue
        mean = {key: np.mean([scores[key] for scores in own]) for key in own[0]}
        line = {"flow": method, "published": PUBLISHED.get(method, "-")}
        line |= {key: f"{mean[name]:.3f}" for key, name in COLUMNS.items()}
        line |= {key: f"{mean[key]:,.0f}" for key in ("parameters", "epochs", "best epoch")}
        lines.append(line | {"minutes": f"{mean['seconds'] / 60:.1f}", "seeds": len(own)})
    return listed(lines)


COLUMNS = {"test": "bits", "validation": "validation", "training": "training"}


def tables(records):
    """Return the Markdown of all tables, by name."""
    return {"bits": bits(records)}
