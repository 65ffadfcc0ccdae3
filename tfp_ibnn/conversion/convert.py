"""Turn a deterministic Keras model into a stochastic one, and back."""

import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import keras
from keras import layers

from tfp_ibnn._core import checks, keras_internals
from tfp_ibnn._core.protocols import PosteriorTemplate
from tfp_ibnn.conversion.graph import functional_graph, has_layer_graph, overrides_call
from tfp_ibnn.layers import StochasticLayer, stochastic_layers
from tfp_ibnn.layers.base import CONVERTIBLE, check_train_size
from tfp_ibnn.layers.control import some_stochastic_layers
from tfp_ibnn.layers.model import StochasticModel
from tfp_ibnn.layers.multiplicative import NOISES, REDUCTIONS

# Layers whose weights nobody expects to be converted.
_SILENT = (
    *(layers.BatchNormalization, layers.GroupNormalization, layers.LayerNormalization),
    *(layers.Normalization, layers.RMSNormalization, layers.SpectralNormalization),
    *(layers.Embedding, layers.PReLU),
)

# The pattern of all layers that other patterns leave, which may be none.
_REST = ".*"


def to_stochastic(
    model: keras.Model,
    posterior: PosteriorTemplate | Mapping[str, PosteriorTemplate],
    train_size: int | None = None,
    *,
    noise: str = "channel",
    kl_reduction: str = "sum",
    train_samples: int = 1,
    seed: int | None = None,
) -> StochasticModel:
    """Return a stochastic copy of a model: each chosen layer has noise on its input or weights.

    The copy is Functional, and not compiled. Weights carry over and the original is not changed.
    With the noise off, the copy computes what the original does. Dense, EinsumDense and all
    convolution layers can be converted, in nested models too; a layer that is used twice stays one
    layer, with one draw and one KL.

    Args:
        model: a built Functional or Sequential model, trained or not.
        posterior: a template for all layers, or a mapping from patterns of layer names
            (`re.fullmatch`, the first match wins) to templates. Layers that match no pattern stay
            deterministic, and a pattern passes over layers that cannot be converted. Each must
            convert some layer, but for ".*", which others may leave nothing to.
        train_size: number of training examples, over which the KL is spread.
        noise: "channel" or "position", see `Stochastic`; for posteriors over z.
        kl_reduction: "sum" or "mean" over positions, see `Stochastic`; for posteriors over z.
        train_samples: samples of z for each example in training.
        seed: of the noise; each layer draws a stream of its own.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> det = keras.Sequential(
        ...     [keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(3)]
        ... )
        >>> sto = ibnn.to_stochastic(det, ibnn.NormalAffine(), train_size=100)
        >>> [type(layer).__name__ for layer in sto.layers]
        ['InputLayer', 'Stochastic', 'Stochastic']
    """
    train_size = check_train_size(train_size)
    checks.positive_integer("train_samples", train_samples)
    checks.one_of("noise", noise, NOISES)
    checks.one_of("kl_reduction", kl_reduction, REDUCTIONS)
    graph = _graph_of(model)
    if stochastic_layers(model):
        raise ValueError(f"{model.name!r} is already stochastic; `to_deterministic` undoes that.")
    templates = _checked_templates(posterior)
    chosen: dict[int, str] = {}
    convertible: list[str] = []
    passed_over: list[str] = []
    for layer in _leaves(graph):
        pattern = next((p for p in templates if re.fullmatch(p, layer.name)), None)
        if isinstance(layer, CONVERTIBLE):
            convertible.append(layer.name)
            if pattern is not None:
                chosen[id(layer)] = pattern
        elif pattern is not None and layer.trainable_weights and not isinstance(layer, _SILENT):
            passed_over.append(f"{layer.name} ({type(layer).__name__})")
    remedy = (
        f"cannot be converted: {', '.join(passed_over)}. To make one stochastic, put "
        "`ibnn.Stochastic(layer, posterior, train_size)` in its place, if it has one input, or "
        "use `ibnn.StochasticDense` inside a layer of your own."
    )
    if not convertible:
        kinds = ", ".join(kind.__name__ for kind in CONVERTIBLE)
        more = f" These layers {remedy}" if passed_over else ""
        raise ValueError(f"`model` has no layer to convert. Those that can be are {kinds}.{more}")
    used = {*chosen.values(), *([_REST] if chosen else ())}
    unused = [pattern for pattern in templates if pattern not in used]
    if unused:
        raise ValueError(
            f"`posterior` has the pattern {unused[0]!r}, which converts no layer. It must be the "
            f"first to match a whole name. Those that can be converted: {', '.join(convertible)}."
        )
    at_depth = {pattern: one.at_depth(len(chosen)) for pattern, one in templates.items()}
    converted: list[tuple[PosteriorTemplate, StochasticLayer]] = []

    def convert(layer: keras.layers.Layer) -> keras.layers.Layer:
        copy = _copy_layer(layer)
        if id(layer) not in chosen:
            return copy
        pattern = chosen[id(layer)]
        own_seed = templates[pattern].seed if seed is None else seed
        own_seed = None if own_seed is None else own_seed + len(converted)
        options = {"noise": noise, "kl_reduction": kl_reduction, "seed": own_seed}
        wrapped = at_depth[pattern].wrap(copy, train_size, name=layer.name, **options)
        converted.append((templates[pattern], wrapped))
        return wrapped

    inputs, outputs = _rebuild(graph, convert)
    if passed_over:
        warnings.warn(f"These layers stay deterministic, since they {remedy}", stacklevel=2)
    for template in {id(template): template for template, _ in converted}.values():
        template.bind([wrapped for its_own, wrapped in converted if its_own is template])
    return StochasticModel(inputs, outputs, train_samples=train_samples, name=model.name)


def to_deterministic(model: keras.Model) -> keras.Model:
    """Return a plain Keras model with the posterior means folded into the weights.

    It computes what the stochastic model does with its noise off, contains no class of this
    library, and can be saved, quantised or served like any other. Where a mean cannot be folded
    into a kernel, a `keras.layers.Rescaling` layer applies it.

    Args:
        model: a Functional or Sequential model with stochastic layers.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> det = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        >>> sto = ibnn.to_stochastic(det, ibnn.NormalPlanar1d(), train_size=100)
        >>> type(ibnn.to_deterministic(sto).layers[-1]).__name__
        'Dense'
    """
    graph = _graph_of(model)
    some_stochastic_layers(model)

    def convert(layer: keras.layers.Layer) -> keras.layers.Layer:
        if isinstance(layer, StochasticLayer):
            return layer.fold()
        if stochastic_layers(layer):
            place = f"layer {layer.name!r} ({type(layer).__name__})"
            raise ValueError(f"The stochastic layer inside {place} cannot be folded away.")
        return _copy_layer(layer)

    return keras.Model(*_rebuild(graph, convert), name=model.name)


def copy_of(model: keras.Model) -> keras.Model:
    """Return a Functional model of new layers with the same weights, not compiled."""
    return keras.Model(*_rebuild(_graph_of(model), _copy_layer), name=model.name)


def _checked_templates(posterior: Any) -> Mapping[str, PosteriorTemplate]:
    """Return posteriors by patterns of layer names."""
    templates = {_REST: posterior} if isinstance(posterior, PosteriorTemplate) else posterior
    want = "must be a posterior such as ibnn.NormalAffine(), with its parentheses"
    if not isinstance(templates, Mapping) or not templates:
        other = "or a mapping from patterns of layer names to such"
        raise ValueError(f"`posterior` {want}, {other}; got {posterior!r}.")
    for pattern, template in templates.items():
        if not isinstance(template, PosteriorTemplate):
            raise ValueError(f"`posterior[{pattern!r}]` {want}; got {template!r}.")
        try:
            re.compile(pattern)
        except (re.error, TypeError, OverflowError, RecursionError) as error:
            no = f"is not a regular expression: {error}."
            raise ValueError(f"`posterior` has the pattern {pattern!r}, which {no}") from None
    return templates


def _graph_of(model: Any) -> keras.Model:
    """Return the Functional model behind a model, or raise if there is none."""
    if not isinstance(model, keras.Model):
        raise ValueError(f"`model` must be a Keras model; got {model!r}.")
    kind = type(model).__name__
    if not has_layer_graph(model):
        remedy = "make it Functional or Sequential, or use Stochastic and StochasticDense inside"
        raise ValueError(f"Model {model.name!r} is a subclass of keras.Model ({kind}): {remedy}.")
    if overrides_call(model):
        remedy = "would be lost: make it part of the graph, by keras.layers.Rescaling for example"
        raise ValueError(f"Model {model.name!r} ({kind}) has a `call` of its own, which {remedy}.")
    graph = functional_graph(model)
    if graph is None:
        remedy = "begin it with a keras.Input, or call `model.build(input_shape)`"
        raise ValueError(f"Sequential model {model.name!r} is not built: {remedy}.")
    return graph


def _leaves(graph: keras.Model) -> list[keras.layers.Layer]:
    """Return the layers of a graph and of the models nested in it, each once."""
    leaves: dict[int, keras.layers.Layer] = {}
    for layer in graph.layers:
        nested = _leaves(_graph_of(layer)) if has_layer_graph(layer) else [layer]
        leaves |= {id(leaf): leaf for leaf in nested}
    return list(leaves.values())


def _copy_layer(layer: keras.layers.Layer) -> keras.layers.Layer:
    try:
        return type(layer).from_config(layer.get_config())
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(
            f"Layer {layer.name!r} ({type(layer).__name__}) cannot be copied: it needs a config, "
            f"and `keras.saving.register_keras_serializable` for what it uses. Keras says: {error}"
        ) from error


def _rebuild(
    graph: keras.Model, convert: Callable[[keras.layers.Layer], keras.layers.Layer]
) -> tuple[Any, Any]:
    """Rebuild a Functional model with converted layers; return its inputs and outputs."""
    pairs: list[tuple[keras.layers.Layer, keras.layers.Layer]] = []
    copies: dict[int, Any] = {}

    def clone(layer: Any) -> Any:
        # One copy for each layer, so that what is shared, even among nested models, stays shared.
        if id(layer) in copies:
            return copies[id(layer)]
        if not isinstance(layer, keras.layers.Layer):  # an operation such as x + y
            copy = type(layer).from_config(layer.get_config())
        elif has_layer_graph(layer):
            copy = keras.Model(*rebuild(_graph_of(layer)), name=layer.name)
        else:
            copy = convert(layer)
            pairs.append((layer, copy))
        copies[id(layer)] = copy
        return copy

    def fresh_input(x: Any) -> Any:
        name = keras_internals.origin(x)[0].name
        return keras.Input(batch_shape=x.shape, dtype=x.dtype, name=name)

    def rebuild(graph: keras.Model) -> tuple[Any, Any]:
        # An alias of the same layers, since Keras would compile the clone of a compiled model.
        alias = keras.Model(graph.input, graph.output)
        fresh = keras.tree.map_structure(fresh_input, alias.input)
        rebuilt = keras.models.clone_model(
            alias, input_tensors=fresh, clone_function=clone, call_function=_call
        )
        return rebuilt.input, rebuilt.output

    ends = rebuild(graph)
    for old, new in pairs:
        if isinstance(new, StochasticLayer):
            new.carry_over(old.get_weights())
        elif not isinstance(old, StochasticLayer):  # whose weights are folded in already
            new.set_weights(old.get_weights())
    return ends


def _call(layer: Any, *args: Any, mask: Any = None, **kwargs: Any) -> Any:
    """Call a layer of a new graph, with the mask of the old one if it can take one."""
    if mask is not None and "mask" in inspect.signature(layer.call).parameters:
        kwargs["mask"] = mask
    return layer(*args, **kwargs)
