"""Batches in an order that is a function of a seed and the epoch."""

import math
from typing import Any

import keras
import numpy as np

from tfp_ibnn._core import checks

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
        shard: (index, count) takes, of every batch, the share of one of `count` processes that
            train together: the shares, in order, are the batch that one process would have. Each
            batch must divide evenly.

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
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        super().__init__()
        if len(x) != len(y) or len(x) == 0:
            raise ValueError(
                "`x` and `y` must hold the same number of examples, at least 1; got "
                f"{len(x)} and {len(y)}."
            )
        self.x, self.y = x, y
        self.batch_size = checks.positive_integer("batch_size", batch_size)
        self.seed = checks.whole("seed", seed)
        self.drop_remainder = bool(drop_remainder) and len(x) >= self.batch_size
        self.shard = self._checked_shard(shard)
        self._followed = self._begun = False
        self.set_epoch(0)

    def __len__(self) -> int:
        count = len(self.x) / self.batch_size
        return math.floor(count) if self.drop_remainder else math.ceil(count)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if index == 0 and self._finished and not self._followed:
            raise ValueError("A new epoch began unnoticed: pass `batches.follow()` as a callback.")
        self._finished = index == len(self) - 1 and len(self) > 1
        chosen = self.order[index * self.batch_size : (index + 1) * self.batch_size]
        share, shares = self.shard
        size = len(chosen) // shares
        chosen = chosen[share * size : (share + 1) * size]
        return self.x[chosen], self.y[chosen]

    def on_epoch_begin(self) -> None:
        """Forget, before the first epoch, what Keras has read to learn of the shapes."""
        if not self._begun:
            self._begun, self._finished = True, False

    def set_epoch(self, epoch: int) -> None:
        """Take the order of an epoch, counted from 0."""
        self.order = np.random.default_rng((self.seed, epoch)).permutation(len(self.x))
        self._finished = False

    def follow(self) -> keras.callbacks.Callback:
        """Return a callback that tells these batches the epoch."""

        def begin(epoch: int, logs: dict[str, Any] | None = None) -> None:
            self._followed = True
            self.set_epoch(epoch)

        return keras.callbacks.LambdaCallback(on_epoch_begin=begin)

    def _checked_shard(self, shard: tuple[int, int]) -> tuple[int, int]:
        if not isinstance(shard, (tuple, list)) or len(shard) != 2:
            raise ValueError(f"`shard` must be (index, count), such as (0, 2); got {shard!r}.")
        index = checks.whole("shard[0]", shard[0])
        count = checks.positive_integer("shard[1]", shard[1])
        if index >= count:
            raise ValueError(f"The index of a `shard` must be below its count; got {shard!r}.")
        last = 0 if self.drop_remainder else len(self.x) % self.batch_size
        for size in (min(self.batch_size, len(self.x)), last):
            if size % count:
                raise ValueError(
                    f"A batch of {size} does not divide into {count} shares: choose another "
                    "`batch_size`, or leave out the last batch by `drop_remainder`."
                )
        return index, count
