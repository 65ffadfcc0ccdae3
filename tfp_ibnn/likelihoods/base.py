"""What a network's output means: the base of all kinds."""

import copy
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.serialization import Configured
from tfp_ibnn._core.unrolling import quantiles
from tfp_ibnn.metrics._mean import RunningMean


class Likelihood(Configured):
    """What one output of a network says about its target.

    *Outputs* are what the network returns, (..., width). *Logits* are what it gives to its last
    activation, `end`; `outputs` turns logits into outputs. Without an activation ("linear") they
    are the same.

    A subclass defines the methods that its uses need:

    - `MonteCarlo`: `draws`, `divergence`, `statistics`, `scores`, `pair`, `loss`;
    - posteriors over weights, such as `Laplace`: `targets`, `log_prob`, `hessian_factors`;
    - `calibrate`: `row_shapes`, `fit`, `predict`, `nll`, `evidence`, `scaled`, `strata`.

    Give an instance as the `head` of `MonteCarlo` or of a posterior over weights. To be saved, its
    class must be registered by `keras.saving.register_keras_serializable`, and keep the arguments
    of its constructor as attributes.

    Args:
        width: size of the last axis of the outputs; None if it is unknown.
    """

    end: str = "linear"
    """The last activation: "linear", "softmax", "log_softmax", "sigmoid" or "gaussian"."""
    is_classifier: bool = False
    free_scale: bool = False
    """Whether there is a noise scale that the network does not predict."""
    is_softmax: bool = False
    """Whether the prediction has probabilities of classes, of which one is right."""
    predicts_scale: bool = False
    """Whether the network predicts the standard deviation of its targets."""
    predicts_epistemic: bool = False
    """Whether one network, without draws, predicts how much draws would disagree."""
    needs_all_draws: bool = False
    """Whether a prediction cannot be made from a summary of the draws."""
    variants: ClassVar[dict[str, bool]] = {"": False}
    """What `calibrate` adds to a candidate's name, and whether the parameter is fitted."""
    variants_as_it_is: ClassVar[dict[str, str]] = {}
    """More for the model as it is alone: what is added to its name, and the kind of parameter."""
    column: ClassVar[str]
    """The heading of the parameter in a table."""

    def __init__(self, width: int | None = None) -> None:
        self.width = width

    def for_width(self, width: int | None) -> Self:
        """Return the same likelihood for outputs of another width."""
        changed = copy.copy(self)
        changed.width = width
        return changed

    # Several outputs are taken apart and put together by name; one output has the name "".

    @property
    def parts(self) -> dict[str, "Likelihood"]:
        """The likelihood of each output by name."""
        return {"": self}

    def split(self, values: Any) -> dict[str, Any]:
        """Return the values of each output by name."""
        return {"": values}

    def split_given(self, what: str, values: Any, for_all: bool = False) -> dict[str, Any]:
        """Return what a user gives for each output, by name, or raise.

        Args:
            what: name of the argument.
            values: a value; of several outputs a dict or list of them.
            for_all: whether a single value may count for all outputs.
        """
        return {"": values}

    def join(self, values: dict[str, Any]) -> Any:
        """Put together what `split` has taken apart."""
        return values[""]

    @property
    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of a row's `outputs`, `y` and `prediction` in a calibration."""
        raise self._missing("row_shapes")

    def split_rows(self, **arrays: Any) -> dict[str, dict[str, Any]]:
        """Return arrays of rows, such as `outputs`, `y` and `prediction`, of each output."""
        return {"": arrays}

    def join_rows(self, kind: str, values: dict[str, np.ndarray], numbers: np.ndarray) -> Any:
        """Put together the rows of all outputs.

        Args:
            kind: what they are: "outputs", "y" or "prediction".
            values: the rows of each output, by its name.
            numbers: the place of each row's output among the outputs, (rows,).
        """
        return values[""]

    def check_outputs(self, outputs: Any) -> None:
        """Raise if the outputs of a network are not those of this likelihood."""
        if isinstance(outputs, dict):
            heads = dict.fromkeys(outputs, "softmax")
            raise ValueError(f"The model has several outputs: give `head` for each, like {heads}.")

    # One network: the density of its targets.

    def targets(self, y: Any, *, what: str = "`y`") -> np.ndarray:
        """Return targets in the form that `log_prob` takes, or raise.

        Args:
            y: what the user gives.
            what: what the user calls it, for errors.
        """
        raise self._missing("targets")

    def outputs(self, logits: Tensor) -> Tensor:
        """Return what the network returns for these logits."""
        return logits

    def log_prob(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the log-probability of each example's targets.

        Args:
            logits: (..., examples, width).
            y: as `targets` gives them.

        Returns:
            (..., examples), in nats.
        """
        raise self._missing("log_prob")

    def hessian_factors(self, logits: Tensor) -> Tensor:
        """Return S (examples, width, C): S S^T is the Hessian of minus `log_prob` in the logits."""
        raise self._missing("hessian_factors")

    # Many networks: what their draws predict together.

    def draws(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return draws in a form that can be averaged, and the uncertainty within each.

        Args:
            outputs: of sampled networks, (draws, examples, ..., width).
        """
        raise self._missing("draws")

    def divergence(self, draw: Tensor, mean: Tensor) -> Tensor:
        """Return how far a draw is from the mean, in nats or as a square.

        Its average over some draws must be their average divergence from their own mean, plus the
        divergence of that mean: this holds for squared distances and for KL.

        Args:
            draw: from `draws`, (..., examples, ...).
            mean: an average of draws, (examples, ...).
        """
        raise self._missing("divergence")

    def statistics(self, summary: Any) -> dict[str, Tensor]:
        """Return the entries of a prediction from a `Summary` of the draws."""
        raise self._missing("statistics")

    def public(self, draws: Tensor) -> Tensor:
        """Return draws, or their mean or spread, in the form the user sees."""
        return draws

    def interval(self, draws: Tensor, within: Tensor, level: float) -> tuple[Tensor, Tensor]:
        """Return the bounds of the central interval of a probability.

        Args:
            draws: from `draws`, (draws, examples, ...).
            within: the uncertainty within each.
            level: the probability, between 0 and 1.
        """
        tail = (1 - level) / 2
        lower, upper = quantiles(self.public(draws), [tail, 1 - tail])
        return lower, upper

    def check_interval(self, level: float) -> None:
        """Raise if a prediction can have no central interval of a probability."""

    def of_one(self, draws: Tensor, within: Tensor) -> dict[str, Tensor]:
        """Return the prediction of one network.

        Args:
            draws: from `draws`, (1, examples, ...).
            within: the uncertainty within it.
        """
        return {"mean": self.public(draws)[0], "aleatoric": within[0]}

    def of_all_draws(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return further entries of a prediction, if it `needs_all_draws`."""
        return {}

    # Scores of predictions.

    def scores(self) -> list[keras.metrics.Metric]:
        """Return the metrics that `MonteCarlo.evaluate` reports."""
        raise self._missing("scores")

    def pair(self, y_true: Any, prediction: dict[str, Tensor]) -> tuple[Any, Tensor]:
        """Return targets and predictions in the forms that metrics take.

        Args:
            y_true: targets.
            prediction: the dict of `MonteCarlo`.
        """
        raise self._missing("pair")

    def loss(self, y_true: Any, prediction: dict[str, Tensor]) -> Tensor:
        """Return the loss of each example, or of each of its positions.

        Args:
            y_true: targets.
            prediction: the dict of `MonteCarlo`.
        """
        raise self._missing("loss")

    def update(
        self,
        scores: Sequence[keras.metrics.Metric],
        y_true: Any,
        prediction: dict[str, Tensor],
        sample_weight: Any,
    ) -> None:
        """Count a batch in metrics.

        Args:
            scores: from `scores`; a plain mean among them is one of losses.
            y_true: targets.
            prediction: the dict of `MonteCarlo`.
            sample_weight: of the examples, or None.
        """
        for score in scores:
            if type(score) is RunningMean:
                score.update_state(self.loss(y_true, prediction), sample_weight=sample_weight)
            else:
                score.update_state(*self.pair(y_true, prediction), sample_weight=sample_weight)

    def mean_loss(self, y_true: Any, prediction: dict[str, Tensor], sample_weight: Any) -> Tensor:
        """Return the loss of a batch, averaged over examples and positions.

        Args:
            y_true: targets.
            prediction: the dict of `MonteCarlo`.
            sample_weight: of the examples, or None.
        """
        loss = self.loss(y_true, prediction)
        if sample_weight is not None:
            weight = ops.cast(sample_weight, loss.dtype)
            loss = loss * with_rank(weight, len(loss.shape))
        # A replica may have no example.
        count = ops.maximum(ops.size(loss), 1)
        return ops.sum(loss) / ops.cast(count, loss.dtype)

    # Calibration by one parameter, in NumPy, of outputs (examples, draws, width).

    @property
    def head(self) -> dict[str, Any]:
        """What the network returns, as arguments of `MonteCarlo`."""
        return {"head": self}

    @property
    def scaled_head(self) -> dict[str, Any]:
        """What `scaled` returns, as arguments of `MonteCarlo`."""
        return self.head

    def scaled(self, outputs: Tensor, parameter: Any) -> Tensor:
        """Return outputs at a temperature, or with a scale or a factor for their scale.

        Args:
            outputs: (examples, width), a tensor or a Keras tensor.
            parameter: as `fit` returns it.
        """
        raise self._missing("scaled")

    def fit(self, outputs: np.ndarray, y: np.ndarray, weight: np.ndarray | None = None) -> Any:
        """Return the parameter with the lowest NLL of the averaged prediction.

        Args:
            outputs: (examples, draws, width).
            y: as `targets` gives them.
            weight: how often each example counts; None is once.
        """
        raise self._missing("fit")

    def parameter(
        self,
        outputs: np.ndarray,
        y: np.ndarray,
        fitted: bool | str,
        weight: np.ndarray | None = None,
    ) -> Any:
        """Return the parameter of one of the `variants`: a fitted one, or 1, which changes nothing.

        Args:
            outputs: (examples, draws, width).
            y: as `targets` gives them.
            fitted: whether the variant has a fitted parameter, or one of which kind.
            weight: how often each example counts; None is once.
        """
        return self.fit(outputs, y, weight) if fitted else 1.0

    def predict(self, outputs: np.ndarray, parameter: Any) -> np.ndarray:
        """Return the averaged prediction with a parameter, an array with a row per example.

        Args:
            outputs: (examples, draws, width).
            parameter: as `fit` returns it.
        """
        raise self._missing("predict")

    def nll(self, prediction: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return minus the log-probability of each example's targets, in nats.

        Args:
            prediction: from `predict`.
            y: as `targets` gives them.
        """
        raise self._missing("nll")

    def best_nll(
        self, outputs: np.ndarray, y: np.ndarray, weight: np.ndarray | None = None
    ) -> float:
        """Return the mean NLL with the parameter fitted to these examples; see `fit`.

        Args:
            outputs: (examples, draws, width).
            y: as `targets` gives them.
            weight: how often each example counts; None is once.
        """
        parameter = self.fit(outputs, y, weight)
        nll = self.nll(self.predict(outputs, parameter), y)
        return float(np.average(nll, weights=weight))

    def evidence(
        self,
        prediction: np.ndarray,
        y: np.ndarray,
        seed: int,
        weight: np.ndarray | None = None,
    ) -> dict[str, float]:
        """Return the scores of a table's row.

        Args:
            prediction: from `predict`.
            y: as `targets` gives them.
            seed: of what is drawn for a score.
            weight: how often each example counts; None is once.
        """
        raise self._missing("evidence")

    def strata(self, y: np.ndarray) -> np.ndarray:
        """Return the strata of targets, whole numbers: splits of the data spread each evenly."""
        raise self._missing("strata")

    def noise_scale(self, parameter: Any) -> float | None:
        """Return the standard deviation of the noise, if the loss leaves it open."""
        return None

    def _missing(self, method: str) -> NotImplementedError:
        return NotImplementedError(f"The likelihood {type(self).__name__} defines no `{method}`.")


def with_rank(weight: Tensor, rank: int) -> Tensor:
    """Return weights with a given number of axes.

    Args:
        weight: of examples or positions.
        rank: number of axes, perhaps one less than the weights have if their last is of size 1.

    Returns:
        The weights with that last axis removed, or with axes of size 1 added.
    """
    if len(weight.shape) > rank:
        weight = weight[..., 0]
    missing = rank - len(weight.shape)
    ones = (1,) * missing
    return ops.reshape(weight, (*ops.shape(weight), *ones))
