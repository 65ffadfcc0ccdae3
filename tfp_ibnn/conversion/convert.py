"""Turn a deterministic Keras model into a stochastic one, and back."""

import warnings
from collections.abc import Mapping
from typing import Any

import keras

from tfp_ibnn._core import checks
from tfp_ibnn._core.protocols import PosteriorTemplate, WeightPosterior
from tfp_ibnn.conversion.choice import checked_templates, choose
from tfp_ibnn.conversion.classes import deterministic_model, stochastic_model
from tfp_ibnn.conversion.copying import check_built, folded_copy_of, rebuild
from tfp_ibnn.conversion.transfer import carry_over
from tfp_ibnn.conversion.wrappers import PredictionWrapper
from tfp_ibnn.layers import StochasticLayer, stochastic_layers
from tfp_ibnn.layers.base import check_train_size
from tfp_ibnn.layers.control import some_stochastic_layers
from tfp_ibnn.layers.inside import Place, Steps, replace
from tfp_ibnn.layers.model import StochasticModel, StochasticSubclass
from tfp_ibnn.layers.multiplicative import NOISES, REDUCTIONS
from tfp_ibnn.layers.rows import check_rows


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

    Each chosen layer multiplies its input by a latent z, or draws its weights; the posterior says
    which. The copy is not compiled. Weights carry over; with the noise off, it computes what the
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
            layers that cannot be converted. Every pattern must convert a layer, except ".*" after
            other patterns.
        train_size: number of training examples, over which the KL is spread; it must be given.
        noise: "channel" or "position", see `Stochastic`; for posteriors over z.
        kl_reduction: "sum" or "mean" over positions, see `Stochastic`; for posteriors over z.
        train_samples: samples of z for each example in training.
        seed: of the noise; each layer draws a stream of its own. None takes the templates'.

    Returns:
        A built model: a `StochasticModel`, or a `StochasticSubclass` around a copy of a model with
        a `call` of its own; of the user's class too where that defines how to train or evaluate.

    Raises:
        ValueError: If an argument is not of these values, the model is not built, cannot be copied
            or is stochastic already, or a pattern converts no layer.

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
    check_built(model)
    if stochastic_layers(model):
        raise ValueError(f"{model.name!r} is already stochastic; `to_deterministic` undoes that.")
    copied = rebuild(model)
    carry_over(copied)
    templates = checked_templates(posterior)
    # Patterns are matched with the names of the original: layers of the copy may have others.
    choice = choose(copied.old.values(), templates)
    options = {"noise": noise, "kl_reduction": kl_reduction}
    wrapped = _wrap(copied.new, choice.templates, train_size, seed, options)
    replace(copied.copy, copied.new, wrapped)
    if choice.unchanged:
        warnings.warn(choice.explanation.strip(), stacklevel=2)
    stochastic = stochastic_model(copied, train_samples)
    check_rows(stochastic)
    return stochastic


def _wrap(
    places: Mapping[Steps, Place],
    templates: Mapping[Steps, PosteriorTemplate],
    train_size: int,
    seed: int | None,
    options: Mapping[str, Any],
) -> dict[Steps, StochasticLayer]:
    """Return built stochastic layers around the chosen layers of a copy, by their places.

    Args:
        places: where the plain layers of the copy are.
        templates: of the chosen layers, by their places.
        train_size: number of training examples.
        seed: of the noise of the first layer, from which the others count on; None takes the
            templates'. No two layers get the same one.
        options: `noise` and `kl_reduction` of `wrap`.
    """
    depth = len(templates)
    # Keyed by id: layers that share a template share its copy.
    at_depth = {id(template): template.at_depth(depth) for template in templates.values()}
    wrapped: dict[Steps, StochasticLayer] = {}
    used: set[int] = set()
    for number, (steps, template) in enumerate(templates.items()):
        first_seed = template.seed if seed is None else seed
        layer_seed = None
        if first_seed is not None:
            layer_seed = _unused(first_seed + number, used)
        place = places[steps]
        name = place.layer.name
        with place.name_scope():
            layer = at_depth[id(template)].wrap(
                place.layer, train_size, name=name, seed=layer_seed, **options
            )
            layer.build(place.shape)
        wrapped[steps] = layer
    return wrapped


def _unused(seed: int, used: set[int]) -> int:
    """Return the first seed, from one on, that is not used yet, and add it to those that are."""
    while seed in used:
        seed += 1
    used.add(seed)
    return seed


def to_deterministic(model: keras.Model) -> keras.Model:
    """Return a plain Keras model with the posterior means folded into the weights.

    It computes what the stochastic model does with its noise off, contains no class of this
    library, and can be saved, quantised or served like any other. Where a mean cannot be folded
    into a kernel, a `keras.layers.Rescaling` layer applies it.

    Args:
        model: a model with stochastic layers.

    Returns:
        A built model, not compiled, of the user's own class where the original's was one.

    Raises:
        ValueError: If the model has no stochastic layer, or one that cannot be folded away.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> det = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        >>> sto = ibnn.to_stochastic(det, ibnn.NormalAffine(), train_size=100)
        >>> [type(layer).__name__ for layer in ibnn.to_deterministic(sto).layers]
        ['InputLayer', 'Dense']
    """
    some_stochastic_layers(model)
    network = model.model if isinstance(model, StochasticSubclass) else model
    return deterministic_model(model, folded_copy_of(network))


def without_uncertainty(model: Any) -> keras.Model:
    """Return the plain network at the mean of a posterior, or the model itself if it has none.

    Args:
        model: a `MonteCarlo` or another wrapper, a model, or a posterior over weights.
    """
    while isinstance(model, PredictionWrapper):
        model = model.inner
    network = model.mean_network() if isinstance(model, WeightPosterior) else model
    if stochastic_layers(network):
        network = to_deterministic(network)
    return network
