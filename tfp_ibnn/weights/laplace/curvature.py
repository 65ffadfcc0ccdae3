"""One pass, or several, over the data: the sums of which a Hessian is made."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor, compiled, fori_loop, pullback
from tfp_ibnn.data.examples import Examples, labelled_examples
from tfp_ibnn.weights.features import LogitNetwork
from tfp_ibnn.weights.laplace.blocks import Block, Slope, Tap
from tfp_ibnn.weights.laplace.structure import Structure
from tfp_ibnn.weights.vectors import double

_ON_DEVICE = 16
"""Of how many batches the sums stay where they are computed: the matrices may be large."""


class Fit(NamedTuple):
    """What the data says at the trained weights, in sums over the examples, by their weights."""

    count: int  # of the examples
    examples: float  # the sum of their weights
    log_likelihood: float  # of a Gaussian with a free scale, at the scale 1
    gradient: np.ndarray  # (W,), of the log-likelihood
    values: list[np.ndarray]  # the structure's sums; in the end, those of its variables


class Linearized(NamedTuple):
    """A network on a batch, with the derivatives of its logits."""

    logits: Tensor
    taps: list[Tap]
    slopes_of: Callable[[Tensor], list[Slope]]  # of cotangents of the logits


def linearized(network: LogitNetwork, blocks: list[Block], values: Any) -> Linearized:
    """Run a network, and keep what the gradients of its weights need.

    Args:
        network: the network, cut before its uncertain weights.
        blocks: the layers with uncertain weights.
        values: what the network's `prefix` gave for a batch.

    Returns:
        The logits, the inputs of the blocks, and what turns cotangents into derivatives.

    Raises:
        ValueError: if a layer is called on several tensors.
    """
    outputs = _Outputs(blocks)
    network.logits(values, outputs.runs())
    zeros = [ops.zeros_like(output) for output in outputs.kept]

    def forward(zeros: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        inputs = _Inputs(blocks, zeros)
        logits = network.logits(values, inputs.runs())
        return logits, inputs.kept

    logits, inputs, pull = pullback(forward, zeros)
    taps = []
    for block, x in zip(blocks, inputs, strict=True):
        taps.append(Tap(block, block.tap(x)))

    def slopes_of(cotangent: Tensor) -> list[Slope]:
        derivatives = pull(cotangent)
        return [Slope(*tap, g) for tap, g in zip(taps, derivatives, strict=True)]

    return Linearized(logits, taps, slopes_of)


class _Outputs:
    """Runs blocks as they are, and keeps the outputs to which zeros are to be added."""

    def __init__(self, blocks: list[Block]) -> None:
        self._blocks = blocks
        self.kept: list[Any] = [None] * len(blocks)

    def runs(self) -> dict[Any, Callable[..., Tensor]]:
        """Return what runs the blocks, by their layers."""
        runs = {}
        for number, block in enumerate(self._blocks):
            runs[block.layer] = functools.partial(self._run, number)
        return runs

    def _run(self, number: int, is_stripped: bool, *args: Any, **_: Any) -> Tensor:
        block = self._blocks[number]
        if len(args) != 1 or not ops.is_tensor(args[0]):
            raise ValueError(
                f"Layer {block.layer.name!r} is called on several tensors: leave it out by a "
                "pattern in `subset_of_weights`."
            )
        output, after = block.run(is_stripped, args[0])
        return after(self._passed_on(number, args[0], output))

    def _passed_on(self, number: int, x: Tensor, output: Tensor) -> Tensor:
        """Keep what is wanted of a call, and return the output that is passed on."""
        self.kept[number] = output
        return output


class _Inputs(_Outputs):
    """Adds zeros to the outputs of blocks, and keeps the inputs."""

    def __init__(self, blocks: list[Block], zeros: list[Tensor]) -> None:
        super().__init__(blocks)
        self._zeros = zeros

    def _passed_on(self, number: int, x: Tensor, output: Tensor) -> Tensor:
        self.kept[number] = x
        return output + self._zeros[number]


def collect(
    network: LogitNetwork,
    structure: Structure,
    x: Any,
    y: Any,
    batch_size: int,
    verbose: Any,
    watch: Callable[[Any, np.ndarray], None] = lambda inputs, targets: None,
    sample_weight: Any = None,
) -> Fit:
    """Go through the data and return what it says; the network stays as it is.

    Args:
        network: the network, cut before its uncertain weights.
        structure: the form of the Hessian.
        x: inputs, or a dataset of batches (x, y).
        y: targets; None with a dataset.
        batch_size: examples at a time.
        verbose: 0 shows no progress.
        watch: is given the inputs and the targets of each batch, as the likelihood takes them.
        sample_weight: how often each example counts, for arrays; None counts each once.

    Returns:
        Sums over the examples, and the values of the structure's variables.

    Raises:
        ValueError: if a gradient is not finite.
    """
    model = network.model
    is_read_once = structure.passes == 1
    run = compiled(functools.partial(_of_batch, network, structure), model.weights)

    def one_pass(*basis: np.ndarray) -> Fit:
        sums = _Sums(model.name)
        count = 0
        examples = 0
        size = 0
        batches = labelled_examples(x, y, sample_weight, batch_size, verbose, once=is_read_once)
        for inputs, labels, weight in map(_with_weight, batches):
            if not len(labels):
                continue
            targets = network.likelihood.targets(labels)
            watch(inputs, targets)
            size = max(size, len(targets))
            filled, mask = _filled((inputs, targets, weight), len(targets), size)
            *batch, weights = filled
            sums.add(run(*batch, mask * weights, *basis))
            count += len(targets)
            examples += float(weight.sum())
        log_likelihood, gradient, values = sums.finish()
        return Fit(count, examples, float(log_likelihood), gradient, values)

    last_pass, values = structure.fit(one_pass)
    return last_pass._replace(values=values)


def _with_weight(batch: Examples) -> Examples:
    """Return the examples of a batch that count, with their weights (examples,)."""
    count = len(batch.y)
    if batch.weight is None:
        return batch._replace(weight=np.ones(count, "float32"))
    if batch.weight.size != count:
        raise ValueError(
            f"`sample_weight` must have one number per example, {count} here; got the shape "
            f"{batch.weight.shape}."
        )
    weight = batch.weight.reshape(count).astype("float32")
    return batch._replace(weight=weight).take(weight > 0)


def _of_batch(
    network: LogitNetwork,
    structure: Structure,
    inputs: Any,
    y: Tensor,
    weight: Tensor,
    *basis: Tensor,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the log-likelihood of a batch, its gradient, and what the structure sums up."""
    likelihood = network.likelihood
    values = network.prefix(inputs)
    linear = linearized(network, structure.blocks, values)
    logits = linear.logits
    weight = ops.cast(weight, logits.dtype)

    def log_prob(points: list[Tensor]) -> tuple[Tensor, None]:
        each = likelihood.log_prob(points[0], y)
        return ops.sum(weight * each), None

    total, _, score = pullback(log_prob, [logits])
    (cotangent,) = score(ops.ones_like(total))
    slopes = linear.slopes_of(cotangent)
    gradients = [slope.total() for slope in slopes]
    factors = likelihood.hessian_factors(logits) * ops.sqrt(weight)[:, None, None]
    columns = ops.moveaxis(factors, -1, 0)
    sums = structure.all_steps(linear.taps, columns)
    if sums is None:
        sums = _over_columns(structure, linear, columns, basis)
    per_batch = structure.per_batch(linear.taps, weight)
    return total, ops.concatenate(gradients), [*per_batch, *sums]


def _over_columns(
    structure: Structure,
    linear: Linearized,
    columns: Tensor,
    basis: Sequence[Tensor],
) -> list[Tensor]:
    """Return the sums of the structure's steps over the columns (C, N, K) of the factors."""
    count = columns.shape[0]
    dtype = columns.dtype
    basis = [ops.cast(part, dtype) for part in basis]

    def add_column(number: int | Tensor, sums: list[Tensor]) -> list[Tensor]:
        slopes = linear.slopes_of(columns[number])
        terms = structure.step(slopes, *basis)
        return [total + term for total, term in zip(sums, terms, strict=True)]

    zeros = [ops.zeros(shape, dtype) for shape in structure.sums()]
    return fori_loop(0, count, add_column, zeros)


def _filled(batch: Any, examples: int, size: int) -> tuple[Any, np.ndarray]:
    """Repeat the examples of a batch up to a size; return it with a mask, 0 for the repeated ones.

    Another size would be compiled anew.
    """
    places = np.arange(size)
    rows = places % examples
    mask = places < examples
    return keras.tree.map_structure(lambda x: x[rows], batch), mask.astype("float32")


class _Sums:
    """Sums over batches, in float64 and in the machine's memory, but for those of some batches."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._total: Any = None
        self._recent: Any = None  # in the precision of the network, on its device
        self._count = 0

    def add(self, terms: Any) -> None:
        """Add what a batch gave."""
        self._recent = _added(self._recent, terms, ops.add)
        self._count += 1
        if self._count == _ON_DEVICE:
            self._flush()

    def finish(self) -> Any:
        """Return the sums."""
        if self._count:
            self._flush()
        return self._total

    def _flush(self) -> None:
        recent = keras.tree.map_structure(double, self._recent)
        if not all(np.isfinite(part).all() for part in keras.tree.flatten(recent)):
            raise ValueError(
                f"The gradients are NaN or infinite: check the weights of model {self._name!r}."
            )
        self._total = _added(self._total, recent, np.add)
        self._recent = None
        self._count = 0


def _added(sums: Any, terms: Any, add: Callable[[Any, Any], Any]) -> Any:
    if sums is None:
        return terms
    return keras.tree.map_structure(add, sums, terms)
