"""Calibration of a trained classifier by a few parameters fitted to validation data."""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import keras
import numpy as np

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.text import TakesStrings, refuse_single_strings, with_strings
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.conversion.wrappers import ScaledModel, innermost
from tfp_ibnn.data.datasets import is_dataset
from tfp_ibnn.data.examples import Examples, some_at_a_time, unpacked
from tfp_ibnn.data.positions import PositionSample, rows_of_labels
from tfp_ibnn.likelihoods.infer import logits_by_loss, predicts_numbers
from tfp_ibnn.likelihoods.last_layer import activation_of
from tfp_ibnn.metrics._base import checked
from tfp_ibnn.prediction.monte_carlo import MonteCarlo
from tfp_ibnn.prediction.padding import mask_of_arrays, output_masks, weight_of_positions

_RETURNS_LOGITS = {"softmax": False, "sigmoid": False, "linear": True, "log_softmax": True}
"""Whether a classifier returns logits, by its last activation."""


class _Validation(NamedTuple):
    """The outputs of a classifier for validation data, and the labels."""

    outputs: Any
    labels: Any
    weight: Any  # of the examples or positions, or None
    mask: np.ndarray | None  # False for positions that are padding; None if there are none


class FittedScaling(ScaledModel, TakesStrings, keras.Model):
    """A classifier whose outputs are rescaled by parameters fitted to validation data.

    A subclass has `best`, which fits the parameter, `assign`, which takes it, and `scale`, which
    applies it.

    Args:
        model: the classifier, (batch, ...) to (batch, ..., classes), or (batch, ..., 1) for two.
        from_logits: whether it returns logits; None reads it off the activation of the last layer,
            or, for a model with its own `call`, off the loss it is compiled with.
        **kwargs: those of `keras.Model`.
    """

    def __init__(self, model: keras.Model, from_logits: bool | None = None, **kwargs: Any) -> None:
        if not isinstance(model, keras.Model):
            raise ValueError(f"`model` must be a Keras classifier; got {model!r}.")
        kwargs.setdefault("dtype", checks.full_precision(model.dtype_policy))
        super().__init__(**kwargs)
        self.supports_masking = True
        self.model = model
        has_own_call = functional_graph(innermost(model)) is None
        if from_logits is None and model.built and has_own_call:
            from_logits = logits_by_loss(model)
        self.from_logits = None if from_logits is None else bool(from_logits)
        self._evaluate: Callable[..., Any] | None = None
        self._head: str | None = None
        self.built = model.built

    def best(self, log_p: np.ndarray, labels: np.ndarray, weight: np.ndarray) -> Any:
        """Return the parameter that fits validation data.

        Args:
            log_p: log-probabilities of the classifier, (examples, classes).
            labels: classes (examples,).
            weight: how often each example counts, (examples,).
        """
        raise NotImplementedError(f"{type(self).__name__} must define `best`.")

    def assign(self, parameter: Any) -> None:
        """Set the parameter, as `best` returns it."""
        raise NotImplementedError(f"{type(self).__name__} must define `assign`.")

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

    def fit(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        batch_size: int | None = None,
        verbose: Any = 0,
    ) -> Self:
        """Fit to the labels of validation data, and return the model.

        For an output with positions, such as pixels, a random sample of 100,000 positions is used.

        Args:
            x: validation inputs that the classifier was not trained on: arrays, or a finite dataset
                of batches (x, y) or (x, y, sample_weight): a `tf.data.Dataset`, a `PyDataset` or a
                generator.
            y: labels of arrays, (...) or (..., 1) integers, or (..., classes) one-hot.
            sample_weight: weights of the examples or positions of arrays; those of weight 0 are
                left out.
            batch_size: number of examples per batch of arrays; None is Keras's 32.
            verbose: 1 shows progress, 0 nothing.

        Returns:
            This model, which now predicts with the fitted parameters.

        Raises:
            ValueError: If labels are missing or all the same, or the model does not classify.
        """
        self._check_classifies()
        if self._has_positions():
            data = self._of_positions(x, y, sample_weight, batch_size, verbose)
        elif is_dataset(x):
            if y is not None or sample_weight is not None:
                raise ValueError(
                    "`y` and `sample_weight` must come from `x`, a dataset: omit them."
                )
            data = self._of_dataset(x, verbose)
        else:
            data = self._of_arrays(x, y, sample_weight, batch_size, verbose)
        outputs, from_logits = self._read(data.outputs)
        weight = data.weight
        if data.mask is not None:
            weight = weight_of_positions(weight, data.mask, np.shape(outputs)[:-1])
        names = ("model(x)", "y", "sample_weight")
        examples = checked(outputs, data.labels, weight, from_logits, names)
        labels = np.argmax(examples.targets, axis=-1)
        if np.ptp(labels) == 0:
            raise ValueError(f"`y` must hold at least two classes to fit to; got only {labels[0]}.")
        log_p = examples.log_probabilities.astype("float64")
        self.assign(self.best(log_p, labels, examples.weight))
        self._head = "sigmoid" if outputs.shape[-1] == 1 else None
        self.built = True  # the classifier has been run, so it is built
        return self

    def _has_positions(self) -> bool:
        """Whether the output is known to have positions, (N, ..., classes)."""
        graph = functional_graph(innermost(self))
        return graph is not None and len(graph.outputs[0].shape) > 2

    def _of_positions(
        self, x: Any, y: Any, sample_weight: Any, batch_size: int | None, verbose: Any
    ) -> _Validation:
        """Run the classifier, and keep a random sample of the positions that count."""
        masks = output_masks(self)
        sample = PositionSample()
        for batch in some_at_a_time(x, y, sample_weight, batch_size, verbose):
            if batch.y is None:
                raise ValueError("The labels are missing: give `y`, or batches (x, y).")
            outputs, _ = self._read(self.model.predict_on_batch(with_strings(batch.x)))
            positions = np.shape(outputs)[:-1]
            mask = None if masks is None else mask_of_arrays(masks, batch.x)
            weight = np.ravel(weight_of_positions(batch.weight, mask, positions))
            rows = np.reshape(outputs, (weight.size, -1))
            labels = rows_of_labels(batch.y, positions)
            counts = weight != 0
            sample.add((rows[counts], labels[counts], weight[counts]))
        if not sample.total:
            raise ValueError("`x` must hold at least one position that counts; got none.")
        return _Validation(*sample.rows(), mask=None)

    def _of_arrays(
        self, x: Any, y: Any, sample_weight: Any, batch_size: int | None, verbose: Any
    ) -> _Validation:
        """Run the classifier on arrays."""
        if y is None:
            raise ValueError("`y` must hold the labels when `x` is an array; got None.")
        refuse_single_strings(x, "x")
        if not len(keras.tree.flatten(x)[0]):
            raise ValueError("`x` must hold at least one example; got none.")
        masks = output_masks(self)
        x = with_strings(x)
        outputs = self.model.predict(x, batch_size=batch_size, verbose=verbose)
        mask = None if masks is None else mask_of_arrays(masks, x)
        return _Validation(outputs, y, sample_weight, mask)

    def _of_dataset(self, x: Any, verbose: Any) -> _Validation:
        """Run the classifier on a dataset, in one pass, since it may be shuffled."""
        masks = output_masks(self)
        batches = []
        mask_by_batch = []
        for inputs, labels, weight in unpacked(x, "x", verbose):
            if labels is None:
                raise ValueError("`x` must give batches (x, y) with labels; got inputs alone.")
            if weight is None:
                weight = np.ones(len(labels))
            outputs = self.model.predict_on_batch(inputs)
            batches.append(Examples(outputs, labels, weight))
            if masks is not None:
                mask_by_batch.append(mask_of_arrays(masks, inputs))
        outputs, labels, weight = Examples.joined(batches)
        has_mask = bool(mask_by_batch) and mask_by_batch[0] is not None
        mask = np.concatenate(mask_by_batch) if has_mask else None
        return _Validation(outputs, labels, weight, mask)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Return accuracy, NLL, Brier score and ECE, or the compiled metrics of the model."""
        if self.compiled:
            return super().evaluate(*args, **kwargs)
        if self._evaluate is None:
            self._check_classifies()
            # Only the method: a model would be tracked, and saved, as part of this one.
            averaged = MonteCarlo(self, samples=1, head=self._head, independent=True)
            self._evaluate = averaged.evaluate
        return self._evaluate(*args, **kwargs)

    def _check_classifies(self) -> None:
        network = innermost(self)
        if self.from_logits is None and predicts_numbers(network):
            raise ValueError(
                f"`model`, {network.name!r}, predicts numbers, as its loss says; scaling is "
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
        if isinstance(self.model, FittedScaling):
            return self.model.returns_logits
        if innermost(self) is not self.model:
            return False
        return _RETURNS_LOGITS.get(activation_of(self.model))

    def _read(self, outputs: Any) -> tuple[Any, bool]:
        """Return the classifier's one output, and whether it is logits."""
        from_logits = self.returns_logits
        if isinstance(outputs, dict) and "mean" in outputs:
            outputs = outputs["mean"]
            from_logits = bool(from_logits)
        if not hasattr(outputs, "shape"):
            types = keras.tree.map_structure(type, outputs)
            raise ValueError(f"`model` must return one tensor, or a dict with 'mean'; got {types}.")
        if from_logits is None:
            raise ValueError(
                f"It is unknown whether `model`, {self.model.name!r}, returns logits. Give "
                "from_logits=True or from_logits=False."
            )
        if outputs.shape[-1] != 1 and activation_of(self.model) == "sigmoid":
            raise ValueError(
                f"`model`, {self.model.name!r}, predicts several binary labels; scaling is "
                "for one label, or for classes."
            )
        return outputs, from_logits
