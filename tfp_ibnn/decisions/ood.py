"""Detect inputs unlike the training data."""

import warnings
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks, keras_internals
from tfp_ibnn._core.backend import Tensor, jit_pays, matmul
from tfp_ibnn._core.protocols import WeightPosterior
from tfp_ibnn.conversion import to_deterministic
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.conversion.wrappers import PredictionWrapper, innermost
from tfp_ibnn.data.datasets import is_dataset
from tfp_ibnn.data.examples import check_finite, unpacked, with_strings
from tfp_ibnn.decisions.fitted import Fitted
from tfp_ibnn.layers import stochastic_layers
from tfp_ibnn.likelihoods import Categorical
from tfp_ibnn.likelihoods.base import with_rank
from tfp_ibnn.likelihoods.categorical import classes
from tfp_ibnn.metrics.detection import finite_vector, ood_scores
from tfp_ibnn.prediction.padding import mask_of_arrays, output_masks
from tfp_ibnn.prediction.validation import check_input
from tfp_ibnn.weights.features import logit_layer

_OF_OUTPUTS = ("max_probability", "entropy", "epistemic")
_OF_LOGITS, _OF_FEATURES = ("energy", "vim"), ("mahalanobis", "relative_mahalanobis", "knn")
_AT_ONCE = 8192  # training examples that a batch is compared with


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class OODDetector(Fitted):
    """Score how unusual inputs are: higher is more unusual, for every score.

    - "max_probability": minus the largest class probability of the averaged prediction;
    - "entropy" of that prediction, and "epistemic", what the draws of a posterior disagree about;
    - "energy": minus the log-sum-exp of the logits (arXiv 2010.03759);
    - "mahalanobis": the squared distance of the features to the nearest class mean, by the
      covariance within classes; "relative_mahalanobis": less that to the mean of all, by the
      covariance of all (2106.09022);
    - "knn": the distance of features, of length 1, to the k-th nearest of training (2204.06507);
    - "vim": "energy" plus the scaled length outside of the principal subspace (2203.10807). The
      scale is the mean of the largest logit; where that is not positive, of its height above the
      mean logit. Where the features have fewer dimensions than that subspace, it has half of them.

    Features and logits are without noise, at the posterior mean that `fit` sees; of an ensemble
    they are those of its first member, with a warning.

    Args:
        model: a `MonteCarlo`, or a model or posterior that `MonteCarlo` takes.
        score: one of the above.
        layer: name of the layer whose inputs are the features, averaged over positions; None takes
            the last one with weights.
        k: of "knn".
        bank: of "knn", how many training examples to keep, drawn at random; None keeps all.
        **kwargs: those of `keras.Model`.

    Example:
        >>> import keras, numpy as np, tfp_ibnn as ibnn
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, "softmax")])
        >>> x = np.random.default_rng(0).normal(size=(200, 2)).astype("float32")
        >>> detector = ibnn.OODDetector(model, "mahalanobis").fit(x)
        >>> detector.score(x[:2] + 9) > detector.threshold(0.95)
        array([ True,  True])
    """

    def __init__(
        self,
        model: Any,
        score: str = "max_probability",
        layer: str | None = None,
        k: int = 50,
        bank: int | None = None,
        **kwargs: Any,
    ) -> None:
        checks.one_of("score", score, (*_OF_OUTPUTS, *_OF_LOGITS, *_OF_FEATURES))
        super().__init__(model, {}, **kwargs)
        self._masks = output_masks(self.inner)
        self.kind, self.layer, self.k = score, layer, checks.positive_integer("k", k)
        self.bank = None if bank is None else checks.positive_integer("bank", bank)
        self.jit_compile = jit_pays()
        likelihood = self.inner.likelihood
        if type(likelihood) is not Categorical and score in ("max_probability", *_OF_LOGITS):
            raise ValueError(f"score={score!r} is for models with a softmax over classes.")
        if not likelihood.is_classifier and score == "entropy":
            raise ValueError("score='entropy' is for classes; 'epistemic' is for numbers too.")
        if score == "epistemic" and self.inner.samples == 1:
            raise ValueError("score='epistemic' needs a posterior; `model` has none.")
        self._network = None
        if score not in _OF_OUTPUTS:
            self._network, _ = _chosen(self.inner, score, layer)
            _warn_of_modes(_unwrapped(self.inner), score)

    def fit(
        self, x: Any, y: Any = None, batch_size: int | None = None, verbose: Any = 0
    ) -> "OODDetector":
        """Learn from training data, and return the detector.

        Args:
            x: inputs; or a dataset of batches: a `tf.data.Dataset`, a `PyDataset` or a generator.
            y: classes, (N,) or one-hot, for Mahalanobis scores; from batches (x, y) if not given.
            batch_size: for arrays; as for `predict`.
            verbose: 1 shows progress, 0 nothing.
        """
        if self._network is None:
            self.keep({"known": self.score(x, batch_size, verbose)})
            return self
        check_input(x)
        x = with_strings(x)
        network, layer = _chosen(self.inner, self.kind, self.layer)  # as they are now
        keras_internals.swap_sublayers(self, {id(self._network): network})
        network.jit_compile = self.jit_compile
        is_distance = self.kind.endswith("mahalanobis")
        if is_distance and y is not None and self._has_positions(y):
            raise ValueError(
                f"score={self.kind!r} needs one class per example; `y` has the shape "
                f"{np.shape(y)}, one at each position: leave it out, or take score='entropy'."
            )
        if is_dataset(x):
            f, labels = self._features_of_dataset(x, verbose)
            y = labels if y is None else y
        else:
            f = self._network.predict(x, batch_size=batch_size, verbose=verbose)
        check_finite(f, "features")
        found = {"center": f.mean(axis=0), **self._learn(f.astype("float64"), y, layer)}
        self.keep(found)
        known = [self._of_features(f[i : i + 1024]) for i in range(0, len(f), 1024)]
        self.keep({**found, "known": np.concatenate(known)})
        return self

    def _features_of_dataset(self, x: Any, verbose: Any) -> tuple[np.ndarray, Any]:
        """Return features and classes, if any, in one pass, since it may be shuffled."""
        has_classes = self.inner.likelihood.is_classifier
        features, labels = [], []
        for inputs, y, _ in unpacked(x, "x", verbose):
            features.append(self._network.predict_on_batch(inputs))
            if y is not None and has_classes and not self._has_positions(y):
                labels.append(ops.convert_to_numpy(y))
        return np.concatenate(features), np.concatenate(labels) if labels else None

    def _has_positions(self, y: Any) -> bool:
        """Whether labels are at each position of an output, such as pixels."""
        rank = len(functional_graph(innermost(self.inner)).outputs[0].shape)
        return rank > 2 and np.prod(np.shape(y)[1:]) > 1

    def score(self, x: Any, batch_size: int | None = None, verbose: Any = 0) -> np.ndarray:
        """Return the scores (N,) of arrays, or of a dataset; higher is more unusual."""
        options = {"batch_size": batch_size, "verbose": verbose}
        if self._masks is not None and self._network is None and is_dataset(x):
            batches = unpacked(x, "x", verbose)
            return np.concatenate([self.score(inputs, batch_size) for inputs, _, _ in batches])
        if self._network is None:
            found = self._of_positions(self.inner.predict(x, **options))
            mask = None if self._masks is None else mask_of_arrays(self._masks, x)
            return ops.convert_to_numpy(_summed(found, mask))
        with self.inner._checked(x):
            found = self.predict(with_strings(x), **options)
        check_finite(found, "features")
        return found

    def call(self, inputs: Any, prediction: Any = None) -> Tensor:
        """Return the scores (N,) of one batch, by its prediction if that is known."""
        if self._network is not None:
            return self._of_features(self._network(inputs, training=False))
        found = self.inner.average(inputs) if prediction is None else prediction
        mask = self._masks(inputs).get("") if self._masks else None
        return _summed(self._of_positions(found), mask)

    def serve(self, inputs: Any) -> dict[str, Tensor]:
        """Return the dict of `MonteCarlo` for one batch, with the `score`."""
        prediction = self.inner.average(inputs)
        return {**prediction, "score": self.call(inputs, prediction)}

    def threshold(self, true_positive_rate: float = 0.95, x: Any = None) -> float:
        """Return the score that this share of known inputs (`x`, or of `fit`) do not exceed."""
        rate = checks.probability("true_positive_rate", true_positive_rate)
        scores = ops.convert_to_numpy(self.arrays["known"]) if x is None else self.score(x)
        return float(np.quantile(scores, rate, method="higher"))

    def evaluate(
        self, known: Any, unknown: Any, batch_size: int | None = None, verbose: Any = 0
    ) -> dict[str, float]:
        """Return `auroc`, `aupr` and `fpr95`, as `metrics.ood_scores` does."""
        scores = [self.score(x, batch_size, verbose) for x in (known, unknown)]
        return ood_scores(*scores)

    def _of_positions(self, prediction: dict[str, Any]) -> Any:
        """Return the score of each position of an output, (N, ...)."""
        if self.kind in prediction:
            return prediction[self.kind]
        return -ops.max(prediction["mean"], axis=-1)

    def _learn(self, f: np.ndarray, y: Any, layer: Any) -> dict[str, np.ndarray]:
        """Return what the score needs to know of the features of all training data."""
        if self.kind == "knn":
            bank = f[np.random.default_rng(0).permutation(len(f))[: self.bank]]
            if self.k > len(bank):
                raise ValueError(f"k={self.k} neighbours need as many examples; got {len(bank)}.")
            length = np.linalg.norm(bank, axis=1, keepdims=True)
            return _bank(bank / np.maximum(length, 1e-12))
        if self.kind in _OF_LOGITS:
            kernel, *bias = (w.astype("float64") for w in layer.get_weights())
            bias = np.zeros(kernel.shape[1]) + sum(bias)
            head = {"kernel": kernel, "bias": bias}
            return head if self.kind == "energy" else {**head, **_virtual_logit(f, kernel, bias)}
        if y is None and self.kind == "relative_mahalanobis":
            raise ValueError("`y` must hold the classes for 'relative_mahalanobis'; got None.")
        if np.ndim(y) == 2 and np.shape(y)[1] > 1:
            y = classes(y, np.shape(y)[1], "`y`, if not of the shape (N,),")
        y = finite_vector("y", np.zeros(len(f)) if y is None else y, len(f))
        y = np.unique(y, return_inverse=True)[1]
        center = f.mean(axis=0)
        means = np.stack([f[y == c].mean(axis=0) for c in np.unique(y)])
        if 2 * len(means) > len(f):
            got = f"{len(means)} for {len(f)} examples"
            raise ValueError(f"`y` must hold classes with several examples each; got {got}.")
        within, whole = _whitening(f - means[y]), _whitening(f - center)
        if not within.shape[1]:
            raise ValueError(
                f"score={self.kind!r} needs features that vary within classes; these do not."
            )
        whole = whole[:, :0] if self.kind == "mahalanobis" else whole  # nothing is subtracted
        return {"within": within, "means": (means - center) @ within, "whole": whole}

    def _of_features(self, f: Tensor) -> Tensor:
        found = {name: ops.convert_to_tensor(value) for name, value in self.arrays.items()}
        if (width := found["center"].shape[0]) != f.shape[1]:
            got = f"{width} features; `model` has {f.shape[1]}"
            raise ValueError(f"What was learned is of another model's {got}: call `fit` again.")
        if self.kind == "knn":
            return _neighbour_distance(f, found, self.k)
        if self.kind in _OF_LOGITS:
            energy = -ops.logsumexp(matmul(f, found["kernel"]) + found["bias"], axis=1)
            if self.kind == "energy":
                return energy
            residual = ops.norm(matmul(f - found["origin"], found["outside"]), axis=1)
            return energy + found["alpha"] * residual
        near, far = (matmul(f - found["center"], found[name]) for name in ("within", "whole"))
        # One class at a time: a^2 + b^2 - 2 a b has no digits left where classes are tight.
        to_means = ops.map(lambda mean: ops.sum(ops.square(near - mean), axis=1), found["means"])
        return ops.min(to_means, axis=0) - ops.sum(ops.square(far), axis=1)

    def load_own_variables(self, store: Any) -> None:
        arrays = {name: np.asarray(store[name]) for name in store.keys()}
        if "bank" in arrays and "middle" not in arrays:  # of version 0.1.0
            arrays = {**arrays, **_bank(arrays["bank"].T.astype("float64"))}
        self.keep(arrays)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "score": self.kind}


def _virtual_logit(f: np.ndarray, kernel: np.ndarray, bias: np.ndarray) -> dict[str, np.ndarray]:
    """Return the origin, the subspace outside of the principal one, and its scale, `alpha`."""
    width = f.shape[1]
    principal = 1000 if width >= 2048 else 512 if width >= 768 else width // 2
    if len(f) <= principal:
        raise ValueError(f"{width} features need more than {principal} examples; got {len(f)}.")
    origin = -np.linalg.pinv(kernel.T) @ bias
    values, vectors = np.linalg.eigh((f - origin).T @ (f - origin))  # the smallest values first
    # Dead units have no variance. Were all that is outside of that kind, there would be no scale.
    dimensions = int(np.sum(values > 1e-10 * values[-1]))
    if dimensions <= principal:
        principal = dimensions // 2
    outside = vectors[:, : width - principal]
    length = np.linalg.norm((f - origin) @ outside, axis=1).mean()
    logits = f @ kernel + bias
    largest = logits.max(axis=1).mean()
    # To shift all logits changes no probability; with a negative scale, less would be unusual.
    height = largest if largest > 0 else largest - logits.mean()
    if not height > 0 or not length > 0 or not f.std(axis=0).any():
        raise ValueError(
            "score='vim' needs features and logits that vary over the training data; these do "
            "not: take score='max_probability' or 'entropy'."
        )
    return {"origin": origin, "outside": outside, "alpha": height / length}


def _bank(unit: np.ndarray) -> dict[str, np.ndarray]:
    """Return features of length 1 as columns, their mean, and their squared distances to it."""
    middle = unit.mean(axis=0)
    return {"bank": unit.T, "middle": middle, "spread": np.sum((unit - middle) ** 2, axis=1)}


def _neighbour_distance(f: Tensor, known: dict[str, Tensor], k: int) -> Tensor:
    """Return the distance of features, brought to length 1, to the k-th nearest of the bank."""
    bank = known["bank"]
    f = f / ops.maximum(ops.norm(f, axis=1, keepdims=True), 1e-12)
    # The order is found by products with what is left of f: else close features look the same.
    shifted, closest = f - known["middle"], f[:, :0]
    columns = ops.cast(closest, "int32")
    for first in range(0, bank.shape[1], _AT_ONCE):
        block = slice(first, first + _AT_ONCE)
        closeness = 2 * matmul(shifted, bank[:, block]) - known["spread"][block]
        kept = closest.shape[1]
        closest = ops.concatenate([closest, closeness], axis=1)
        closest, chosen = ops.top_k(closest, min(k, closest.shape[1]))
        fresh = first + chosen - kept
        if kept:
            earlier = ops.take_along_axis(columns, ops.minimum(chosen, kept - 1), axis=1)
            fresh = ops.where(chosen < kept, earlier, fresh)
        columns = fresh
    # The distance itself is the length of a difference.
    return ops.norm(f - ops.transpose(ops.take(bank, columns[:, -1], axis=1)), axis=1)


def _whitening(deviations: np.ndarray) -> np.ndarray:
    """Return the map to unit covariance, on the subspace that has variance."""
    values, vectors = np.linalg.eigh(deviations.T @ deviations / len(deviations))
    kept = values > 1e-7 * values.max()
    return vectors[:, kept] / np.sqrt(values[kept])


def _unwrapped(model: Any) -> Any:
    while isinstance(model, PredictionWrapper):
        model = model.inner
    return model


def _warn_of_modes(model: Any, score: str) -> None:
    """Warn if features are those of one network among several."""
    if (modes := getattr(model, "modes", 1)) > 1:
        warnings.warn(
            f"score={score!r} has the features of the first of {modes} networks only. For the "
            f"mean over all write np.mean([ibnn.OODDetector(model, {score!r}).fit(x, y).score(new) "
            "for model in models], axis=0).",
            stacklevel=3,
        )


def _summed(scores: Any, mask: Any) -> Any:
    """Return the sum of the scores (N, ...) of all positions, but for those that are padding."""
    if mask is not None:
        scores = ops.where(with_rank(mask, len(scores.shape)), scores, 0.0)
    return ops.sum(scores, axis=tuple(range(1, len(scores.shape))))


def _mean_of_positions(features: Any, mask: Any) -> Any:
    """Return the mean (N, d) of features (N, ..., d) over all positions that are no padding."""
    axes = tuple(range(1, len(features.shape) - 1))
    if mask is None:
        return ops.mean(features, axis=axes)
    missing = tuple(range(len(mask.shape), len(features.shape)))
    weight = ops.cast(ops.expand_dims(mask, missing), features.dtype)
    weight = weight * ops.ones_like(features[..., :1])
    return ops.sum(weight * features, axis=axes) / ops.maximum(ops.sum(weight, axis=axes), 1)


def _chosen(model: Any, score: str, name: str | None) -> tuple[keras.Model, keras.layers.Layer]:
    """Return the network of features (N, d), and the layer behind it, both without uncertainty."""
    model = _unwrapped(model)
    if isinstance(model, WeightPosterior):
        model = model.mean_network()
    model = to_deterministic(model) if stochastic_layers(model) else model
    graph = functional_graph(model)
    if graph is None:
        raise ValueError(
            f"score={score!r} needs features of a Functional or Sequential model; {model.name!r} "
            "has a `call` of its own. Take score='max_probability' or 'entropy', or 'epistemic' "
            "for a posterior."
        )
    layers = {x.name: x for x in graph.layers if x.weights}
    if not layers or name not in (None, *layers):
        wanted = f"a Functional or Sequential model, whose layer is one of {[*layers]}"
        raise ValueError(f"score={score!r} needs features of {wanted}; got `layer`={name!r}.")
    chosen = layers[name or [*layers][-1]]
    if score in _OF_LOGITS and not (isinstance(chosen, keras.layers.Dense) and name is None):
        raise ValueError(
            f"score={score!r} needs a Dense layer at the end, and `layer`=None. Others such as "
            "score='entropy' or 'knn' need none."
        )
    if score in _OF_LOGITS and logit_layer(model) is not chosen:
        raise ValueError(f"score={score!r} needs a Dense layer at the end, in no model inside.")
    features = ops.cast(chosen.input, "float32")
    if len(features.shape) > 2:
        features = _mean_of_positions(features, keras_internals.mask_of(chosen.input))
    return keras.Model(graph.inputs, features), chosen
