"""A layer whose weights are independent Gaussians."""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import layers, ops
from keras.backend import is_float_dtype

from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.protocols import Draw, PosteriorTemplate
from tfp_ibnn.layers.base import CONVERTIBLE, StochasticLayer, is_known
from tfp_ibnn.layers.blocks import by_block
from tfp_ibnn.layers.estimators import Explicit, Flipped, Local, sign_shapes
from tfp_ibnn.noise import Pass, current

_KERNELS = ("kernel", "depthwise_kernel", "pointwise_kernel")
_LEAST_VARIANCE = 1e-16  # the square root has no derivative at 0, where an input is all zeros


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class MeanFieldLayer(StochasticLayer):
    """Wrap a layer: its kernel is the mean of a Gaussian whose scales are in the posterior.

    `MeanField.wrap` and `to_stochastic` make it.

    Args:
        layer: one of the layers that `to_stochastic` converts.
        posterior: a `MeanField` template, or one with the same methods.
        train_size: number of training examples.
        seed: of the noise.
        **kwargs: those of `keras.layers.Layer`.
    """

    draws_ahead = False  # a set of weights is large

    def __init__(
        self,
        layer: keras.layers.Layer,
        posterior: PosteriorTemplate,
        train_size: int | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(layer, posterior, train_size, seed, **kwargs)
        if not isinstance(layer, CONVERTIBLE):
            kinds = ", ".join(kind.__name__ for kind in CONVERTIBLE)
            raise ValueError(f"MeanField needs one of {kinds}; got {layer!r}.")
        self._estimator = self.posterior.estimator
        if self._estimator == "local" and type(layer) is not layers.Dense:
            raise self._not_local(f"it is {type(layer).__name__}")
        if not is_known(layer):
            self._estimator = "shared"  # the others need outputs that are linear in the kernel
        self.activity_regularizer = layer.activity_regularizer

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        layer = self.layer
        if self._estimator == "local" and len(input_shape) != 2:
            raise self._not_local(f"its input has the shape {tuple(input_shape)}")
        self._input_shape = tuple(input_shape)
        if not layer.built:
            layer.build(input_shape)
        self._kernels = [name for name in _KERNELS if hasattr(layer, name)]
        self._random = list(self._kernels)
        if self.posterior.bias == "stochastic" and self._bias() is not None:
            self._random.append("bias")
        for name in self._random:
            self._check_is_float(name)
        self.forbid("quantize", "enable_lora")
        shapes = {name: tuple(getattr(layer, name).shape) for name in self._random}
        self._shapes = list(shapes.values())
        if self._estimator == "flipout":
            self._sign_shapes = sign_shapes(layer, self._input_shape)
        self.posterior.build(shapes)
        self.posterior.start_at(self._means())
        super().build(input_shape)
        self.input_spec = layer.input_spec

    def _check_is_float(self, name: str) -> None:
        """Raise if a weight of the layer cannot have noise."""
        weight = getattr(self.layer, name)
        if not isinstance(weight, keras.Variable) or not is_float_dtype(weight.dtype):
            raise ValueError(
                f"MeanField needs a layer without quantization or LoRA, whose `{name}` is a "
                f"floating-point variable; got {self.layer.name!r}. Use a posterior over z for it, "
                "such as ibnn.NormalAffine(), by patterns of layer names."
            )

    @property
    def prior_on_weights(self) -> bool:
        return self.posterior.pulls_means

    @property
    def draw_size(self) -> int:
        return sum(math.prod(shape) for shape in self._shapes)

    def call(self, inputs: Tensor, mask: Any = None, training: bool | None = None) -> Tensor:
        latent = current().recall(self)
        if latent is not None and isinstance(self._noise_in(latent), Local):
            raise self._not_local("it is called twice in one pass")
        return super().call(inputs, mask=mask, training=training)

    def _noise_in(self, latent: Any) -> Explicit | Flipped | Local:
        """Return the noise of the weights in a latent, which may have more parts."""
        return latent

    def draw(
        self, forward_pass: Pass, count: int | Tensor, inputs: Any = None, training: bool = False
    ) -> Draw:
        noise = self._noise(forward_pass, count, training)
        if not forward_pass.losses:
            return self._without_kl(noise)
        kl, entropy = self._kl_and_entropy(forward_pass)
        return Draw(noise, kl, entropy)

    def _noise(
        self, forward_pass: Pass, count: int | Tensor, training: bool
    ) -> Explicit | Flipped | Local:
        """Return the noise of the weights in a pass; 0 if it is switched off.

        Training draws as the estimator says. Otherwise it is a set of weights for each block of a
        pass in groups, or each example of a pass that numbers its draws, or else one for all.
        """
        source = forward_pass.source
        if source.sampling == "qmc":
            raise ValueError(
                "Quasi-random draws have too few dimensions for weights. Write "
                'sampling="antithetic" or "iid".'
            )
        switch = ops.cast(self.noise_switch > 0.5, self.posterior.dtype)
        normal = functools.partial(self._normal(forward_pass), stddev=switch)
        as_estimated = training and forward_pass.groups is None
        if as_estimated and self._estimator == "local":
            return Local(normal(count, (self.layer.units,)))
        sets = self._sets(forward_pass, count)
        noise = [normal(sets, shape) for shape in self._shapes]
        if not as_estimated or self._estimator != "flipout":
            return Explicit(noise)
        sign = functools.partial(source.sign, count, **self._kind_of_numbers())
        sign_in, sign_out = map(sign, self._sign_shapes)
        return Flipped(noise, sign_in, sign_out)

    def _normal(self, forward_pass: Pass) -> Callable[..., Tensor]:
        """Return the function (count, shape, stddev=1) that draws the normal numbers of a pass."""
        return functools.partial(forward_pass.source.normal, **self._kind_of_numbers())

    def _kind_of_numbers(self) -> dict[str, Any]:
        return {"dtype": self.posterior.dtype, "generator": self.posterior.seed_generator}

    def _without_kl(self, latent: Any) -> Draw:
        """Return a draw in a pass where KL and entropy do not count."""
        zero = ops.zeros((), dtype=self.posterior.dtype)
        return Draw(latent, zero, zero)

    def _kl_and_entropy(self, forward_pass: Pass, *of_draw: Any) -> tuple[Tensor, Tensor]:
        """Return both for the layer's weights.

        Args:
            forward_pass: gives noise, should an estimate need it.
            *of_draw: what else the posterior takes.
        """
        normal = self._normal(forward_pass)

        def one(shape: tuple[int, ...]) -> Tensor:
            return normal(1, shape)[0]

        return self.posterior.kl_and_entropy(self._means(), one, *of_draw)

    def apply(
        self,
        inputs: Tensor,
        latent: Any,
        groups: int | Tensor | None = None,
        mask: Tensor | None = None,
        training: bool = False,
    ) -> Tensor:
        inputs = ops.cast(inputs, self.layer.compute_dtype)
        if not is_known(self.layer):
            return self._outputs_of_subclass(inputs, latent, mask, training)
        outputs = self._outputs(inputs, latent)
        if self.layer.activation is None:
            return outputs
        return self.layer.activation(outputs)

    def spread(self, latent: Any, rows: int | Tensor) -> Any:
        if isinstance(self._noise_in(latent), Explicit):
            return latent  # weights are multiplied with blocks of rows
        return super().spread(latent, rows)

    def mean_latent(self) -> Explicit:
        dtype = self.posterior.dtype
        return Explicit([ops.zeros((1, *shape), dtype=dtype) for shape in self._shapes])

    def fold(self) -> keras.layers.Layer:
        config = {**self.layer.get_config(), "name": self.name}
        plain = type(self.layer).from_config(config)
        plain.build(self._input_shape)
        plain.set_weights(self.layer.get_weights())
        centers = self.posterior.centers(self._means())
        for name, center in zip(self._random, centers, strict=True):
            getattr(plain, name).assign(ops.convert_to_numpy(center))
        return plain

    def summary(self) -> Draw:
        return self.posterior.summary(self._means())

    def signal_to_noise(self) -> dict[str, np.ndarray]:
        means = self._means()
        centers = self.posterior.centers(means)
        spreads = self.posterior.spreads(means)
        ratios = {}
        for name, center, spread in zip(self._random, centers, spreads, strict=True):
            ratio = ops.abs(center) / spread
            ratios[name] = ops.convert_to_numpy(ratio)
        return ratios

    def continue_from(self, layer: "MeanFieldLayer") -> None:
        means = layer._means()
        self.posterior.continue_from(layer.posterior, means)
        switch = ops.convert_to_numpy(layer.noise_switch)
        self.noise_switch.assign(switch)

    @staticmethod
    def _sets(forward_pass: Pass, count: int | Tensor) -> int | Tensor:
        """Return how many sets of explicit weights a pass has."""
        by_example = forward_pass.source.sample is not None
        return count if forward_pass.groups is not None or by_example else 1

    def _outputs(self, inputs: Tensor, latent: Explicit | Flipped | Local) -> Tensor:
        """Return the outputs for random weights before the activation."""
        if isinstance(latent, Local):
            kernel = self._means()[:1]
            outputs = self._linear(inputs, kernel, self._bias())
            return outputs + self._local_noise(inputs, latent.noise)
        deviations = self._deviations(latent)
        if isinstance(latent, Explicit):
            return self._explicit(inputs, deviations)
        self.check_blocks(inputs, latent.sign_in.shape[0])
        sign_in = ops.cast(latent.sign_in, inputs.dtype)
        sign_out = ops.cast(latent.sign_out, inputs.dtype)
        one_set = [deviation[0] for deviation in deviations]
        return self._in_terms(inputs, one_set, sign_in, sign_out)

    def _outputs_of_subclass(
        self, inputs: Tensor, latent: Explicit, mask: Any, training: bool
    ) -> Tensor:
        """Return what a layer's `call` gives for random weights, activation included.

        Nothing is known about it, so each set of weights is summed first, in full precision.
        """
        parameters = inspect.signature(self.layer.call).parameters
        options = {"training": training} if "training" in parameters else {}
        means = self._means()

        def one(examples: dict[str, Tensor], deviations: list[Tensor]) -> Tensor:
            weights = _sums(means, deviations)
            values = dict(zip(self._random, weights, strict=True))
            inputs = examples["inputs"]
            own_options = dict(options)
            if "mask" in examples:
                own_options["mask"] = examples["mask"]
            return keras_internals.call_with(self.layer, inputs, options=own_options, **values)

        examples = {"inputs": ops.cast(inputs, means[0].dtype)}
        if mask is not None and "mask" in parameters:
            examples["mask"] = mask
        deviations = self._deviations(latent)
        outputs = by_block(self, one, examples, deviations)
        return ops.cast(outputs, self.layer.compute_dtype)

    def _deviations(self, latent: Explicit | Flipped) -> list[Tensor]:
        """Return by how much the weights of each draw differ from their means."""
        scales = self.posterior.scales()
        return [scale * noise for scale, noise in zip(scales, latent.noise, strict=True)]

    def _means(self) -> list[Tensor]:
        """Return the means of the random weights, in the type of the posterior."""
        dtype = self.posterior.dtype
        weights = [getattr(self.layer, name) for name in self._random]
        values = map(keras_internals.uncast, weights)
        return [ops.cast(value, dtype) for value in values]

    def _bias(self) -> Tensor | None:
        """Return the bias of the layer in its own type, if it has one."""
        bias = getattr(self.layer, "bias", None)
        return None if bias is None else keras_internals.uncast(bias)

    def _linear(self, inputs: Tensor, kernels: Sequence[Tensor], bias: Any = None) -> Tensor:
        """Return what the wrapped layer computes before its activation, with other weights.

        Args:
            inputs: those of the layer.
            kernels: one, or the two of a separable convolution.
            bias: None leaves it out.

        Returns:
            The outputs, in the type of the inputs.
        """
        named = zip(self._kernels, kernels, strict=True)
        values = {name: ops.cast(kernel, inputs.dtype) for name, kernel in named}
        values["bias"] = None if bias is None else ops.cast(bias, inputs.dtype)
        return keras_internals.call_with(
            self.layer, inputs, use_bias=bias is not None, activation=None, **values
        )

    def _explicit(self, inputs: Tensor, deviations: list[Tensor]) -> Tensor:
        """Return the outputs for one set of weights, or for one for each block of examples."""
        means = self._means()
        plain_bias = self._bias()
        number = len(self._kernels)

        def one(examples: dict[str, Tensor], deviations: list[Tensor]) -> Tensor:
            inputs = examples["inputs"]
            if inputs.dtype != means[0].dtype:
                # In half precision the sum of a weight and its noise would lose the noise.
                return self._in_terms(inputs, deviations)
            weights = _sums(means, deviations)
            bias = weights[number] if len(weights) > number else plain_bias
            return self._linear(inputs, weights[:number], bias)

        return by_block(self, one, {"inputs": inputs}, deviations)

    def _in_terms(
        self, inputs: Tensor, deviations: list[Tensor], sign_in: Any = 1, sign_out: Any = 1
    ) -> Tensor:
        """Return the outputs for means + signs * deviations, as a sum of linear maps.

        Flipout: sign_out * layer(sign_in * x; deviation) is the layer with the deviation multiplied
        by signs, which differ from example to example at the cost of one more pass. The two kernels
        of a separable convolution make four terms; there the signs of the inputs are those of the
        first, and the signs of the outputs those of the second.

        Args:
            inputs: (batch, ..., channels).
            deviations: of the random weights from their means, those of kernels first.
            sign_in: 1 or -1, for each example and channel of the inputs.
            sign_out: 1 or -1, for each example and channel of the outputs.

        Returns:
            The outputs before the activation.
        """
        number = len(self._kernels)
        means = self._means()
        flipped = inputs * sign_in
        outputs = 0
        for noisy in itertools.product((False, True), repeat=number):
            choices = zip(noisy, means[:number], deviations[:number], strict=True)
            kernels = [deviation if on else mean for on, mean, deviation in choices]
            bias = self._bias_of_term(noisy, deviations[number:])
            term = self._linear(flipped if noisy[0] else inputs, kernels, bias)
            if noisy[-1]:
                term = term * sign_out
            outputs += term
        return outputs

    def _bias_of_term(self, noisy: tuple[bool, ...], deviation: list[Tensor]) -> Tensor | None:
        """Return the bias of a term: its mean with all means, its deviation with the others."""
        if not any(noisy):
            return self._bias()
        if all(noisy) and deviation:
            return deviation[0]
        return None

    def _local_noise(self, inputs: Tensor, noise: Tensor) -> Tensor:
        """Return the noise that Gaussian weights add to the outputs at the means.

        A sum of Gaussians w x has the variance scale^2 x^2.
        """
        scales = self.posterior.scales()
        kernel_variance, *bias_variance = map(ops.square, scales)
        # Squares of scales are too small for half precision.
        full = ops.cast(inputs, self.posterior.dtype)
        squares = ops.square(full)
        variance = self._linear(squares, [kernel_variance], *bias_variance)
        variance = ops.maximum(variance, _LEAST_VARIANCE)
        scale = ops.sqrt(variance)
        added = scale * noise
        return ops.cast(added, inputs.dtype)

    def _not_local(self, why: str) -> ValueError:
        return ValueError(
            "`estimator='local'` is for Dense layers on vectors that are called once, and not for "
            f"layer {self.layer.name!r}: {why}. Use estimator='flipout', for this layer alone by "
            "patterns of layer names: to_stochastic(model, {pattern: posterior})."
        )


def _sums(means: list[Tensor], deviations: list[Tensor]) -> list[Tensor]:
    return [mean + deviation for mean, deviation in zip(means, deviations, strict=True)]
