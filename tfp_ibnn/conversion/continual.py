"""From one task to the next: a posterior that becomes a prior."""

import keras

from tfp_ibnn.conversion.classes import model_like
from tfp_ibnn.conversion.copying import check_built, exact_copy
from tfp_ibnn.layers import StochasticLayer, folding
from tfp_ibnn.layers.base import check_train_size
from tfp_ibnn.layers.control import some_stochastic_layers
from tfp_ibnn.layers.inside import Place, replace
from tfp_ibnn.layers.model import StochasticSubclass


def posterior_as_prior(model: keras.Model, train_size: int | None = None) -> keras.Model:
    """Return a copy of a trained stochastic model, for the next task: its posterior is the prior.

    Every stochastic layer starts at the posterior that the model has learned, which is its prior
    from now on: the KL is 0, and grows as the layer moves away. Bayes' rule says that learning one
    part of the data after the other then gives what learning them together gives, as far as the
    posteriors are exact (variational continual learning, arXiv 1710.10628). The prior is not
    trained, and saved with the model; the model itself stays as it is.

    What is not random has no prior, and forgets: biases, unless `MeanField(bias="stochastic")`, and
    all weights around a posterior over z, unless `ibnn.freeze(model, "deterministic")`.

    Posteriors are those of `MeanField`, `NormalAffine`, `NormalFull`, `NormalLowRank` and
    `FlowPosterior`. The KL between Gaussians is in closed form; that of flows is estimated by the
    draws of the pass, and takes the inverse of the flows of the prior.

    Args:
        model: with stochastic layers, trained on the tasks until now.
        train_size: number of training examples of the next task, over which the KL is spread; None
            is that of the model. `beta` stays what it was.

    Returns:
        A built model of the same class, not compiled; a `StochasticModel` of a plain Keras graph.

    Raises:
        ValueError: If the model has no stochastic layer, or a posterior has no density that can be
            computed: `MNF`, `MixturePosterior`, `JointPosterior`, `shared_components`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> det = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        >>> sto = ibnn.to_stochastic(det, ibnn.MeanField(bias="stochastic"), train_size=100)
        >>> later = ibnn.posterior_as_prior(sto, train_size=50)
        >>> [float(layer.summary().kl) for layer in ibnn.stochastic_layers(later)]
        [0.0]
    """
    some_stochastic_layers(model)
    check_built(model)
    if train_size is not None:
        train_size = check_train_size(train_size)
    network = model.model if isinstance(model, StochasticSubclass) else model
    _check_posteriors(network)
    copied = exact_copy(network)
    layers = {
        steps: _next_layer(place.layer, copied.new[steps], train_size)
        for steps, place in copied.old.items()
        if isinstance(place.layer, StochasticLayer)
    }
    replace(copied.copy, copied.new, layers)
    return model_like(model, copied)


def _check_posteriors(model: keras.Model) -> None:
    """Raise if a posterior cannot be a prior, with the name of its layer."""
    for layer in some_stochastic_layers(model):
        try:
            layer.posterior.for_next_task()
        except ValueError as error:
            raise ValueError(f"Layer {layer.name!r}: {error}") from None


def _next_layer(old: StochasticLayer, place: Place, train_size: int | None) -> StochasticLayer:
    """Return the layer for the next task, around the plain layer that a copy has.

    One of a class that makes the plain layer itself, such as `StochasticDense`, gets its weights.

    Args:
        old: the layer that has learned.
        place: of its copy.
        train_size: of the next task, or None.
    """
    plain = place.layer.layer
    config = old.get_config()
    if "layer" in config:
        config["layer"] = plain
    config["posterior"] = old.posterior.for_next_task()
    if train_size is not None:
        config["train_size"] = train_size
    with place.name_scope():
        layer = type(old).from_config(config)
        layer.build_from_config(old.get_build_config())
    if layer.layer is not plain:
        folding.adapt(layer.layer, plain)
        folding.copy_weights(layer.layer, plain)
    layer.continue_from(old)
    return layer
