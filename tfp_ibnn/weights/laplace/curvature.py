"""One pass, or several, over the data: the sums of which a Hessian is made."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor, compiled, fori_loop, pullback
from tfp_ibnn.data.examples import labelled_batches
from tfp_ibnn.weights.features import LogitNetwork
from tfp_ibnn.weights.flat import double
from tfp_ibnn.weights.laplace.blocks import LEAVE_OUT, Block
from tfp_ibnn.weights.laplace.structures import Structure, Taps

_ON_DEVICE = 16
"""Of how many batches the sums stay where they are computed: the matrices may be large."""


class Fit(NamedTuple):
    """What the data says at the trained weights, in sums over the examples."""

    examples: int
    log_likelihood: float  # of a Gaussian with a free scale, at the scale 1
    gradient: np.ndarray  # (W,), of the log-likelihood
    values: list[np.ndarray]  # the structure's sums; in the end, those of its variables


def linearized(network: LogitNetwork, blocks: list[Block], values: Any) -> tuple[Tensor, Taps, Any]:
    """Return the logits for a prefix, each block with its tap, and what pulls cotangents back."""

    def forward(zeros: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        seen: dict[int, Tensor] = {}

        def run(number: int, is_stripped: bool, *args: Any, **_: Any) -> Tensor:
            if len(args) != 1 or not ops.is_tensor(args[0]):
                name = blocks[number].layer.name
                raise ValueError(f"Layer {name!r} is called on several tensors: {LEAVE_OUT}.")
            output, after = blocks[number].run(is_stripped, args[0])
            seen[number] = args[0] if zeros is not None else output
            return after(output if zeros is None else output + zeros[number])

        others = {block.layer: functools.partial(run, i) for i, block in enumerate(blocks)}
        return network.logits(values, others), [seen[i] for i in range(len(blocks))]

    zeros = [ops.zeros_like(output) for output in forward(None)[1]]  # for their shapes
    logits, inputs_of, pull = pullback(forward, zeros)
    return logits, [(b, b.tap(x)) for b, x in zip(blocks, inputs_of, strict=True)], pull


def collect(
    network: LogitNetwork,
    structure: Structure,
    x: Any,
    y: Any,
    batch_size: int,
    verbose: Any,
    watch: Callable[[Any, np.ndarray], None] = lambda inputs, targets: None,
) -> Fit:
    """Go through the data and return what it says; the network stays as it is.

    `watch` is given the inputs and the targets of each batch, as the likelihood takes them.
    """
    likelihood, blocks = network.likelihood, structure.blocks

    def of_batch(inputs: Any, y: Tensor, mask: Tensor, *basis: Tensor) -> Any:
        logits, taps, pull = linearized(network, blocks, network.prefix(inputs))
        mask = ops.cast(mask, logits.dtype)
        basis = [ops.cast(part, logits.dtype) for part in basis]

        def total(logits: list[Tensor]) -> tuple[Tensor, None]:
            return ops.sum(mask * likelihood.log_prob(logits[0], y)), None

        log_prob, _, score = pullback(total, [logits])
        g = pull(score(ops.ones_like(log_prob))[0])
        gradient = [block.total(a, part) for (block, a), part in zip(taps, g, strict=True)]
        columns = ops.moveaxis(likelihood.hessian_factors(logits) * mask[:, None, None], -1, 0)

        def step(i: int | Tensor, sums: list[Tensor]) -> list[Tensor]:
            found = structure.step(taps, pull(columns[i]), *basis)
            return [old + new for old, new in zip(sums, found, strict=True)]

        start = [ops.zeros(shape, logits.dtype) for shape in structure.sums()]
        sums = structure.at_once(taps, columns) or fori_loop(0, columns.shape[0], step, start)
        return log_prob, ops.concatenate(gradient), [*structure.once(taps, mask), *sums]

    run = compiled(of_batch, network.model.weights)

    def one_pass(*basis: np.ndarray) -> Fit:
        count, size, sums, recent = 0, 0, None, None
        read = labelled_batches(x, y, batch_size, verbose, once=structure.passes == 1)
        for step, (inputs, labels) in enumerate(read, start=1):
            labels = likelihood.targets(labels)
            watch(inputs, labels)
            size, number = max(size, len(labels)), len(labels)
            # A batch that is not full is filled up, since another size would be compiled anew.
            rows, mask = np.arange(size) % number, (np.arange(size) < number).astype("float32")
            filled = keras.tree.map_structure(lambda x, i=rows: x[i], (inputs, labels))
            found = run(*filled, mask, *basis)
            recent = found if recent is None else keras.tree.map_structure(ops.add, recent, found)
            count += number
            if step % _ON_DEVICE == 0:
                sums, recent = _added(sums, recent, network.model.name), None
        if recent is not None:
            sums = _added(sums, recent, network.model.name)
        return Fit(count, float(sums[0]), *sums[1:])

    found, values = structure.fit(one_pass)
    return Fit(*found[:3], values)


def _added(sums: Any, found: Any, name: str) -> Any:
    """Return sums in float64, in the machine's memory, with what some batches gave."""
    found = keras.tree.map_structure(double, found)
    if not all(np.isfinite(part).all() for part in keras.tree.flatten(found)):
        raise ValueError(f"The gradients are NaN or infinite: check the weights of model {name!r}.")
    return found if sums is None else keras.tree.map_structure(np.add, sums, found)
