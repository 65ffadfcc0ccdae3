"""Distill a posterior or an ensemble into a single-pass network."""

import math
import time
import warnings
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import backend, checks, keras_internals
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.progress import printer
from tfp_ibnn.data.datasets import progress_bar
from tfp_ibnn.distillation.student import (
    Student,
    copied_student,
    given_student,
    student_kind,
)
from tfp_ibnn.distillation.transfer import Transfer, transfer_of
from tfp_ibnn.likelihoods.base import with_rank
from tfp_ibnn.prediction.monte_carlo import MonteCarlo

_HOTTEST = 10.0
"""The temperature at which the fit of `loss="likelihood"` starts."""
_RATE = 1e-3
"""The initial learning rate of the default optimizer; it falls to 0 by half a cosine."""


def distill(
    teacher: Any,
    data: Any,
    student: keras.Model | None = None,
    *,
    augment: keras.layers.Layer | None = None,
    loss: str = "moments",
    samples: int | None = None,
    epochs: int = 20,
    optimizer: Any = None,
    batch_size: int = 128,
    seed: int = 0,
    verbose: Any = "auto",
    minutes: float | None = None,
) -> MonteCarlo:
    """Train one network to predict the mean and the spread of many sampled networks in one pass.

    The student predicts `mean`, `aleatoric` and `epistemic` in closed form. It is trained on the
    teacher's predictions, not on labels:

    - for classes and labels, it predicts a Dirichlet distribution of their probabilities (ensemble
      distribution distillation, arXiv 1905.00076): see `likelihoods.Dirichlet` and `Beta`;
    - for numbers, it predicts a Gaussian of the means of draws, and the mean variance of their
      noise: see `likelihoods.SpreadGaussian` and `SpreadPoint`.

    A student learns the teacher's uncertainty from inputs that the teacher is unsure about. The
    training data alone contain few of them: give further inputs without labels, or `augment`.

    Args:
        teacher: a `MonteCarlo`, or a model or posterior that it takes.
        data: inputs, or (inputs, targets), whose targets are not used: arrays, or a dataset of
            batches that can be read more than once, a `tf.data.Dataset` or a `PyDataset`.
        student: a network, which is trained in place. Its outputs are those of the likelihood, or
            features, to which two heads are added. None takes a copy of the teacher's network at
            the posterior mean, with a second head; at first it predicts the mean of this network.
        augment: a Keras layer or model that changes a batch of inputs at random, for teacher and
            student alike.
        loss: "moments" is lowest where mean and epistemic uncertainty equal the teacher's;
            "likelihood", for classes and labels, is the negative log-density of the teacher's draws
            under the student's distribution, as in the paper: the logits of both are divided by a
            temperature that falls from 10 to 1 over the first half of the epochs. For numbers the
            two losses are the same.
        samples: number of the teacher's draws. None takes all of them for arrays without `augment`,
            which the teacher predicts once; otherwise it takes new ones in each step, at most 32.
        epochs: passes over the data; 0 returns the untrained student.
        optimizer: what `keras.optimizers.get` takes; None takes Adam, at a learning rate that
            falls from 1e-3 to 0.
        batch_size: batch size for arrays.
        seed: of the order of the data, and of the teacher's draws.
        verbose: 1 shows progress, 0 nothing; "auto" is 1.
        minutes: time after which no further step starts; None sets no limit.

    Returns:
        A `MonteCarlo` of the student with one sample. It has `predict`, `evaluate`, `save` and
        `export`, and `Conformal` and `OODDetector` take it. Its `inner` is the Keras model.

    Raises:
        ValueError: If the teacher has only one draw or several outputs, or the loss is not finite.

    Example:
        >>> import keras, numpy as np, tfp_ibnn as ibnn
        >>> det = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, "softmax")])
        >>> sto = ibnn.to_stochastic(det, ibnn.NormalAffine(), train_size=100)
        >>> x = np.random.default_rng(0).normal(size=(100, 2)).astype("float32")
        >>> one_pass = ibnn.distill(ibnn.MonteCarlo(sto), x, epochs=2, verbose=0)
        >>> sorted(one_pass.predict(x, verbose=0))
        ['aleatoric', 'entropy', 'epistemic', 'mean', 'total_variance', 'variance']
    """
    checks.one_of("loss", loss, ("moments", "likelihood"))
    epochs = checks.whole("epochs", epochs)
    batch_size = checks.positive_integer("batch_size", batch_size)
    seed = checks.whole("seed", seed)
    end = math.inf
    if minutes is not None:
        end = time.monotonic() + 60 * checks.positive("minutes", minutes)
    teacher = _checked_teacher(teacher, samples)
    if augment is not None and not isinstance(augment, keras.Layer):
        raise ValueError(f"`augment` must be a Keras layer or model; got {augment!r}.")
    kind = student_kind(teacher.likelihood)
    options = {
        "seed": seed,
        "return_samples": loss == "likelihood" and teacher.likelihood.is_classifier,
    }
    if samples is not None:
        options["samples"] = samples
    transfer = transfer_of(teacher, data, augment, batch_size, verbose, options)
    _, prediction = next(iter(transfer.epoch(0)))
    likelihood = kind.of_size(prediction["mean"].shape[-1])
    if student is None:
        made = copied_student(teacher, likelihood)
    else:
        made = given_student(student, likelihood)
    made.begin(prediction)
    if epochs:
        _train(made, transfer, optimizer, epochs, end, verbose)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`interval` holds")  # as of the teacher
        return MonteCarlo(
            made.network, samples=1, head=likelihood, seed=seed, interval=teacher.interval
        )


def _checked_teacher(teacher: Any, samples: int | None) -> MonteCarlo:
    """Return a teacher with several draws that differ, or raise."""
    if not isinstance(teacher, MonteCarlo):
        teacher = MonteCarlo(teacher)
    is_single = 1 in (teacher.samples, samples)
    if is_single and not teacher.likelihood.predicts_epistemic:
        raise ValueError(
            f"`teacher` has a single draw, so no epistemic uncertainty: its model "
            f"{teacher.inner.name!r} has no posterior, or `samples` is 1."
        )
    return teacher


class _Lessons(keras.Model):
    """A student that is trained on a teacher's predictions instead of targets.

    A copy of the teacher's network is trained in inference mode: without dropout and random
    augmentation, with the averages of batch normalization. It sees the same inputs as the teacher.
    """

    def __init__(self, student: Student) -> None:
        # The network gets the inputs unchanged, also under a mixed-precision policy.
        super().__init__(name="lessons", autocast=False)
        self.network = student.network
        self.is_copy = student.is_copy
        self.likelihood = student.likelihood
        self.temperature = self.add_weight((), "ones", name="temperature", trainable=False)
        self.built = True

    def call(self, inputs: Any, training: bool | None = None) -> Tensor:
        return self.network(inputs, training=training and not self.is_copy)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Tensor:
        dtype = checks.full_precision(y_pred.dtype)
        outputs = ops.cast(y_pred, dtype)
        if "samples" in y:
            losses = self.likelihood.sample_loss(outputs, y["samples"], self.temperature)
        else:
            losses = self.likelihood.distillation_loss(outputs, y)
        mask = keras_internals.mask_of(y_pred)
        return _mean(losses, mask) + sum(self.losses)


def _mean(losses: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean of losses (examples, ...) over all positions that are not padding."""
    if mask is None:
        return backend.mean(losses)
    weight = ops.cast(mask, losses.dtype)
    weight = with_rank(weight, len(losses.shape))
    weight = ops.broadcast_to(weight, ops.shape(losses))
    count = ops.maximum(ops.sum(weight), 1)
    return ops.sum(weight * losses) / count


def _train(
    student: Student, transfer: Transfer, optimizer: Any, epochs: int, end: float, verbose: Any
) -> None:
    """Train a student until all epochs are done or the time is up."""
    is_default = optimizer is None
    optimizer = keras.optimizers.Adam(_RATE) if is_default else keras.optimizers.get(optimizer)
    lessons = _Lessons(student)
    lessons.compile(optimizer, jit_compile=backend.jit_pays())
    lessons.optimizer.build(lessons.trainable_variables)
    say = printer(verbose)
    with keras_internals.values_kept([*lessons.variables, *lessons.optimizer.variables]):
        for epoch in range(epochs):
            if time.monotonic() > end:
                say(f"`minutes` ended the training after {epoch} of {epochs} epochs.")
                break
            if is_default:
                optimizer.learning_rate = _RATE * (1 + math.cos(math.pi * epoch / epochs)) / 2
            say(f"Epoch {epoch + 1}/{epochs}")
            # Over the first half of the epochs.
            cooled = min(1.0, 2 * epoch / epochs)
            lessons.temperature.assign(_HOTTEST + cooled * (1 - _HOTTEST))
            loss = _train_one_epoch(lessons, transfer, epoch, end, verbose)
            if not math.isfinite(loss):
                raise ValueError(
                    f"The loss is {loss} after epoch {epoch + 1}: use a lower learning rate, such "
                    "as optimizer=keras.optimizers.Adam(1e-4), and check the inputs."
                )


def _train_one_epoch(
    lessons: _Lessons, transfer: Transfer, epoch: int, end: float, verbose: Any
) -> float:
    """Train for an epoch, or until the time is up; return the mean loss."""
    bar = progress_bar(transfer.count, verbose)
    losses = []
    for number, (x, prediction) in enumerate(transfer.epoch(epoch), start=1):
        loss = lessons.train_on_batch(x, prediction, return_dict=True)["loss"]
        losses.append(float(loss))
        bar.update(number, [("loss", losses[-1])])
        if time.monotonic() > end:
            break
    return float(np.mean(losses))
