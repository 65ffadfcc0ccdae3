"""The tables of the study of variational autoencoders."""

import numpy as np
import pandas as pd

from lib.markdown import listed, spread
from studies.vae.run import POSTERIORS

PUBLISHED = {  # -ELBO and NLL; of mlp the bound alone
    "conv": {  # arXiv 1803.05649
        "Gaussian": (86.55, 82.14),
        "16 planar": (86.06, 81.91),
        "4 IAF": (84.20, 80.79),
        "16 Sylvester": (83.32, 80.22),
    },
    "mlp": {  # arXiv 1505.05770
        "Gaussian": (89.9,),
        "10 planar": (87.5,),
        "20 planar": (86.5,),
        "40 planar": (85.7,),
        "80 planar": (85.1,),
    },
}


def posteriors(records, pair):
    """Return a Markdown table of the posteriors of a pair: mean and deviation over seeds."""
    lines = []
    for method in POSTERIORS[pair]:
        runs = [r["scores"] for r in records if (r["pair"], r["group"]) == (pair, method)]
        if not runs:
            continue
        found, (bound, *nll) = pd.DataFrame(runs), PUBLISHED[pair][method]
        line = {"posterior": method, "-ELBO": spread(found["-ELBO"], 2), "published": bound}
        line["NLL"] = spread(found["NLL"], 2)
        if nll:
            line["published NLL"] = nll[0]
        line["KL"] = f"{found['kl'].mean():.1f}"
        line["reconstruction"] = f"{found['reconstruction'].mean():.1f}"
        line["active latents"] = f"{found['active'].mean():.0f}"
        line["parameters"] = f"{found['parameters'].max():,}"
        line["epochs"] = _range(found["epochs"])
        line["seconds"] = _range(found["seconds"])
        lines.append(line)
    return listed(lines)


def _range(values):
    low, high = (f"{bound:,.0f}" for bound in (np.min(values), np.max(values)))
    return low if low == high else f"{low} to {high}"


def tables(records):
    """Return the Markdown of all tables, by name."""
    return {pair: posteriors(records, pair) for pair in POSTERIORS}
