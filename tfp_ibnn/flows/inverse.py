"""A flow the other way round."""

import keras

from tfp_ibnn._core.backend import Tensor, tfb
from tfp_ibnn.flows.autoregressive import InverseAutoregressive
from tfp_ibnn.flows.chain import FlowOfFlow


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Inverse(FlowOfFlow):
    """The inverse of a flow: it maps forward as the other maps back.

    A density needs the way from data to noise for each training step, a posterior the way from
    noise to draws: a flow that is quick or exact one way only, such as `Planar`, serves both.

    Args:
        flow: Flow; it is copied, with new weights.
        **kwargs: arguments of `Flow`; `condition_size` and `dtype` are passed on to the copy.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> flow = ibnn.flows.Inverse(ibnn.flows.Planar())
        >>> flow(keras.ops.ones((2, 3))).shape[-1]
        3
    """

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        self.flow.build(input_shape)

    def bijector(self, condition: Tensor | None = None) -> tfb.Invert:
        return tfb.Invert(self.flow._bijector_for(condition))


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class MaskedAutoregressive(InverseAutoregressive):
    """Masked autoregressive flow (MAF): the inverse of `InverseAutoregressive`.

    x_i = (y_i - shift_i(x_<i)) * exp(-log_scale_i(x_<i)), with x the outcome. Its log-density takes
    one pass of the masked network, and a draw one for each channel. The arguments are those of
    `InverseAutoregressive`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> flow = ibnn.flows.MaskedAutoregressive(hidden=8)
        >>> flow(keras.ops.ones((2, 3))).shape[-1]
        3

    References:
        Papamakarios et al., Masked Autoregressive Flow for Density Estimation, arXiv 1705.07057.
    """

    def bijector(self, condition: Tensor | None = None) -> tfb.Invert:
        return tfb.Invert(super().bijector(condition))
