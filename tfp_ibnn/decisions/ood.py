"""Detect inputs unlike the training data."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from scipy.spatial.distance import cdist
from scipy.special import logsumexp

from tfp_ibnn._core import checks, keras_internals
from tfp_ibnn._core.protocols import WeightPosterior
from tfp_ibnn.conversion import to_deterministic
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.decisions.conformal import with_seed
from tfp_ibnn.layers import stochastic_layers
from tfp_ibnn.metrics.detection import finite_vector, ood_scores
from tfp_ibnn.prediction.head import PredictionWrapper
from tfp_ibnn.prediction.predictive import Categorical
from tfp_ibnn.weights.features import check_finite

_OF_OUTPUTS = ("max_probability", "entropy", "epistemic")
_OF_LOGITS, _OF_FEATURES = ("energy", "vim"), ("mahalanobis", "relative_mahalanobis", "knn")
_Score = Callable[[np.ndarray], np.ndarray]  # of features (N, d)


class OODDetector:
    """Score how unusual inputs are: higher is more unusual, for every score.

    - "max_probability": minus the largest class probability of the averaged prediction;
    - "entropy" of that prediction, and "epistemic", what the draws of a posterior disagree about;
    - "energy": minus the log-sum-exp of the logits (arXiv 2010.03759);
    - "mahalanobis": the squared distance of the features to the nearest class mean, by the
      covariance within classes; "relative_mahalanobis": less that to the mean of all, by the
      covariance of all (2106.09022);
    - "knn": the distance of features, of length 1, to the k-th nearest of training (2204.06507);
    - "vim": "energy" plus the scaled length outside of the principal subspace (2203.10807).

    Features and logits are without noise, by the model as it is now, at its posterior mean.

    Args:
        model: a `MonteCarlo`, or a model or posterior that `MonteCarlo` takes.
        score: one of the above.
        layer: name of the layer whose inputs are the features, averaged over positions; None takes
            the last one with weights.
        k: of "knn".
        bank: of "knn", how many training examples to keep, drawn at random; None keeps all.
    """

    def __init__(
        self,
        model: Any,
        score: str = "max_probability",
        layer: str | None = None,
        k: int = 50,
        bank: int | None = None,
    ) -> None:
        checks.one_of("score", score, (*_OF_OUTPUTS, *_OF_LOGITS, *_OF_FEATURES))
        self.model, self.kind, self.k = with_seed(model), score, checks.positive_integer("k", k)
        self.bank = None if bank is None else checks.positive_integer("bank", bank)
        kind = type(self.model._predictive)
        if kind is not Categorical and score in ("max_probability", *_OF_LOGITS):
            raise ValueError(f"score={score!r} is for models with a softmax over classes.")
        if score == "epistemic" and self.model.samples == 1:
            raise ValueError("score='epistemic' needs a posterior; `model` has none.")
        self._chosen = None if score in _OF_OUTPUTS else _chosen(self.model, score, layer)
        self._unusual = self._known = None

    def fit(self, x: Any, y: Any = None, batch_size: int | None = None) -> "OODDetector":
        """Learn from training data; Mahalanobis scores take classes `y` (N,), None: one for all."""
        if self._chosen is not None:
            self._unusual = self._learn(self._features(x, batch_size).astype("float64"), y)
        self._known = self.score(x, batch_size)
        return self

    def score(self, x: Any, batch_size: int | None = None) -> np.ndarray:
        """Return the scores (N,); higher is more unusual."""
        if self._chosen is None:
            found = self.model.predict(x, batch_size=batch_size, verbose=0)
            found = found.get(self.kind, -found["mean"].max(axis=-1))
            return found.reshape(len(found), -1).sum(axis=1)
        if self._unusual is None:
            raise ValueError(f"score={self.kind!r} needs training data: call `fit` first.")
        f = self._features(x, batch_size)
        return np.concatenate([self._unusual(f[i : i + 1024]) for i in range(0, len(f), 1024)])

    def threshold(self, true_positive_rate: float = 0.95, x: Any = None) -> float:
        """Return the score that this share of known inputs (`x`, or of `fit`) do not exceed."""
        rate = checks.probability("true_positive_rate", true_positive_rate)
        if x is None and self._known is None:
            raise ValueError("There are no scores of known inputs: call `fit` first, or give `x`.")
        scores = self._known if x is None else self.score(x)
        return float(np.quantile(scores, rate, method="higher"))

    def evaluate(self, known: Any, unknown: Any) -> dict[str, float]:
        """Return `auroc`, `aupr` and `fpr95`, as `metrics.ood_scores` does."""
        return ood_scores(self.score(known), self.score(unknown))

    def _features(self, x: Any, batch_size: int | None) -> np.ndarray:
        f = self._chosen[0].predict(x, batch_size=batch_size, verbose=0)
        check_finite(f, "features")
        return f.mean(axis=tuple(range(1, f.ndim - 1)))

    def _learn(self, f: np.ndarray, y: Any) -> _Score:
        """Return the score as a function of features, from those of all training data."""
        if self.kind == "knn":
            bank = _unit(f[np.random.default_rng(0).permutation(len(f))[: self.bank]])
            if self.k > len(bank):
                raise ValueError(f"k={self.k} neighbours need as many examples; got {len(bank)}.")
            return lambda f: np.sqrt(
                np.maximum(np.partition(2 - 2 * _unit(f) @ bank.T, self.k - 1)[:, self.k - 1], 0)
            )
        if self.kind in _OF_LOGITS:
            kernel, *bias = (w.astype("float64") for w in self._chosen[1].get_weights())
            return _virtual_logit(f, kernel, sum(bias), self.kind == "energy")
        if y is None and self.kind == "relative_mahalanobis":
            raise ValueError("`y` must hold the classes for 'relative_mahalanobis'; got None.")
        y = finite_vector("y", np.zeros(len(f)) if y is None else y, len(f))
        y = np.unique(y, return_inverse=True)[1]
        means, center = np.stack([f[y == c].mean(axis=0) for c in np.unique(y)]), f.mean(axis=0)
        near, far = _mahalanobis(means, f - means[y]), _mahalanobis(center[None], f - center)
        return near if self.kind == "mahalanobis" else lambda f: near(f) - far(f)


def _unit(f: np.ndarray) -> np.ndarray:
    return (f / np.maximum(np.linalg.norm(f, axis=1)[:, None], 1e-12)).astype("float32")


def _virtual_logit(f: np.ndarray, kernel: np.ndarray, bias: Any, plain: bool) -> _Score:
    """Return the energy, or "vim": the residual is scaled to the mean of the largest logit."""
    width = f.shape[1]
    origin = -np.linalg.pinv(kernel.T) @ (np.zeros(kernel.shape[1]) + bias)
    _, vectors = np.linalg.eigh((f - origin).T @ (f - origin))  # the smallest eigenvalues first
    outside = vectors[:, : width - (1000 if width >= 2048 else 512 if width >= 768 else width // 2)]

    def residual(f: np.ndarray) -> np.ndarray:
        return np.linalg.norm((f - origin) @ outside, axis=1)

    scale = 0.0 if plain else (f @ kernel + bias).max(axis=1).mean() / residual(f).mean()
    return lambda f: scale * residual(f) - logsumexp(f @ kernel + bias, axis=1)


def _mahalanobis(means: np.ndarray, deviations: np.ndarray) -> _Score:
    """Return the squared distance to the nearest mean, on the subspace that has variance."""
    values, vectors = np.linalg.eigh(deviations.T @ deviations / len(deviations))
    kept = values > 1e-7 * values.max()
    scaled = vectors[:, kept] / np.sqrt(values[kept])
    return lambda f: cdist(f @ scaled, means @ scaled, "sqeuclidean").min(axis=1)


def _chosen(model: Any, score: str, name: str | None) -> tuple[keras.Model, keras.layers.Layer]:
    """Return the network up to the chosen layer, and that layer, both without uncertainty."""
    while isinstance(model, PredictionWrapper):
        model = model.inner
    if isinstance(model, WeightPosterior):
        with keras_internals.values_in_place(zip(model.sampled, model.mean(), strict=True)):
            weights = model.network.get_weights()
        model = keras.models.clone_model(model.network)
        model.set_weights(weights)
    model = to_deterministic(model) if stochastic_layers(model) else model
    graph = functional_graph(model)
    layers = {x.name: x for x in (graph.layers if graph else ()) if x.weights}
    if not layers or name not in (None, *layers):
        wanted = f"a Functional or Sequential model, whose layer is one of {[*layers]}"
        raise ValueError(f"score={score!r} needs features of {wanted}; got `layer`={name!r}.")
    chosen = layers[name or [*layers][-1]]
    if score in _OF_LOGITS and not (isinstance(chosen, keras.layers.Dense) and name is None):
        raise ValueError(f"score={score!r} needs a Dense layer at the end, and `layer`=None.")
    return keras.Model(graph.inputs, chosen.input), chosen
