"""Prediction by many sampled networks: a Keras model."""

import contextlib
import os
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn import noise
from tfp_ibnn._core import checks, keras_internals
from tfp_ibnn._core.backend import REPLICA_STRIDE, Tensor, jit_pays, replica_id
from tfp_ibnn._core.progress import FirstBatch
from tfp_ibnn._core.protocols import WeightPosterior
from tfp_ibnn._core.text import with_strings
from tfp_ibnn.conversion.wrappers import PredictionWrapper
from tfp_ibnn.likelihoods import Likelihood
from tfp_ibnn.likelihoods.infer import likelihood_of
from tfp_ibnn.noise import counter
from tfp_ibnn.prediction import validation
from tfp_ibnn.prediction.noise_sampler import NoiseSampler
from tfp_ibnn.prediction.padding import output_masks, without_padding
from tfp_ibnn.prediction.saved_model import write_saved_model
from tfp_ibnn.prediction.summary import Wanted, average, of_one
from tfp_ibnn.prediction.validation import check_model


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class MonteCarlo(PredictionWrapper, keras.Model):
    """Average a stochastic model over draws of its noise, and split the uncertainty.

    `predict` returns a dict of arrays. For N examples and K classes:

    - `mean` (N, K): the class probabilities, averaged over the draws;
    - `variance` (N, K): of the draws, and `total_variance` (N,), its sum over the classes;
    - `entropy` (N,): of the mean, in nats, the whole uncertainty: aleatoric + epistemic;
    - `aleatoric` (N,): the mean entropy of the draws, which every draw has by itself;
    - `epistemic` (N,): the mean KL divergence of a draw from the mean: how much draws disagree.

    Sigmoid outputs (N, L) are L questions of yes or no: every entry is (N, L). An output for each
    pixel or step, (N, ..., K), has its positions in every entry. For regression the entries are
    `mean`, `epistemic` (the variance of the draws), `aleatoric` (the mean of the variances that a
    `GaussianHead` predicts, 0 without one) and `total_variance`, the sum of both, each (N, D). Of
    several outputs there is such a dict for each, by name, and scores begin with the name.

    `evaluate` scores `mean`: accuracy, NLL, Brier score and ECE, or RMSE and, with a
    `GaussianHead`, the NLL of a Gaussian with that mean and the total variance. `loss` is that NLL
    too (of a point the squared error). `compile(metrics=[...])` adds more.

    All examples share the draws: each is a sampled network, one function for all inputs. Each
    `predict` and `evaluate` draws anew, as `resample` does, a plain call does not. With a seed the
    draws stay: predictions are the same, to float tolerance, in batches of any size, compiled or
    not, on every backend.

    Args:
        model: a built Keras model with stochastic layers, a `TemperatureScaling`, or a posterior
            over weights such as `DeepEnsemble`.
        samples: number of draws; of a posterior with fewer weight sets, all of them.
        head: what the output means: "softmax", "sigmoid", "gaussian", "point", a function that
            makes a TFP distribution of it, as for `layers.DistributionNLL`, or a `Likelihood` of
            your own; None finds out from the last layer and the loss the model is compiled with. A
            dict for several outputs.
        from_logits: whether the output is logits; None finds out the same way.
        sampling: "iid", "antithetic" (mirrored pairs) or "qmc" (quasi-random, up to 65,536 draws).
        seed: of the draws, a whole number of 0 or above.
        independent: draw anew for each example. The answers then repeat, with a seed, at one batch
            size only; without one, the draws take less time.
        chunk_size: how many draws to run at once; more take more memory. None chooses; set it for
            models whose `call` is their own, or whose inputs have no fixed size.
        dropout: leave the dropout layers on, each draw with masks of its own (MC dropout), while
            batch normalization stays as in inference. Works for models without stochastic layers.
        return_samples: return `samples` (N, draws, K) too; of a `GaussianHead`, the means. Their
            memory grows with `samples`, as it does for the intervals.
        interval: probability of a central interval, such as 0.9; returns `lower` and `upper`, its
            bounds (N, K): of the draws, or, with a `GaussianHead`, of new observations. Numbers
            without one warn, since few observations lie within the draws: see `Conformal`.
        standard_error: return `standard_error` (N, K), that of the mean of iid draws.
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
        head: Any = None,
        from_logits: Any = None,
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
            raise ValueError(f"`model` is already a MonteCarlo: {model.name!r}.")
        network = check_model(model, dropout)
        samples = checks.positive_integer("samples", samples)
        checks.one_of("sampling", sampling, noise.SAMPLINGS)
        if chunk_size is not None:
            chunk_size = checks.positive_integer("chunk_size", chunk_size)
        seed = None if seed is None else checks.whole("seed", seed)
        interval = None if interval is None else checks.probability("interval", interval)
        if standard_error and (sampling != "iid" or samples < 2):
            got = f"{samples} with sampling={sampling!r}"
            raise ValueError(f"`standard_error` needs 2 or more independent `samples`; got {got}.")
        likelihood = likelihood_of(network, head, from_logits)
        if interval is not None:
            _warn_of_open_noise(likelihood, interval)
        # Inputs reach the model as they are; it knows best which precision it needs.
        super().__init__(**{"autocast": False, **kwargs})
        self.inner = model
        self.head, self.from_logits, self.seed = head, from_logits, seed
        self.sampling, self.independent = sampling, bool(independent)
        self.chunk_size, self.dropout = chunk_size, bool(dropout)
        self.return_samples, self.interval = bool(return_samples), interval
        self.standard_error = bool(standard_error)
        names = ("sampling", "independent", "chunk_size", "dropout")
        options = {name: getattr(self, name) for name in names}
        if isinstance(model, WeightPosterior):
            self._sampler = model.sampler(samples, **options)
        else:
            self._sampler = NoiseSampler(model, samples, portable=seed is not None, **options)
        self._wanted_samples, self.samples = samples, self._sampler.samples
        integers = {"initializer": "zeros", "dtype": "int", "trainable": False}
        self._key = self.add_weight(shape=(2,), name="key", **integers)
        self._batch = self.add_weight(shape=(), name="batch", **integers)
        self.likelihood = likelihood
        self._scores = likelihood.scores()
        self._masks = output_masks(network)
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
        stream = 0
        if self.independent:
            # A cast, which reads at once: the variable itself would be read after it has counted.
            stream = ops.cast(self._batch, "int32") + replica_id() * REPLICA_STRIDE
            self._batch.assign(self._batch + 1)
        prediction = self.average(inputs, stream)
        # Here, since on JAX the network has no weights where metrics are computed.
        for name, mask in self._masks(inputs).items() if self._masks else ():
            keras_internals.set_mask(prediction[name]["mean"] if name else prediction["mean"], mask)
        return prediction

    def average(self, inputs: Any, stream: int | Tensor = 0) -> dict[str, Tensor]:
        """Do as a call does, but without state; `stream` chooses among `independent` draws."""
        first, second = ops.unstack(ops.cast(self._key, "int32"), num=2)
        key = ops.stack([first + ops.cast(stream, "int32"), second])
        wanted = Wanted(self.samples, self.return_samples, self.interval, self.standard_error)
        return average(self.likelihood, self._sampler.chunks(inputs, key), wanted)

    serve = average

    def draw(self, inputs: Any, number: int | Tensor) -> dict[str, Tensor]:
        """Return `mean` and `aleatoric` of one network; 0 to `samples` - 1 are those averaged."""
        outputs = self._sampler.draw(inputs, ops.cast(self._key, "int32"), number)
        return of_one(self.likelihood, outputs)

    def at_mean(self, inputs: Any) -> dict[str, Tensor]:
        """Return the output of the network without noise, with every z at its posterior mean."""
        return of_one(self.likelihood, self._sampler.at_mean(inputs))

    def compute_output_spec(self, inputs: Any) -> Any:
        raise NotImplementedError("MonteCarlo is called on data, not in a Functional model.")

    def compile(
        self, metrics: Any = None, run_eagerly: bool = False, jit_compile: Any = None, **kwargs: Any
    ) -> None:
        """Compile for `evaluate` and `predict`; the arguments are Keras's.

        The metrics are added to the scores. `jit_compile=None` uses XLA where it pays. `optimizer`,
        `loss` and the like are not used.
        """
        for unused in ("optimizer", "loss", "loss_weights", "auto_scale_loss"):
            kwargs.pop(unused, None)
        self._jit_is_open = jit_compile is None
        jit = jit_pays() and not run_eagerly if self._jit_is_open else jit_compile
        options = {"metrics": metrics, "run_eagerly": run_eagerly, "jit_compile": jit, **kwargs}
        super().compile(optimizer=None, **options)

    def get_compile_config(self) -> dict[str, Any]:
        config = super().get_compile_config()
        return {**config, "jit_compile": None} if self._jit_is_open else config

    def compile_from_config(self, config: dict[str, Any]) -> None:
        self.compile(**keras.saving.deserialize_keras_object(config))

    @contextlib.contextmanager
    def _checked(self, x: Any, y: Any = None) -> Iterator[None]:
        """Check the input, and draw new networks."""
        validation.check_input(x, y)
        self.resample()
        with keras_internals.values_kept(self.variables):
            yield

    def predict(self, x: Any, *args: Any, **kwargs: Any) -> dict[str, np.ndarray]:
        """Return the dict that the class describes; the arguments are Keras's."""
        x = with_strings(x)
        with self._checked(x), FirstBatch(self.predict_function) as notice:
            if len(args) < 4:  # of which the fourth is `callbacks`
                kwargs["callbacks"] = _with_callback(notice, kwargs.get("callbacks"))
            found = super().predict(x, *args, **kwargs)
            return validation.checked_prediction(self.inner.name, found)

    def predict_on_batch(self, x: Any) -> dict[str, np.ndarray]:
        x = with_strings(x)
        with self._checked(x):
            return validation.checked_prediction(self.inner.name, super().predict_on_batch(x))

    def evaluate(self, x: Any = None, *args: Any, allow_nan: bool = False, **kwargs: Any) -> Any:
        """Score the averaged prediction; `allow_nan` returns NaN scores instead of an error."""
        x = with_strings(x)
        checked = self._checked(x, args[0] if args else kwargs.get("y"))
        with checked, FirstBatch(self.test_function) as notice:
            if len(args) < 6:
                kwargs["callbacks"] = _with_callback(notice, kwargs.get("callbacks"))
            scores = super().evaluate(x, *args, **kwargs)
            return scores if allow_nan else validation.checked_scores(self.inner.name, scores)

    def test_on_batch(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        x = with_strings(x)
        with self._checked(x, args[0] if args else kwargs.get("y")):
            scores = super().test_on_batch(x, *args, **kwargs)
            return validation.checked_scores(self.inner.name, scores)

    def fit(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("MonteCarlo only predicts: train the model that it averages.")

    train_on_batch = fit

    def export(self, filepath: Any, **options: Any) -> None:
        """Write a TensorFlow SavedModel, as `tfp_ibnn.export` does, whose options it takes."""
        export(self, filepath, **options)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Tensor:
        if y is None:
            raise ValueError("The evaluation needs labels or targets: `y` is missing.")
        targets = self.likelihood.split_given("y", y)
        weights = self._weights(y_pred, sample_weight, scaled=True)
        predictions = self.likelihood.split(y_pred)
        # Of several outputs, the sum of their losses.
        return sum(
            part.mean_loss(targets[name], predictions[name], weights[name])
            for name, part in self.likelihood.parts.items()
        )

    def compute_metrics(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None
    ) -> dict[str, Tensor]:
        targets = self.likelihood.split_given("y", y)
        weights = self._weights(y_pred, sample_weight)
        predictions = self.likelihood.split(y_pred)
        scores = self.likelihood.split(self._scores)
        for name, part in self.likelihood.parts.items():
            part.update(scores[name], targets[name], predictions[name], weights[name])
        means = {name: prediction["mean"] for name, prediction in predictions.items()}
        return super().compute_metrics(x, y, self.likelihood.join(means), sample_weight)

    def _weights(self, y_pred: Any, sample_weight: Any, scaled: bool = False) -> dict[str, Any]:
        """Return the weights of each output's examples and positions, 0 for padding."""
        weights = self.likelihood.split_given("sample_weight", sample_weight, for_all=True)
        if self._masks is None:
            return weights
        for name, prediction in self.likelihood.split(y_pred).items():
            mask = keras_internals.mask_of(prediction["mean"])
            if mask is not None:
                weights[name] = without_padding(mask, weights[name], scaled)
        return weights

    def get_config(self) -> dict[str, Any]:
        head = keras.saving.serialize_keras_object(self.head)
        return {**super().get_config(), **self.options(), "head": head}

    def options(self) -> dict[str, Any]:
        """Return the constructor's arguments but for the model."""
        names = MonteCarlo.__init__.__kwdefaults__  # all that are keywords only
        return {"samples": self._wanted_samples, **{name: getattr(self, name) for name in names}}


def _with_callback(own: keras.callbacks.Callback, given: Any) -> Any:
    """Return callbacks with one of ours, which a `CallbackList` that is ready does not take."""
    is_ready = isinstance(given, keras.callbacks.CallbackList)
    return given if is_ready else [own, *keras.tree.flatten(given or [])]


def _warn_of_open_noise(likelihood: Likelihood, interval: float) -> None:
    """Warn that an interval of draws holds few observations, if their noise is not predicted."""
    points = [name for name, part in likelihood.parts.items() if part.free_scale]
    if points:
        which = "the output" if points == [""] else f"the outputs {points}"
        warnings.warn(
            f"`interval` holds {interval:.3g} of the draws of {which}, and far fewer of new "
            "observations, whose noise the loss leaves open. End the network in an "
            "ibnn.layers.GaussianHead with the loss ibnn.layers.GaussianNLL, or use "
            f"ibnn.Conformal(model, coverage={interval:.3g}).",
            stacklevel=3,
        )


def export(
    model: keras.Model,
    path: str | os.PathLike,
    *,
    samples: int | None = None,
    seed: int | None = None,
    input_signature: Any = None,
    overwrite: bool = False,
) -> Path:
    """Write a TensorFlow SavedModel that gives the averaged prediction and its uncertainty.

    TensorFlow Serving serves it, and TensorFlow alone loads it, for an input "features" by
    `tf.saved_model.load(path).signatures["serve"](features=x)["epistemic"]`. Its signatures take
    the model's inputs by name, in batches of any size:

    - `serve`, also the default: all that `MonteCarlo.predict` returns;
    - `sample`: `mean` and `aleatoric` of one sampled network, which the further input `seed`, a
      whole number, chooses. The seeds 0 to `samples` - 1 are the networks that `serve` averages;
    - `deterministic`: `mean` and `aleatoric` of the network at the posterior mean, without noise.

    The sampled networks are fixed in the file: equal inputs have equal outputs, unless the draws
    are `independent`. `serve` of a `Conformal` adds its `set` or `interval`, of an `OODDetector`
    its `score`. `assets.extra/tfp_ibnn.json` has versions, seed, signatures and SHA-256 of the
    files. The backend must be TensorFlow; `scripts/export.py` exports `.keras` files made on JAX.

    Args:
        model: a `MonteCarlo`, `Conformal` or `OODDetector`, or a model to average.
        path: of a folder. It is written whole or not at all.
        samples: number of draws; None takes the `MonteCarlo`'s.
        seed: of the draws; None takes the `MonteCarlo`'s, or a random one.
        input_signature: `keras.InputSpec` or arrays, by name or in a list as Keras has it, for a
            model whose inputs are unknown because its `call` is its own.
        overwrite: replace a folder that is not empty.

    Example:
        >>> import keras, tempfile, tfp_ibnn as ibnn
        >>> inputs = keras.Input((3,), name="features")
        >>> outputs = ibnn.StochasticDense(2, activation="softmax", train_size=100)(inputs)
        >>> mc = ibnn.MonteCarlo(keras.Model(inputs, outputs), samples=16)
        >>> if keras.backend.backend() == "tensorflow":
        ...     path = ibnn.export(mc, tempfile.mkdtemp() + "/1", seed=0)
    """
    kind, options = MonteCarlo, {}
    if isinstance(model, MonteCarlo):
        kind, model, options = type(model), model.inner, model.options()
    elif isinstance(model, PredictionWrapper) and hasattr(model, "serve"):  # a decision
        if samples is not None or seed is not None:
            raise ValueError("`samples` and `seed` are those that `fit` has seen: leave them out.")
        return write_saved_model(model, path, input_signature, overwrite)
    if samples is not None:
        options["samples"] = samples
    if seed is not None or options.get("seed") is None:
        # One that nobody has chosen, which leaves the states of all generators as they are.
        options["seed"] = np.random.SeedSequence().entropy % 2**31 if seed is None else seed
    return write_saved_model(kind(model, **options), path, input_signature, overwrite)
