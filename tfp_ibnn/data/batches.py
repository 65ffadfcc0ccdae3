"""Training images in a reproducible order."""

from typing import Any

import keras
import numpy as np

from tfp_ibnn._core import checks


class ShuffledBatches(keras.utils.PyDataset):
    """Arrays in batches, shuffled anew in each epoch by (seed, epoch) alone.

    So a run that resumes sees what an unbroken one would have seen; `fit` on plain arrays shuffles
    by a state that no checkpoint holds. The epoch comes through a callback, and Keras must not
    shuffle: `model.fit(batches, shuffle=False, callbacks=[batches.follow()])`.

    Args:
        x: examples.
        y: labels, as many.
        batch_size: number of examples in a batch.
        seed: of the order.
        drop_remainder: leave out examples that do not fill a batch, unless it is the only one.
        shard: (index, count) takes the share of one of `count` processes, of every batch, evenly.
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
            wanted = "hold the same number of examples, at least 1"
            raise ValueError(f"`x` and `y` must {wanted}; got {len(x)} and {len(y)}.")
        self.x, self.y = x, y
        self.batch_size = checks.positive_integer("batch_size", batch_size)
        self.seed = checks.whole("seed", seed)
        self.drop_remainder = bool(drop_remainder) and len(x) >= self.batch_size
        wrong = not isinstance(shard, (tuple, list)) or len(shard) != 2
        self.shard = (0, 0) if wrong else tuple(checks.whole("shard", part) for part in shard)
        if self.shard[0] >= (count := self.shard[1]):
            raise ValueError(f"`shard` must be (index, count), such as (0, 2); got {shard!r}.")
        last = 0 if self.drop_remainder else len(x) % self.batch_size
        for size in (min(self.batch_size, len(x)), last):
            if size % count:
                remedy = "choose another `batch_size`, or `drop_remainder`"
                raise ValueError(f"A batch of {size} does not make {count} shares: {remedy}.")
        self._followed = self._begun = False
        self.set_epoch(0)

    def __len__(self) -> int:
        rest = len(self.x) % self.batch_size
        return len(self.x) // self.batch_size + (rest > 0 and not self.drop_remainder)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if index == 0 and self._finished and not self._followed:
            raise ValueError("A new epoch began unnoticed: pass `batches.follow()` as a callback.")
        self._finished = index == len(self) - 1 and len(self) > 1
        chosen = self.order[index * self.batch_size : (index + 1) * self.batch_size]
        chosen = np.split(chosen, self.shard[1])[self.shard[0]]
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
        """Return a callback that sets the epoch of these batches."""

        def begin(epoch: int, logs: dict[str, Any] | None = None) -> None:
            self._followed = True
            self.set_epoch(epoch)

        return keras.callbacks.LambdaCallback(on_epoch_begin=begin)
