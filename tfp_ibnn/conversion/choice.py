"""Which layers of a model become stochastic, and by which posterior."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import keras
from keras import layers

from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.protocols import PosteriorTemplate
from tfp_ibnn.layers.base import CELLS, CONVERTIBLE, has_lora, is_quantized
from tfp_ibnn.layers.inside import Place, Steps

_SILENT = (
    layers.BatchNormalization,
    layers.GroupNormalization,
    layers.LayerNormalization,
    layers.Normalization,
    layers.RMSNormalization,
    layers.SpectralNormalization,
    layers.Embedding,
    layers.PReLU,
)
"""Layers whose weights nobody expects to be converted."""

_REST = ".*"
"""The pattern of all layers that other patterns leave, which may be none."""


class Choice(NamedTuple):
    """What `choose` found, for the layers of one model."""

    templates: dict[Steps, PosteriorTemplate]
    """The template of each layer that becomes stochastic, by the layer's place."""

    unchanged: list[Place]
    """Layers with weights that a pattern matches, and that cannot be converted by its template."""

    @property
    def explanation(self) -> str:
        """A sentence on the layers that stay as they are, and one on what to do; "" if none do."""
        if not self.unchanged:
            return ""
        names = ", ".join(map(_described, self.unchanged))
        return (
            f" These layers stay deterministic, since they cannot be converted: {names}. To make "
            "one stochastic, put `ibnn.Stochastic(layer, posterior, train_size)` in its place, if "
            "it has one input, or use `ibnn.StochasticDense` inside a layer of your own."
        )


def choose(candidates: Collection[Place], templates: Mapping[str, PosteriorTemplate]) -> Choice:
    """Return which layers of a model become stochastic, by the first pattern that matches each.

    Args:
        candidates: the places of the layers inside of a model, none of them stochastic.
        templates: posteriors by patterns of the names or paths of layers.

    Returns:
        The choice, in the order of the layers.

    Raises:
        ValueError: If no layer can be converted, or a pattern converts none.
    """
    convertible = [place for place in candidates if place.shape is not None]
    # A layer around one that can be converted needs no warning: what is inside is converted.
    around = {id(owner) for place in convertible for owner in place.owners}
    patterns: dict[Steps, str] = {}
    unchanged: list[Place] = []
    for place in candidates:
        pattern = _first_match(place, templates)
        if pattern is None:
            continue
        if place.shape is not None and _suits(place.layer, templates[pattern]):
            patterns[place.steps] = pattern
        elif id(place.layer) not in around and _has_unexpected_weights(place.layer):
            unchanged.append(place)
    chosen = {steps: templates[pattern] for steps, pattern in patterns.items()}
    choice = Choice(chosen, unchanged)
    _check_all_used(choice, convertible, templates, set(patterns.values()))
    return choice


def _first_match(place: Place, patterns: Mapping[str, Any]) -> str | None:
    """Return the first pattern that matches the whole name or path of a layer."""
    for pattern in patterns:
        if re.fullmatch(pattern, place.layer.name) or re.fullmatch(pattern, place.path):
            return pattern
    return None


def _suits(layer: keras.layers.Layer, template: PosteriorTemplate) -> bool:
    """Whether a template can make a layer stochastic that can be converted at all."""
    if template.latent == "z":
        return True
    # Posteriors over weights take the place of one float kernel.
    return not (type(layer) in CELLS or is_quantized(layer) or has_lora(layer))


def _has_unexpected_weights(layer: keras.layers.Layer) -> bool:
    """Whether a layer has trainable weights of its own, of which a user may expect noise."""
    if isinstance(layer, _SILENT):
        return False
    weights = keras_internals.own_trainable_variables(layer)
    return any(weight.trainable for weight in weights)


def _described(place: Place) -> str:
    """Return path and class of a layer that stays as it is, and what posterior would suit it."""
    kind = type(place.layer).__name__
    if place.shape is None:
        return f"{place.path} ({kind})"
    return f"{place.path} ({kind}, which needs a posterior over z)"


def _check_all_used(
    choice: Choice,
    convertible: Sequence[Place],
    templates: Mapping[str, PosteriorTemplate],
    used: set[str],
) -> None:
    """Raise if no layer can be converted, or if a pattern other than ".*" converts none."""
    if not convertible:
        kinds = ", ".join(kind.__name__ for kind in (*CONVERTIBLE, *CELLS))
        raise ValueError(
            f"`model` has no layer to convert. Those that can be are {kinds}.{choice.explanation}"
        )
    may_be_unused = {_REST} if choice.templates else set()
    unused = [pattern for pattern in templates if pattern not in used | may_be_unused]
    if unused:
        unchanged = {place.steps for place in choice.unchanged}
        paths = [place.path for place in convertible if place.steps not in unchanged]
        names = ", ".join(paths) or "none"
        raise ValueError(
            f"`posterior` has the pattern {unused[0]!r}, which converts no layer. It must be the "
            f"first to match a whole name or path. Those that can be converted: {names}."
            f"{choice.explanation}"
        )


def checked_templates(posterior: Any) -> Mapping[str, PosteriorTemplate]:
    """Return posteriors by patterns of layer names.

    Args:
        posterior: a template for all layers, or a mapping from patterns to templates.

    Returns:
        The mapping; of one template, with a pattern that matches all names.

    Raises:
        ValueError: If it is neither, or a pattern is not a regular expression.
    """
    if isinstance(posterior, PosteriorTemplate):
        return {_REST: posterior}
    if not isinstance(posterior, Mapping) or not posterior:
        raise ValueError(
            "`posterior` must be a posterior such as ibnn.NormalAffine(), with its parentheses, "
            f"or a mapping from patterns of layer names to such; got {posterior!r}."
        )
    for pattern, template in posterior.items():
        if not isinstance(template, PosteriorTemplate):
            raise ValueError(
                f"`posterior[{pattern!r}]` must be a posterior such as ibnn.NormalAffine(), with "
                f"its parentheses; got {template!r}."
            )
        try:
            re.compile(pattern)
        except (re.error, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"`posterior` has the pattern {pattern!r}, which is not a regular expression: "
                f"{error}."
            ) from None
    return posterior
