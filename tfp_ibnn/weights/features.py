"""A network cut before some of its layers, without the activation of its output."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks, keras_internals
from tfp_ibnn._core.backend import Tensor, compiled
from tfp_ibnn.conversion.graph import Graph, functional_graph
from tfp_ibnn.layers import stochastic_layers
from tfp_ibnn.prediction.head import activation_of, is_transparent, output_layer
from tfp_ibnn.weights.likelihood import likelihood_of


class LogitNetwork:
    """A Functional or Sequential model that gives logits, (N, K), with its likelihood.

    Args:
        model: built, with one output (N, K).
        is_chosen: which layers stand behind the cut; what comes before them runs in `prefix`.
        head, from_logits: those of `MonteCarlo`.
    """

    def __init__(
        self,
        model: keras.Model,
        is_chosen: Callable[[Any], bool],
        head: str | None = None,
        from_logits: bool | None = None,
    ) -> None:
        self.model, self.likelihood = model, likelihood_of(model, head, from_logits)
        self.graph, self._output_layer = Graph(model, is_chosen), output_layer(model)
        shape = tuple(functional_graph(model).outputs[0].shape)
        if len(shape) != 2 or shape[-1] is None:
            raise ValueError(f"`model` must have one output of shape (N, K); got {shape}.")
        self.width = shape[-1]
        # Half precision is too little for sums over the data.
        wide = any(v.dtype == "float64" for v in model.weights)
        self.dtype = "float64" if wide else "float32"
        # What turns logits into the output, and is left out.
        heads = ("softmax", "log_softmax", "sigmoid", "gaussian")
        self.strips = activation_of(model) in heads

    def prefix(self, inputs: Any) -> dict[int, Tensor]:
        """Run what stands before the cut."""
        return self.graph.prefix(inputs, call)

    def logits(self, values: dict[int, Tensor], run: Callable[..., Any] | None = None) -> Tensor:
        """Return the logits from what `prefix` gave.

        `run(layer, is_stripped, *args, **kwargs)` may run the layers with weights in another way;
        a stripped one is to be run without its activation.
        """

        def run_layer(layer: Any, *args: Any, **kwargs: Any) -> Any:
            is_stripped = layer is self._output_layer and self.strips
            if is_stripped and not has_weights(layer):
                return args[0] if args else kwargs["inputs"]
            if run is not None and has_weights(layer):
                return run(layer, is_stripped, *args, **kwargs)
            return (without_activation if is_stripped else call)(layer, *args, **kwargs)

        return ops.cast(self.graph.suffix(values, run_layer), self.dtype)


class Cache(NamedTuple):
    """The inputs of a network's last layer for all examples, (N, D), and their targets."""

    features: np.ndarray
    y: np.ndarray


class LastLayer:
    """The last layer of a network, a Dense one, as a linear model of cached features.

    The logits are `features @ kernel + bias`; `likelihood` takes them, and its `outputs` makes of
    them what the network returns.

    Args:
        model: a Functional or Sequential model, built, whose last layer with weights is a Dense
            one; only its activation and layers without effect, such as dropout, may follow.
        head: what the output means, as for `MonteCarlo`.
        from_logits: whether the output is logits, as for `MonteCarlo`.
    """

    def __init__(
        self, model: keras.Model, head: str | None = None, from_logits: bool | None = None
    ) -> None:
        self.layer = last_weighted_layer(model)
        self._network = LogitNetwork(model, lambda x: x is self.layer, head, from_logits)
        self.likelihood, self.width = self._network.likelihood, self._network.width
        activation = activation_of(model)
        after = self._network.graph.layers
        after = after[after.index(self.layer) + 1 :]
        stripped = output_layer(model) if self._network.strips else None
        others = [x for x in after if not is_transparent(x) and x is not stripped]
        nonlinear = stripped is None and activation not in (None, "linear")
        if type(self.layer) is not keras.layers.Dense or others or nonlinear:
            what = f"{self.layer.name!r}, a {type(self.layer).__name__}"
            if others or nonlinear:
                what += f", followed by {others[0].name if others else activation}"
            raise ValueError(
                f"The last layer with weights of `model` must be a Dense one whose output is the "
                f"logits or the prediction itself; it is {what}."
            )
        self._compiled = compiled(self.features, model.weights)

    @property
    def variables(self) -> list[keras.Variable]:
        """The kernel (D, K) and, if there is one, the bias (K,)."""
        return [x for x in (self.layer.kernel, self.layer.bias) if x is not None]

    def features(self, inputs: Any) -> Tensor:
        """Return the inputs (N, D) of the layer for a batch, in full precision."""
        values = self._network.prefix(inputs)
        if len(values) != 1:
            raise ValueError(f"The output of `model` depends on more than {self.layer.name!r}.")
        (features,) = values.values()
        if len(features.shape) != 2:
            shape = tuple(features.shape)
            raise ValueError(f"The input of {self.layer.name!r} must be (N, D); got {shape}.")
        return ops.cast(features, self.layer.kernel.dtype)

    def logits(self, features: Tensor, kernel: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the logits (..., N, K) of features (N, D) for kernels (..., D, K)."""
        logits = ops.matmul(features, kernel)
        return logits if bias is None else logits + bias[..., None, :]

    def cache(self, x: Any, y: Any = None, batch_size: int = 256, verbose: Any = "auto") -> Cache:
        """Return features and checked targets of arrays, or of a dataset of batches (x, y)."""
        features, targets = [], []
        for inputs, labels in batches(x, y, batch_size, verbose):
            targets.append(self.likelihood.targets(labels, self.width))
            features.append(ops.convert_to_numpy(self._compiled(inputs)))
        found = np.concatenate(features)
        check_finite(found, f"inputs of layer {self.layer.name!r}")
        return Cache(found, np.concatenate(targets))


def last_weighted_layer(model: Any) -> keras.layers.Layer:
    """Return the layer with weights that stands last in a model's graph, or raise."""
    check_network(model)
    weighted = [x for x in Graph(model, lambda _: True).layers if has_weights(x)]
    if not weighted:
        raise ValueError(f"Model {model.name!r} has no weights.")
    return weighted[-1]


def check_network(model: Any) -> None:
    """Raise unless a model is built, plain, and has a graph with one output."""
    if not isinstance(model, keras.Model):
        raise ValueError(f"`model` must be a Keras model; got {model!r}.")
    graph = functional_graph(model)
    if graph is None:
        problem = "is not built" if not model.built else "has a `call` of its own"
        raise ValueError(f"`model` must be a built Functional or Sequential one; it {problem}.")
    if len(graph.outputs) != 1:
        raise ValueError(f"`model` must have one output; got {len(graph.outputs)}.")
    if stochastic_layers(model):
        raise ValueError("`model` has stochastic layers: give ibnn.to_deterministic(model).")


def batches(x: Any, y: Any, batch_size: int, verbose: Any = 0) -> Iterator[tuple[Any, np.ndarray]]:
    """Yield (inputs, targets) of arrays, or of a dataset that ends, with a progress bar."""
    if y is not None:
        size = checks.positive_integer("batch_size", batch_size)
        x, y = keras.tree.map_structure(np.asarray, x), np.asarray(y)
        lengths = {len(part) for part in keras.tree.flatten(x)} | {len(y)}
        if len(lengths) != 1:
            raise ValueError(f"`x` and `y` must have as many examples; got {sorted(lengths)}.")
        count = -(-len(y) // size)

        def part(number: int) -> tuple[Any, np.ndarray]:
            rows = slice(number * size, (number + 1) * size)
            return keras.tree.map_structure(lambda a: a[rows], x), y[rows]

        found = map(part, range(count))
    else:
        count, found = dataset_batches(x, "x")
    bar = keras.utils.Progbar(max(count, 0) or None, verbose=1 if verbose == "auto" else verbose)
    number = 0
    for number, batch in enumerate(found, start=1):
        if len(batch) != 2:
            raise ValueError(f"A dataset must give (x, y); got {len(batch)} parts.")
        inputs, targets = keras.tree.map_structure(_as_array, tuple(batch))
        if not len(targets):
            continue
        for part in keras.tree.flatten(inputs):
            check_finite(part, "inputs")
        yield inputs, targets
        bar.update(number)
    if not number:
        raise ValueError("There are no examples.")


def dataset_batches(data: Any, name: str) -> tuple[int, Iterator[Any]]:
    """Return the number of batches of a dataset that ends, and these."""
    if isinstance(data, keras.utils.PyDataset):
        count = -1 if data.num_batches is None else data.num_batches
        found = map(data.__getitem__, range(count))
    elif hasattr(data, "cardinality"):
        count, found = int(data.cardinality()), iter(data)
    else:
        kinds = "Give arrays x and y, a tf.data.Dataset or a PyDataset"
        raise ValueError(f"{kinds}; `{name}` is a {type(data).__name__}.")
    if count == -1:
        raise ValueError(f"`{name}` never ends: give a dataset of one pass over the examples.")
    return count, found


def check_finite(values: np.ndarray, what: str) -> None:
    """Raise for NaN or infinity."""
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        bad = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
        where = f"{bad.sum()} of {len(bad)} rows; the first is number {bad.argmax()}"
        raise ValueError(f"The {what} hold NaN or infinity in {where}.")


def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a layer as in inference."""
    if isinstance(layer, keras.layers.Layer):
        kwargs["training"] = False
    return layer(*args, **kwargs)


def without_activation(layer: keras.layers.Layer, x: Tensor) -> Tensor:
    """Return what a layer gives to its activation, in the precision of its weights."""
    x = ops.cast(x, layer.variable_dtype)
    return keras_internals.call_with(layer, x, activation=keras.activations.linear)


def has_weights(layer: Any) -> bool:
    """Whether a layer or operation has weights."""
    return bool(getattr(layer, "weights", []))


def _as_array(part: Any) -> np.ndarray:
    return ops.convert_to_numpy(part) if ops.is_tensor(part) else np.asarray(part)
