"""Find out what a model's output means: the only reader of losses."""

from collections.abc import Mapping
from typing import Any

import keras
from keras import losses

from tfp_ibnn._core import checks
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.conversion.wrappers import ScaledModel, unscaled
from tfp_ibnn.layers.heads import DistributionNLL, GaussianHead, GaussianNLL
from tfp_ibnn.layers.quantiles import PinballLoss
from tfp_ibnn.likelihoods.base import Likelihood
from tfp_ibnn.likelihoods.categorical import Categorical
from tfp_ibnn.likelihoods.distribution import Distribution
from tfp_ibnn.likelihoods.gaussian import Gaussian, Point
from tfp_ibnn.likelihoods.labels import Labels
from tfp_ibnn.likelihoods.last_layer import (
    activation_of,
    innermost_output_layer,
    output_layer,
    own_activation,
)
from tfp_ibnn.likelihoods.predicted_quantiles import Quantiles
from tfp_ibnn.likelihoods.several import Several, by_name, output_names

_FOR_PREDICTION = (
    'Write ibnn.MonteCarlo(model, head="softmax", from_logits=True) for logits of classes, '
    "from_logits=False for their probabilities; other heads are "
    '"sigmoid" for yes or no, "point" for numbers, "gaussian" for numbers and their standard '
    "deviations."
)
_FOR_WEIGHTS = (
    "Compile the model with a categorical or binary crossentropy, the mean squared error or "
    "ibnn.layers.GaussianNLL; or give head='softmax', 'sigmoid', 'point' or 'gaussian', for logits "
    "with from_logits=True."
)

_CATEGORICAL = (losses.CategoricalCrossentropy, losses.CategoricalFocalCrossentropy)
_ABSOLUTE = (losses.MeanAbsoluteError, losses.MeanAbsolutePercentageError)
_SQUARED = (losses.MeanSquaredError, losses.MeanSquaredLogarithmicError)
_LOSSES = {
    "softmax": (*_CATEGORICAL, losses.SparseCategoricalCrossentropy),
    "sigmoid": (losses.BinaryCrossentropy, losses.BinaryFocalCrossentropy),
    "gaussian": (GaussianNLL,),
    "point": (*_ABSOLUTE, *_SQUARED, losses.Huber, losses.LogCosh),
}
"""The losses that go with each head."""


def likelihood_of(
    model: keras.Model, head: Any = None, from_logits: Any = None, remedy: str = _FOR_PREDICTION
) -> Likelihood:
    """Return what a model's output means, by the arguments, its last layer or its loss.

    Args:
        model: a Keras model.
        head: "softmax", "sigmoid", "gaussian", "point", a function that makes a TFP distribution,
            or a `Likelihood`; None finds out. Of several outputs a dict or list of them.
        from_logits: whether the outputs are logits; None finds out.
        remedy: what the error advises if nothing says what the output means.

    Raises:
        ValueError: if it is unknown, or if what is known contradicts the arguments.
    """
    names = output_names(model)
    graph = functional_graph(unscaled(model))
    if graph is None and isinstance(head, Mapping):
        names = _names_of_heads(head)
    if not names:
        return _of_one_output(model, head, from_logits, remedy)
    heads = by_name("head", head, names, for_all=True)
    logits = by_name("from_logits", from_logits, names, for_all=True)
    models = dict.fromkeys(names, model)
    if graph is not None:
        models = _models_of_outputs(model, names)
    parts = {}
    for name in names:
        parts[name] = _of_one_output(models[name], heads[name], logits[name], remedy)
    return Several(parts)


def likelihood_for_weights(
    model: keras.Model, head: Any = None, from_logits: bool | None = None
) -> Likelihood:
    """Return the likelihood of a model for a posterior over its weights.

    Args:
        model: a Keras model with one output.
        head: as for `likelihood_of`.
        from_logits: as for `likelihood_of`.

    Raises:
        ValueError: also if its loss is not minus a log-likelihood.
    """
    likelihood = likelihood_of(model, head, from_logits, _FOR_WEIGHTS)
    check_one_output(likelihood, "A posterior over weights")
    if isinstance(likelihood, Quantiles):
        raise ValueError(
            f"Model {model.name!r} predicts quantiles, which have no density, and a posterior over "
            "weights needs one. Average trained networks by ibnn.DeepEnsemble, or train noise by "
            "ibnn.to_stochastic."
        )
    if head is None and model.compiled:
        loss = next(iter(keras.tree.flatten(model.loss)), None)
        name = getattr(loss, "name", getattr(loss, "__name__", loss))
        name = str(name).lower()
        is_squared = "squared_error" in name or name == "mse"
        is_another = likelihood.free_scale and not is_squared
        if is_another or "focal" in name:
            raise ValueError(f"The loss {name!r} is not minus a log-likelihood. {_FOR_WEIGHTS}")
    return likelihood


def likelihood_for_calibration(model: keras.Model, loss: Any) -> tuple[Likelihood, Any]:
    """Return the likelihood of a model, and its loss.

    Args:
        model: a Functional or Sequential model.
        loss: a Keras loss, of several outputs a dict or list of them; None takes the model's own.

    Raises:
        ValueError: if there is not exactly one loss for each output, or one that cannot be
            calibrated.
    """
    if loss is None and model.compiled:
        loss = model.loss
    names = output_names(model)
    own_losses = keras.tree.flatten(loss)
    if not names:
        if len(own_losses) != 1 or own_losses[0] is None:
            raise ValueError(
                "`model` is not compiled with one loss: give one, such as "
                "loss='sparse_categorical_crossentropy' or loss='mse'."
            )
        return _calibrated(model, own_losses[0]), own_losses[0]
    if len(own_losses) not in (1, len(names)) or None in own_losses:
        raise ValueError(
            f"`model` is not compiled with a loss for each of its outputs {names}: give a dict, "
            f"loss={{{names[0]!r}: 'mse', ...}}."
        )
    loss_by_name = by_name("loss", loss, names, for_all=True)
    graph = functional_graph(model)
    parts = {}
    for name, output in zip(names, graph.outputs, strict=True):
        model_of_output = keras.Model(graph.inputs, output, name=name)
        parts[name] = _calibrated(model_of_output, loss_by_name[name])
    return Several(parts), loss


def _calibrated(model: keras.Model, loss: Any) -> Likelihood:
    """Return what the one output of a model means in a calibration, by its loss."""
    width = model.output_shape[-1]
    known = losses.get(loss)
    from_logits = bool(getattr(known, "from_logits", False))
    activation = activation_of(model)
    if len(model.output_shape) < 2 or width is None:
        raise ValueError(
            f"The outputs of {model.name!r} must have the shape (N, ..., K), with a known K; got "
            f"{model.output_shape}."
        )
    if from_logits and activation in ("softmax", "sigmoid"):
        raise ValueError(
            f"`model` ends in a {activation}, but its loss has from_logits=True: give one without, "
            "as loss='sparse_categorical_crossentropy'."
        )
    is_one_hot = is_loss(known, losses.CategoricalCrossentropy)
    if width > 1 and (is_one_hot or is_loss(known, losses.SparseCategoricalCrossentropy)):
        likelihood = Categorical(from_logits, width, one_hot=is_one_hot)
        likelihood.ignored = getattr(known, "ignore_class", None)
        return likelihood
    if is_loss(known, losses.BinaryCrossentropy):
        return Labels(from_logits, width)
    if is_loss(known, GaussianNLL) and width % 2 == 0:
        return Gaussian(width)
    if is_loss(known, losses.MeanSquaredError):
        return Point(width)
    if isinstance(known, PinballLoss):
        raise ValueError(
            "Quantiles have no density, by which `calibrate` compares: use "
            'ibnn.Conformal(model, "cqr").fit(x, y), which calibrates their interval.'
        )
    name = getattr(known, "__name__", type(known).__name__)
    raise ValueError(
        f"The loss {name} with {width} outputs cannot be calibrated; give a categorical or binary "
        "crossentropy, ibnn.layers.GaussianNLL, 'mse'."
    )


def check_one_output(likelihood: Likelihood, what: str) -> None:
    """Raise if a model has several outputs, or a likelihood of TFP's.

    Args:
        likelihood: of the model.
        what: what asks, for the error.
    """
    if isinstance(likelihood, (Several, Distribution)):
        raise ValueError(
            f"{what} is for models with one output of classes, answers or numbers: "
            "keras.Model(model.inputs, output)."
        )


def is_loss(loss: Any, kind: type) -> bool:
    """Whether a loss is one of a Keras class, or the function of that class.

    Args:
        loss: a Keras loss.
        kind: a class of losses.
    """
    if isinstance(loss, kind):
        return True
    function = getattr(kind(), "fn", None)
    return loss is not None and loss is function


def logits_by_loss(model: keras.Model) -> bool | None:
    """Return whether a classifier returns logits by its loss; None if that does not say so."""
    head, from_logits = _head_of_loss(_one_loss(model))
    return from_logits if head in ("softmax", "sigmoid") else None


def predicts_numbers(model: keras.Model) -> bool:
    """Return whether a model is a regression, by its last layer or its loss."""
    activation = activation_of(model)
    if activation in ("softmax", "log_softmax", "sigmoid", "gaussian", "quantiles"):
        return activation in ("gaussian", "quantiles")
    head, _ = _head_of_loss(_one_loss(model))
    return head in ("gaussian", "point") or isinstance(head, Quantiles)


def _names_of_heads(heads: Mapping[str, Any]) -> list[str]:
    """Return the names of outputs, in numerical order if the names are numbers."""
    if all(name.isdecimal() for name in heads):
        return sorted(heads, key=int)
    return list(heads)


def _models_of_outputs(model: keras.Model, names: list[str]) -> dict[str, keras.Model]:
    """Return a model for each output, compiled with its loss."""
    graph = functional_graph(unscaled(model))
    loss = model.loss if model.compiled else None
    if isinstance(loss, Mapping):
        loss = {**dict.fromkeys(names), **loss}
    loss = by_name("loss", loss, names, for_all=True)
    models = {}
    for name, output in zip(names, graph.outputs, strict=True):
        models[name] = keras.Model(graph.inputs, output, name=name)
        models[name].compile(loss=loss[name])
    return models


def _of_one_output(
    model: keras.Model, head: Any, from_logits: bool | None, remedy: str
) -> Likelihood:
    """Return what the one output of a model means; `likelihood_of` has the arguments."""
    if isinstance(head, Mapping):
        raise ValueError(f"`head` is a dict, but model {model.name!r} has one output.")
    is_own = isinstance(head, Likelihood) or callable(head)
    if head is not None and not is_own:
        checks.one_of("head", head, tuple(_LOSSES))
    activation = activation_of(model)
    from_logits = _known_logits(model, activation, from_logits)
    width = _width(model)
    loss = _one_loss(model)
    loss_head, loss_logits = _head_of_loss(loss)
    if activation == "log_softmax":
        # The softmax of its output is the same as that of its input.
        loss_head, loss_logits = "softmax", True
    if activation == "quantiles":
        loss_head = _quantiles(model, loss)
    meaning = head
    if meaning is None:
        meaning = activation if activation in _LOSSES else loss_head
    if meaning is None and from_logits is not None:
        meaning = "sigmoid" if width == 1 else "softmax"
    if meaning is None:
        _raise_unknown(model, activation, loss, remedy)
    if isinstance(meaning, Likelihood):
        return meaning.for_width(width)
    if callable(meaning):
        return Distribution(meaning)
    if meaning not in ("gaussian", "point"):
        return _classifier(model, meaning, from_logits, loss_logits)
    if from_logits is not None and head is None:
        raise ValueError(
            f"`from_logits` is {from_logits}, but model {model.name!r} is for regression: take "
            "head='softmax' or 'sigmoid'"
        )
    return Point(width) if meaning == "point" else _gaussian(model, width)


def _classifier(
    model: keras.Model, head: str, from_logits: bool | None, by_loss: bool | None
) -> Categorical:
    """Return the likelihood of a classifier, whose `from_logits` may be known by its loss alone."""
    activation = activation_of(model)
    width = _width(model)
    if from_logits is None:
        from_logits = by_loss
        if not from_logits and activation == "linear":
            raise ValueError(
                f"The output of {model.name!r} is linear: is it logits? Say from_logits=True, or "
                "compile the model with such a loss."
            )
    if head == "sigmoid":
        return Labels(from_logits, width)
    layer = output_layer(model)  # or an operation of keras.ops, which has no `activation`
    if from_logits and layer is not None and own_activation(layer) == "log_softmax":
        return Categorical(from_logits, width, end="log_softmax")
    return Categorical(from_logits, width)


def _known_logits(
    model: keras.Model, activation: str | None, from_logits: bool | None
) -> bool | None:
    """Return whether the output is logits: what is known, or else what is given."""
    known = model.returns_logits if isinstance(model, ScaledModel) else None
    if activation in ("softmax", "sigmoid"):
        known = False
    if known is None:
        return from_logits
    if from_logits in (None, known):
        return known
    if known:
        raise ValueError(
            f"`from_logits` is {from_logits}, but model {model.name!r} returns logits: leave it "
            "out."
        )
    raise ValueError(
        f"`from_logits` is {from_logits}, but model {model.name!r} returns probabilities, those of "
        f"a {activation or 'scaled model'}: leave it out."
    )


def _gaussian(model: keras.Model, width: int | None) -> Gaussian:
    if width is not None and width % 2:
        raise ValueError(f"A 'gaussian' `head` has an even size; {model.name!r} has {width}.")
    layer = output_layer(model)
    return Gaussian(width, layer if isinstance(layer, GaussianHead) else None)


def _quantiles(model: keras.Model, loss: Any) -> Quantiles:
    """Return the likelihood of a model that ends in a `QuantileHead`."""
    levels = innermost_output_layer(model).levels
    if isinstance(loss, PinballLoss) and loss.levels != levels:
        raise ValueError(
            f"The QuantileHead of model {model.name!r} has the levels {levels}, its PinballLoss "
            f"has {loss.levels}: give both the same."
        )
    return Quantiles(levels)


def _raise_unknown(model: keras.Model, activation: str | None, loss: Any, remedy: str) -> None:
    if loss is None:
        raise ValueError(
            f"It is unknown what the output of model {model.name!r} means: its last layer "
            f"({activation or 'unknown'}) has no softmax or sigmoid, and it is not compiled. "
            f"{remedy}"
        )
    kind = repr(loss) if isinstance(loss, str) else type(loss).__name__
    name = getattr(loss, "__name__", kind)
    raise ValueError(
        f"It is unknown what the output of model {model.name!r} means: its last layer "
        f"({activation or 'unknown'}) has no softmax or sigmoid, and its loss is {name}. {remedy}"
    )


def _width(model: keras.Model) -> int | None:
    graph = functional_graph(unscaled(model))
    return None if graph is None else graph.outputs[0].shape[-1]


def _one_loss(model: keras.Model) -> Any:
    """Return the loss that a model is compiled with; of one output it may be in a list or dict."""
    loss = keras.tree.flatten(getattr(model, "loss", None) if model.compiled else None)
    return loss[0] if len(loss) == 1 else loss


def _head_of_loss(loss: Any) -> tuple[Any, bool | None]:
    """Return the head that goes with a loss, and its `from_logits`."""
    loss = losses.get(loss) if isinstance(loss, str) else loss
    if isinstance(loss, DistributionNLL):
        return loss.make, None
    if isinstance(loss, PinballLoss):
        return Quantiles(loss.levels), None
    for head, kinds in _LOSSES.items():
        if any(is_loss(loss, kind) for kind in kinds):
            return head, getattr(loss, "from_logits", False)
    return None, None
