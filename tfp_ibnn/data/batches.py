"""Batches in an order that is a function of a seed and the epoch."""

import math
from typing import Any

import keras
import numpy as np

from tfp_ibnn import _checks

__all__ = ["ShuffledBatches"]


class ShuffledBatches(keras.utils.PyDataset):
    """Arrays in batches, shuffled anew in each epoch by (seed, epoch) alone.

    `fit` on plain arrays shuffles by a state that no checkpoint holds, and on TensorFlow, after
    `keras.utils.set_random_seed`, in the same way in every epoch. Here a run that goes on at epoch
    20 sees what an unbroken one would have seen. The epoch comes from `fit`, through the callback
    that `follow` returns.

    Args:
        x: examples.
        y: labels, as many.
        batch_size: number of examples in a batch.
        seed: of the order.
        drop_remainder: leave out the examples of an epoch that do not fill a batch, so that all
            batches have one shape. With fewer examples than `batch_size` they make up one batch.

    Example:
        >>> import numpy as np, tfp_ibnn as ibnn
        >>> batches = ibnn.data.ShuffledBatches(np.arange(6), np.arange(6), 4, seed=0)
        >>> [len(labels) for _, labels in (batches[0], batches[1])]
        [4, 2]

        Give it to `fit` with `shuffle=False`, so that Keras leaves the order alone:

            model.fit(batches, shuffle=False, epochs=10, callbacks=[batches.follow()])
    """

    def __init__(
        self,
        x: np.ndarray,
        y: np.ndarray,
        batch_size: int,
        seed: int = 0,
        drop_remainder: bool = False,
    ) -> None:
        super().__init__()
        if len(x) != len(y) or len(x) == 0:
            raise ValueError(
                "`x` and `y` must hold the same number of examples, at least 1; got "
                f"{len(x)} and {len(y)}."
            )
        self.x, self.y = x, y
        self.batch_size = _checks.positive_integer("batch_size", batch_size)
        self.seed = _checks.whole("seed", seed)
        self.drop_remainder = bool(drop_remainder) and len(x) >= self.batch_size
        self._followed = False
        self.set_epoch(0)

    def __len__(self) -> int:
        count = len(self.x) / self.batch_size
        return math.floor(count) if self.drop_remainder else math.ceil(count)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if index == 0 and self._finished and not self._followed:
            raise ValueError(
                "A new epoch began without notice: pass `batches.follow()` among the callbacks."
            )
        self._finished = index == len(self) - 1 and len(self) > 1
        chosen = self._order[index * self.batch_size : (index + 1) * self.batch_size]
        return self.x[chosen], self.y[chosen]

    def set_epoch(self, epoch: int) -> None:
        """Take the order of an epoch, counted from 0."""
        self._order = np.random.default_rng((self.seed, epoch)).permutation(len(self.x))
        self._finished = False

    def follow(self) -> keras.callbacks.Callback:
        """Return a callback that tells these batches the epoch."""

        def begin(epoch: int, logs: dict[str, Any] | None = None) -> None:
            self._followed = True
            self.set_epoch(epoch)

        return keras.callbacks.LambdaCallback(on_epoch_begin=begin)
