"""Training images: some held back for validation, the others in a reproducible order."""

from typing import Any

import keras
import numpy as np

from tfp_ibnn._core import checks

Splits = tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def validation_split(x: Any, y: Any, size: int, seed: int = 0) -> Splits:
    """Return `(x_train, y_train), (x_val, y_val)`, copies; every class keeps its share.

    The class c gets size * n_c / N of the places, rounded down or up so that they add up to `size`;
    the seed decides who gets them, with every version of numpy. Both parts keep their order.

    Args:
        x: (N, ...), the images.
        y: (N,), their classes, as integers.
        size: number of images to hold back, from 1 to N - 1.
        seed: from 0 to 2**32 - 1.

    Example:
        >>> import numpy as np, tfp_ibnn as ibnn
        >>> x, y = np.arange(6), np.array([0, 0, 0, 0, 1, 1])
        >>> (x_train, y_train), (x_val, y_val) = ibnn.data.validation_split(x, y, 3)
        >>> y_train, y_val
        (array([0, 0, 1]), array([0, 0, 1]))
    """
    x, y = np.asarray(x), np.asarray(y)
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        got = f"{y.dtype} of shape {y.shape}. For one-hot labels, give `y.argmax(-1)`"
        raise ValueError(f"`y` must be integers of shape (N,); got {got}.")
    if x.ndim < 1 or len(x) != len(y):
        raise ValueError(f"`x` must have as many rows as `y`, {len(y)}; got shape {x.shape}.")
    size, seed = checks.positive_integer("size", size), checks.whole("seed", seed)
    if size >= len(y):
        raise ValueError(f"`size` must leave some to train on: at most {len(y) - 1}; got {size}.")
    if seed >= 2**32:
        raise ValueError(f"`seed` must be below 2**32; got {seed}.")
    # RandomState's stream is frozen, unlike that of numpy's newer generators.
    random = np.random.RandomState(seed)
    _, which, counts = np.unique(y, return_inverse=True, return_counts=True)
    # Largest remainders, lower classes first; in whole numbers, so that none differ by rounding.
    shares, remainders = np.divmod(counts.astype(np.int64) * size, len(y))
    shares[np.argsort(-remainders, kind="stable")[: size - shares.sum()]] += 1
    held_back = np.zeros(len(y), bool)
    for label, places in enumerate(shares):
        held_back[random.permutation(np.flatnonzero(which == label))[:places]] = True
    return (x[~held_back], y[~held_back]), (x[held_back], y[held_back])


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

    Example:
        >>> import numpy as np, tfp_ibnn as ibnn
        >>> batches = ibnn.data.ShuffledBatches(np.arange(6), np.arange(6), 4, seed=0)
        >>> [len(labels) for _, labels in (batches[0], batches[1])]
        [4, 2]
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
        if not isinstance(shard, (tuple, list)) or len(shard) != 2:
            raise ValueError(f"`shard` must be (index, count), such as (0, 2); got {shard!r}.")
        count = checks.positive_integer("shard[1]", shard[1])
        self.shard = checks.whole("shard[0]", shard[0]), count
        if self.shard[0] >= count:
            raise ValueError(f"The index of a `shard` must be below its count; got {shard!r}.")
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
