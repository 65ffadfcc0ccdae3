"""Monte Carlo evaluation while training."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from tfp_ibnn._core import checks
from tfp_ibnn.prediction.monte_carlo import MonteCarlo
from tfp_ibnn.training.callback import Callback

__all__ = [
    "MonteCarloEvaluation",
]


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class MonteCarloEvaluation(Callback):
    """Evaluate the averaged prediction while training, among Keras's own logs.

    The keys are those of `MonteCarlo.evaluate` behind `val_mc_`, such as `val_mc_accuracy`,
    `val_mc_nll` and `val_mc_ece`. List it before the callbacks that read them, such as
    EarlyStopping("val_mc_nll", mode="min"), ModelCheckpoint and CSVLogger. (`val_nll` and the like,
    from `validation_data`, are of single draws.)

    Args:
        data: (x, y), (x, y, sample_weight), or a dataset of such batches.
        samples: number of draws.
        every: evaluate in the first epoch and then in every so many epochs.
        batch_size: for arrays.
        seed: of the draws, the same in every epoch, so that epochs can be compared.
        **options: those of `MonteCarlo`.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> x, y = [[0.0], [1.0]], [0, 1]
        >>> callback = ibnn.MonteCarloEvaluation((x, y), samples=32, every=5)
    """

    def __init__(
        self,
        data: Any,
        samples: int = 32,
        every: int = 1,
        batch_size: int | None = None,
        seed: int | None = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        self.samples = checks.positive_integer("samples", samples)
        self.every = checks.positive_integer("every", every)
        self.batch_size = batch_size
        self.options = {"seed": seed, **options}
        if isinstance(data, (tuple, list)):
            if len(data) not in (2, 3):
                raise ValueError(
                    "`data` must be (x, y), (x, y, sample_weight) or a dataset; got a "
                    f"{type(data).__name__} of {len(data)}."
                )
            names = ("x", "y", "sample_weight")
            self._data = dict(zip(names, data, strict=False))
        else:
            self._data = {"x": data}
        self._monte_carlo: MonteCarlo | None = None

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor, the data included if it is arrays."""
        data = list(self._data.values())
        if len(data) == 1:
            raise ValueError("The config of a MonteCarloEvaluation can hold arrays, not a dataset.")
        return {
            "data": data,
            "samples": self.samples,
            "every": self.every,
            "batch_size": self.batch_size,
            **self.options,
        }

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Wrap the model that is trained."""
        self._random_state = random.getstate()
        self._monte_carlo = self._wrap() if self.model.built else None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the entries; they are NaN if the training has diverged."""
        if logs is None or epoch % self.every:
            return
        if self._monte_carlo is None:
            self._monte_carlo = self._wrap()
        with self._own_randomness():
            scores = self._monte_carlo.evaluate(
                **self._data,
                batch_size=self.batch_size,
                verbose=0,
                return_dict=True,
                allow_nan=not np.isfinite(logs.get("loss", 0.0)),
            )
        del scores["loss"]
        logs.update({f"val_mc_{key}": value for key, value in scores.items()})

    def _wrap(self) -> MonteCarlo:
        with self._own_randomness():
            return MonteCarlo(self.model, self.samples, **self.options)

    @contextlib.contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Leave Python's random state, by which Keras shuffles datasets, to the training."""
        before = random.getstate()
        random.setstate(self._random_state)
        try:
            yield
        finally:
            self._random_state = random.getstate()
            random.setstate(before)
