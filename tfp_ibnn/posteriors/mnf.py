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
from tfp_ibnn.flows.chain import through
from tfp_ibnn.layers.mnf import MNFLayer
from tfp_ibnn.posteriors import base
from tfp_ibnn.posteriors.flow import FlowPosterior, copied
from tfp_ibnn.posteriors.mean_field import MeanField, Noise


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
        given = {"flows": flows, "auxiliary_flows": auxiliary_flows}
        self._left_open = [name for name, value in given.items() if value is None]
        flows = _couplings() if flows is None else flows
        options = {"initial_scale": z_scale, "affine": "first", "dtype": self.dtype, "name": "z"}
        self.z = _Factors(flows, **options)
        auxiliary = _couplings() if auxiliary_flows is None else auxiliary_flows
        self.auxiliary_flows = copied(auxiliary, self.dtype, "auxiliary_flows")

    def build(self, input_shape: Mapping[str, tuple[int, ...]]) -> None:
        super().build(input_shape)
        kernel = next(iter(input_shape.values()))
        self.on_inputs = len(kernel) == 2
        channels = kernel[0] if self.on_inputs else kernel[-1]
        if channels == 1:  # a coupling needs one to keep and one to move
            for name in self._left_open:
                getattr(self, name).clear()
        for part in (self.z, *self.auxiliary_flows):
            part.build((None, channels))
        log_scale = keras.initializers.Constant(math.log(self.z_scale))
        for name, start in (
            *(("auxiliary_vector", keras.initializers.RandomNormal(stddev=channels**-0.5)),),
            *(("auxiliary_loc", "ones"), ("auxiliary_loc_slope", "zeros")),
            *(("auxiliary_log_scale", log_scale), ("auxiliary_log_scale_slope", "zeros")),
        ):
            setattr(self, name, self._add_parameter(name, (channels,), start))

    @property
    def flows(self) -> list[Flow]:
        """The flows of z."""
        return self.z.flows

    def get_config(self) -> dict[str, Any]:
        """Return the arguments; until the layer is known, flows that were left open stay so."""
        left_open = {} if self.built else dict.fromkeys(self._left_open)
        return {**super().get_config(), **left_open}

    def times_z(self, kernel: Tensor, z: Tensor) -> Tensor:
        """Return a kernel multiplied by z (..., channels), with the leading axes of z."""
        if self.on_inputs:
            return kernel * z[..., :, None]
        return kernel * ops.reshape(z, (*ops.shape(z)[:-1], *(1,) * (len(kernel.shape) - 1), -1))

    def centers(self, means: Sequence[Tensor]) -> list[Tensor]:
        return [self.times_z(means[0], self.z.mean()), *means[1:]]

    def spreads(self, means: Sequence[Tensor]) -> list[Tensor]:
        """Return the standard deviations of the weights, those of z included."""
        kernel, *rest = self.scales()
        by_z = self.times_z(means[0], ops.std(self.z.summary().z, axis=0))
        return [ops.sqrt(kernel**2 + by_z**2), *rest]

    def kl_and_entropy(
        self, means: Sequence[Tensor], normal: Noise, draw: Draw | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return bounds of both in nats, at one draw of z, here or given, and of the weights."""
        if draw is None:
            draw = self.z.transform(normal((1, self.z.channels)))
        mean = self.times_z(means[0], draw.z[0])
        kl, entropy = super().kl_and_entropy([mean, *means[1:]], normal)
        weights = mean + self.scales()[0] * normal(tuple(mean.shape))
        axis = 0 if self.on_inputs else -1
        products = ops.tensordot(weights, ops.convert_to_tensor(self.auxiliary_vector), (axis, 0))
        summary = ops.mean(ops.tanh(products))
        loc = self.auxiliary_loc + self.auxiliary_loc_slope * summary
        log_scale = self.auxiliary_log_scale + self.auxiliary_log_scale_slope * summary
        z, log_det = through(self.auxiliary_flows, draw.z, None, "forward")
        log_r = log_det + base.log_normal((z - loc) * ops.exp(-log_scale)) - ops.sum(log_scale)
        gap = -ops.sum(draw.entropy) - ops.sum(log_r)
        return kl + gap, entropy - gap


class _Factors(FlowPosterior):
    """q(z), without a prior, and so without a KL and its weight."""

    _is_gaussian = False  # densities are at draws, as all of the bound

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.channels = input_shape[-1]
        for flow in self._chain():
            flow.build(input_shape)


def _couplings() -> list[Flow]:
    return [AffineCoupling(50, swap=swap, mask="alternating") for swap in (False, True)]
