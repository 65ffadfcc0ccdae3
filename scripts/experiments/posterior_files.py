"""Posteriors by layer, read from a JSON file."""

import difflib
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tfp_ibnn as ibnn
from tfp_ibnn import FlowPosterior, MixturePosterior, Posterior, flows

__all__ = ["read_posteriors"]

_RECIPES = {
    name: getattr(ibnn, name)
    for name in ibnn.__all__
    if name.startswith("Normal") or name in ("FlowPosterior", "MixturePosterior")
}
_FLOWS = {
    name: kind
    for name in flows.__all__
    if issubclass(kind := getattr(flows, name), flows.Flow) and kind is not flows.Flow
}


def read_posteriors(
    path: str | os.PathLike, defaults: dict[str, Any] | None = None
) -> dict[str, Posterior]:
    """Read the posteriors of a network's layers from a JSON file.

    The file maps patterns of layer names to posteriors, as `to_stochastic` takes them. Each is an
    object with the name of a recipe or class under "posterior", and its arguments:

        {
          "conv2": {"posterior": "NormalInvConv", "depth": 3, "prior_scale": 0.3},
          "fc1": {"posterior": "FlowPosterior", "flows": [{"flow": "Planar"}, {"flow": "Radial"}]},
          ".*": {"posterior": "NormalAffine"}
        }

    Args:
        path: of the file.
        defaults: arguments for posteriors that do not state them.

    Raises:
        ValueError: for a file that is not as above; it names the key.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = json.loads(text, object_pairs_hook=_once_each)
    except OSError as error:
        raise ValueError(f"The posterior file {str(path)!r}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"The posterior file {str(path)!r} is no JSON: {error}.") from error
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{path} must map patterns of layer names to posteriors.")
    for pattern in content:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{path}: {pattern!r} is no regular expression: {error}.") from error
    return {
        pattern: _posterior(f"{path}, {pattern!r}", entry, defaults or {})
        for pattern, entry in content.items()
    }


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, or raise for a name that is there twice: one would be lost."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"it has {name!r} twice in one object")
    return dict(pairs)


def _posterior(where: str, entry: Any, defaults: dict[str, Any]) -> Posterior:
    name, arguments = _name_and_arguments(where, entry, "posterior", _RECIPES)
    recipe = _RECIPES[name]
    known = _keywords(recipe, MixturePosterior if recipe is MixturePosterior else FlowPosterior)
    _check_keys(where, arguments, known)
    if "flows" in arguments:
        if not isinstance(arguments["flows"], list):
            raise ValueError(f"{where}: `flows` must be a list; got {arguments['flows']!r}.")
        arguments["flows"] = [
            _flow(f"{where}, flow {position}", flow)
            for position, flow in enumerate(arguments["flows"], start=1)
        ]
    return _make(where, recipe, {**defaults, **arguments})


def _flow(where: str, entry: Any) -> flows.Flow:
    name, arguments = _name_and_arguments(where, entry, "flow", _FLOWS)
    _check_keys(where, arguments, _keywords(_FLOWS[name], _FLOWS[name]))
    return _make(where, _FLOWS[name], arguments)


def _name_and_arguments(
    where: str, entry: Any, key: str, known: Iterable[str]
) -> tuple[str, dict[str, Any]]:
    if not isinstance(entry, dict) or key not in entry:
        raise ValueError(f"{where} must be an object with the key {key!r}; got {entry!r}.")
    arguments = dict(entry)
    name = arguments.pop(key)
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"{where}: unknown {key} {name!r}{_suggestion(name, known)}")
    return name, arguments


def _keywords(recipe: Callable[..., Any], owner: type) -> set[str]:
    """Return the arguments that a recipe takes, those that it passes on included."""
    functions = [recipe, *(cls.__init__ for cls in owner.__mro__ if cls.__module__ != "builtins")]
    names = {
        name
        for function in functions
        if getattr(function, "__module__", "").startswith("tfp_ibnn")
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    # A recipe builds its own flows.
    return names - {"self"} - ({"flows"} if inspect.isfunction(recipe) else set())


def _check_keys(where: str, arguments: dict[str, Any], known: set[str]) -> None:
    for key in arguments:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}{_suggestion(key, known)}")


def _suggestion(word: Any, known: Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(str(word), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}."


def _make(where: str, recipe: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        return recipe(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
