"""Independent Gaussians over the weights of a layer."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks, constraints
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.protocols import Draw
from tfp_ibnn.layers.estimators import ESTIMATORS
from tfp_ibnn.layers.mean_field import MeanFieldLayer
from tfp_ibnn.posteriors import priors
from tfp_ibnn.posteriors.earlier import Earlier, copy_values
from tfp_ibnn.posteriors.template import Template

Noise = Callable[[tuple[int, ...]], Tensor]
"""Gives standard normal noise of a shape."""

_REGULARIZERS = ("kernel_regularizer", "depthwise_regularizer", "pointwise_regularizer")
_OPTIONS_OF_Z = ("noise", "kl_reduction")


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class MeanField(Template):
    """Gaussian weights, independent of each other: w = mean + scale * eps, eps ~ N(0, 1).

    The means are the kernel of the layer itself, so pretrained weights carry over, and
    `to_deterministic` gives them back. A scale per weight doubles the number of parameters.

    The estimators differ in training only, in the variance of the gradient:
    - "flipout", the default: one weight draw for the batch, with random signs for each example
      (arXiv 1803.04386);
    - "shared": one weight draw for the batch, as in Bayes by Backprop (1505.05424);
    - "local": the output is drawn instead of the weights, independently for each example. For Dense
      layers on vectors, called once in a pass: elsewhere this is another model (1506.02557).
    Subclasses of Keras's layers, which may not be linear in their kernel, train by "shared".
    All predictions use explicit weights, one draw for each of the `samples` of `MonteCarlo`.

    Args:
        prior: of each weight, such as `ibnn.priors.ScaleMixture()`, or a distribution with a method
            `log_prob`, such as a `tfd.Distribution`. None is N(0, prior_scale^2). The KL is in
            closed form for Gaussians, and estimated by a weight draw of its own for others.
        prior_scale: standard deviation of the prior if `prior` is None; 1 by default.
        initial_scale: the scales at the start.
        moped: the start and prior of MOPED (arXiv 1906.05323), for pretrained models: the prior
            moves to the weights at conversion, and the scales start at this fraction of their size.
        estimator: "flipout", "shared" or "local".
        bias: "deterministic", or "stochastic" for a scale per bias, too.
        **kwargs: `beta`, `gamma` and `seed`, those of `Template`, and of `keras.layers.Layer`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> det = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        >>> sto = ibnn.to_stochastic(det, ibnn.MeanField(prior_scale=0.5), train_size=100)
        >>> sto.count_params() - det.count_params()  # 12 scales; 4 numbers that are not trained
        16
    """

    wrapper: type[MeanFieldLayer] = MeanFieldLayer
    """The layer that `wrap` makes."""

    def __init__(
        self,
        *,
        prior: Any = None,
        prior_scale: float | None = None,
        initial_scale: float = 0.01,
        moped: float | None = None,
        estimator: str = "flipout",
        bias: str = "deterministic",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if prior is not None and prior_scale is not None:
            raise ValueError("Give the scale to the `prior` itself, and leave `prior_scale` out.")
        self.prior = None if prior is None else priors.checked(prior)
        self.prior_scale = prior_scale
        self._prior = self.prior
        if self._prior is None:
            self._prior = priors.Normal(1.0 if prior_scale is None else prior_scale)
        self.initial_scale = checks.positive("initial_scale", initial_scale)
        self.moped = None if moped is None else checks.positive("moped", moped)
        self.estimator = checks.one_of("estimator", estimator, ESTIMATORS)
        self.bias = checks.one_of("bias", bias, ("deterministic", "stochastic"))

    def build(self, input_shape: Mapping[str, tuple[int, ...]]) -> None:
        """Add the scales of weights, whose shapes are given by their names."""
        super().build(input_shape)
        raw_scale = keras.initializers.Constant(constraints.inverse_scale(self.initial_scale))
        self.raw_scales = []
        self.prior_locs = []
        self.prior_scales = []
        for name, shape in input_shape.items():
            self._prior.check(name, tuple(shape))
            self.raw_scales.append(self._add_parameter(f"{name}_raw_scale", shape, raw_scale))
            if self.moped is not None or self._follows_task:
                loc = self._add_parameter(f"{name}_prior_loc", shape, "zeros", trainable=False)
                self.prior_locs.append(loc)
            if self._follows_task:
                scale = self._add_parameter(f"{name}_prior_scale", shape, "ones", trainable=False)
                self.prior_scales.append(scale)

    @property
    def _follows_task(self) -> bool:
        """Whether the prior is the posterior of an earlier task."""
        return isinstance(self._prior, Earlier)

    @property
    def pulls_means(self) -> bool:
        """Whether the KL acts on the means, and not on the scales alone."""
        return not isinstance(self._prior, priors.Tied)

    def start_at(self, weights: Sequence[Any]) -> None:
        """Take weights as the prior's location, and the scales from their sizes, if asked to."""
        if self.moped is None:
            return
        copy_values(self.prior_locs, weights)
        for raw_scale, weight in zip(self.raw_scales, weights, strict=True):
            size = np.abs(ops.convert_to_numpy(weight))
            scale = np.maximum(self.moped * size, 10 * constraints.MIN_SCALE)
            raw_scale.assign(constraints.inverse_scales(scale))

    def scales(self) -> list[Tensor]:
        """Return the standard deviations of the weights."""
        return [constraints.scale(ops.convert_to_tensor(raw)) for raw in self.raw_scales]

    def centers(self, means: Sequence[Tensor]) -> list[Tensor]:
        """Return the means of the weights of a layer whose own weights are given."""
        return list(means)

    def kl_and_entropy(self, means: Sequence[Tensor], normal: Noise) -> tuple[Tensor, Tensor]:
        """Return the KL to the prior and the entropy, of all random weights together.

        Args:
            means: of the random weights, in the order of `scales`.
            normal: gives standard normal noise of a shape, should an estimate need it.

        Returns:
            Both in nats, ().
        """
        kl = 0.0
        entropy = 0.0
        scales = self.scales()
        for loc, scale in self._seen_from_prior(means, scales):
            kl += self._prior.kl(loc, scale, functools.partial(normal, scale.shape))
        for scale in scales:
            entropy += priors.gaussian_entropy(scale)
        return kl, entropy

    def _seen_from_prior(
        self, means: Sequence[Tensor], scales: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """Return means and scales where those of the prior are 0 and 1, as far as it has any."""
        pairs = []
        for number, (loc, scale) in enumerate(zip(means, scales, strict=True)):
            if self.prior_locs:
                loc = loc - self.prior_locs[number]
            loc = ops.cast(loc, scale.dtype)
            if self.prior_scales:
                unit = 1 / ops.convert_to_tensor(self.prior_scales[number])
                loc = loc * unit
                scale = scale * unit
            pairs.append((loc, scale))
        return pairs

    def for_next_task(self) -> "MeanField":
        return self.copy(prior=Earlier(), prior_scale=None, moped=None)

    def continue_from(self, posterior: "MeanField", means: Sequence[Tensor] = ()) -> None:
        copy_values(self.raw_scales, posterior.raw_scales)
        copy_values(self.prior_locs, means)
        copy_values(self.prior_scales, posterior.scales())
        state = self.seed_generator.state
        copy_values([self.beta, state], [posterior.beta, posterior.seed_generator.state])

    def spreads(self, means: Sequence[Tensor]) -> list[Tensor]:
        """Return the standard deviations of the weights of a layer whose own weights are given."""
        return self.scales()

    def summary(self, means: Sequence[Tensor] = ()) -> Draw:
        """Return weights one standard deviation above and below their means, KL and entropy."""
        rng = np.random.default_rng(0)

        def fixed_noise(shape: tuple[int, ...]) -> Tensor:
            return ops.cast(rng.standard_normal(tuple(shape)), self.dtype)

        centers = self.centers(means)
        spreads = self.spreads(means)
        both_sides = []
        for center, spread in zip(centers, spreads, strict=True):
            sides = ops.stack([center - spread, center + spread])
            both_sides.append(ops.reshape(sides, (2, -1)))
        weights = ops.concatenate(both_sides, axis=1)
        kl, entropy = self.kl_and_entropy(means, fixed_noise)
        return Draw(weights, kl, entropy)

    def wrap(self, layer: keras.layers.Layer, train_size: int, **options: Any) -> MeanFieldLayer:
        penalties = [name for name in _REGULARIZERS if getattr(layer, name, None) is not None]
        if penalties and self.pulls_means:
            remedy = "use prior=ibnn.priors.Tied(scale), which leaves means alone"
            checks.warn_of_regularizer(f"Layer {layer.name!r}", penalties[0], remedy)
        own = {name: value for name, value in options.items() if name not in _OPTIONS_OF_Z}
        return self.wrapper(layer, self, train_size, **own)
