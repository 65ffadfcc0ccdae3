"""Switch the noise of a model off, or stop training a part of it."""

import contextlib
from collections.abc import Iterator

import keras
from keras import ops

from tfp_ibnn._core import checks, keras_internals
from tfp_ibnn.layers.base import StochasticLayer


def stochastic_layers(model: keras.layers.Layer) -> list[StochasticLayer]:
    """Return the stochastic layers of a model, nested ones included, each once."""
    layers = keras_internals.nested_layers(model)
    return [layer for layer in layers if isinstance(layer, StochasticLayer)]


def some_stochastic_layers(model: keras.layers.Layer) -> list[StochasticLayer]:
    """Return the stochastic layers of a model, or raise if there are none."""
    layers = stochastic_layers(model)
    if not layers:
        raise ValueError(f"Model {model.name!r} has no stochastic layer.")
    return layers


def set_noise(model: keras.layers.Layer, on: bool) -> None:
    """Switch the noise of all stochastic layers on or off.

    Off, z is its posterior mean and no KL is added; functions that are already compiled follow.

    Args:
        model: a built model, or layer, with stochastic layers.
        on: whether there is noise.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> layer = ibnn.StochasticDense(1, train_size=10)
        >>> layer.build((None, 3))
        >>> ibnn.set_noise(layer, on=False)
        >>> y = layer(keras.ops.ones((2, 3)))
        >>> bool(y[0, 0] == y[1, 0])
        True
    """
    for switch in _switches(model):
        switch.assign(float(on))


@contextlib.contextmanager
def noise_off(model: keras.layers.Layer) -> Iterator[None]:
    """Switch the noise off inside a `with` block, then back to what it was.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> layer = ibnn.StochasticDense(1, train_size=10)
        >>> x = keras.ops.ones((2, 3))
        >>> _ = layer(x)
        >>> with ibnn.noise_off(layer):
        ...     y = layer(x)
        >>> bool(keras.ops.all(y[0] == y[1]))
        True
    """
    switches = _switches(model)
    before = [float(ops.convert_to_numpy(switch)) for switch in switches]
    set_noise(model, on=False)
    try:
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.assign(value)


def _switches(model: keras.layers.Layer) -> list[keras.Variable]:
    layers = some_stochastic_layers(model)
    unbuilt = [layer.name for layer in layers if not layer.built]
    if unbuilt:
        raise ValueError(
            f"{', '.join(unbuilt)} cannot be switched before it is built: call the model on data, "
            "or build it, first."
        )
    return [layer.noise_switch for layer in layers]


def freeze(model: keras.layers.Layer, part: str) -> None:
    """Stop training one part of a model; compile it again afterwards, as Keras requires.

    Args:
        model: a model with stochastic layers.
        part: "stochastic", the posteriors, or "deterministic", all other weights.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> layer = ibnn.StochasticDense(1, train_size=10)
        >>> layer.build((None, 3))
        >>> ibnn.freeze(layer, "deterministic")
        >>> [weight.name for weight in layer.trainable_weights]
        ['shift', 'raw_scale']
    """
    # Listed first, since setting a layer sets its weights and sublayers as well.
    trained = [switch for switch in _switches_of(model, part) if switch.trainable]
    for switch in trained:
        switch.frozen_by_part = True
        switch.trainable = False


def unfreeze(model: keras.layers.Layer, part: str) -> None:
    """Train again what `freeze` has stopped; compile the model again afterwards.

    What was frozen before `freeze`, by `layer.trainable = False`, stays frozen. Files do not
    record which is which: if nothing of the part trains and no `freeze` is known, as in a loaded
    model, all of the part is trained.

    Args:
        model: a model with stochastic layers.
        part: "stochastic", the posteriors, or "deterministic", all other weights.
    """
    switches = _switches_of(model, part)
    frozen = [switch for switch in switches if getattr(switch, "frozen_by_part", False)]
    layers = [switch for switch in switches if isinstance(switch, keras.layers.Layer)]
    are_trained = any(layer.trainable_weights for layer in layers)
    if not frozen and not are_trained:
        frozen = switches
    thawed = {id(switch) for switch in frozen}
    # Listed first, since setting a layer sets its weights and sublayers as well.
    is_trained = [switch.trainable or id(switch) in thawed for switch in switches]
    for switch, value in zip(switches, is_trained, strict=True):
        switch.trainable = value
        switch.frozen_by_part = False


def _switches_of(model: keras.layers.Layer, part: str) -> list[keras.layers.Layer | keras.Variable]:
    """Return all of a part that has a flag `trainable`: layers, each before what it contains."""
    checks.one_of("part", part, ("stochastic", "deterministic"))
    posteriors = [layer.posterior for layer in some_stochastic_layers(model)]
    nested = keras_internals.nested_layers
    layers = [layer for posterior in posteriors for layer in nested(posterior)]
    fixed = [layer for posterior in posteriors for layer in posterior.fixed_layers()]
    constant = {id(layer) for owner in fixed for layer in nested(owner)}
    if part == "deterministic":
        inside = {id(layer) for layer in layers}
        others = nested(model, include_self=False)
        layers = [layer for layer in others if id(layer) not in inside]
    switches = []
    for layer in layers:
        if id(layer) in constant:
            continue
        # The flag of a container would reach its posteriors too, so only its own weights are set.
        if part == "stochastic" or not nested(layer, include_self=False):
            switches.append(layer)
        switches += keras_internals.own_trainable_variables(layer)
    return switches
