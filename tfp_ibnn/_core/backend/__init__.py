"""The one place that knows which Keras backend is active.

Everything else takes TensorFlow Probability (`tfd`, `tfb`) from here, and the few functions in
which `keras.ops` is not enough. `tensorflow.py` and `jax.py` have the same names.
"""

import keras

from tfp_ibnn._core.backend.shared import NAMES, NETWORK, REPLICA_STRIDE, Tensor

NAME = keras.backend.backend()
"""The active backend, "tensorflow" or "jax"."""

if NAME == "tensorflow":
    from tfp_ibnn._core.backend.tensorflow import *  # noqa: F403
elif NAME == "jax":
    from tfp_ibnn._core.backend.jax import *  # noqa: F403
else:
    raise ImportError(
        f"tfp_ibnn works with the Keras backends 'tensorflow' and 'jax'; the active one is "
        f"{NAME!r}. Set the environment variable KERAS_BACKEND before Keras is imported."
    )

__all__ = ["NAME", "NETWORK", "REPLICA_STRIDE", "Tensor", *NAMES]
