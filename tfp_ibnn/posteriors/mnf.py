"""Multiplicative normalizing flows: a posterior over weights with dependent means."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.protocols import Draw
from tfp_ibnn.flows import AffineCoupling, Flow
from tfp_ibnn.flows._rows import log_normal
from tfp_ibnn.flows.chain import copied, through
from tfp_ibnn.layers.mnf import MNFLayer
from tfp_ibnn.posteriors.flow import FlowPosterior
from tfp_ibnn.posteriors.mean_field import MeanField, Noise
from tfp_ibnn.posteriors.template import Template


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class MNF(MeanField):
    """Gaussian weights around z * mean, where z has a normalizing flow for its distribution.

    q(W) is a mixture over z, so that the weights depend on each other and may have several modes:

        W ~ N(z * mean, scale^2),  z = NF(z_0),  z_0 ~ N(loc, s^2)

    Its KL has no closed form. The loss has an upper bound, which is as tight as an auxiliary
    distribution r is close to q(z|W), estimated at one draw of z and W:

        KL[q(W) || p(W)] <= E[ KL[q(W|z) || p(W)] + log q(z) - log r(z|W) ]
        log r(z|W) = log N(g(z); m(W), s(W)^2) + log|det dg/dz|

    Here g is a flow, too; m and log s are linear in the mean of tanh(c^T W). z is on the inputs of
    a Dense layer and on the output channels of a convolution; other layers are refused. The entropy
    is a lower bound. In training every example has its own z; all else is as in `MeanField`.
    Reference: Louizos and Welling, Multiplicative Normalizing Flows, arXiv 1703.01961.

    Args:
        flows: of z; None is two masked affine couplings, with alternating masks, and no flow where
            z has one channel only. They are copied.
        auxiliary_flows: g, likewise.
        z_scale: standard deviation s of z_0 at the start; its mean starts at 1.
        **kwargs: those of `MeanField`, whose example shows the steps.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> det = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        >>> sto = ibnn.to_stochastic(det, ibnn.MNF(), train_size=100)
        >>> [len(layer.posterior.flows) for layer in ibnn.stochastic_layers(sto)]
        [2]
    """

    wrapper = MNFLayer

    def __init__(
        self,
        flows: Sequence[Flow] | None = None,
        auxiliary_flows: Sequence[Flow] | None = None,
        *,
        z_scale: float = 0.1**0.5,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.z_scale = checks.positive("z_scale", z_scale)
        self._flows_are_open = flows is None
        self._auxiliary_flows_are_open = auxiliary_flows is None
        if flows is None:
            flows = _couplings()
        if auxiliary_flows is None:
            auxiliary_flows = _couplings()
        self.z = _Factors(flows, initial_scale=z_scale, affine="first", dtype=self.dtype, name="z")
        self.auxiliary_flows = copied(auxiliary_flows, self.dtype, "auxiliary_flows")

    def build(self, input_shape: Mapping[str, tuple[int, ...]]) -> None:
        super().build(input_shape)
        kernel = next(iter(input_shape.values()))
        self.on_inputs = len(kernel) == 2
        channels = kernel[0] if self.on_inputs else kernel[-1]
        if channels == 1:
            self._leave_couplings_out()
        self.z.build((None, channels))
        for flow in self.auxiliary_flows:
            flow.build((None, channels))
        self._add_auxiliary_parameters((channels,))

    def _leave_couplings_out(self) -> None:
        """Remove flows that were not given: a coupling needs a channel to keep and one to move."""
        if self._flows_are_open:
            self.flows.clear()
        if self._auxiliary_flows_are_open:
            self.auxiliary_flows.clear()

    def _add_auxiliary_parameters(self, shape: tuple[int, ...]) -> None:
        """Add those of r(z|W): the vector c, and m and log s as linear functions of a summary."""
        direction = keras.initializers.RandomNormal(stddev=shape[0] ** -0.5)
        log_scale = keras.initializers.Constant(math.log(self.z_scale))
        add = self._add_parameter
        self.auxiliary_vector = add("auxiliary_vector", shape, direction)
        self.auxiliary_loc = add("auxiliary_loc", shape, "ones")
        self.auxiliary_loc_slope = add("auxiliary_loc_slope", shape, "zeros")
        self.auxiliary_log_scale = add("auxiliary_log_scale", shape, log_scale)
        self.auxiliary_log_scale_slope = add("auxiliary_log_scale_slope", shape, "zeros")

    @property
    def flows(self) -> list[Flow]:
        """The flows of z."""
        return self.z.flows

    def get_config(self) -> dict[str, Any]:
        """Return the arguments; until the layer is known, flows that were left open stay so."""
        config = super().get_config()
        if not self.built and self._flows_are_open:
            config["flows"] = None
        if not self.built and self._auxiliary_flows_are_open:
            config["auxiliary_flows"] = None
        return config

    def times_z(self, kernel: Tensor, z: Tensor) -> Tensor:
        """Return a kernel multiplied by z, on its input or its output channels.

        Args:
            kernel: (inputs, outputs), or (..., inputs, outputs) of a convolution.
            z: (..., channels).

        Returns:
            A tensor with the leading axes of z, then those of the kernel.
        """
        if self.on_inputs:
            return kernel * z[..., :, None]
        ones = (1,) * (len(kernel.shape) - 1)
        leading = ops.shape(z)[:-1]
        return kernel * ops.reshape(z, (*leading, *ones, -1))

    def for_next_task(self) -> MeanField:
        """Raise: q(W) is an integral over z.

        Raises:
            ValueError: Always.
        """
        return Template.for_next_task(self)

    def centers(self, means: Sequence[Tensor]) -> list[Tensor]:
        kernel, *others = means
        return [self.times_z(kernel, self.z.mean()), *others]

    def spreads(self, means: Sequence[Tensor]) -> list[Tensor]:
        """Return the standard deviations of the weights, those of z included."""
        kernel_scale, *other_scales = self.scales()
        spread_of_z = ops.std(self.z.summary().z, axis=0)
        by_z = self.times_z(means[0], spread_of_z)
        return [ops.sqrt(kernel_scale**2 + by_z**2), *other_scales]

    def kl_and_entropy(
        self, means: Sequence[Tensor], normal: Noise, draw: Draw | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return bounds of KL and entropy in nats, at one draw of z and of the weights.

        Args:
            means: of the random weights, as the layer has them.
            normal: gives standard normal noise of a shape.
            draw: one of z, (1, channels); None draws one here.

        Returns:
            An upper bound of the KL and a lower bound of the entropy, ().
        """
        if draw is None:
            draw = self.z.transform(normal((1, self.z.channels)))
        kernel, *others = means
        center = self.times_z(kernel, draw.z[0])
        kl, entropy = super().kl_and_entropy([center, *others], normal)
        kernel_scale = self.scales()[0]
        weights = center + kernel_scale * normal(tuple(center.shape))
        log_q = -ops.sum(draw.entropy)
        gap = log_q - self._log_r(draw.z, weights)
        return kl + gap, entropy - gap

    def _log_r(self, z: Tensor, weights: Tensor) -> Tensor:
        """Return log r(z|W) for one draw of z, (1, channels), and of the kernel."""
        channel_axis = 0 if self.on_inputs else -1
        direction = ops.convert_to_tensor(self.auxiliary_vector)
        products = ops.tensordot(weights, direction, (channel_axis, 0))
        summary = ops.mean(ops.tanh(products))
        loc = self.auxiliary_loc + self.auxiliary_loc_slope * summary
        log_scale = self.auxiliary_log_scale + self.auxiliary_log_scale_slope * summary
        mapped, log_det = through(self.auxiliary_flows, z, None, "forward")
        standardized = (mapped - loc) * ops.exp(-log_scale)
        log_r = log_det + log_normal(standardized) - ops.sum(log_scale)
        return ops.sum(log_r)


class _Factors(FlowPosterior):
    """q(z), without a prior, and so without a KL and its weight."""

    _is_gaussian = False  # densities are at draws, as all of the bound

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.channels = input_shape[-1]
        for flow in self._chain():
            flow.build(input_shape)


def _couplings() -> list[Flow]:
    """Return two couplings, the second of which moves what the first keeps."""
    return [
        AffineCoupling(50, mask="alternating"),
        AffineCoupling(50, mask="alternating", swap=True),
    ]
