"""Detect inputs unlike the training data."""

from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks, keras_layers
from tfp_ibnn._core.backend import Tensor, jit_pays
from tfp_ibnn._core.protocols import Density
from tfp_ibnn._core.rows import in_blocks
from tfp_ibnn._core.text import with_strings
from tfp_ibnn.data.datasets import dataset_batches, is_dataset
from tfp_ibnn.data.examples import check_finite, some_at_a_time, unpacked
from tfp_ibnn.data.positions import PositionSample
from tfp_ibnn.decisions.density_scores import DENSITY_SCORES, LogDensities, check_densities
from tfp_ibnn.decisions.feature_scores import FEATURE_SCORES
from tfp_ibnn.decisions.features import check_classes, feature_network, warn_of_modes
from tfp_ibnn.decisions.fitted import Fitted, has_positions
from tfp_ibnn.decisions.reductions import (
    REDUCTIONS,
    check_weight,
    reduced,
    rows_of_features,
    sampled,
    without_padding,
)
from tfp_ibnn.decisions.scores import OUTPUT_SCORES
from tfp_ibnn.metrics.detection import ood_scores
from tfp_ibnn.prediction.padding import mask_of_arrays, output_masks
from tfp_ibnn.prediction.validation import check_input

_AT_ONCE = 1024  # training examples that are scored together


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
      mean logit. Where the features have fewer dimensions than that subspace, it has half of them;
    - "density": minus log p(x), of a `FlowDensity` in the place of a network. It is low for inputs
      simpler than the data (1810.09136), which the other two find: "typicality", the distance of
      log p(x) to its mean over the data of `fit` (1906.02994), which should be held out; and
      "likelihood_ratio", log q(x) - log p(x), with the density q as `background` (1906.02845).

    An output with positions (N, ..., K), such as pixels or time steps, is scored at each of them,
    and `reduction` makes one score of an image: "mean", "max", for what is unusual in one place, or
    None, which leaves the scores (N, ...) as they are, NaN at padding. `fit` then learns from the
    features of 100,000 positions, drawn at random, of "knn" from `bank` or 10,000. "pooled" is what
    version 0.1.0 did: scores of outputs are summed, and features are averaged before they are
    scored.

    Features and logits are without noise, at the posterior mean that `fit` sees; of an ensemble
    they are those of its first member, with a warning.

    Args:
        model: a `MonteCarlo`, or a model or posterior that `MonteCarlo` takes; or a density.
        score: one of the above.
        layer: name of the layer whose inputs are the features, averaged over positions if the
            output has none; None takes the last one with weights.
        k: of "knn", which of the nearest neighbors is compared with.
        bank: of "knn", how many training examples to keep, drawn at random; None keeps all.
        reduction: "mean", "max", None or "pooled", for outputs with positions; see above.
        background: of "likelihood_ratio", a density trained on perturbed or more general data.
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
        reduction: str | None = "mean",
        background: Density | None = None,
        **kwargs: Any,
    ) -> None:
        checks.one_of("score", score, (*OUTPUT_SCORES, *FEATURE_SCORES, *DENSITY_SCORES))
        check_densities(score, model, background)
        super().__init__(model, {}, **kwargs)
        self._masks = output_masks(self.inner)
        self.kind = score
        self.layer = layer
        self.k = checks.positive_integer("k", k)
        self.bank = None if bank is None else checks.positive_integer("bank", bank)
        self.reduction = checks.one_of("reduction", reduction, REDUCTIONS)
        self.background = background
        self._has_positions = has_positions(self.inner)
        self.jit_compile = jit_pays()
        self._of_outputs = None
        self._of_features = None
        self._network = None
        if score in OUTPUT_SCORES:
            self._of_outputs = OUTPUT_SCORES[score]()
            self._of_outputs.check(self.inner.likelihood, self.inner.samples)
        elif score in DENSITY_SCORES:
            self._of_features = DENSITY_SCORES[score]()
            self._network = LogDensities(self.inner, background)
        else:
            self._of_features = FEATURE_SCORES[score].with_options(self.k, self.bank)
            self._of_features.check(self.inner.likelihood)
            self._network, _ = self._feature_network()
            warn_of_modes(self.inner, score)

    def _predictor(self, model: Any, defaults: dict[str, Any]) -> keras.Model:
        return model if isinstance(model, Density) else super()._predictor(model, defaults)

    def _feature_network(self) -> tuple[keras.Model, keras.layers.Layer | None]:
        """Return the network of features as it is now, and the layer whose inputs they are."""
        if self.kind in DENSITY_SCORES:
            return self._network, None
        keeps_positions = self._has_positions and self.reduction != "pooled"
        return feature_network(self.inner, self._of_features, self.layer, keeps_positions)

    @property
    def _scores_positions(self) -> bool:
        """Whether features are those of positions, with their validity."""
        return self._has_positions and len(self._network.outputs[0].shape) > 2

    def fit(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = 0,
        sample_weight: Any = None,
    ) -> "OODDetector":
        """Learn from training data, and return the detector.

        Args:
            x: inputs; or a dataset of batches: a `tf.data.Dataset`, a `PyDataset` or a generator.
                For "mean" and "max" of features at positions it is read twice.
            y: classes, (N,) or one-hot, for Mahalanobis scores; from batches (x, y) if not given.
                At positions they may be (N, ...).
            batch_size: for arrays; as for `predict`.
            verbose: 1 shows progress, 0 nothing.
            sample_weight: 0 for positions to leave out of what features are learned from, for
                arrays; a dataset gives it as the third part of a batch.

        Returns:
            The detector itself.

        Raises:
            ValueError: if the data do not allow the score, such as features that do not vary.
        """
        check_weight(sample_weight, self._of_features is not None and self._scores_positions)
        if self._of_features is None:
            known = sampled(self.score(x, batch_size, verbose))
            self.keep({"known": known})
            return self
        check_input(x)
        x = with_strings(x)
        # As they are now: the model may have been trained since.
        network, layer = self._feature_network()
        keras_layers.swap_sublayers(self, {id(self._network): network})
        network.jit_compile = self.jit_compile
        if self._of_features.takes_classes:
            of_positions = not self._scores_positions and self._labels_positions(y)
            check_classes(y, self.kind, self.inner, of_positions)
        if self._scores_positions:
            return self._fit_positions(layer, x, y, sample_weight, batch_size, verbose)
        if is_dataset(x):
            features, labels = self._features_of_dataset(x, verbose)
            y = labels if y is None else y
        else:
            features = self._network.predict(x, batch_size=batch_size, verbose=verbose)
        learned = self._learn(features, y, layer)
        self.keep({**learned, "known": self._scores_of_rows(features)})
        return self

    def _fit_positions(
        self,
        layer: keras.layers.Layer,
        x: Any,
        y: Any,
        sample_weight: Any,
        batch_size: int | None,
        verbose: Any,
    ) -> "OODDetector":
        """Learn from a random sample of positions."""
        if is_dataset(x) and self.reduction is not None:
            dataset_batches(x, "x")  # raises if it cannot be read twice
        has_classes = self._of_features.takes_classes and self.inner.likelihood.is_classifier
        sample = PositionSample(self._of_features.most_positions)
        for batch in some_at_a_time(x, y, sample_weight, batch_size, verbose):
            features = self._network.predict_on_batch(batch.x)
            features = ops.convert_to_numpy(features)
            labels = batch.y if has_classes else None
            rows = rows_of_features(features, labels, batch.weight)
            sample.add(rows)
        features, *labels = sample.rows()
        classes = labels[0] if labels else None
        learned = self._learn(features, classes, layer)
        if self.reduction is None:
            known = self._scores_of_rows(features)
        else:
            known = self.score(x, batch_size, verbose)
        self.keep({**learned, "known": known})
        return self

    def _learn(self, features: np.ndarray, y: Any, layer: keras.layers.Layer) -> dict[str, Any]:
        """Return, and keep, what the score learns of features (rows, d)."""
        check_finite(features, self._of_features.features)
        learned = {"center": features.mean(axis=0)}
        learned |= self._of_features.learn(features.astype("float64"), y, layer)
        self.keep(learned)
        return learned

    def _scores_of_rows(self, features: np.ndarray) -> np.ndarray:
        """Return the scores of features (rows, d), some at a time."""
        scores = []
        for first in range(0, len(features), _AT_ONCE):
            part = self._scores_of(features[first : first + _AT_ONCE])
            scores.append(ops.convert_to_numpy(part))
        return np.concatenate(scores)

    def _features_of_dataset(self, x: Any, verbose: Any) -> tuple[np.ndarray, Any]:
        """Return features and classes, if any, in one pass, since it may be shuffled."""
        has_classes = self._of_features.takes_classes and self.inner.likelihood.is_classifier
        features = []
        labels = []
        for inputs, y, _ in unpacked(x, "x", verbose):
            features.append(self._network.predict_on_batch(inputs))
            if y is not None and has_classes and not self._labels_positions(y):
                labels.append(ops.convert_to_numpy(y))
        joined = np.concatenate(labels) if labels else None
        return np.concatenate(features), joined

    def _labels_positions(self, y: Any) -> bool:
        """Whether labels, if any, are at each position of an output, such as pixels."""
        return self._has_positions and np.prod(np.shape(y)[1:]) > 1

    def score(self, x: Any, batch_size: int | None = None, verbose: Any = 0) -> np.ndarray:
        """Return how unusual inputs are; higher is more unusual.

        Args:
            x: inputs; or a dataset of batches, as for `fit`.
            batch_size: for arrays; as for `predict`.
            verbose: 1 shows progress, 0 nothing.

        Returns:
            Scores (N,); with `reduction` None those of positions, (N, ...).
        """
        options = {"batch_size": batch_size, "verbose": verbose}
        if self._of_features is not None:
            scores = self._scores_by_features(x, options)
            counted = scores
            if self._scores_positions:
                counted = np.where(np.isnan(scores), 0, scores)
            check_finite(counted, self._of_features.features)
            return scores
        if self._has_positions:
            batches = some_at_a_time(x, None, None, batch_size, verbose)
            scores = [self._score_of_batch(batch.x) for batch in batches]
            return np.concatenate(scores)
        if self._masks is not None and is_dataset(x):
            batches = unpacked(x, "x", verbose)
            return np.concatenate([self.score(inputs, batch_size) for inputs, _, _ in batches])
        prediction = self.inner.predict(x, **options)
        return self._reduced_outputs(x, prediction)

    def _scores_by_features(self, x: Any, options: dict[str, Any]) -> np.ndarray:
        if self.kind in DENSITY_SCORES:
            return self._scores_of_rows(self._network.predict(x, **options))
        with self.inner._checked(x):
            return self.predict(with_strings(x), **options)

    def _score_of_batch(self, x: Any) -> np.ndarray:
        """Return the scores of the outputs for some inputs."""
        return self._reduced_outputs(x, self.inner.predict_on_batch(x))

    def _reduced_outputs(self, x: Any, prediction: Any) -> np.ndarray:
        scores = self._of_outputs.of_prediction(prediction)
        mask = None if self._masks is None else mask_of_arrays(self._masks, x)
        return ops.convert_to_numpy(reduced(scores, mask, self.reduction))

    def call(self, inputs: Any, prediction: Any = None) -> Tensor:
        """Return the scores of one batch.

        Args:
            inputs: the batch.
            prediction: that of `MonteCarlo` for it, if it is known.

        Returns:
            Scores (N,), or (N, ...).
        """
        if self._of_features is not None:
            features = self._network(inputs, training=False)
            if self._scores_positions:
                return self._scores_at_positions(features)
            return self._scores_of(features)
        if prediction is None:
            prediction = self.inner.average(inputs)
        scores = self._of_outputs.of_prediction(prediction)
        mask = self._masks(inputs).get("") if self._masks else None
        return reduced(scores, mask, self.reduction)

    def _scores_at_positions(self, features: Tensor) -> Tensor:
        """Return the scores of features (N, ..., d + 1), the last of which is their validity."""
        *positions, _ = ops.shape(features)
        validity = features[..., -1]
        features = features[..., :-1]
        width = features.shape[-1]
        rows = ops.reshape(features, (-1, width))
        scores = in_blocks(self._scores_of, rows, _AT_ONCE)
        scores = ops.reshape(scores, tuple(positions))
        # NaN says that a position is padding.
        is_bad = ops.isnan(scores)
        scores = ops.where(is_bad, float("inf"), scores)
        return reduced(scores, validity > 0, self.reduction)

    def serve(self, inputs: Any) -> dict[str, Tensor]:
        """Return the dict of `MonteCarlo` for one batch, and "score" (N,), or (N, ...)."""
        prediction = self.inner.average(inputs)
        return {**prediction, "score": self.call(inputs, prediction)}

    def threshold(self, true_positive_rate: float = 0.95, x: Any = None) -> float:
        """Return the score that a share of known inputs do not exceed.

        Args:
            true_positive_rate: the share, between 0 and 1.
            x: known inputs; None takes those of `fit`.

        Returns:
            The smallest score for which that holds.
        """
        rate = checks.probability("true_positive_rate", true_positive_rate)
        if x is None:
            scores = ops.convert_to_numpy(self.arrays["known"])
        else:
            scores = self.score(x)
        return float(np.quantile(without_padding(scores), rate, method="higher"))

    def evaluate(
        self, known: Any, unknown: Any, batch_size: int | None = None, verbose: Any = 0
    ) -> dict[str, float]:
        """Return how well the score separates unknown inputs from known ones.

        Args:
            known: inputs like the training data, as for `score`.
            unknown: inputs from elsewhere, as for `score`.
            batch_size: for arrays; as for `predict`.
            verbose: 1 shows progress, 0 nothing.

        Returns:
            A dict with the keys "auroc", "aupr" and "fpr95", see `metrics.ood_scores`.
        """
        of_known = self.score(known, batch_size, verbose)
        of_unknown = self.score(unknown, batch_size, verbose)
        return ood_scores(without_padding(of_known), without_padding(of_unknown))

    def _scores_of(self, features: Tensor) -> Tensor:
        """Return the scores (N,) of features (N, d), by what `fit` learned."""
        arrays = {name: ops.convert_to_tensor(value) for name, value in self.arrays.items()}
        width = arrays["center"].shape[0]
        if width != features.shape[1]:
            raise ValueError(
                f"What was learned is of another model's {width} features; `model` has "
                f"{features.shape[1]}: call `fit` again."
            )
        return self._of_features.of_features(features, arrays)

    def load_own_variables(self, store: Any) -> None:
        arrays = {name: np.asarray(store[name]) for name in store.keys()}
        if self._of_features is not None:
            arrays = self._of_features.upgraded(arrays)
        self.keep(arrays)

    def get_config(self) -> dict[str, Any]:
        background = keras.saving.serialize_keras_object(self.background)
        return {**super().get_config(), "score": self.kind, "background": background}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "OODDetector":
        """Return a detector with the same arguments; of version 0.1.0, it has no `reduction`."""
        return super().from_config({"reduction": "pooled", **config}, custom_objects)
