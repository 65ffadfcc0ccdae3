"""Variational autoencoders, with Gaussian or flow posteriors."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import backend, checks, constraints
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.serialization import SavesRandomState
from tfp_ibnn.conversion.graph import infer
from tfp_ibnn.data.examples import check_finite, labelled_batches
from tfp_ibnn.flows import Flow
from tfp_ibnn.flows.chain import through
from tfp_ibnn.generative.density import FlowDensity
from tfp_ibnn.generative.pixels import LIKELIHOODS
from tfp_ibnn.generative.unsupervised import Unsupervised, as_numbers
from tfp_ibnn.likelihoods.last_layer import activation_of
from tfp_ibnn.posteriors.base import log_normal
from tfp_ibnn.posteriors.flow import copied

_SAMPLES_AT_ONCE = 10


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class VAE(SavesRandomState, Unsupervised):
    """A variational autoencoder: x ~ p(x | decoder(z)), z ~ p(z), and q(z | x) by an encoder.

        z = loc(h) + scale(h) * NF(eps; h),   h = encoder(x),   eps ~ N(0, 1)
        loss = -log p(x | z) + beta * KL[q(z | x) || p(z)],   in nats per example

    Linear maps of h give loc, scale and the parameters of the flows. The KL is a closed form where
    q is Gaussian and p(z) is N(0, 1), else log q(z | x) - log p(z) at the draw. Metrics are `loss`,
    `reconstruction`, -log p(x | z), and `kl`; `predict(x)` gives these two, of sum -ELBO, by row.

    Args:
        encoder: Keras model that turns x into vectors h.
        decoder: Keras model that turns z into logits ("bernoulli") or means, in the shape of x.
        latent_size: size of z.
        flows: flows, applied in order to eps; copied, with new weights. Without them q is Gaussian.
        posterior: "gaussian", or "point" for a plain autoencoder, which has eps = 0 and no KL.
        prior: 1 is N(0, 1); a number of Gaussians, or a new copy of a `FlowDensity`, are trained.
        likelihood: "bernoulli" for x in [0, 1], "discretised_logistic" for x in [0, 1] rounded to
            k / 255, or "gaussian". The latter two learn one scale for all of x.
        beta: weight of the KL, a variable (see `ibnn.KLAnnealing`); 1 is the ELBO.
        free_bits: KL in nats, in the mean of a batch, below which it is not penalised.
        seed: of the draws in `fit`, `evaluate` and `predict`.
        **kwargs: those of `keras.Model`.

    Example:
        >>> import keras, numpy as np, tfp_ibnn as ibnn
        >>> encoder = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu")])
        >>> decoder = keras.Sequential([keras.Input((2,)), keras.layers.Dense(6)])
        >>> vae = ibnn.VAE(encoder, decoder, 2, [ibnn.flows.Planar()])
        >>> vae.encode(np.ones((50, 6))).shape, vae.sample(3, seed=0).shape
        ((50, 2), (3, 6))
    """

    def __init__(
        self,
        encoder: keras.Model,
        decoder: keras.Model,
        latent_size: int,
        flows: Sequence[Flow] = (),
        *,
        posterior: str = "gaussian",
        prior: int | FlowDensity = 1,
        likelihood: str = "bernoulli",
        beta: float = 1.0,
        free_bits: float = 0.0,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**{**kwargs, "dtype": checks.full_precision(kwargs.get("dtype"))})
        self.likelihood = checks.one_of("likelihood", likelihood, tuple(LIKELIHOODS))
        self.posterior = checks.one_of("posterior", posterior, ("gaussian", "point"))
        self.seed = seed
        self.latent_size = checks.positive_integer("latent_size", latent_size)
        self.initial_beta = checks.non_negative("beta", beta)
        self.free_bits = checks.non_negative("free_bits", free_bits)
        x_shape, h_shape = _checked_shapes(encoder, decoder, self.latent_size)
        if likelihood == "bernoulli" and activation_of(decoder) == "sigmoid":
            warnings.warn(
                "`decoder` ends in a sigmoid, but 'bernoulli' takes logits: leave it out.",
                stacklevel=2,
            )
        self.encoder = encoder
        self.decoder = decoder
        self.event_shape = x_shape[1:]
        self.flows = copied(flows, self.dtype, condition_size=h_shape[1])
        self.prior = _copied_prior(prior, self.dtype)
        self.head = keras.layers.Dense(
            2 * self.latent_size,
            dtype=self.dtype,
            name="head",
        )
        self.head.build(h_shape)
        for layer in (*self.flows, self.prior):
            layer.build((None, self.latent_size))
        self._add_scalars(beta)
        self.seed_generator = backend.SeedGenerator(seed)
        self.reconstruction = keras.metrics.Mean("reconstruction")
        self.kl = keras.metrics.Mean("kl")
        self.built = True

    def _add_scalars(self, beta: float) -> None:
        """Add the weight of the KL, and the raw scale of likelihoods that have one."""
        start = keras.initializers.Constant(beta)
        self.beta = self.add_weight((), start, trainable=False, name="beta")
        initial_scale = LIKELIHOODS[self.likelihood].initial_scale
        if initial_scale is not None:
            start = keras.initializers.Constant(constraints.inverse_scale(initial_scale))
            self.raw_scale = self.add_weight((), start, name="raw_scale")

    def call(self, inputs: Any, training: bool = False) -> dict[str, Tensor]:
        """Return the two terms of minus the ELBO, at one draw of z for each example.

        Args:
            inputs: (examples, ...), data.
            training: as in Keras.

        Returns:
            A dict with the keys "reconstruction", -log p(x | z), and "kl", both (examples,) in
            nats.
        """
        eps = backend.normal(
            (1, ops.shape(inputs)[0], self.latent_size),
            self.dtype,
            self.seed_generator,
        )
        h = self.encoder(inputs, training=training)
        reconstruction, kl = self._terms(inputs, h, eps, training)
        return {"reconstruction": reconstruction[0], "kl": kl[0]}

    def example_losses(self, outputs: dict[str, Tensor]) -> Tensor:
        """Return the losses (examples,), by beta and the free bits."""
        kl = outputs["kl"]
        if self.free_bits:  # of the mean: single estimates are noisy
            kl = ops.where(backend.mean(kl) < self.free_bits, self.free_bits, kl)
        return outputs["reconstruction"] + self.beta * kl

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        for name, values in y_pred.items():
            getattr(self, name).update_state(values, sample_weight)
        return self.get_metrics_result()

    def encode(self, x: Any, seed: int | None = None) -> np.ndarray:
        """Return z of q(z | x) for data.

        Args:
            x: (examples, ...), data.
            seed: of a draw of each z; None takes z at eps = 0, the mean if there are no flows.

        Returns:
            z, (examples, latent_size).
        """
        x = self._checked(x)
        shape = (len(x), self.latent_size)
        if seed is None:
            eps = np.zeros(shape, self.dtype)
        else:
            eps = np.random.default_rng(seed).standard_normal(shape, self.dtype)

        def draw(x: Tensor, eps: Tensor) -> Tensor:
            z, *_ = self._draw(infer(self.encoder, x), eps)
            return z

        return _in_batches(draw, x, eps)

    def decode(self, z: Any) -> np.ndarray:
        """Return the means of p(x | z) for z (examples, latent_size)."""
        mean = LIKELIHOODS[self.likelihood].mean

        def decode(z: Tensor, _: Tensor) -> Tensor:
            decoded = infer(self.decoder, z)
            return mean(ops.cast(decoded, self.dtype))

        z = np.asarray(z, self.dtype)
        return _in_batches(decode, z, z)

    def reconstruct(self, x: Any, seed: int | None = None) -> np.ndarray:
        """Return the means of p(x | z) at `encode(x, seed)`.

        Args:
            x: (examples, ...), data.
            seed: of a draw of each z; None takes z at eps = 0.

        Returns:
            Means, of the shape of x.
        """
        return self.decode(self.encode(x, seed))

    def sample(self, number: int, seed: int = 0) -> np.ndarray:
        """Return the means of p(x | z) at draws z of the prior.

        Args:
            number: of draws.
            seed: equal seeds give equal draws.

        Returns:
            Means (number, ...).
        """
        return self.decode(self.prior.sample(number, seed))

    def interpolate(self, first: Any, last: Any, steps: int = 10) -> np.ndarray:
        """Return decoded points on the lines between `encode` of each pair of examples.

        Args:
            first: (examples, ...), where the lines start.
            last: (examples, ...), where they end.
            steps: number of points, both ends included, at least 2.

        Returns:
            Means (examples, steps, ...).
        """
        start = self.encode(first)
        end = self.encode(last)
        if len(start) != len(end):
            raise ValueError(f"`first` has {len(start)} examples, `last` {len(end)}: give pairs.")
        steps = checks.positive_integer("steps", steps, least=2)
        points = []
        for share in np.linspace(0, 1, steps):
            z = start + share * (end - start)
            points.append(self.decode(z))
        return np.stack(points, axis=1)

    def negative_log_likelihood(
        self, x: Any, samples: int = 1000, seed: int = 0, batch_size: int = 100, verbose: Any = 0
    ) -> np.ndarray:
        """Return estimates of -log p(x) by importance sampling from q.

        The estimate is -log mean p(x | z) p(z) / q(z | x), z ~ q: in the mean above -log p(x), and
        closer with more samples.

        Args:
            x: (examples, ...), data.
            samples: draws of z for each example.
            seed: equal seeds give equal estimates.
            batch_size: how many examples to take at once.
            verbose: 1 shows progress, 0 nothing.

        Returns:
            Estimates (examples,) in nats.

        Raises:
            ValueError: for a plain autoencoder, posterior="point".
        """
        if self.posterior == "point":
            raise ValueError("An autoencoder, posterior='point', has no likelihood.")
        samples = checks.positive_integer("samples", samples)
        rng = np.random.default_rng(seed)
        terms = backend.compiled(self._sampled_terms, self.variables)
        x = self._checked(x)
        estimates = []
        for inputs, _ in labelled_batches(x, x, batch_size, verbose):
            h = infer(self.encoder, inputs)
            count = min(samples, _SAMPLES_AT_ONCE)
            shape = (count, len(h), self.latent_size)
            log_weights = []
            while len(log_weights) < samples:
                eps = rng.standard_normal(shape, self.dtype)
                reconstruction, kl = terms(inputs, h, eps)
                costs = ops.convert_to_numpy(reconstruction) + ops.convert_to_numpy(kl)
                log_weights.extend(-costs)
            total = np.logaddexp.reduce(log_weights[:samples], dtype=float)
            estimates.append(math.log(samples) - total)
        return np.concatenate(estimates)

    def get_config(self) -> dict[str, Any]:
        names = "encoder decoder latent_size flows posterior prior likelihood free_bits seed"
        arguments = {name: getattr(self, name) for name in names.split()}
        arguments["beta"] = self.initial_beta
        return {**super().get_config(), **keras.saving.serialize_keras_object(arguments)}

    def _draw(
        self, h: Tensor, eps: Tensor, training: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return z and log q(z | x) of noise (..., examples, latent_size), and loc and scale."""
        h = ops.cast(h, self.dtype)
        loc, raw_scale = ops.split(self.head(h), 2, axis=-1)
        scale = constraints.scale(raw_scale)
        is_point = self.posterior == "point"
        standard, log_det = through(
            self.flows,
            0 * eps if is_point else eps,
            h,
            "forward",
            training=training,
        )
        z = loc + scale * standard
        log_scales = ops.sum(ops.log(scale), axis=-1)
        log_q = log_normal(eps)
        log_q = log_q - log_scales - log_det
        return z, log_q, loc, scale

    def _terms(
        self, x: Tensor, h: Tensor, eps: Tensor, training: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return -log p(x | z) and the KL, (draws, examples), of which the KL may be exact.

        The closed form has no draws: it is (1, examples).
        """
        z, log_q, loc, scale = self._draw(h, eps, training)
        draws = eps.shape[0]
        reconstruction = self._reconstruction(x, z, draws, training)
        if self.posterior == "point":
            return reconstruction, ops.zeros_like(log_q)
        has_flows = self.flows or self.prior.flows
        if has_flows or self.prior.base > 1:
            return reconstruction, self._sampled_kl(z, log_q, draws)
        # Of Gaussians: (loc^2 + scale^2 - 1) / 2 - log scale, summed over the numbers of z.
        squares = loc * loc + scale * scale
        excess = 0.5 * (squares - 1)
        log_scale = ops.log(scale)
        by_number = excess - log_scale
        kl = ops.sum(by_number, axis=-1)
        return reconstruction, kl[None]

    def _sampled_terms(self, x: Tensor, h: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        """Return -log p(x | z) and log q(z | x) - log p(z), both (draws, examples)."""
        z, log_q, *_ = self._draw(h, eps)
        draws = eps.shape[0]
        reconstruction = self._reconstruction(x, z, draws)
        return reconstruction, self._sampled_kl(z, log_q, draws)

    def _sampled_kl(self, z: Tensor, log_q: Tensor, draws: int) -> Tensor:
        """Return log q(z | x) - log p(z) of z (draws, examples, latent_size)."""
        rows = ops.reshape(z, (-1, self.latent_size))
        log_prior = self.prior(rows)
        log_prior = ops.reshape(log_prior, (draws, -1))
        return log_q - log_prior

    def _reconstruction(self, x: Tensor, z: Tensor, draws: int, training: bool = False) -> Tensor:
        """Return -log p(x | z), (draws, examples), of z (draws, examples, latent_size)."""
        rows = ops.reshape(z, (-1, self.latent_size))
        decoded = self.decoder(rows, training=training)
        decoded = ops.reshape(decoded, (draws, -1, *self.event_shape))
        x = ops.cast(x, self.dtype)
        decoded = ops.cast(decoded, self.dtype)
        log_probs = self._log_likelihood(x, decoded)
        axes = tuple(range(2, len(log_probs.shape)))
        return -ops.sum(log_probs, axis=axes)

    def _log_likelihood(self, x: Tensor, decoded: Tensor) -> Tensor:
        """Return log p(x | z) of each number in x."""
        likelihood = LIKELIHOODS[self.likelihood]
        scale = None
        if likelihood.initial_scale is not None:
            scale = constraints.scale(self.raw_scale)
        return likelihood.log_prob(x, decoded, scale)

    def _checked(self, x: Any) -> np.ndarray:
        """Return data as an array, or raise."""
        x = as_numbers(x, self.dtype)
        if x.shape[1:] != self.event_shape or not x.size:
            raise ValueError(f"`x` must be examples of shape {self.event_shape}; got {x.shape}.")
        check_finite(x, "values of `x`")
        low = x.min()
        high = x.max()
        if self.likelihood != "gaussian" and (low < 0 or high > 1):
            raise ValueError(f"`x` must be in [0, 1]; got values from {low:g} to {high:g}.")
        return x


def _in_batches(function: Callable[..., Tensor], *arrays: np.ndarray) -> np.ndarray:
    """Return what a function makes of two arrays, a thousand rows at a time."""
    results = []
    for parts in labelled_batches(*arrays, 1000):
        result = function(*parts)
        results.append(ops.convert_to_numpy(result))
    return np.concatenate(results)


def _checked_shapes(encoder: Any, decoder: Any, size: int) -> tuple[Any, Any]:
    """Return the shapes of x and of the encoder's vectors, or raise."""
    x_shape = getattr(encoder, "input_shape", None)
    h_shape = getattr(encoder, "output_shape", None)
    z_shape = getattr(decoder, "input_shape", None)
    decoded_shape = getattr(decoder, "output_shape", None)
    are_vectors = len(h_shape or ()) == 2
    if not are_vectors or z_shape != (None, size) or decoded_shape != x_shape:
        raise ValueError(
            f"`encoder` must turn x into vectors and `decoder` {(None, size)} into x; their input "
            f"and output shapes are {[x_shape, h_shape, z_shape, decoded_shape]}."
        )
    return x_shape, h_shape


def _copied_prior(prior: Any, dtype: str) -> FlowDensity:
    """Return a new copy of a density, or a mixture of so many Gaussians, or raise."""
    if not isinstance(prior, FlowDensity):
        prior = FlowDensity([], base=checks.positive_integer("prior", prior))
    if prior.condition is not None or prior.surjection is not None:
        raise ValueError("`prior` must be a density without a condition or a surjection.")
    return FlowDensity.from_config({**prior.get_config(), "dtype": dtype})
