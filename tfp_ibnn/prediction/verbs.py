"""Keras's verbs for a model that predicts by sampled networks."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.backend import Tensor, jit_pays
from tfp_ibnn._core.progress import FirstBatch
from tfp_ibnn._core.text import with_strings
from tfp_ibnn.likelihoods import Likelihood
from tfp_ibnn.prediction import validation
from tfp_ibnn.prediction.padding import without_padding


class PredictingModel(keras.Model):
    """A model that checks its data, draws new networks, and scores what they predict.

    Attributes:
        inner: the model whose draws are averaged.
        likelihood: what its outputs mean; it gives the loss and the scores.
    """

    inner: Any
    likelihood: Likelihood
    _scores: Any  # the metrics of the likelihood
    _masks: Callable[[Any], dict[str, Tensor]] | None  # those of the outputs, if any is padded

    def resample(self) -> None:
        """Draw new networks; with a seed, the same ones again."""
        raise NotImplementedError(f"{type(self).__name__} must define `resample`.")

    def compile(
        self, metrics: Any = None, run_eagerly: bool = False, jit_compile: Any = None, **kwargs: Any
    ) -> None:
        """Compile for `evaluate` and `predict`.

        Args:
            metrics: Keras metrics of the mean, added to the scores.
            run_eagerly: run without compilation, to debug.
            jit_compile: whether to use XLA; None does where it pays.
            **kwargs: others of Keras's `compile`. `optimizer`, `loss`, `loss_weights` and
                `auto_scale_loss` are not used.
        """
        for unused in ("optimizer", "loss", "loss_weights", "auto_scale_loss"):
            kwargs.pop(unused, None)
        self._jit_is_open = jit_compile is None
        if self._jit_is_open:
            jit_compile = jit_pays() and not run_eagerly
        super().compile(
            optimizer=None,
            metrics=metrics,
            run_eagerly=run_eagerly,
            jit_compile=jit_compile,
            **kwargs,
        )

    def get_compile_config(self) -> dict[str, Any]:
        config = super().get_compile_config()
        if self._jit_is_open:
            config = {**config, "jit_compile": None}
        return config

    def compile_from_config(self, config: dict[str, Any]) -> None:
        self.compile(**keras.saving.deserialize_keras_object(config))

    @contextlib.contextmanager
    def _checked(self, x: Any, y: Any = None) -> Iterator[None]:
        """Check the input, and draw new networks."""
        validation.check_input(x, y)
        self.resample()
        with keras_internals.values_kept(self.variables):
            yield

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> dict[str, np.ndarray]:
        """Predict by the average of all sampled networks, and split the uncertainty.

        Args:
            x: inputs: arrays, or a dataset of batches.
            batch_size: number of examples per batch of arrays; None is Keras's 32.
            verbose: 1 shows a progress bar, 2 a line, 0 nothing; "auto" is 1.
            steps: number of batches of a dataset to predict; None takes all.
            callbacks: Keras callbacks.

        Returns:
            A dict of arrays; of several outputs, such a dict for each, by name. For N examples and
            K classes:

            - `mean` (N, K): the class probabilities, averaged over the draws;
            - `variance` (N, K): of the draws;
            - `total_variance` (N,): its sum over the classes;
            - `entropy` (N,): of the mean, in nats, the whole uncertainty: aleatoric + epistemic;
            - `aleatoric` (N,): the mean entropy of the draws, which each draw has by itself;
            - `epistemic` (N,): the mean KL divergence of a draw from the mean: how much draws
              disagree.

            Sigmoid outputs (N, L) are L questions of yes or no: every entry is (N, L). An output
            for each pixel or step, (N, ..., K), has its positions in every entry. For regression,
            each (N, D):

            - `mean`: averaged over the draws;
            - `epistemic`: the variance of the draws;
            - `aleatoric`: the mean of the variances that a `GaussianHead` predicts, 0 without one;
            - `total_variance`: aleatoric + epistemic.

            A `QuantileHead` has no variances: `quantiles` (N, D, L) are those of the mixture of all
            draws, `mean` averages the draws' medians, and `epistemic` is the variance of these.

            If the constructor was asked for them: `samples` (N, draws, K), `lower` and `upper`
            (N, K), and `standard_error` (N, K). For a function that makes a TFP distribution,
            `parameters` (N, draws, ...), the network's outputs.

        Raises:
            ValueError: If the input or the prediction is not finite, or there are no examples.
        """
        x = with_strings(x)
        with self._checked(x), FirstBatch(self.predict_function) as notice:
            callbacks = _with_callback(notice, callbacks)
            prediction = super().predict(x, batch_size, verbose, steps, callbacks)
            return validation.checked_prediction(self.inner.name, prediction)

    def predict_on_batch(self, x: Any) -> dict[str, np.ndarray]:
        x = with_strings(x)
        with self._checked(x):
            prediction = super().predict_on_batch(x)
            return validation.checked_prediction(self.inner.name, prediction)

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
        *,
        allow_nan: bool = False,
    ) -> Any:
        """Score the averaged prediction.

        Args:
            x: inputs: arrays, or a dataset of batches (x, y) or (x, y, sample_weight).
            y: labels or targets of arrays.
            batch_size: number of examples per batch of arrays; None is Keras's 32.
            verbose: 1 shows a progress bar, 2 a line, 0 nothing; "auto" is 1.
            sample_weight: weights of arrays' examples.
            steps: number of batches of a dataset; None takes all.
            callbacks: Keras callbacks.
            return_dict: return the scores by name.
            allow_nan: return NaN scores instead of an error.

        Returns:
            A dict, or a list in the same order. Names begin with that of the output, if there are
            several. The metrics that `compile` was given follow these:

            - `loss`: the mean `nll`; for numbers without a density, the mean squared error;
            - for classes: `accuracy`, `nll` (in nats), `brier` (the Brier score) and `ece` (the
              expected calibration error), of the mean;
            - for numbers: `rmse`, of the mean, and, where there is a density, its `nll`: with a
              `GaussianHead` of a Gaussian with the mean and the total variance;
            - for a `QuantileHead`: `rmse`, `pinball`, which is the loss, and, if no two neighbors
              among 0, the levels and 1 are more than 0.1 apart, `crps`.

        Raises:
            ValueError: If the data or a score is not finite, or labels are missing.
        """
        x = with_strings(x)
        with self._checked(x, y), FirstBatch(self.test_function) as notice:
            callbacks = _with_callback(notice, callbacks)
            scores = super().evaluate(
                x, y, batch_size, verbose, sample_weight, steps, callbacks, return_dict
            )
            if allow_nan:
                return scores
            return validation.checked_scores(self.inner.name, scores)

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        x = with_strings(x)
        with self._checked(x, y):
            scores = super().test_on_batch(x, y, sample_weight, return_dict)
            return validation.checked_scores(self.inner.name, scores)

    def fit(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("MonteCarlo only predicts: train the model that it averages.")

    train_on_batch = fit

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Tensor:
        if y is None:
            raise ValueError("The evaluation needs labels or targets: `y` is missing.")
        targets = self.likelihood.split_given("y", y)
        predictions = self.likelihood.split(y_pred)
        weights = self._weights(predictions, sample_weight, scaled=True)
        # Of several outputs, the sum of their losses.
        loss = 0
        for name, part in self.likelihood.parts.items():
            loss = loss + part.mean_loss(targets[name], predictions[name], weights[name])
        return loss

    def compute_metrics(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None
    ) -> dict[str, Tensor]:
        targets = self.likelihood.split_given("y", y)
        predictions = self.likelihood.split(y_pred)
        weights = self._weights(predictions, sample_weight, scaled=False)
        scores = self.likelihood.split(self._scores)
        means = {}
        for name, part in self.likelihood.parts.items():
            prediction = predictions[name]
            part.update(scores[name], targets[name], prediction, weights[name])
            means[name] = prediction["mean"]
        # The metrics that the user has added see the mean.
        y_pred = self.likelihood.join(means)
        return super().compute_metrics(x, y, y_pred, sample_weight)

    def _weights(
        self, predictions: dict[str, Any], sample_weight: Any, scaled: bool
    ) -> dict[str, Any]:
        """Return the weights of each output's examples and positions, 0 for padding."""
        weights = self.likelihood.split_given("sample_weight", sample_weight, for_all=True)
        if self._masks is None:
            return weights
        for name, prediction in predictions.items():
            mask = keras_internals.mask_of(prediction["mean"])
            if mask is not None:
                weights[name] = without_padding(mask, weights[name], scaled)
        return weights


def _with_callback(callback: keras.callbacks.Callback, callbacks: Any) -> Any:
    """Return callbacks with one of ours, which a `CallbackList` that is ready does not take."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    return [callback, *keras.tree.flatten(callbacks or [])]
