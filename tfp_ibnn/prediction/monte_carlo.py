"""Prediction by many sampled networks: a Keras model."""

import random
from typing import Any, Self

import keras
import numpy as np
from keras import ops

from tfp_ibnn import noise
from tfp_ibnn._core import checks, keras_internals
from tfp_ibnn._core.backend import NETWORK, REPLICA_STRIDE, Tensor, replica_id
from tfp_ibnn._core.protocols import Chunks, Sampler, WeightPosterior
from tfp_ibnn._core.unrolling import is_unrolled
from tfp_ibnn.conversion.wrappers import PredictionWrapper
from tfp_ibnn.likelihoods.infer import likelihood_of
from tfp_ibnn.noise import counter
from tfp_ibnn.prediction import validation
from tfp_ibnn.prediction.batch_norm import BatchStatistics
from tfp_ibnn.prediction.exporting import Exports
from tfp_ibnn.prediction.noise_sampler import NoiseSampler
from tfp_ibnn.prediction.padding import output_masks
from tfp_ibnn.prediction.summary import Wanted, average, of_one
from tfp_ibnn.prediction.verbs import PredictingModel


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class MonteCarlo(Exports, PredictionWrapper, PredictingModel):
    """Average a stochastic model over draws of its noise, and split the uncertainty.

    A Keras model: `predict` returns a dict with the mean, the variances and the entropies,
    `evaluate` scores the mean, and both say what each of their keys is.

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
        batch_norm: training inputs, as arrays or a dataset of batches: each draw has batch
            normalization by the statistics of one mini-batch of them (MC batch normalization), of
            32 examples if they are arrays. They are computed here, once, and saved with the model;
            of a dataset with fewer batches than `samples` there is one draw for each.
        return_samples: return `samples` (N, draws, K) too; of a `GaussianHead`, the means. Their
            memory grows with `samples`, as it does for the intervals.
        interval: probability of a central interval, such as 0.9; returns `lower` and `upper`, its
            bounds (N, K): of the draws, or, with a `GaussianHead` or a `QuantileHead` of these
            levels, of new observations. Other numbers warn, since few observations lie within the
            draws: see `Conformal`.
        standard_error: return `standard_error` (N, K), that of the mean of iid draws.
        **kwargs: those of `keras.Model`.

    Attributes:
        inner: the model that is averaged.
        samples: number of draws: fewer than asked for if there are no more, 1 without noise.
        likelihood: what the outputs mean.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> inputs = keras.Input((3,))
        >>> outputs = ibnn.StochasticDense(2, activation="softmax", train_size=100)(inputs)
        >>> mc = ibnn.MonteCarlo(keras.Model(inputs, outputs), samples=16, seed=0)
        >>> x = keras.ops.ones((5, 3))
        >>> sorted(mc.predict(x, verbose=0))
        ['aleatoric', 'entropy', 'epistemic', 'mean', 'total_variance', 'variance']
        >>> sorted(mc.evaluate(x, keras.ops.zeros(5), verbose=0, return_dict=True))
        ['accuracy', 'brier', 'ece', 'loss', 'nll']
    """

    batch_norm = None  # once it is made: `inner` has the statistics

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
        batch_norm: Any = None,
        return_samples: bool = False,
        interval: float | None = None,
        standard_error: bool = False,
        **kwargs: Any,
    ) -> None:
        if isinstance(model, MonteCarlo):
            raise ValueError(f"`model` is already a MonteCarlo: {model.name!r}.")
        network = validation.check_model(model, dropout)
        samples = checks.positive_integer("samples", samples)
        checks.one_of("sampling", sampling, noise.SAMPLINGS)
        if chunk_size is not None:
            chunk_size = checks.positive_integer("chunk_size", chunk_size)
        if seed is not None:
            seed = checks.whole("seed", seed)
        if interval is not None:
            interval = checks.probability("interval", interval)
        if standard_error:
            validation.check_standard_error(samples, sampling)
        likelihood = likelihood_of(network, head, from_logits)
        if interval is not None:
            validation.check_interval(likelihood, interval)
        model = _with_batch_norm(model, batch_norm, samples, seed)
        # Inputs reach the model as they are; it knows best which precision it needs.
        super().__init__(**{"autocast": False, **kwargs})
        self.inner = model
        self.head = head
        self.from_logits = from_logits
        self.seed = seed
        self.sampling = sampling
        self.independent = bool(independent)
        self.chunk_size = chunk_size
        self.dropout = bool(dropout)
        self.return_samples = bool(return_samples)
        self.interval = interval
        self.standard_error = bool(standard_error)
        self._requested_samples = samples
        self._sampler = self._make_sampler()
        self.samples = self._sampler.samples
        self._key = self._add_counter("key", (2,))
        self._batch = self._add_counter("batch", ())
        self.likelihood = likelihood
        self._scores = likelihood.scores()
        self._masks = output_masks(network)
        self.built = True
        self.resample()
        self.compile()

    def _make_sampler(self) -> Sampler:
        options = {
            "sampling": self.sampling,
            "independent": self.independent,
            "chunk_size": self.chunk_size,
            "dropout": self.dropout,
        }
        samples = self._requested_samples
        if isinstance(self.inner, WeightPosterior):
            return self.inner.sampler(samples, **options)
        # Draws that no seed repeats may be made in the fastest way.
        is_portable = self.seed is not None
        return NoiseSampler(self.inner, samples, portable=is_portable, **options)

    def _add_counter(self, name: str, shape: tuple[int, ...]) -> keras.Variable:
        return self.add_weight(shape, "zeros", dtype="int", trainable=False, name=name)

    def resample(self) -> None:
        """Draw new networks; with a seed, the same ones again."""
        seed = random.getrandbits(64) if self.seed is None else self.seed
        self._key.assign(counter.key_from_seed(seed))
        self._batch.assign(0)

    def call(self, inputs: Any) -> dict[str, Tensor]:
        """Return the dict that `predict` describes, for one batch."""
        stream = self._next_stream() if self.independent else 0
        prediction = self.average(inputs, stream)
        if self._masks is not None:
            # Here, since on JAX the network has no weights where metrics are computed.
            predictions = self.likelihood.split(prediction)
            for name, mask in self._masks(inputs).items():
                keras_internals.set_mask(predictions[name]["mean"], mask)
        return prediction

    def _next_stream(self) -> Tensor:
        """Return the number of this batch on this replica, and count it."""
        # A cast, which reads at once: the variable itself would be read after it has counted.
        batch = ops.cast(self._batch, "int32")
        stream = batch + replica_id() * REPLICA_STRIDE
        self._batch.assign(self._batch + 1)
        return stream

    def average(self, inputs: Any, stream: int | Tensor = 0) -> dict[str, Tensor]:
        """Do as a call does, but without state.

        Args:
            inputs: a batch, as the model takes it.
            stream: chooses among `independent` draws, which differ for each batch.

        Returns:
            The dict that `predict` describes, of tensors.
        """
        first, second = ops.unstack(ops.cast(self._key, "int32"), num=2)
        stream = ops.cast(stream, "int32")
        key = ops.stack([first + stream, second])
        chunks = self._chunks(inputs, key)
        wanted = Wanted(self.samples, self.return_samples, self.interval, self.standard_error)
        return average(self.likelihood, chunks, wanted)

    serve = average

    def _chunks(self, inputs: Any, key: Tensor) -> Chunks:
        """Return the sampled networks on a batch."""
        if not is_unrolled():
            return self._sampler.chunks(inputs, key)
        with keras.name_scope(NETWORK):
            chunks = self._sampler.unrolled(inputs, key)

        def run(first: int) -> Any:
            with keras.name_scope(NETWORK):
                return chunks.run(first)

        return chunks._replace(run=run)

    def draw(self, inputs: Any, number: int | Tensor) -> dict[str, Tensor]:
        """Return the prediction of one sampled network.

        Args:
            inputs: a batch, as the model takes it.
            number: which network; 0 to `samples` - 1 are those that are averaged.

        Returns:
            A dict with `mean` and `aleatoric`, or `quantiles`; of several outputs, one for each by
            name.
        """
        key = ops.cast(self._key, "int32")
        outputs = self._sampler.draw(inputs, key, number)
        return of_one(self.likelihood, outputs)

    def at_mean(self, inputs: Any) -> dict[str, Tensor]:
        """Return `mean` and `aleatoric` of the network without noise, at the posterior mean."""
        outputs = self._sampler.at_mean(inputs)
        return of_one(self.likelihood, outputs)

    def compute_output_spec(self, inputs: Any) -> Any:
        raise NotImplementedError("MonteCarlo is called on data, not in a Functional model.")

    def with_fixed_draws(self, samples: int | None = None, seed: int | None = None) -> Self:
        """Return a `MonteCarlo` of the same model whose draws have a seed.

        Args:
            samples: number of draws; None takes this model's.
            seed: of the draws; None takes this model's, or a random one.

        Returns:
            A model with the other options of this one.
        """
        options = self.options()
        if samples is not None:
            options["samples"] = samples
        options["seed"] = fixed_seed(self.seed if seed is None else seed)
        return type(self)(self.inner, **options)

    def get_config(self) -> dict[str, Any]:
        head = keras.saving.serialize_keras_object(self.head)
        return {**super().get_config(), **self.options(), "head": head}

    def options(self) -> dict[str, Any]:
        """Return the constructor's arguments but for the model."""
        names = MonteCarlo.__init__.__kwdefaults__  # all that are keywords only
        options = {name: getattr(self, name) for name in names}
        return {"samples": self._requested_samples, **options}


def _with_batch_norm(model: Any, data: Any, samples: int, seed: int | None) -> Any:
    """Return networks with the statistics of mini-batches of data; without data the model."""
    if data is None:
        return model
    if isinstance(model, WeightPosterior):
        raise ValueError(
            f"`batch_norm` is for a Keras model; got a {type(model).__name__}, which has its own "
            "statistics for each set of weights. Leave it out."
        )
    return BatchStatistics.of(model, data, samples, seed=seed)


def fixed_seed(seed: int | None) -> int:
    """Return a seed; for None one that leaves the states of all generators as they are."""
    if seed is None:
        return np.random.SeedSequence().entropy % 2**31
    return seed
