"""Turn a deterministic Keras model into a stochastic one, and back."""

import re
import warnings
from collections.abc import Mapping
from typing import Any

import keras
from keras import layers

from tfp_ibnn._core import checks, keras_internals
from tfp_ibnn._core.protocols import PosteriorTemplate
from tfp_ibnn.conversion.classes import deterministic_model, stochastic_model
from tfp_ibnn.conversion.copying import copy_of
from tfp_ibnn.layers import stochastic_layers
from tfp_ibnn.layers.base import CELLS, CONVERTIBLE, check_train_size, has_lora, is_quantized
from tfp_ibnn.layers.control import some_stochastic_layers
from tfp_ibnn.layers.inside import Place, Steps, places, replace
from tfp_ibnn.layers.model import StochasticModel, StochasticSubclass
from tfp_ibnn.layers.multiplicative import NOISES, REDUCTIONS
from tfp_ibnn.layers.rows import check_rows

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
) -> StochasticModel | StochasticSubclass:
    """Return a stochastic copy of a model: each chosen layer has noise on its input or weights.

    The copy is not compiled. Weights carry over; with the noise off, the copy computes what the
    original does. Dense, EinsumDense and all convolution layers can be converted, and the cells of
    LSTM, GRU and SimpleRNN by posteriors over z, in nested models, attention and other layers too.
    A layer that is used twice stays one, with one draw and one KL. The copy of a model with a
    `call` of its own has it as `model`. What the model's class defines for training and evaluation,
    such as `train_step` or `compute_loss`, the copy does as well; a warning names what it cannot.

    Args:
        model: a built model, trained or not.
        posterior: a template for all layers, or a mapping from patterns of layer names, or of
            paths such as "encoder/attention/query" (`re.fullmatch`, the first match wins), to
            templates. Layers that match no pattern stay deterministic, and a pattern passes over
            layers that cannot be converted. Each must convert some layer, but for ".*", which
            others may leave nothing to.
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
    copied = copy_of(model)
    if stochastic_layers(model):
        raise ValueError(f"{model.name!r} is already stochastic; `to_deterministic` undoes that.")
    templates = _checked_templates(posterior)
    known = places(model).values()
    convertible = [place for place in known if place.shape is not None]
    chosen: dict[Steps, str] = {}
    passed_over: list[str] = []
    unfit: list[Place] = []
    reached = {id(owner) for place in convertible for owner in place.owners}
    for place in known:
        names = (place.layer.name, place.path)
        pattern = next((p for p in templates if any(re.fullmatch(p, x) for x in names)), None)
        # Of several kernels only posteriors over z know what to multiply.
        is_one_kernel = not (type(place.layer) in CELLS or is_quantized(place.layer))
        is_one_kernel = is_one_kernel and not has_lora(place.layer)
        is_over_z = pattern is not None and templates[pattern].latent == "z"
        fits = is_one_kernel or is_over_z
        if pattern is not None and place in convertible and fits:
            chosen[place.steps] = pattern
        elif pattern is not None and not isinstance(place.layer, _SILENT):
            own = keras_internals.own_trainable_variables(place.layer)
            if id(place.layer) not in reached and any(weight.trainable for weight in own):
                hint = "" if fits else ", which needs a posterior over z"
                passed_over.append(f"{place.path} ({type(place.layer).__name__}{hint})")
                unfit += [] if fits else [place]
    remedy = (
        f"cannot be converted: {', '.join(passed_over)}. To make one stochastic, put "
        "`ibnn.Stochastic(layer, posterior, train_size)` in its place, if it has one input, or "
        "use `ibnn.StochasticDense` inside a layer of your own."
    )
    more = f" These layers {remedy}" if passed_over else ""
    if not convertible:
        kinds = ", ".join(kind.__name__ for kind in (*CONVERTIBLE, *CELLS))
        raise ValueError(f"`model` has no layer to convert. Those that can be are {kinds}.{more}")
    used = {*chosen.values(), *([_REST] if chosen else ())}
    unused = [pattern for pattern in templates if pattern not in used]
    if unused:
        names = ", ".join(place.path for place in convertible if place not in unfit) or "none"
        raise ValueError(
            f"`posterior` has the pattern {unused[0]!r}, which converts no layer. It must be the "
            f"first to match a whole name or path. Those that can be converted: {names}.{more}"
        )
    at_depth = {id(one): one.at_depth(len(chosen)) for one in templates.values()}
    copies, converted = places(copied), {}
    for steps, pattern in chosen.items():
        own_seed = templates[pattern].seed if seed is None else seed
        own_seed = None if own_seed is None else own_seed + len(converted)
        options = {"noise": noise, "kl_reduction": kl_reduction, "seed": own_seed}
        place = copies[steps]
        with place.name_scope():
            plain, wrap = place.layer, at_depth[id(templates[pattern])].wrap
            converted[steps] = wrap(plain, train_size, name=plain.name, **options)
            converted[steps].build(place.shape)
    replace(copied, converted)
    if passed_over:
        warnings.warn(f"These layers stay deterministic, since they {remedy}", stacklevel=2)
    stochastic = stochastic_model(model, copied, train_samples=train_samples, name=model.name)
    check_rows(stochastic)
    return stochastic


def to_deterministic(model: keras.Model) -> keras.Model:
    """Return a plain Keras model with the posterior means folded into the weights.

    It computes what the stochastic model does with its noise off, contains no class of this
    library, and can be saved, quantised or served like any other. Where a mean cannot be folded
    into a kernel, a `keras.layers.Rescaling` layer applies it.

    Args:
        model: a model with stochastic layers.
    """
    some_stochastic_layers(model)
    is_around = isinstance(model, StochasticSubclass)
    return deterministic_model(model, copy_of(model.model if is_around else model, fold=True))


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
