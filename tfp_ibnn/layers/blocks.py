"""Sets of weights that each act on a block of the examples."""

from collections.abc import Callable

from keras import ops

from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.unrolling import map_first_axis
from tfp_ibnn.layers.base import StochasticLayer


def by_block(
    layer: StochasticLayer,
    one: Callable[[dict[str, Tensor], list[Tensor]], Tensor],
    examples: dict[str, Tensor],
    deviations: list[Tensor],
) -> Tensor:
    """Return the outputs of `one` for each draw, each on its block of the examples.

    Args:
        layer: the one whose outputs they are, for errors.
        one: gives the outputs for one set of weights.
        examples: tensors (batch, ...) by name, `inputs` among them.
        deviations: of the random weights, (draws, ...) each.

    Returns:
        The outputs, (batch, ...).
    """
    first = deviations[0]
    if first.shape[0] == 1:
        of_only_draw = [deviation[0] for deviation in deviations]
        return one(examples, of_only_draw)
    inputs = examples["inputs"]
    layer.check_blocks(inputs, first.shape[0])
    batch = ops.shape(inputs)[0]
    draws = ops.shape(first)[0]
    size = batch // draws

    def in_blocks(x: Tensor) -> Tensor:
        _, *sizes = ops.shape(x)
        return ops.reshape(x, (draws, size, *sizes))

    blocks = {name: in_blocks(x) for name, x in examples.items()}
    outputs = map_first_axis(lambda pair: one(*pair), (blocks, deviations))
    _, _, *sizes = ops.shape(outputs)
    return ops.reshape(outputs, (batch, *sizes))
