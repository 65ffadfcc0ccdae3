"""Find layers inside of layers, and put others in their places."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras

from tfp_ibnn._core import keras_internals, keras_layers
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.layers.base import CELLS, CONVERTIBLE, StochasticLayer
from tfp_ibnn.layers.control import stochastic_layers
from tfp_ibnn.noise import Pass

LEAVES = (StochasticLayer, *CONVERTIBLE, *CELLS, keras.layers.SpectralNormalization)
"""Layers not searched: they are stochastic, can become so, or compute with a kernel inside."""

Steps = tuple[str | int, ...]
"""The way from a model to a layer inside: attributes, and places in lists and graphs."""


class Place(NamedTuple):
    """Where a layer is: the way there, the layers around it from the outermost on, and itself."""

    steps: Steps
    owners: tuple[keras.layers.Layer, ...]
    layer: keras.layers.Layer

    @property
    def path(self) -> str:
        """The names of the layers around it, less the model's, and its own."""
        layers = (*self.owners[1:], self.layer)
        names = [layer.name for layer in layers]
        return "/".join(names)

    @property
    def shape(self) -> tuple[int | None, ...] | None:
        """The input shape it was built for; None if it cannot be converted or reached."""
        is_of_a_kind = isinstance(self.layer, CONVERTIBLE) or type(self.layer) in CELLS
        if not is_of_a_kind or not self.layer.built or keras_layers.HIDDEN in self.steps:
            return None
        config = self.layer.get_build_config() or {}
        return config.get("input_shape")

    @property
    def in_graph(self) -> bool:
        """Whether the graphs around it call it directly, and have it in their configs."""
        are_graphs = all(map(keras_internals.is_plain_graph, self.owners[1:]))
        attributes = set(self.steps[::2])
        return are_graphs and attributes == {keras_layers.GRAPH}

    @contextlib.contextmanager
    def name_scope(self) -> Iterator[None]:
        """Give variables that are made in the block the paths that its owners would give them."""
        with contextlib.ExitStack() as stack:
            for owner in self.owners[1:]:
                stack.enter_context(keras.name_scope(owner.name))
            yield


def places(model: keras.layers.Layer) -> dict[Steps, Place]:
    """Return the layers inside of a model, owners first; what can be stochastic is not searched."""
    found: dict[Steps, Place] = {}
    _add_places((model,), (), found, visited={id(model)})
    return found


def _add_places(
    owners: tuple[keras.layers.Layer, ...],
    steps: Steps,
    found: dict[Steps, Place],
    visited: set[int],
) -> None:
    """Add the layers inside of the last of the owners, and inside of these."""
    for key, layer in keras_layers.sublayers(owners[-1]).items():
        if id(layer) in visited:
            continue
        visited.add(id(layer))
        steps_there = (*steps, *key)
        found[steps_there] = Place(steps_there, owners, layer)
        if not isinstance(layer, LEAVES):
            _add_places((*owners, layer), steps_there, found, visited)


def replace(
    model: keras.layers.Layer,
    known: Mapping[Steps, Place],
    layers: Mapping[Steps, keras.layers.Layer],
) -> None:
    """Replace layers by built ones, wherever in the model they are used.

    Args:
        model: the model to change.
        known: the layers inside of it, by their places.
        layers: the new layers, by the places of the old ones.
    """
    swaps = {id(known[steps].layer): layer for steps, layer in layers.items()}
    inner = [place.layer for place in known.values()]
    for owner in (model, *inner):
        keras_layers.swap_sublayers(owner, swaps)


def configs(model: keras.layers.Layer) -> list[tuple[Steps, dict[str, Any]]]:
    """Return the configs of stochastic layers that the configs of the layers around them lack."""
    saved = []
    for place in places(model).values():
        if isinstance(place.layer, StochasticLayer) and not place.in_graph:
            config = keras.saving.serialize_keras_object(place.layer)
            config["config"]["layer"] = None
            saved.append((list(place.steps), config))
    return saved


def restore(model: keras.layers.Layer, saved: Sequence[tuple[Steps, dict[str, Any]]]) -> None:
    """Make layers of a model stochastic again.

    Args:
        model: the model to change.
        saved: what `configs` returned, of a model of the same structure.
    """
    known = places(model)
    layers = {}
    for steps, config in saved:
        place = known[tuple(steps)]
        if not isinstance(place.layer, StochasticLayer):
            arguments = {**config["config"], "layer": place.layer}
            with place.name_scope():
                layer = keras.saving.deserialize_keras_object({**config, "config": arguments})
            layers[place.steps] = layer
    replace(model, known, layers)
    bind(model)


def bind(model: keras.layers.Layer) -> None:
    """Show all stochastic layers of a model to each posterior; layers may share one."""
    layers = stochastic_layers(model)
    for layer in layers:
        layer.posterior.bind(layers)


def called_inside(model: keras.layers.Layer) -> list[StochasticLayer]:
    """Return the stochastic layers that other layers call, perhaps in loops."""
    return [
        place.layer
        for place in places(model).values()
        if isinstance(place.layer, StochasticLayer) and not place.in_graph
    ]


def draw_ahead(
    layers: Sequence[StochasticLayer],
    forward_pass: Pass,
    batch: int | Tensor,
    training: bool = False,
) -> None:
    """Draw what layers need in a pass before they are called: no draw can leave a loop.

    Args:
        layers: those that may be called in a loop.
        forward_pass: the pass.
        batch: number of examples.
        training: whether this is a training step.
    """
    count = batch if forward_pass.groups is None else forward_pass.groups
    for layer in layers:
        if layer.draws_ahead and forward_pass.recall(layer) is None:
            layer.draw_for(forward_pass, count, None, training)
