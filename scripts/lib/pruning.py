"""The weights of a trained network: their histogram, and its errors without the noisiest."""

import numpy as np
from keras import ops

import tfp_ibnn as ibnn

SHARES = (0.0, 0.5, 0.75, 0.95, 0.98)
EDGES = np.linspace(-0.2, 0.2, 81)
"""Of the histogram; weights beyond count in its first or last bin."""
DECIBELS = np.linspace(-40, 40, 81)
"""Of that of the signal-to-noise ratios, 10 log10(|mean| / scale)."""
_NONE = -1e4  # a softplus of this is 0, and a scale the least that there is


def measure(model, scorer, test):
    """Return counts of the kernels' weights, and of mean-field ones what pruning does.

    Of mean-field weights the histogram is that of a draw, as in arXiv 1505.05424. They are pruned
    in order of |mean| / scale over all layers, as by `ibnn.prune`, but the others keep their noise:
    a pruned one is 0 without noise. The model is the scorer's, and has its weights back in the end.
    """
    layers = [part for part in ibnn.stochastic_layers(model) if _is_mean_field(part)]
    if not layers:
        return {"histogram": _counts(_kernels(model), EDGES)}
    means = [part.layer.kernel for part in layers]
    raws = [part.posterior.raw_scales[0] for part in layers]
    before = [ops.convert_to_numpy(variable) for variable in (*means, *raws)]
    scales = [ops.convert_to_numpy(part.posterior.scales()[0]) for part in layers]
    pairs = zip(before[: len(layers)], scales, strict=True)
    ratios = [part.signal_to_noise()["kernel"] for part in layers]
    rng, rows = np.random.default_rng(0), []
    every = np.concatenate([ratio.ravel() for ratio in ratios])
    drawn = [mean + scale * rng.standard_normal(scale.shape) for mean, scale in pairs]
    try:
        for share in SHARES:
            least = np.quantile(every, share)
            for variables, gone in ((means, 0.0), (raws, _NONE)):
                for variable, ratio in zip(variables, ratios, strict=True):
                    old = ops.convert_to_numpy(variable)
                    variable.assign(np.where(ratio < least, gone, old).astype(old.dtype))
            rows.append({"removed": share, **scorer.score(*test).scores()})
    finally:
        for variable, value in zip((*means, *raws), before, strict=True):
            variable.assign(value)
    found = {"histogram": _counts(drawn, EDGES), "pruned": rows}
    return {**found, "snr": _counts([10 * np.log10(np.maximum(every, 1e-9))], DECIBELS)}


def _is_mean_field(layer):
    return type(layer.posterior) is ibnn.MeanField and hasattr(layer.layer, "kernel")


def _kernels(model):
    layers = (getattr(layer, "layer", layer) for layer in model.layers)
    return [ops.convert_to_numpy(part.kernel) for part in layers if hasattr(part, "kernel")]


def _counts(parts, edges):
    every = np.concatenate([np.ravel(part) for part in parts])
    return np.histogram(np.clip(every, edges[0], edges[-1]), edges)[0].tolist()
