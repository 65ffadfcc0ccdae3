"""A layer whose weights are independent Gaussians."""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
from keras import layers, ops
from keras.backend import is_float_dtype

from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.protocols import Draw
from tfp_ibnn.layers.base import CONVERTIBLE, StochasticLayer, is_known
from tfp_ibnn.noise import Pass, current

ESTIMATORS = ("flipout", "shared", "local")

_Shapes = tuple[tuple[int, ...], tuple[int, ...]]
_KERNELS = ("kernel", "depthwise_kernel", "pointwise_kernel")
_LEAST_VARIANCE = 1e-16  # the square root has no derivative at 0, where an input is all zeros


class Explicit(NamedTuple):
    """Standard normal noise (draws, ...) for each random weight: the latent of explicit weights."""

    noise: list[Tensor]


class Flipped(NamedTuple):
    """Noise (1, ...) for each random weight, and signs (batch, ...) of inputs and outputs."""

    noise: list[Tensor]
    sign_in: Tensor
    sign_out: Tensor


class Local(NamedTuple):
    """Standard normal noise (batch, units) of the outputs."""

    noise: Tensor


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class MeanFieldLayer(StochasticLayer):
    """Wrap a layer: its kernel is the mean of a Gaussian whose scales the posterior has.

    `MeanField.wrap` and `to_stochastic` make it.
    """

    draws_ahead = False  # a set of weights is large

    def __init__(self, layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> None:
        super().__init__(layer, *args, **kwargs)
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
        layer, posterior = self.layer, self.posterior
        if self._estimator == "local" and len(input_shape) != 2:
            raise self._not_local(f"its input has the shape {tuple(input_shape)}")
        self._input_shape = tuple(input_shape)
        if not layer.built:
            layer.build(input_shape)
        self._kernels = [name for name in _KERNELS if hasattr(layer, name)]
        random_bias = posterior.bias == "stochastic" and self._bias() is not None
        self._random = [*self._kernels, *["bias"] * random_bias]
        for name in self._random:
            weight = getattr(layer, name)
            if not isinstance(weight, keras.Variable) or not is_float_dtype(weight.dtype):
                raise ValueError(
                    f"MeanField needs a layer without quantization or LoRA, whose `{name}` is a "
                    f"floating-point variable; got {layer.name!r}. Use a posterior over z for it, "
                    "such as ibnn.NormalAffine(), by patterns of layer names."
                )
        self.forbid("quantize", "enable_lora")
        shapes = {name: tuple(getattr(layer, name).shape) for name in self._random}
        self._shapes = list(shapes.values())
        if self._estimator == "flipout":
            self._sign_shapes = _sign_shapes(layer, self._input_shape)
        posterior.build(shapes)
        posterior.start_at(self._means())
        super().build(input_shape)
        self.input_spec = layer.input_spec

    @property
    def prior_on_weights(self) -> bool:
        return self.posterior.pulls_means

    @property
    def draw_size(self) -> int:
        return sum(map(math.prod, self._shapes))

    def call(self, inputs: Tensor, mask: Any = None, training: bool | None = None) -> Tensor:
        latent = current().recall(self)
        if isinstance(getattr(latent, "rest", latent), Local):  # the rest beside the z of MNF
            raise self._not_local("it is called twice in one pass")
        return super().call(inputs, mask=mask, training=training)

    def draw(
        self, forward_pass: Pass, count: int | Tensor, inputs: Any = None, training: bool = False
    ) -> Draw:
        """Return the noise of a pass, with KL and entropy.

        Training draws as the estimator says. Otherwise it is a set of weights for each block of a
        pass in groups, or each example of a pass that numbers its draws, or else one for all.
        """
        posterior, source = self.posterior, forward_pass.source
        if source.sampling == "qmc":
            remedy = 'Write sampling="antithetic" or "iid"'
            raise ValueError(f"Quasi-random draws have too few dimensions for weights. {remedy}.")
        kind = {"dtype": posterior.dtype, "generator": posterior.seed_generator}
        switch = ops.cast(self.noise_switch > 0.5, posterior.dtype)
        normal = functools.partial(source.normal, **kind, stddev=switch)
        grouped = forward_pass.groups is not None
        estimator = self._estimator if training and not grouped else None
        if estimator == "local":
            latent = Local(normal(count, (self.layer.units,)))
        else:
            sets = self._sets(forward_pass, count)
            latent = Explicit([normal(sets, shape) for shape in self._shapes])
        if estimator == "flipout":
            signs = (source.sign(count, shape, **kind) for shape in self._sign_shapes)
            latent = Flipped(*latent, *signs)
        return self._with_kl(forward_pass, latent, count, training)

    def apply(
        self,
        inputs: Tensor,
        latent: Explicit | Flipped | Local,
        groups: int | Tensor | None = None,
        mask: Tensor | None = None,
        training: bool = False,
    ) -> Tensor:
        inputs = ops.cast(inputs, self.layer.compute_dtype)
        if not is_known(self.layer):
            return self._outputs_of_subclass(inputs, latent, mask, training)
        outputs = self._outputs(inputs, latent)
        activation = self.layer.activation
        return outputs if activation is None else activation(outputs)

    def spread(self, latent: Any, rows: int | Tensor) -> Any:
        # Weights are multiplied with blocks of rows.
        is_explicit = isinstance(getattr(latent, "rest", latent), Explicit)
        return latent if is_explicit else super().spread(latent, rows)

    def mean_latent(self) -> Explicit:
        return Explicit([ops.zeros((1, *x), dtype=self.posterior.dtype) for x in self._shapes])

    def fold(self) -> keras.layers.Layer:
        plain = type(self.layer).from_config({**self.layer.get_config(), "name": self.name})
        plain.build(self._input_shape)
        plain.set_weights(self.layer.get_weights())
        centers = self.posterior.centers(self._means())
        for name, center in zip(self._random, centers, strict=True):
            getattr(plain, name).assign(ops.convert_to_numpy(center))
        return plain

    def summary(self) -> Draw:
        return self.posterior.summary(self._means())

    def _with_kl(
        self, forward_pass: Pass, latent: Any, count: int | Tensor, training: bool, *given: Any
    ) -> Draw:
        """Return the draw of a pass, with KL and entropy where they count; `given` is for both."""
        posterior = self.posterior
        if not forward_pass.losses:
            nothing = ops.zeros((), dtype=posterior.dtype)
            return Draw(latent, nothing, nothing)
        kind = {"dtype": posterior.dtype, "generator": posterior.seed_generator}
        own = functools.partial(forward_pass.source.normal, 1, **kind)
        kl = posterior.kl_and_entropy(self._means(), lambda shape: own(shape)[0], *given)
        return Draw(latent, *kl)

    @staticmethod
    def _sets(forward_pass: Pass, count: int | Tensor) -> int | Tensor:
        """Return how many sets of explicit weights a pass has."""
        by_example = forward_pass.source.sample is not None
        return count if forward_pass.groups is not None or by_example else 1

    def _outputs(self, inputs: Tensor, latent: Explicit | Flipped | Local) -> Tensor:
        """Return the outputs for random weights before the activation."""
        if isinstance(latent, Local):
            outputs = self._linear(inputs, self._means()[:1], self._bias())
            return outputs + self._local_noise(inputs, latent.noise)
        deviations = self._deviations(latent)
        if isinstance(latent, Flipped):
            self.check_blocks(inputs, latent.sign_in.shape[0])
            signs = (ops.cast(sign, inputs.dtype) for sign in latent[1:])
            return self._in_terms(inputs, [x[0] for x in deviations], *signs)
        return self._explicit(inputs, deviations)

    def _outputs_of_subclass(
        self, inputs: Tensor, latent: Explicit, mask: Any, training: bool
    ) -> Tensor:
        """Return what a layer's own `call` gives for random weights, activation and all.

        Nothing is known of it, so that each set of weights is a sum, in full precision.
        """
        takes = inspect.signature(self.layer.call).parameters
        options = {"training": training} if "training" in takes else {}
        means = self._means()

        def one(examples: dict[str, Tensor], deviations: list[Tensor]) -> Tensor:
            weights = [x + y for x, y in zip(means, deviations, strict=True)]
            values = dict(zip(self._random, weights, strict=True))
            masks = {name: x for name, x in examples.items() if name == "mask"}
            return keras_internals.call_with(
                self.layer, examples["inputs"], options={**options, **masks}, **values
            )

        examples = {"inputs": ops.cast(inputs, means[0].dtype)}
        if mask is not None and "mask" in takes:
            examples["mask"] = mask
        outputs = self._by_block(one, examples, self._deviations(latent))
        return ops.cast(outputs, self.layer.compute_dtype)

    def _deviations(self, latent: Explicit | Flipped) -> list[Tensor]:
        """Return by how much the weights of each draw differ from their means."""
        return [s * noise for s, noise in zip(self.posterior.scales(), latent.noise, strict=True)]

    def _means(self) -> list[Tensor]:
        """Return the means of the random weights, in the type of the posterior."""
        values = (keras_internals.uncast(getattr(self.layer, name)) for name in self._random)
        return [ops.cast(value, self.posterior.dtype) for value in values]

    def _bias(self) -> Tensor | None:
        bias = getattr(self.layer, "bias", None)
        return None if bias is None else keras_internals.uncast(bias)

    def _linear(self, inputs: Tensor, kernels: Sequence[Tensor], bias: Any = None) -> Tensor:
        """Return what the wrapped layer computes before its activation, with other weights."""
        values = dict(zip(self._kernels, kernels, strict=True))
        values = {name: ops.cast(value, inputs.dtype) for name, value in values.items()}
        bias = None if bias is None else ops.cast(bias, inputs.dtype)
        own = {"bias": bias, "use_bias": bias is not None, "activation": None}
        return keras_internals.call_with(self.layer, inputs, **values, **own)

    def _explicit(self, inputs: Tensor, deviations: list[Tensor]) -> Tensor:
        """Return the outputs for one set of weights, or for one for each block of examples."""
        number, means, bias = len(self._kernels), self._means(), self._bias()

        def one(examples: dict[str, Tensor], deviations: list[Tensor]) -> Tensor:
            inputs = examples["inputs"]
            if inputs.dtype != means[0].dtype:
                # In half precision the sum of a weight and its noise would lose the noise.
                return self._in_terms(inputs, deviations)
            weights = [x + y for x, y in zip(means, deviations, strict=True)]
            return self._linear(inputs, weights[:number], *(weights[number:] or [bias]))

        return self._by_block(one, {"inputs": inputs}, deviations)

    def _by_block(
        self,
        one: Callable[[dict[str, Tensor], list[Tensor]], Tensor],
        examples: dict[str, Tensor],
        deviations: list[Tensor],
    ) -> Tensor:
        """Return `one(examples, deviations)` of each draw, on its own block of the examples."""
        draws = deviations[0].shape[0]
        if draws == 1:
            return one(examples, [x[0] for x in deviations])
        inputs = examples["inputs"]
        self.check_blocks(inputs, draws)
        batch, draws = ops.shape(inputs)[0], ops.shape(deviations[0])[0]
        blocks = {
            name: ops.reshape(x, (draws, batch // draws, *ops.shape(x)[1:]))
            for name, x in examples.items()
        }
        outputs = ops.map(lambda pair: one(*pair), (blocks, deviations))
        return ops.reshape(outputs, (batch, *ops.shape(outputs)[2:]))

    def _in_terms(
        self, inputs: Tensor, deviations: list[Tensor], sign_in: Any = 1, sign_out: Any = 1
    ) -> Tensor:
        """Return the outputs for means + signs * deviations, as a sum of linear maps.

        Flipout: sign_out * layer(sign_in * x; deviation) is the layer with the deviation multiplied
        by signs, which differ from example to example at the cost of one pass more. The two kernels
        of a separable convolution make four terms; there the signs of the inputs are those of the
        first, and the signs of the outputs those of the second.
        """
        number, means, bias = len(self._kernels), self._means(), self._bias()
        flipped, outputs = inputs * sign_in, 0
        for noisy in itertools.product((False, True), repeat=number):
            pairs = zip(noisy, means[:number], deviations[:number], strict=True)
            kernels = [deviation if on else mean for on, mean, deviation in pairs]
            own_bias = None if any(noisy) else bias
            if all(noisy) and len(deviations) > number:
                own_bias = deviations[number]
            term = self._linear(flipped if noisy[0] else inputs, kernels, own_bias)
            outputs += term * sign_out if noisy[-1] else term
        return outputs

    def _local_noise(self, inputs: Tensor, noise: Tensor) -> Tensor:
        """Return what is added to the outputs at the means, as Gaussian weights give it."""
        squares = [ops.square(scale) for scale in self.posterior.scales()]
        # Squares of scales are too small for half precision.
        full = ops.cast(inputs, self.posterior.dtype)
        variance = self._linear(ops.square(full), squares[:1], *squares[1:])
        return ops.cast(ops.sqrt(ops.maximum(variance, _LEAST_VARIANCE)) * noise, inputs.dtype)

    def _not_local(self, why: str) -> ValueError:
        return ValueError(
            "`estimator='local'` is for Dense layers on vectors that are called once, and not for "
            f"layer {self.layer.name!r}: {why}. Use estimator='flipout', for this layer alone by "
            "patterns of layer names: to_stochastic(model, {pattern: posterior})."
        )


def _sign_shapes(layer: layers.Layer, input_shape: tuple[int | None, ...]) -> _Shapes:
    """Return the shapes of an example's signs, one for each row and column of the kernel."""
    if not isinstance(layer, layers.EinsumDense):
        shapes = (input_shape, layer.compute_output_shape(input_shape))
        return tuple((*(1,) * (len(shape) - 2), shape[-1]) for shape in shapes)
    operands, target = layer.equation.replace(" ", "").split("->")
    source, kernel = operands.split(",")
    sizes = dict(zip(kernel.replace("...", ""), layer.kernel.shape, strict=True))
    free = len(input_shape) - len(source.replace("...", ""))  # the axes behind the dots
    shapes, batches = [], []
    for labels in (source, target):
        before, dots, after = labels.partition("...")
        axes = [*before, *[dots] * free, *after]
        batches.append(axes[0])
        shapes.append(tuple(sizes.get(label, 1) for label in axes[1:]))
    if batches[0] != batches[1] or batches[0] in sizes:
        wanted = "`estimator='flipout'` needs the examples on the first axis of input and output"
        got = f"layer {layer.name!r} has the equation {layer.equation!r}. Use estimator='shared'"
        raise ValueError(f"{wanted}; {got}.")
    return tuple(shapes)
