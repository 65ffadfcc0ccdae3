"""Posteriors by layer, read from a JSON file."""

import difflib
import inspect
import json
import re
from pathlib import Path

import tfp_ibnn as ibnn

_POSTERIORS = [name for name in ibnn.__all__ if name.startswith("Normal")]
_POSTERIORS += ["FlowPosterior", "MixturePosterior", "MeanField", "MNF"]
_POSTERIORS = {name: getattr(ibnn, name) for name in _POSTERIORS}
_OVER_WEIGHTS = ("MeanField", "MNF")
_PRIORS = {n: getattr(ibnn.priors, n) for n in ibnn.priors.__all__ if n != "Prior"}
_FLOWS = {name: kind for name, kind in vars(ibnn.flows).items() if isinstance(kind, type)}
_FLOWS = {n: x for n, x in _FLOWS.items() if issubclass(x, ibnn.Flow) and x is not ibnn.Flow}


def read_posteriors(path, defaults=None):
    """Read the posteriors of a network's layers from a JSON file.

    The file maps patterns of layer names to posteriors, as `to_stochastic` takes them. Each is an
    object with the name of a recipe or class under "posterior", and its arguments:

        {
          "conv2": {"posterior": "NormalInvConv", "depth": 3, "prior_scale": 0.3},
          "fc1": {"posterior": "FlowPosterior", "flows": [{"flow": "Planar"}, {"flow": "Radial"}]},
          ".*": {"posterior": "NormalAffine"}
        }

    A prior is an object as well: {"prior": "Laplace", "scale": 0.1}.

    The path may be what the file would hold; `defaults` are arguments for posteriors that do not
    state them; those over z start at their prior. A ValueError names the key that is not as above.
    """
    try:
        inline = str(path).startswith("{")
        text = path if inline else Path(path).read_text(encoding="utf-8")
        content = json.loads(text, object_pairs_hook=_once_each)
    except OSError as error:
        raise ValueError(f"The posterior file {str(path)!r}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"The posterior file {str(path)!r} is not JSON: {error}.") from error
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{path} must map patterns of layer names to posteriors.")
    found, where = {}, "the posteriors" if inline else path
    for pattern, entry in content.items():
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            reason = f"{pattern!r} is not a regular expression: {error}."
            raise ValueError(f"{where}: {reason}") from error
        found[pattern] = _made(f"{where}, {pattern!r}", entry, "posterior", _POSTERIORS, defaults)
    return found


def _once_each(pairs):
    """Return an object of JSON, or raise for a name that is there twice: one would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {max(names, key=names.count)!r} twice in one object")
    return found


def _made(where, entry, key, known, defaults=None):
    if not isinstance(entry, dict) or key not in entry:
        raise ValueError(f"{where} must be an object with the key {key!r}; got {entry!r}.")
    arguments = dict(entry)
    name = arguments.pop(key)
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"{where}: unknown {key} {name!r}{_suggestion(name, known)}")
    taken = _keywords(known[name])
    if unknown := [argument for argument in arguments if argument not in taken]:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}{_suggestion(unknown[0], taken)}")
    if "flows" in arguments:
        if not isinstance(arguments["flows"], list):
            raise ValueError(f"{where}: `flows` must be a list; got {arguments['flows']!r}.")
        arguments["flows"] = [
            _made(f"{where}, flow {place}", flow, "flow", _FLOWS)
            for place, flow in enumerate(arguments["flows"], start=1)
        ]
    if "prior" in arguments:
        arguments["prior"] = _made(f"{where}, prior", arguments["prior"], "prior", _PRIORS)
        defaults = {k: v for k, v in (defaults or {}).items() if k != "prior_scale"}
    if key == "posterior" and name not in ("MixturePosterior", *_OVER_WEIGHTS):
        arguments.setdefault("initial_scale", None)
    try:
        return known[name](**{**(defaults or {}), **arguments})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def _keywords(maker):
    """Return the arguments that a recipe or class takes, those that it passes on included."""
    is_recipe = inspect.isfunction(maker)
    kinds = (ibnn.FlowPosterior if is_recipe else maker).__mro__
    taken, others = {}, {"self", "flows"} if is_recipe else {"self"}  # a recipe builds its flows
    for function in (maker, *(kind.__init__ for kind in kinds)):
        if (getattr(function, "__module__", None) or "").startswith("tfp_ibnn"):
            taken |= inspect.signature(function).parameters
    named = {name for name, p in taken.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    return named - others


def _suggestion(word, known):
    close = difflib.get_close_matches(str(word), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(known))}."
