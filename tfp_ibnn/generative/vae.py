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
from tfp_ibnn.generative.density import FlowDensity, Unsupervised
from tfp_ibnn.likelihoods.last_layer import activation_of
from tfp_ibnn.posteriors.base import log_normal
from tfp_ibnn.posteriors.flow import copied


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
        checks.one_of("likelihood", likelihood, ("bernoulli", "gaussian", "discretised_logistic"))
        checks.one_of("posterior", posterior, ("gaussian", "point"))
        self.likelihood, self.posterior, self.seed = likelihood, posterior, seed
        self.latent_size = size = checks.positive_integer("latent_size", latent_size)
        self.initial_beta = checks.non_negative("beta", beta)
        self.free_bits = checks.non_negative("free_bits", free_bits)
        sides = ("input_shape", "output_shape")
        x, h, *decoded = shapes = [getattr(m, s, None) for m in (encoder, decoder) for s in sides]
        if len(h or ()) != 2 or decoded != [(None, size), x]:
            wanted = f"`encoder` must turn x into vectors and `decoder` {(None, size)} into x"
            raise ValueError(f"{wanted}; their input and output shapes are {shapes}.")
        if likelihood == "bernoulli" and activation_of(decoder) == "sigmoid":
            problem = "`decoder` ends in a sigmoid, but 'bernoulli' takes logits: leave it out."
            warnings.warn(problem, stacklevel=2)
        if not isinstance(prior, FlowDensity):
            prior = FlowDensity([], base=checks.positive_integer("prior", prior))
        if prior.condition is not None or prior.surjection is not None:
            raise ValueError("`prior` must be a density without a condition or a surjection.")
        self.encoder, self.decoder, self.event_shape = encoder, decoder, x[1:]
        self.flows = copied(flows, self.dtype, condition_size=h[1])
        self.prior = FlowDensity.from_config({**prior.get_config(), "dtype": self.dtype})
        self.head = keras.layers.Dense(2 * size, dtype=self.dtype, name="head")
        self.head.build(h)
        for layer in (*self.flows, self.prior):
            layer.build((None, size))
        initial = keras.initializers.Constant
        self.beta = self.add_weight((), initial(beta), trainable=False, name="beta")
        if likelihood != "bernoulli":
            raw = initial(constraints.inverse_scale(1.0 if likelihood == "gaussian" else 0.1))
            self.raw_scale = self.add_weight((), raw, name="raw_scale")
        self.seed_generator = backend.SeedGenerator(seed)
        self.reconstruction, self.kl = map(keras.metrics.Mean, ("reconstruction", "kl"))
        self.built = True

    def call(self, inputs: Any, training: bool = False) -> dict[str, Tensor]:
        """Return `reconstruction` and `kl` (examples,), in nats, at one draw of z each."""
        shape = (1, ops.shape(inputs)[0], self.latent_size)
        eps = backend.normal(shape, self.dtype, self.seed_generator)
        terms = self._terms(inputs, self.encoder(inputs, training=training), eps, training)
        return {"reconstruction": terms[0][0], "kl": terms[1][0]}

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
        """Return draws of q(z | x) by a seed, or z at eps = 0: the mean if there are no flows."""
        x, eps = self._checked(x), np.zeros((len(x), self.latent_size), self.dtype)
        if seed is not None:
            eps = np.random.default_rng(seed).standard_normal(eps.shape, self.dtype)
        return _in_batches(lambda x, e: self._draw(infer(self.encoder, x), e)[0], x, eps)

    def decode(self, z: Any) -> np.ndarray:
        """Return the means of p(x | z) for z (examples, latent_size)."""
        links = {"bernoulli": ops.sigmoid, "discretised_logistic": lambda x: ops.clip(x, 0, 1)}
        link, z = links.get(self.likelihood, ops.copy), np.asarray(z, self.dtype)
        return _in_batches(lambda z, _: link(ops.cast(infer(self.decoder, z), self.dtype)), z, z)

    def reconstruct(self, x: Any, seed: int | None = None) -> np.ndarray:
        """Return the means of p(x | z) at `encode(x, seed)`."""
        return self.decode(self.encode(x, seed))

    def sample(self, number: int, seed: int = 0) -> np.ndarray:
        """Return the means of p(x | z) at `number` draws z of the prior."""
        return self.decode(self.prior.sample(number, seed))

    def interpolate(self, first: Any, last: Any, steps: int = 10) -> np.ndarray:
        """Return (examples, steps, ...): decoded points on lines between `encode` of each pair."""
        first, last = self.encode(first), self.encode(last)
        if len(first) != len(last):
            raise ValueError(f"`first` has {len(first)} examples, `last` {len(last)}: give pairs.")
        share = np.linspace(0, 1, checks.positive_integer("steps", steps, least=2))
        return np.stack([self.decode(first + each * (last - first)) for each in share], axis=1)

    def negative_log_likelihood(
        self, x: Any, samples: int = 1000, seed: int = 0, batch_size: int = 100, verbose: Any = 0
    ) -> np.ndarray:
        """Return estimates of -log p(x), (examples,): -log mean p(x | z) p(z) / q(z | x), z ~ q."""
        if self.posterior == "point":
            raise ValueError("An autoencoder, posterior='point', has no likelihood.")
        samples, rng = checks.positive_integer("samples", samples), np.random.default_rng(seed)
        run = backend.compiled(lambda *args: self._terms(*args, closed=False), self.variables)
        x, found = self._checked(x), []
        for inputs, _ in labelled_batches(x, x, batch_size, verbose):
            h = infer(self.encoder, inputs)
            shape, logs = (min(samples, 10), len(h), self.latent_size), []
            while len(logs) < samples:
                terms = run(inputs, h, rng.standard_normal(shape, self.dtype))
                logs.extend(-sum(map(ops.convert_to_numpy, terms)))
            found.append(math.log(samples) - np.logaddexp.reduce(logs[:samples], dtype=float))
        return np.concatenate(found)

    def get_config(self) -> dict[str, Any]:
        names = "encoder decoder latent_size flows posterior prior likelihood free_bits seed"
        own = {"beta": self.initial_beta, **{name: getattr(self, name) for name in names.split()}}
        return {**super().get_config(), **keras.saving.serialize_keras_object(own)}

    def _draw(self, h: Tensor, eps: Tensor, training: bool = False) -> tuple[Tensor, ...]:
        """Return z and log q(z | x) of noise (..., examples, latent_size), and loc and scale."""
        h = ops.cast(h, self.dtype)
        loc, raw = ops.split(self.head(h), 2, axis=-1)
        scale, z = constraints.scale(raw), eps if self.posterior == "gaussian" else 0 * eps
        z, log_det = through(self.flows, z, h, "forward", training=training)
        log_q = log_normal(eps) - ops.sum(ops.log(scale), axis=-1) - log_det
        return loc + scale * z, log_q, loc, scale

    def _terms(
        self, x: Tensor, h: Tensor, eps: Tensor, training: bool = False, closed: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return -log p(x | z) and the KL (draws, examples) at eps (draws, examples, ...)."""
        z, log_q, loc, scale = self._draw(h, eps, training)
        draws, z = eps.shape[0], ops.reshape(z, (-1, self.latent_size))
        decoded = ops.reshape(self.decoder(z, training=training), (draws, -1, *self.event_shape))
        logs = self._log_likelihood(ops.cast(x, self.dtype), ops.cast(decoded, self.dtype))
        reconstruction = -ops.sum(logs, axis=tuple(range(2, len(logs.shape))))
        kl = log_q - ops.reshape(self.prior(z), (draws, -1))
        if closed and not self.flows and not self.prior.flows and self.prior.base == 1:
            kl = ops.sum(0.5 * (loc * loc + scale * scale - 1) - ops.log(scale), axis=-1)[None]
        return reconstruction, kl if self.posterior == "gaussian" else ops.zeros_like(kl)

    def _log_likelihood(self, x: Tensor, decoded: Tensor) -> Tensor:
        """Return log p(x | z) of each number in x."""
        if self.likelihood == "bernoulli":
            return x * decoded - ops.softplus(decoded)
        scale = constraints.scale(self.raw_scale)
        if self.likelihood == "gaussian":
            distance = (x - decoded) / scale
            return -0.5 * (distance * distance + math.log(2 * math.pi)) - ops.log(scale)
        # sigmoid(b) - sigmoid(a) = sigmoid(b) sigmoid(-a) (1 - exp(a - b)); the ends are open.
        x, half = ops.round(255 * x) / 255, 0.5 / (255 * scale)
        distance = (x - decoded) / scale
        below, above = ops.log_sigmoid(half + distance), ops.log_sigmoid(half - distance)
        inside = below + above + ops.log(-ops.expm1(-2 * half))
        return ops.where(x <= 0, below, ops.where(x >= 1, above, inside))

    def _checked(self, x: Any) -> np.ndarray:
        """Return data as an array, or raise."""
        x = np.asarray(x, dtype=self.dtype)
        if x.shape[1:] != self.event_shape or not x.size:
            raise ValueError(f"`x` must be examples of shape {self.event_shape}; got {x.shape}.")
        check_finite(x, "values of `x`")
        if self.likelihood != "gaussian" and (x.min() < 0 or x.max() > 1):
            raise ValueError(f"`x` must be in [0, 1]; got values from {x.min():g} to {x.max():g}.")
        return x


def _in_batches(function: Callable[..., Tensor], *arrays: np.ndarray) -> np.ndarray:
    return np.concatenate(
        [ops.convert_to_numpy(function(*x)) for x in labelled_batches(*arrays, 1000)]
    )
