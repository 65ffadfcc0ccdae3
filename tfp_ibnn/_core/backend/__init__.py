"""The one place that knows which Keras backend is active.

Everything else takes from here TensorFlow Probability's distributions (`tfd`) and bijectors
(`tfb`), and the few functions whose precision `keras.ops` does not keep on JAX, or that
TensorFlow has to be helped with on CPUs. `tensorflow.py` and `jax.py` have the same names.
"""

import keras

from tfp_ibnn._core.backend.shared import NAMES, REPLICA_STRIDE, Tensor

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

__all__ = ["NAME", "REPLICA_STRIDE", "Tensor", *NAMES]
