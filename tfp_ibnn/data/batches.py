"""Training images in a reproducible order."""

from typing import Any

import keras
import numpy as np

from tfp_ibnn._core import checks


class ShuffledBatches(keras.utils.PyDataset):
    """Arrays in batches, shuffled anew in each epoch by (seed, epoch) alone.

    So a run that resumes sees what an uninterrupted one would have seen; `fit` on plain arrays
    shuffles by a state that no checkpoint holds. A callback gives the epoch, and Keras must not
    shuffle: `model.fit(batches, shuffle=False, callbacks=[batches.follow()])`.

    Args:
        x: examples.
        y: labels, one for each example.
        batch_size: number of examples in a batch.
        seed: of the order.
        drop_remainder: leave out examples that do not fill a batch, unless it is the only one.
        shard: (index, count): process `index` of `count` takes an equal share of every batch.

    Example:
        >>> import numpy as np, tfp_ibnn as ibnn
        >>> batches = ibnn.data.ShuffledBatches(np.zeros((10, 2)), np.arange(10), batch_size=4)
        >>> [len(y) for _, y in (batches[i] for i in range(len(batches)))]
        [4, 4, 2]
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
        self.x = x
        self.y = y
        self.batch_size = checks.positive_integer("batch_size", batch_size)
        self.seed = checks.whole("seed", seed)
        self.drop_remainder = bool(drop_remainder) and len(x) >= self.batch_size
        self.shard = _checked_shard(shard)
        self._check_shares()
        self._followed = False
        self._begun = False
        self.set_epoch(0)

    def _check_shares(self) -> None:
        """Raise if a batch cannot be divided evenly among the processes."""
        _, count = self.shard
        whole = min(self.batch_size, len(self.x))
        last = 0 if self.drop_remainder else len(self.x) % self.batch_size
        for size in (whole, last):
            if size % count:
                raise ValueError(
                    f"A batch of {size} cannot be split into {count} equal shares: choose another "
                    "`batch_size`, or `drop_remainder`."
                )

    def __len__(self) -> int:
        full, remainder = divmod(len(self.x), self.batch_size)
        has_part = remainder > 0 and not self.drop_remainder
        return full + has_part

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        is_new_epoch = index == 0 and self._finished
        if is_new_epoch and not self._followed:
            raise ValueError("A new epoch began unnoticed: pass `batches.follow()` as a callback.")
        last = len(self) - 1
        self._finished = index == last and last > 0
        start = index * self.batch_size
        stop = start + self.batch_size
        batch = self.order[start:stop]
        place, count = self.shard
        shares = np.split(batch, count)
        rows = shares[place]
        return self.x[rows], self.y[rows]

    def on_epoch_begin(self) -> None:
        """Forget the batches that Keras has read before the first epoch to learn the shapes."""
        if not self._begun:
            self._begun = True
            self._finished = False

    def set_epoch(self, epoch: int) -> None:
        """Take the order of an epoch, counted from 0."""
        random = np.random.default_rng((self.seed, epoch))
        self.order = random.permutation(len(self.x))
        self._finished = False

    def follow(self) -> keras.callbacks.Callback:
        """Return a callback that sets the epoch of these batches."""

        def begin(epoch: int, logs: dict[str, Any] | None = None) -> None:
            self._followed = True
            self.set_epoch(epoch)

        return keras.callbacks.LambdaCallback(on_epoch_begin=begin)


def _checked_shard(shard: Any) -> tuple[int, int]:
    """Return (index, count), or raise."""
    if isinstance(shard, (tuple, list)) and len(shard) == 2:
        index, count = (checks.whole("shard", part) for part in shard)
        if index < count:
            return index, count
    raise ValueError(f"`shard` must be (index, count), such as (0, 2); got {shard!r}.")
