"""Temperature scaling of a trained classifier."""

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.text import TakesStrings, with_strings
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.conversion.wrappers import ScaledModel, innermost
from tfp_ibnn.data.datasets import is_dataset
from tfp_ibnn.data.examples import Examples, unpacked
from tfp_ibnn.likelihoods import Categorical, Labels
from tfp_ibnn.likelihoods.infer import logits_by_loss, predicts_numbers
from tfp_ibnn.likelihoods.last_layer import activation_of
from tfp_ibnn.likelihoods.temperature import BOUNDS, best_temperature
from tfp_ibnn.metrics._base import checked, spread
from tfp_ibnn.prediction.monte_carlo import MonteCarlo
from tfp_ibnn.prediction.padding import mask_of_arrays, output_masks

_REASONS = {
    BOUNDS[0]: "every prediction is right: the colder, the better",
    BOUNDS[1]: "the predictions are no better than chance",
}
"""Why a fitted temperature is at a bound."""


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class TemperatureScaling(ScaledModel, TakesStrings, keras.Model):
    """A classifier whose logits z are divided by a temperature T fitted to validation data.

    The output is z / T where the classifier returns logits, and softmax(log(p) / T) where it
    returns probabilities p. The predicted class stays the same; T > 1 makes it less confident. T is
    1 until `fit` is called. Of a `MonteCarlo` the "mean" is scaled; that of a scaled model averages
    scaled draws. Reference: Guo et al., arXiv 1706.04599.

    Args:
        model: the classifier, (batch, ...) to (batch, ..., classes), or (batch, ..., 1) for two.
        from_logits: whether it returns logits; None asks the activation of its last layer, or of a
            model with a `call` of its own the loss it is compiled with.
        **kwargs: those of `keras.Model`.

    Example:
        >>> import keras, numpy as np, tfp_ibnn as ibnn
        >>> too_sure = keras.Sequential([keras.Input((2,)), keras.layers.Rescaling(10.0)])
        >>> scaled = ibnn.TemperatureScaling(too_sure, from_logits=True)
        >>> x = np.eye(2)[[0, 0, 0, 0, 1, 1, 1, 1]]
        >>> scaled = scaled.fit(x, np.array([0, 0, 0, 1, 1, 1, 1, 0]))
        >>> round(float(scaled.temperature), 2)  # right three times of four: 10 / T = log 3
        9.1
    """

    def __init__(self, model: keras.Model, from_logits: bool | None = None, **kwargs: Any) -> None:
        if not isinstance(model, keras.Model):
            raise ValueError(f"`model` must be a Keras model that classifies; got {model!r}.")
        kwargs.setdefault("dtype", checks.full_precision(model.dtype_policy))
        super().__init__(**kwargs)
        self.model = model
        has_own_call = functional_graph(innermost(model)) is None
        if from_logits is None and model.built and has_own_call:
            from_logits = logits_by_loss(model)
        self.from_logits = None if from_logits is None else bool(from_logits)
        fixed = {"trainable": False, "autocast": False}
        self.temperature = self.add_weight((), "ones", name="temperature", **fixed)
        self._evaluate: Callable[..., Any] | None = None
        self._head: str | None = None
        self.built = model.built

    @property
    def inner(self) -> keras.Model:
        """The classifier."""
        return self.model

    def build(self, input_shape: Any) -> None:
        if not self.model.built:
            self.model.build(input_shape)
        self.built = True

    def call(self, inputs: Any, training: bool | None = None) -> Tensor:
        return self.scale(self.model(inputs, training=training))

    def scale(self, outputs: Any) -> Tensor:
        """Return an output of the classifier at the temperature."""
        outputs, from_logits = self._read(outputs)
        outputs = ops.cast(outputs, self.temperature.dtype)
        kind = Labels if outputs.shape[-1] == 1 else Categorical
        return kind(from_logits).scaled(outputs, self.temperature)

    def fit(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        batch_size: int | None = None,
        verbose: Any = 0,
    ) -> "TemperatureScaling":
        """Find the one temperature of the least negative log-likelihood, and return the model.

        Args:
            x: validation inputs, which the classifier was not trained on: arrays, or a dataset of
                batches (x, y) or (x, y, sample_weight) that ends: a `tf.data.Dataset`, a
                `PyDataset` or a generator.
            y: labels of arrays, (...) or (..., 1) integers, or (..., classes) one-hot.
            sample_weight: weights of arrays.
            batch_size: for arrays; as for `predict`.
            verbose: 1 shows progress, 0 nothing.
        """
        self._check_classifies()
        masks = output_masks(self)
        if is_dataset(x):
            if y is not None or sample_weight is not None:
                raise ValueError(
                    "`y` and `sample_weight` must come from `x`, a dataset: omit them."
                )
            outputs, y, sample_weight, mask = self._outputs_of_dataset(x, masks, verbose)
        else:
            if y is None:
                raise ValueError("`y` must hold the labels when `x` is an array; got None.")
            if not len(keras.tree.flatten(x)[0]):
                raise ValueError("`x` must hold at least one example; got none.")
            x = with_strings(x)
            outputs = self.model.predict(x, batch_size=batch_size, verbose=verbose)
            mask = None if masks is None else mask_of_arrays(masks, x)
        outputs, from_logits = self._read(outputs)
        names = ("model(x)", "y", "sample_weight")
        if mask is not None:
            sample_weight = _unpadded(np.shape(outputs)[:-1], sample_weight, mask)
        examples = checked(outputs, y, sample_weight, from_logits, names)
        labels = np.argmax(examples.targets, axis=-1)
        if np.ptp(labels) == 0:
            raise ValueError(f"`y` must hold at least two classes to fit to; got only {labels[0]}.")
        log_p = examples.log_probabilities.astype("float64")[:, None]
        temperature = best_temperature(log_p, labels, examples.weight)
        _warn_at_bound(temperature)
        self.temperature.assign(temperature)
        self._head = "sigmoid" if outputs.shape[-1] == 1 else None
        self.built = True  # the classifier is, now that it was run
        return self

    def _outputs_of_dataset(self, x: Any, masks: Any, verbose: Any) -> tuple[Any, Any, Any, Any]:
        """Return outputs, labels, weights and masks, in one pass, since it may be shuffled."""
        parts, all_masks = [], []
        for inputs, labels, weight in unpacked(x, "x", verbose):
            if labels is None:
                raise ValueError("`x` must give batches (x, y) with labels; got inputs alone.")
            if weight is None:
                weight = np.ones(len(labels))
            outputs = self.model.predict_on_batch(inputs)
            parts.append(Examples(outputs, labels, weight))
            if masks is not None:
                all_masks.append(mask_of_arrays(masks, inputs))
        mask = np.concatenate(all_masks) if all_masks and all_masks[0] is not None else None
        return *Examples.joined(parts), mask

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Score by accuracy, NLL, Brier score and ECE, or by what the model is compiled with."""
        if self.compiled:
            return super().evaluate(*args, **kwargs)
        if self._evaluate is None:
            self._check_classifies()
            # The method alone: a model would be tracked, and saved, as a part of this one.
            options = {"head": self._head, "independent": True}
            self._evaluate = MonteCarlo(self, samples=1, **options).evaluate
        return self._evaluate(*args, **kwargs)

    def _check_classifies(self) -> None:
        network = innermost(self)
        if self.from_logits is None and predicts_numbers(network):
            raise ValueError(
                f"`model`, {network.name!r}, predicts numbers, as its loss says; a temperature is "
                "for classes. For numbers, ibnn.calibrate fits a standard deviation, and "
                "ibnn.Conformal gives intervals."
            )

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "from_logits": self.from_logits}

    @property
    def returns_logits(self) -> bool | None:
        """Whether the output is logits; None if that is unknown before the model has run."""
        if self.from_logits is not None:
            return self.from_logits
        if isinstance(self.model, TemperatureScaling):
            return self.model.returns_logits
        if innermost(self) is not self.model:
            return False
        meanings = {"softmax": False, "sigmoid": False, "linear": True, "log_softmax": True}
        return meanings.get(activation_of(self.model))

    def _read(self, outputs: Any) -> tuple[Any, bool]:
        """Return the classifier's one output, and whether it is logits."""
        from_logits = self.returns_logits
        if isinstance(outputs, dict) and "mean" in outputs:
            outputs = outputs["mean"]
            from_logits = bool(from_logits)
        if not hasattr(outputs, "shape"):
            kinds = keras.tree.map_structure(type, outputs)
            raise ValueError(f"`model` must return one tensor, or a dict with 'mean'; got {kinds}.")
        if from_logits is None:
            unknown = f"It is unknown whether `model`, {self.model.name!r}, returns logits."
            raise ValueError(f"{unknown} Give from_logits=True or from_logits=False.")
        if outputs.shape[-1] != 1 and activation_of(self.model) == "sigmoid":
            several = f"`model`, {self.model.name!r}, answers yes or no to several labels"
            raise ValueError(f"{several}; temperature scaling is for one label, or for classes.")
        return outputs, from_logits


def _unpadded(positions: tuple[int, ...], weight: Any, mask: np.ndarray) -> np.ndarray:
    """Return a weight for each position, 0 for those that are padding."""
    weight = np.asarray(1.0 if weight is None else weight)
    weight = spread(np, weight, positions, "sample_weight")
    return np.where(spread(np, mask, positions, "mask"), weight, 0.0)


def _warn_at_bound(temperature: float) -> None:
    if temperature in _REASONS:
        warnings.warn(
            f"The temperature stops at {temperature:g}, because on these data "
            f"{_REASONS[temperature]}. Fit it to more data that the model was not trained on.",
            stacklevel=3,
        )
