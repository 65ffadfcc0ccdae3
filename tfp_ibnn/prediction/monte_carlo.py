"""Prediction by many sampled networks: a Keras model."""

import os
import random
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn import noise
from tfp_ibnn._core import checks, keras_internals
from tfp_ibnn._core.backend import REPLICA_STRIDE, Tensor, jit_pays, replica_id
from tfp_ibnn._core.protocols import WeightPosterior
from tfp_ibnn.noise import counter
from tfp_ibnn.prediction.averaging import Averaging
from tfp_ibnn.prediction.head import predictive_of
from tfp_ibnn.prediction.inputs import (
    check_input,
    check_model,
    check_options,
    checked_prediction,
    checked_scores,
    example_like,
    is_empty,
)
from tfp_ibnn.prediction.sampler import sampler_of
from tfp_ibnn.prediction.saved_model import write_saved_model
from tfp_ibnn.prediction.wrapping import PredictionWrapper

__all__ = [
    "MonteCarlo",
]


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class MonteCarlo(PredictionWrapper, keras.Model):
    """Average a stochastic model over draws of its noise, and split the uncertainty.

    `predict` returns a dict of arrays. For N examples and K classes:

    - `mean` (N, K): the class probabilities, averaged over the draws;
    - `variance` (N, K): the variance of the draws;
    - `entropy` (N,): of the mean, in nats, the whole uncertainty;
    - `aleatoric` (N,): the mean entropy of a draw, what no draw of the network can tell;
    - `epistemic` (N,): the mean KL divergence of a draw from the mean, what the draws disagree
      about; entropy = aleatoric + epistemic;
    - `total_variance` (N,): the variances of all classes summed.

    Sigmoid outputs (N, L) are L questions of yes or no: every entry is (N, L). An output for each
    pixel or step, (N, ..., K), has its positions in every entry. For regression `mean` is the mean
    of the draws, `epistemic` their variance, `aleatoric` the mean of the variances that a
    `GaussianHead` predicts (0 without one) and `total_variance` the sum of both, each (N, D); there
    are no other entries.

    `evaluate` scores `mean`: accuracy, NLL, Brier score and ECE, or RMSE and, with a
    `GaussianHead`, the NLL of a Gaussian with that mean and the total variance. More can be added
    with `compile(metrics=[...])`. `loss` is that NLL too (of a point the squared error).

    By default the draws are shared by all examples of a prediction: each is a sampled network, one
    function for all inputs. They are drawn anew by each `predict` and `evaluate` and by `resample`,
    but not by a plain call. With a seed they stay, and the prediction of an example is always the
    same, to float tolerance, in batches and chunks of any size, compiled or not, on every backend.

    Args:
        model: a built Keras model with stochastic layers and one output, a `TemperatureScaling`,
            or a posterior over weights such as `DeepEnsemble`.
        samples: number of draws; of a posterior with fewer weight sets, all of them.
        head: what the output means: "softmax", "sigmoid", "gaussian" or "point"; None finds out
            from the last layer and the loss the model is compiled with.
        from_logits: whether the output is logits; None finds out the same way.
        sampling: "iid", "antithetic" (mirrored pairs) or "qmc" (quasi-random, up to 65,536 draws).
        seed: of the draws, a whole number of 0 or above.
        independent: draw anew for each example. The answers then repeat, with a seed, at one batch
            size only; without one, the draws take less time.
        chunk_size: how many draws to run at once; more take more memory. None chooses by the size
            of the largest tensor and of the batch; set it for models whose `call` is their own, or
            whose inputs have no fixed size.
        dropout: leave the dropout layers on, each draw with masks of its own (MC dropout), while
            batch normalization stays as in inference. Works for models without stochastic layers.
        return_samples: return `samples` (N, draws, K) too; of a `GaussianHead`, the means. Their
            memory grows with `samples`, as it does for the intervals.
        interval: probability of a central interval, such as 0.9; returns its bounds `lower` and
            `upper`, (N, K): of the draws of each class probability, or, with a `GaussianHead`, of
            new observations.
        standard_error: return `standard_error` (N, K), that of the Monte Carlo mean, to see whether
            the samples are enough.
        **kwargs: those of `keras.Model`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> inputs = keras.Input((3,))
        >>> outputs = ibnn.StochasticDense(2, activation="softmax", train_size=100)(inputs)
        >>> mc = ibnn.MonteCarlo(keras.Model(inputs, outputs), samples=16, seed=0)
        >>> sorted(mc.predict(keras.ops.ones((5, 3)), verbose=0))
        ['aleatoric', 'entropy', 'epistemic', 'mean', 'total_variance', 'variance']
    """

    def __init__(
        self,
        model: keras.Model | WeightPosterior,
        samples: int = 128,
        *,
        head: str | None = None,
        from_logits: bool | None = None,
        sampling: str = "iid",
        seed: int | None = None,
        independent: bool = False,
        chunk_size: int | None = None,
        dropout: bool = False,
        return_samples: bool = False,
        interval: float | None = None,
        standard_error: bool = False,
        **kwargs: Any,
    ) -> None:
        if isinstance(model, MonteCarlo):
            raise ValueError(f"`model` is a MonteCarlo already: {model.name!r}.")
        network = check_model(model, dropout)
        samples = checks.positive_integer("samples", samples)
        checks.one_of("sampling", sampling, noise.SAMPLINGS)
        if chunk_size is not None:
            chunk_size = checks.positive_integer("chunk_size", chunk_size)
        if seed is not None:
            seed = checks.whole("seed", seed)
        check_options(samples, sampling, interval, standard_error)
        predictive = predictive_of(network, head, from_logits)
        # Inputs reach the model as they are; it knows best which precision it needs.
        super().__init__(**{"autocast": False, **kwargs})
        self.inner = model
        self._wanted_samples = samples
        self.head, self.from_logits = head, from_logits
        self.sampling, self.seed, self.independent = sampling, seed, bool(independent)
        self.chunk_size, self.dropout = chunk_size, bool(dropout)
        self.return_samples, self.interval = bool(return_samples), interval
        self.standard_error = bool(standard_error)
        self._predictive = predictive
        self._sampler = sampler_of(
            model,
            samples,
            portable=seed is not None,
            sampling=sampling,
            independent=self.independent,
            chunk_size=chunk_size,
            dropout=self.dropout,
        )
        self.samples = self._sampler.samples
        self._average = Averaging(
            predictive,
            self.samples,
            sampling,
            self.return_samples,
            interval,
            self.standard_error,
        )
        self._key = self.add_weight(
            shape=(2,), initializer="zeros", dtype="int", trainable=False, name="key"
        )
        self._batch = self.add_weight(
            shape=(), initializer="zeros", dtype="int", trainable=False, name="batch"
        )
        self._scores = predictive.scores()
        self.built = True
        self.resample()
        self.compile()

    def resample(self) -> None:
        """Draw new networks; with a seed, the same ones again."""
        seed = random.getrandbits(64) if self.seed is None else self.seed
        self._key.assign(counter.key_from_seed(seed))
        self._batch.assign(0)

    def call(self, inputs: Any) -> dict[str, Tensor]:
        """Return the dict that the class describes, for one batch."""
        if not self.independent:
            return self.average(inputs)
        # A cast, which reads at once: the variable itself would be read after it has counted.
        stream = ops.cast(self._batch, "int32") + replica_id() * REPLICA_STRIDE
        self._batch.assign(self._batch + 1)
        return self.average(inputs, stream)

    def average(self, inputs: Any, stream: int | Tensor = 0) -> dict[str, Tensor]:
        """Return the dict that the class describes, for one batch; unlike a call, it has no state.

        Args:
            inputs: one batch.
            stream: which draws to take, where they are `independent`.
        """
        first, second = ops.unstack(ops.cast(self._key, "int32"), num=2)
        key = ops.stack([first + ops.cast(stream, "int32"), second])
        return self._average(self._sampler.chunks(inputs, key))

    def draw(self, inputs: Any, number: int | Tensor) -> dict[str, Tensor]:
        """Return what one sampled network says: `mean`, and `aleatoric`, its own uncertainty.

        The networks that `average` averages have the numbers 0 to `samples` - 1; others follow.
        """
        return self._of_one(self._sampler.draw(inputs, ops.cast(self._key, "int32"), number))

    def at_mean(self, inputs: Any) -> dict[str, Tensor]:
        """Return what the network without noise says, with every z at its posterior mean."""
        return self._of_one(self._sampler.at_mean(inputs))

    def _of_one(self, outputs: Tensor) -> dict[str, Tensor]:
        draws, within = self._predictive.draws(outputs)
        return {"mean": self._predictive.public(draws)[0], "aleatoric": within[0]}

    def compute_output_spec(self, inputs: Any) -> Any:
        """Not known ahead: the noise of a pass cannot be drawn symbolically."""
        raise NotImplementedError(
            "MonteCarlo is called on data; it is not part of a Functional model."
        )

    def compile(
        self,
        metrics: Any = None,
        *,
        weighted_metrics: Any = None,
        run_eagerly: bool = False,
        steps_per_execution: int = 1,
        jit_compile: bool | str | None = None,
        **kwargs: Any,
    ) -> None:
        """Compile for `evaluate` and `predict`; the arguments are Keras's.

        Args:
            metrics: come on top of the scores there are.
            weighted_metrics: the same, weighted.
            run_eagerly: do not compile.
            steps_per_execution: batches in one execution.
            jit_compile: whether to use XLA; None does so where it pays.
            **kwargs: `optimizer`, `loss` and the like are not used.
        """
        if unknown := kwargs.keys() - {"optimizer", "loss", "loss_weights", "auto_scale_loss"}:
            raise TypeError(f"`compile` has no argument {', '.join(sorted(unknown))}.")
        self._jit_is_open = jit_compile is None
        if self._jit_is_open:
            jit_compile = jit_pays() and not run_eagerly
        super().compile(
            optimizer=None,
            metrics=metrics,
            weighted_metrics=weighted_metrics,
            run_eagerly=run_eagerly,
            steps_per_execution=steps_per_execution,
            jit_compile=jit_compile,
        )

    def get_compile_config(self) -> dict[str, Any]:
        """Return what `compile` was given; another backend may choose otherwise."""
        config = super().get_compile_config()
        return {**config, "jit_compile": None} if self._jit_is_open else config

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compile as a saved model was."""
        self.compile(**keras.saving.deserialize_keras_object(config))

    def predict(self, x: Any, *args: Any, **kwargs: Any) -> dict[str, np.ndarray]:
        """Return the dict that the class describes; the arguments are Keras's."""
        check_input(x)
        if is_empty(x):  # of which Keras makes no batch
            return self.predict_on_batch(x)
        self.resample()
        with keras_internals.values_kept(self.variables):
            return checked_prediction(self.inner.name, super().predict(x, *args, **kwargs))

    def predict_on_batch(self, x: Any) -> dict[str, np.ndarray]:
        """Return the dict that the class describes, for one batch."""
        check_input(x)
        self.resample()
        with keras_internals.values_kept(self.variables):
            if not is_empty(x):
                return checked_prediction(self.inner.name, super().predict_on_batch(x))
            # Not every layer takes an empty batch; of a made-up example no row is returned.
            prediction = super().predict_on_batch(keras.tree.map_structure(example_like, x))
            return {key: np.asarray(value)[:0] for key, value in prediction.items()}

    def evaluate(self, x: Any = None, *args: Any, allow_nan: bool = False, **kwargs: Any) -> Any:
        """Score the averaged prediction.

        Args:
            x: inputs, or a dataset.
            *args: those of Keras.
            allow_nan: return scores that are not finite, instead of an error.
            **kwargs: those of Keras.
        """
        check_input(x, args[0] if args else kwargs.get("y"))
        if is_empty(x):
            raise ValueError("`x` holds no example, so there is nothing to score.")
        self.resample()
        with keras_internals.values_kept(self.variables):
            scores = super().evaluate(x, *args, **kwargs)
            return scores if allow_nan else checked_scores(self.inner.name, scores)

    def test_on_batch(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Score the averaged prediction of one batch."""
        check_input(x, args[0] if args else kwargs.get("y"))
        self.resample()
        with keras_internals.values_kept(self.variables):
            return checked_scores(self.inner.name, super().test_on_batch(x, *args, **kwargs))

    def fit(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: it is the model inside that is trained."""
        raise NotImplementedError(
            "MonteCarlo only predicts. Train the model that it averages; MonteCarlo shares its "
            "weights and follows."
        )

    train_on_batch = fit

    def export(
        self,
        filepath: str | os.PathLike,
        format: str = "tf_saved_model",
        verbose: bool | None = None,
        input_signature: Any = None,
        **options: Any,
    ) -> None:
        """Write a TensorFlow SavedModel, as `tfp_ibnn.export` does.

        Args:
            filepath: of a folder.
            format: "tf_saved_model".
            verbose: print what was written; None does, as Keras does.
            input_signature: `keras.InputSpec` or arrays, for a model whose `call` is its own.
            **options: `samples`, `seed` and `overwrite`, those of `tfp_ibnn.export`.
        """
        if format != "tf_saved_model":
            raise ValueError(
                f"`format` must be 'tf_saved_model'; got {format!r}. For another one, without the "
                f"uncertainty: ibnn.to_deterministic(model).export(path, format={format!r})."
            )
        overwrite = options.pop("overwrite", False)
        path = write_saved_model(self.frozen(**options), filepath, input_signature, overwrite)
        if verbose is None or verbose:
            print(f"Saved the signatures serve, sample, deterministic at {path}.")

    def frozen(self, samples: int | None = None, seed: int | None = None) -> "MonteCarlo":
        """Return a copy on the same weights whose draws stay: it has a seed, and its own key.

        Args:
            samples: number of draws; None takes those of this model.
            seed: of the draws; None takes that of this model, or a random one.
        """
        seed = self.seed if seed is None else seed
        seed = counter.random_seed() if seed is None else seed
        samples = self._wanted_samples if samples is None else samples
        return type(self)(self.inner, **{**self.options(), "samples": samples, "seed": seed})

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = False,
    ) -> Tensor:
        """Return the NLL of the averaged prediction (the squared error of a point)."""
        if y is None:
            raise ValueError("The evaluation needs labels or targets: `y` is missing.")
        return self._predictive.mean_loss(y, y_pred, sample_weight)

    def compute_metrics(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None
    ) -> dict[str, Tensor]:
        """Score the averaged prediction."""
        self._predictive.update(self._scores, y, y_pred, sample_weight)
        return super().compute_metrics(x, y, y_pred["mean"], sample_weight)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        model = keras.saving.serialize_keras_object(self.inner)
        return {**super().get_config(), "model": model, **self.options()}

    def options(self) -> dict[str, Any]:
        """Return the constructor's arguments but for the model."""
        return {
            "samples": self._wanted_samples,
            "head": self.head,
            "from_logits": self.from_logits,
            "sampling": self.sampling,
            "seed": self.seed,
            "independent": self.independent,
            "chunk_size": self.chunk_size,
            "dropout": self.dropout,
            "return_samples": self.return_samples,
            "interval": self.interval,
            "standard_error": self.standard_error,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "MonteCarlo":
        """Return a model from what `get_config` gave."""
        model = keras.saving.deserialize_keras_object(
            config["model"], custom_objects=custom_objects
        )
        return cls(**{**config, "model": model})
